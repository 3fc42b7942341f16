"""Time as an argument: what waits takes a `Clock`, so that a test decides when time passes."""

from __future__ import annotations

import asyncio
import time
from typing import Protocol


class Clock(Protocol):
    """Time that only moves forward, in seconds."""

    def now(self) -> float:
        """Seconds since some fixed moment."""
        ...

    async def sleep(self, seconds: float) -> None:
        """Return after so many seconds."""
        ...


class SystemClock:
    """The clock of this machine."""

    def now(self) -> float:
        """Seconds of `time.monotonic`."""
        return time.monotonic()

    async def sleep(self, seconds: float) -> None:
        """Let other tasks of the event loop run meanwhile."""
        await asyncio.sleep(seconds)


SYSTEM_CLOCK = SystemClock()
