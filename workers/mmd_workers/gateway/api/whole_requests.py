"""Behind a proxy that asks an endpoint picker, no answer begins before its request has arrived. It knows no request: whatever answers, answers later.

The picker's stream ends with the request. A response that the proxy has begun to send through that stream by then, such as an error that needs
the headers alone, would lose its body (`ext_proc`).
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

MOST_SECONDS = 5.0
"""For the rest of a request. Then its answer begins, and passes through the picker if the request is still on its way."""


def after_whole_requests(application: ASGIApp) -> ASGIApp:
    """The application, whose answers wait for the rest of their requests, which is not kept."""

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
