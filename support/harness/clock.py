"""A clock that moves only when a test lets it.

Minutes pass in no time, and a stall of the machine changes nothing.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass


@dataclass
class _Alarm:
    """A call at a moment, unless nobody waits for it any more."""

    ring: Callable[[], object]
    awaited: bool = True


class FakeClock:
    """A clock that jumps to the next awaited moment once no task of the event loop can run.

    Those who wait for the same moment wake in the order in which they began to wait. The clock does not wait
    for real input and output: before a test lets time pass, it awaits the event that real input or output
    brings.
    """

    def __init__(self) -> None:
        self._now = 1000.0
        self._unix = time.time() - self._now
        self._number = itertools.count()
        self._alarms: list[tuple[float, int, _Alarm]] = []

    def now(self) -> float:
        return self._now

    def unix(self) -> float:
        return self._unix + self._now

    @property
    def is_awaited(self) -> bool:
        """Whether anybody waits for time to pass."""
        return self._next() is not None

    async def sleep(self, seconds: float) -> None:
        if seconds <= 0:
            await asyncio.sleep(0)
            return
        over: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        alarm = self._alarm(seconds, lambda: over.done() or over.set_result(None))
        try:
            await over
        finally:
            alarm.awaited = False

    @asynccontextmanager
    async def timeout(self, seconds: float) -> AsyncIterator[None]:
        loop = asyncio.get_running_loop()
        async with asyncio.timeout(None if seconds > 0 else 0) as limit:
            alarm = self._alarm(seconds, lambda: limit.expired() or limit.reschedule(loop.time()))
            try:
                yield
            finally:
                alarm.awaited = False

    async def until(self, condition: Callable[[], object], seconds: float = 1e6) -> None:
        """Let time pass until the condition holds. Fails if it does not within `seconds` of this clock."""
        end = self._now + seconds
        while not await self._at_rest(condition):
            when = self._next()
            if when is None:
                await asyncio.sleep(0.001)  # something real is in progress, such as a thread
                continue
            if when > end:
                raise AssertionError(f"the condition does not hold after {seconds:g} s")
            self._ring()

    async def let_pass(self, seconds: float) -> None:
        """Let `seconds` pass, with everything that happens in them."""
        end = self._now + seconds
        await self._at_rest()
        while (when := self._next()) is not None and when <= end:
            self._ring()
            await self._at_rest()
        self._now = end

    def _alarm(self, seconds: float, ring: Callable[[], object]) -> _Alarm:
        alarm = _Alarm(ring)
        heapq.heappush(self._alarms, (self._now + seconds, next(self._number), alarm))
        return alarm

    def _next(self) -> float | None:
        """The next moment that somebody waits for."""
        while self._alarms and not self._alarms[0][2].awaited:
            heapq.heappop(self._alarms)
        return self._alarms[0][0] if self._alarms else None

    def _ring(self) -> None:
        when, _, alarm = heapq.heappop(self._alarms)
        self._now = max(self._now, when)
        alarm.ring()

    @staticmethod
    async def _at_rest(condition: Callable[[], object] = lambda: False) -> bool:
        """Run the tasks of this event loop until none can run, or the condition holds; returns whether it does."""
        ready = asyncio.get_running_loop()._ready  # type: ignore[attr-defined]
        while not condition():
            await asyncio.sleep(0)
            if not ready:
                return bool(condition())
        return True
