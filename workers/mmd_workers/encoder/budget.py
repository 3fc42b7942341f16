"""A bound on bytes held at the same time: work that needs more waits, and modalities take turns. Belongs to one event loop."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from mmd_api.contract.errors import CapacityError
from mmd_api.contract.pools import Modality
from mmd_workers.encoder.shares import FairShares


class Held:
    """A reserved part of the budget, which may be given back bit by bit."""

    def __init__(self, budget: ByteBudget, num_bytes: int) -> None:
        self.num_bytes = num_bytes
        self._budget = budget

    def shrink(self, num_bytes: int) -> None:
        """Give back the bytes beyond `num_bytes`."""
        if num_bytes < self.num_bytes:
            self._budget.free(self.num_bytes - num_bytes)
            self.num_bytes = num_bytes


class ByteBudget:
    """A budget of bytes that are reserved before anything is produced.

    Modalities that wait get equal shares of the bytes, and media of one modality are admitted in order of arrival. The next medium holds
    up the others until it fits, so that small media do not starve a large one.
    """

    def __init__(self, budget_bytes: int, field: str) -> None:
        """`field`: the field of the spec that raises the budget."""
        self.budget_bytes = budget_bytes
        self.used_bytes = 0
        self._field = field
        self._waiting: dict[Modality, deque[tuple[int, asyncio.Future[None]]]] = {}
        self._shares = FairShares()

    @asynccontextmanager
    async def hold(self, num_bytes: int, what: str, modality: Modality) -> AsyncIterator[Held]:
        """Wait for room, and reserve bytes for the duration of the `with` block.

        Raises:
            CapacityError: `what` can never fit.
        """
        if num_bytes > self.budget_bytes:
            raise CapacityError(
                f"{what} needs {num_bytes >> 20} MiB of host memory to be encoded, but the budget is {self.budget_bytes >> 20} MiB; "
                f"send a smaller one, or raise {self._field}"
            )
        await self._reserve(num_bytes, modality)
        reservation = Held(self, num_bytes)
        try:
            yield reservation
        finally:
            reservation.shrink(0)

    async def _reserve(self, num_bytes: int, modality: Modality) -> None:
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(modality, deque()).append((num_bytes, turn))
        self._admit()
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self.free(num_bytes)
            else:
                self._admit()
            raise

    def free(self, num_bytes: int) -> None:
        """Give bytes back."""
        self.used_bytes -= num_bytes
        self._admit()

    def _admit(self) -> None:
        while (modality := self._turn()) is not None:
            num_bytes, turn = self._waiting[modality][0]
            if self.used_bytes + num_bytes > self.budget_bytes:
                return
            self._waiting[modality].popleft()
            self._shares.add(modality, num_bytes)
            self.used_bytes += num_bytes
            turn.set_result(None)

    def _turn(self) -> Modality | None:
        """The modality whose oldest medium is next; None if nothing waits. Media that have given up are removed."""
        for modality, turns in [*self._waiting.items()]:
            while turns and turns[0][1].done():
                turns.popleft()
            if not turns:
                del self._waiting[modality]
        return self._shares.next_of(self._waiting) if self._waiting else None
