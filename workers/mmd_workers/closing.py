"""The end of a process: each part has its time to close, and what hangs is named instead of waited for."""

from __future__ import annotations

import asyncio
import faulthandler
import logging
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

import uvloop

STEP_SECONDS = 8.0
EXIT_SECONDS = 60.0

log = logging.getLogger(__name__)


async def close_each(*steps: Callable[[], Awaitable[object]], seconds: float = STEP_SECONDS) -> None:
    """Close one part after the other; one that fails or takes longer than `seconds` keeps none of the others open."""
    for step in steps:
        name = getattr(step, "__qualname__", repr(step))
        try:
            async with asyncio.timeout(seconds):
                await step()
        except TimeoutError:
            log.error("%s did not end within %g s: left as it is", name, seconds)
        except Exception:
            log.exception("%s failed", name)


def run(main: Coroutine[Any, Any, None]) -> None:
    """Run a process's coroutine. Threads that then keep the interpreter from its exit are printed, and it ends with status 1."""

    async def whole() -> None:
        try:
            await main
        finally:
            faulthandler.dump_traceback_later(EXIT_SECONDS, exit=True)

    uvloop.run(whole())
