"""Handles a body that its request's answer did not wait for: it is read for a while, then the connection is closed.

Most clients send everything before they read: a connection that closed at once would hide the answer from them, and a connection that
stayed open would be read without limit. Independent of answers.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Iterable, MutableMapping
from typing import Any

DISCARD_BYTES = 32 << 20
DISCARD_SECONDS = 5.0

_Message = MutableMapping[str, Any]
_Receive = Callable[[], Awaitable[_Message]]
_Send = Callable[[_Message], Awaitable[None]]


class UnreadBodyMiddleware:
    """Ends the connection of a request that is answered before its body has been read, within limits of bytes and seconds."""

    def __init__(self, application: Any) -> None:
        self._application = application

    async def __call__(self, scope: MutableMapping[str, Any], receive: _Receive, send: _Send) -> None:
        """Pass a request on; the answer is complete for the client before anything is discarded."""
        if scope["type"] != "http" or not _has_body(scope["headers"]):
            await self._application(scope, receive, send)
            return
        body_ended, closes, answered = False, False, False

        async def reading() -> _Message:
            nonlocal body_ended
            message = await receive()
            body_ended = body_ended or not message.get("more_body", False)  # at its end, or disconnected
            return message

        async def sending(message: _Message) -> None:
            nonlocal closes, answered
            if message["type"] == "http.response.start" and not body_ended:
                closes = True
                message = {**message, "headers": [*message.get("headers", ()), (b"connection", b"close")]}
            elif closes and not message.get("more_body", False):
                answered = True
                message = {**message, "more_body": True}  # the server closes the connection with the last one
            await send(message)

        await self._application(scope, reading, sending)
        if answered:
            remaining_bytes = DISCARD_BYTES
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(DISCARD_SECONDS):
                    while remaining_bytes > 0 and not body_ended:
                        remaining_bytes -= len((await reading()).get("body", b""))
            await send({"type": "http.response.body", "body": b""})


def _has_body(headers: Iterable[tuple[bytes, bytes]]) -> bool:
    return any(
        name == b"transfer-encoding" or (name == b"content-length" and value.strip(b"0 ") != b"")
        for name, value in headers
    )
