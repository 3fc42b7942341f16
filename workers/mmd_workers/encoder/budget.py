"""A bound on bytes held at the same time: work that needs more waits, and modalities take turns. Belongs to one event loop."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial

from mmd_api.contract.errors import CapacityError
from mmd_api.contract.pools import Modality
from mmd_workers.basics.overtaking import MAX_OVERTAKEN, next_in_line
from mmd_workers.encoder.shares import FairShares


class Held:
    """A reserved part of the budget, which may be given back bit by bit."""

    def __init__(self, budget: ByteBudget, num_bytes: int, modality: Modality) -> None:
        self.num_bytes = num_bytes
        self._budget = budget
        self._modality = modality

    def shrink(self, num_bytes: int) -> None:
        """Give back the bytes beyond `num_bytes`."""
        if num_bytes < self.num_bytes:
            self._budget.free(self.num_bytes - num_bytes, self._modality)
            self.num_bytes = num_bytes


@dataclass(slots=True, eq=False)
class _Waiting:
    num_bytes: int
    turn: asyncio.Future[None]
    overtaken: int = 0


class ByteBudget:
    """A budget of bytes that are reserved before anything is produced.

    Modalities that wait get equal shares of the bytes, and the oldest medium of a modality comes first. While the first in turn does not
    fit, those that do pass it, at most `MAX_OVERTAKEN` times; then all bytes that become free are for it.

    A modality leaves `spare_bytes` to the others, unless one medium alone needs them. A medium that waits for those of its own modality
    holds up nobody else.
    """

    def __init__(self, budget_bytes: int, field: str, spare_bytes: int = 0) -> None:
        """`field`: the field of the spec that raises the budget."""
        self.budget_bytes = budget_bytes
        self.used_bytes = 0
        self._field = field
        self._most_bytes = budget_bytes - spare_bytes  # a modality's limit, unless it holds a single medium
        self._held_bytes = Counter[Modality]()
        self._waiting: dict[Modality, list[_Waiting]] = {}
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
        reservation = Held(self, num_bytes, modality)
        try:
            yield reservation
        finally:
            reservation.shrink(0)

    async def _reserve(self, num_bytes: int, modality: Modality) -> None:
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(modality, []).append(_Waiting(num_bytes, turn))
        self._admit()
        try:
            await turn
        except asyncio.CancelledError:
            if turn.cancelled():
                self._admit()
            else:
                self.free(num_bytes, modality)
            raise

    def free(self, num_bytes: int, modality: Modality) -> None:
        """Give back bytes of a medium of this modality."""
        self.used_bytes -= num_bytes
        self._held_bytes[modality] -= num_bytes
        self._admit()

    def _admit(self) -> None:
        while (admitted := self._next()) is not None:
            modality, waiting = admitted
            self._waiting[modality].remove(waiting)
            self._shares.add(modality, waiting.num_bytes)
            self.used_bytes += waiting.num_bytes
            self._held_bytes[modality] += waiting.num_bytes
            waiting.turn.set_result(None)

    def _next(self) -> tuple[Modality, _Waiting] | None:
        """The medium to admit now; None if none may be. Media that have given up are removed."""
        for modality, line in [*self._waiting.items()]:
            line[:] = [waiting for waiting in line if not waiting.turn.done()]
            if not line:
                del self._waiting[modality]
        first: _Waiting | None = None  # the first in turn among those that wait for bytes of any modality
        for modality in self._shares.in_turn(self._waiting):
            line = self._waiting[modality]
            waiting = next_in_line(line, partial(self._fits, modality))
            if waiting is not None:
                if first is not None:
                    first.overtaken += 1
                return modality, waiting
            if first is None and self._is_within_share(modality, line[0]):
                first = line[0]
                if first.overtaken >= MAX_OVERTAKEN:
                    return None
        return None

    def _fits(self, modality: Modality, waiting: _Waiting) -> bool:
        has_room = self.used_bytes + waiting.num_bytes <= self.budget_bytes
        return has_room and self._is_within_share(modality, waiting)

    def _is_within_share(self, modality: Modality, waiting: _Waiting) -> bool:
        held_bytes = self._held_bytes[modality]
        return not held_bytes or held_bytes + waiting.num_bytes <= self._most_bytes
