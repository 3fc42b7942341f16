"""The response to one HTTP request: whole, in pieces, as server-sent events, or an error. Independent of workers and the model."""

from __future__ import annotations

import asyncio
import json
import logging
import math
from collections.abc import Awaitable, Callable, MutableMapping
from dataclasses import dataclass, field
from typing import Any

from starlette.datastructures import Headers
from starlette.responses import Response

from mmd_api.contract.errors import ClientGoneError, MmdError
from mmd_workers.gateway.access.keys import KnownTenant
from mmd_workers.gateway.basics.api_errors import ApiError, ErrorShape
from mmd_workers.gateway.placement.timeline import Timeline

Scope = MutableMapping[str, Any]
ReceiveChannel = Callable[[], Awaitable[MutableMapping[str, Any]]]
SendChannel = Callable[[MutableMapping[str, Any]], Awaitable[None]]

_log = logging.getLogger(__name__)

SEND_BYTES = 256 << 10  # a long answer is sent in parts of this size, so that other requests take turns


@dataclass(slots=True)
class Exchange:
    """An HTTP request and the channel for its response.

    `tenant`: the tenant that sent the request. `deadline`: Unix time by which the client wants the request to end. `scope`: ASGI scope from
    the server. `next_event`: for a client that follows another request's stream with numbered events, the number of its next event; a client
    that resumes a stream not kept here may have received fewer. `notes`: additional response headers.
    """

    request_id: str
    receive: ReceiveChannel
    send: SendChannel
    headers: Headers
    timeline: Timeline
    trace: dict[str, str]
    errors: ErrorShape
    tenant: KnownTenant | None = None
    deadline: float = math.inf
    scope: Scope = field(default_factory=dict)
    streaming: bool = False
    next_event: int = 0
    notes: dict[str, str] = field(default_factory=dict)

    async def reply(self, status: int, body: bytes, headers: dict[str, str] | None = None) -> None:
        """Send a whole JSON response."""
        self.timeline.status = status
        response = Response(
            body,
            status,
            {"x-request-id": self.request_id, **self.notes, **(headers or {})},
            media_type="application/json",
        )
        await response({"type": "http"}, self.receive, self.send)

    async def reply_in_pieces(self, pieces: list[bytes]) -> None:
        """Send a whole JSON response, joining a few pieces at a time because it may be hundreds of megabytes."""
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
        """Send server-sent events; the first call opens the stream."""
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
        """Send the error as a response, or as the last event of a stream that has begun."""
        self.timeline.code, self.timeline.error = error.code, error.recorded
        if self.streaming:
            self.timeline.status = self.errors.status(error)
            await self.events(*self.errors.events(error, self.request_id, self.next_event))
            await self.send({"type": "http.response.body", "body": b""})
            return
        body = json.dumps(self.errors.body(error, self.request_id)).encode()
        await self.reply(self.errors.status(error), body, error.headers)


async def until_gone(receive: ReceiveChannel, answer: Any) -> None:
    """Run `answer`, and cancel it when the client hangs up or when this call is cancelled.

    After a cancellation a refusal (`ApiError`, `MmdError`) is dropped, because nobody waits for it; any other failure is logged.

    Raises:
        ClientGoneError: the client hung up before `answer` was done.
    """
    work: asyncio.Task[None] = asyncio.create_task(answer)
    gone = asyncio.create_task(_hung_up(receive))
    is_answered = False
    try:
        await asyncio.wait({work, gone}, return_when=asyncio.FIRST_COMPLETED)
        is_answered = work.done()
    finally:
        for task in (work, gone):
            task.cancel()
        await asyncio.wait({work, gone})
        fault = None if work.cancelled() else work.exception()
        if not is_answered and not isinstance(fault, ApiError | MmdError | None):
            _log.error("an answer that nobody waits for failed", exc_info=fault)
    if not is_answered:
        raise ClientGoneError("the client hung up")
    work.result()


async def _hung_up(receive: ReceiveChannel) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
