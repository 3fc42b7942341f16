"""Time as an argument: what waits takes a `Clock`, so that a test decides when time passes."""

from __future__ import annotations

import asyncio
import time
from contextlib import AbstractAsyncContextManager
from typing import Protocol


class Clock(Protocol):
    """Time in seconds, and the ways to wait for it on an event loop."""

    def now(self) -> float:
        """Seconds since some fixed moment. Never goes back."""
        ...

    def unix(self) -> float:
        """Unix seconds, as deadlines have them that other pods read too. May be set back."""
        ...

    async def sleep(self, seconds: float) -> None:
        """Return after so many seconds."""
        ...

    def timeout(self, seconds: float) -> AbstractAsyncContextManager[object]:
        """As `asyncio.timeout`: the block ends with `TimeoutError` after so many seconds."""
        ...


class SystemClock:
    """The clock of this machine."""

    def now(self) -> float:
        """Seconds of `time.monotonic`."""
        return time.monotonic()

    def unix(self) -> float:
        """Seconds of `time.time`."""
        return time.time()

    async def sleep(self, seconds: float) -> None:
        """Let other tasks of the event loop run meanwhile."""
        await asyncio.sleep(seconds)

    def timeout(self, seconds: float) -> AbstractAsyncContextManager[object]:
        """Seconds of the event loop."""
        return asyncio.timeout(seconds)


SYSTEM_CLOCK = SystemClock()
