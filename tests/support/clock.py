"""A clock that moves only when a test lets it, so that minutes pass in no time and a stall of the machine changes nothing."""

from __future__ import annotations

import asyncio
import heapq
import itertools
from collections.abc import Callable

SETTLING_TURNS = 20
"""Turns of the event loop in which tasks that wait for no time come to rest. They must do no real input or output."""


class FakeClock:
    """Time jumps to the next sleeper once everything else is at rest."""

    def __init__(self) -> None:
        self._now = 1000.0
        self._number = itertools.count()
        self._sleepers: list[tuple[float, int, asyncio.Future[None]]] = []

    def now(self) -> float:
        return self._now

    async def sleep(self, seconds: float) -> None:
        until: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        heapq.heappush(self._sleepers, (self._now + seconds, next(self._number), until))
        await until

    async def until(self, condition: Callable[[], object], seconds: float = 1e6) -> None:
        """Let time pass until the condition holds; fails if it does not within so many seconds of this clock."""
        end = self._now + seconds
        while not await self._settled(condition):
            if not self._sleepers:
                await asyncio.sleep(0.001)  # something real is under way, a thread for one
                continue
            when, _, sleeper = self._sleepers[0]
            if not sleeper.done() and when > end:
                raise AssertionError(f"the condition does not hold after {seconds:g} s")
            heapq.heappop(self._sleepers)
            if sleeper.done():  # cancelled
                continue
            self._now = max(self._now, when)
            sleeper.set_result(None)

    async def let_pass(self, seconds: float) -> None:
        """Let at least so many seconds pass, up to the next moment that somebody waits for."""
        end = self._now + seconds
        await self.until(lambda: self._now >= end)

    @staticmethod
    async def _settled(condition: Callable[[], object]) -> bool:
        for _ in range(SETTLING_TURNS):
            if condition():
                return True
            await asyncio.sleep(0)
        return bool(condition())
