"""Time as an argument: code that waits takes a `Clock`, so that a test decides when time passes."""

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
        """Unix seconds, as in deadlines that other pods read too. May be set back."""
        ...

    async def sleep(self, seconds: float) -> None:
        """Return after this many seconds."""
        ...

    def timeout(self, seconds: float) -> AbstractAsyncContextManager[object]:
        """Like `asyncio.timeout`: the block ends with `TimeoutError` after this many seconds."""
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
        """Sleep, and let other tasks of the event loop run meanwhile."""
        await asyncio.sleep(seconds)

    def timeout(self, seconds: float) -> AbstractAsyncContextManager[object]:
        """A timeout in seconds of the event loop."""
        return asyncio.timeout(seconds)


SYSTEM_CLOCK = SystemClock()
