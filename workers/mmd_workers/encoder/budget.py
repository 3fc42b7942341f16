"""A bound on bytes held at the same time: work that needs more waits, in order of arrival. Belongs to one event loop."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from mmd_api.contract.errors import CapacityError


class Held:
    """A part of the budget, which may be given back bit by bit."""

    def __init__(self, budget: ByteBudget, num_bytes: int) -> None:
        self.num_bytes = num_bytes
        self._budget = budget

    def shrink(self, num_bytes: int) -> None:
        """Give back what exceeds `num_bytes`."""
        if num_bytes < self.num_bytes:
            self._budget.free(self.num_bytes - num_bytes)
            self.num_bytes = num_bytes


class ByteBudget:
    """Reserved before anything is produced. First come, first served, so that a large medium is not starved by small ones."""

    def __init__(self, budget_bytes: int, field: str) -> None:
        """`field`: the field of the spec that raises the budget."""
        self.budget_bytes = budget_bytes
        self.used_bytes = 0
        self._field = field
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()

    @asynccontextmanager
    async def hold(self, num_bytes: int, what: str) -> AsyncIterator[Held]:
        """Wait for room, and reserve bytes for the duration of the `with` block.

        Raises:
            CapacityError: `what` can never fit.
        """
        if num_bytes > self.budget_bytes:
            raise CapacityError(
                f"{what} needs {num_bytes >> 20} MiB of host memory to be encoded, but the budget is {self.budget_bytes >> 20} MiB; "
                f"send a smaller one, or raise {self._field}"
            )
        await self._reserve(num_bytes)
        held = Held(self, num_bytes)
        try:
            yield held
        finally:
            held.shrink(0)

    async def _reserve(self, num_bytes: int) -> None:
        if not self._waiting and self.used_bytes + num_bytes <= self.budget_bytes:
            self.used_bytes += num_bytes
            return
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append((num_bytes, turn))
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self.free(num_bytes)
            else:
                self._waiting = deque(item for item in self._waiting if item[1] is not turn)
                self._admit()
            raise

    def free(self, num_bytes: int) -> None:
        """Give bytes back."""
        self.used_bytes -= num_bytes
        self._admit()

    def _admit(self) -> None:
        while self._waiting:
            num_bytes, turn = self._waiting[0]
            if not turn.done():
                if self.used_bytes + num_bytes > self.budget_bytes:
                    return
                self.used_bytes += num_bytes
                turn.set_result(None)
            self._waiting.popleft()
