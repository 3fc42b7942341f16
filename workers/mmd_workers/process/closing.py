"""The end of a process: each part has a time limit to close, and a part that hangs is logged, not waited for."""

from __future__ import annotations

import asyncio
import faulthandler
import logging
import os
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, NoReturn

import uvloop

STEP_SECONDS = 8.0
EXIT_SECONDS = 60.0

log = logging.getLogger(__name__)


async def close_each(*steps: Callable[[], Awaitable[object]], seconds: float = STEP_SECONDS) -> None:
    """Close one part after the other; a part that fails or takes longer than `seconds` does not stop the rest."""
    for step in steps:
        name = getattr(step, "__qualname__", repr(step))
        try:
            async with asyncio.timeout(seconds):
                await step()
        except TimeoutError:
            log.error("%s did not finish within %g s; continuing without it", name, seconds)
        except Exception:
            log.exception("%s failed", name)


def end_now(words: str) -> NoReturn:
    """End this process without waiting for its threads, with status 1 and a reason as its last message."""
    log.critical("cannot serve (engine_dead): %s", words)
    logging.shutdown()
    os._exit(1)


def run(main: Coroutine[Any, Any, None]) -> None:
    """Run a process's coroutine. If threads then keep it from exiting, their tracebacks are printed and it ends with status 1."""

    async def guarded() -> None:
        try:
            await main
        finally:
            faulthandler.dump_traceback_later(EXIT_SECONDS, exit=True)

    uvloop.run(guarded())
