"""The response to one HTTP request: complete, in pieces, as server-sent events, or an error. Independent of workers and the model."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, MutableMapping
from dataclasses import dataclass, field
from typing import Any

from starlette.datastructures import Headers
from starlette.responses import Response

from mmd_workers.gateway.access import KnownTenant
from mmd_workers.gateway.api_errors import ApiError, ErrorShape
from mmd_workers.gateway.timeline import Timeline

Scope = MutableMapping[str, Any]
ReceiveChannel = Callable[[], Awaitable[MutableMapping[str, Any]]]
SendChannel = Callable[[MutableMapping[str, Any]], Awaitable[None]]

SEND_BYTES = 256 << 10  # of a long answer at once; other requests have their turn in between


@dataclass(slots=True)
class Exchange:
    """One HTTP request that is being answered."""

    request_id: str
    receive: ReceiveChannel
    send: SendChannel
    headers: Headers
    timeline: Timeline
    trace: dict[str, str]
    errors: ErrorShape
    tenant: KnownTenant | None = None  # the tenant whose request it is
    streaming: bool = False
    notes: dict[str, str] = field(default_factory=dict)  # more response headers

    async def reply(self, status: int, body: bytes, headers: dict[str, str] | None = None) -> None:
        """A whole JSON response."""
        self.timeline.status = status
        response = Response(
            body,
            status,
            {"x-request-id": self.request_id, **self.notes, **(headers or {})},
            media_type="application/json",
        )
        await response({"type": "http"}, self.receive, self.send)

    async def reply_in_pieces(self, pieces: list[bytes]) -> None:
        """A whole JSON response, joined from pieces a little at a time, because it may be hundreds of megabytes."""
        self.timeline.status = 200
        headers = {
            "content-type": "application/json",
            "content-length": str(sum(map(len, pieces))),
            "x-request-id": self.request_id,
            **self.notes,
        }
        raw = [(name.encode(), value.encode()) for name, value in headers.items()]
        await self.send({"type": "http.response.start", "status": 200, "headers": raw})
        part: list[bytes] = []
        size = 0
        for piece in pieces:
            part.append(piece)
            size += len(piece)
            if size >= SEND_BYTES:
                await self.send({"type": "http.response.body", "body": b"".join(part), "more_body": True})
                await asyncio.sleep(0)
                part, size = [], 0
        await self.send({"type": "http.response.body", "body": b"".join(part)})

    async def events(self, *events: str) -> None:
        """Server-sent events; the first call opens the stream."""
        if not self.streaming:
            self.streaming = True
            self.timeline.status = 200
            headers = {
                "content-type": "text/event-stream; charset=utf-8",
                "cache-control": "no-cache",
                "x-accel-buffering": "no",
                "x-request-id": self.request_id,
                **self.notes,
            }
            raw = [(name.encode(), value.encode()) for name, value in headers.items()]
            await self.send({"type": "http.response.start", "status": 200, "headers": raw})
        if body := "".join(events).encode():
            await self.send({"type": "http.response.body", "body": body, "more_body": True})

    async def fail(self, error: ApiError) -> None:
        """The error as a response, or as the last event of a stream that has begun."""
        self.timeline.code, self.timeline.error = error.code, error.recorded
        if self.streaming:
            self.timeline.status = self.errors.status(error)
            await self.events(*self.errors.events(error, self.request_id))
            await self.send({"type": "http.response.body", "body": b""})
            return
        headers = {}
        if error.retry_after is not None:
            headers["retry-after"] = str(error.retry_after)
        body = json.dumps(self.errors.body(error, self.request_id)).encode()
        await self.reply(self.errors.status(error), body, headers)
