"""Delays each answer until its request has arrived, for gateways behind a proxy with an endpoint picker. Wraps any ASGI application.

The picker's stream ends with the request. A response that the proxy has begun to send through that stream before then, such as an error that
needs only the headers, would lose its body (`ext_proc`).
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

MOST_SECONDS = 5.0
"""The longest wait for the rest of a request. Then its answer begins, and passes through the picker if the request is still arriving."""


def after_whole_requests(application: ASGIApp) -> ASGIApp:
    """The application with each answer delayed until the rest of its request has arrived; that rest is discarded."""

    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await application(scope, receive, send)
            return
        has_arrived = False

        async def received() -> Message:
            nonlocal has_arrived
            message = await receive()
            has_arrived = has_arrived or not message.get("more_body", False)
            return message

        async def sent(message: Any) -> None:
            if message["type"] == "http.response.start" and not has_arrived:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(MOST_SECONDS):
                        while not has_arrived:
                            await received()
            await send(message)

        await application(scope, received, sent)

    return answer
