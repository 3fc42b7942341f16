"""Periodic work of `mmd up`, next to the processes that it runs."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import NoReturn

log = logging.getLogger(__name__)


async def repeat(name: str, pause_seconds: float, step: Callable[[], Awaitable[None]]) -> NoReturn:
    """Run `step` after every pause until cancelled.

    A failure is logged, once while it repeats, and the loop continues.
    """
    logged = ""
    while True:
        await asyncio.sleep(pause_seconds)
        try:
            await step()
        except Exception as error:
            if repr(error) != logged:
                log.exception("%s: step failed; next step in %g s", name, pause_seconds)
            logged = repr(error)
        else:
            logged = ""
