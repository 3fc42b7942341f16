"""Which waiting request starts next: deficit round robin over tenants, by seconds of work. Pure: no clock, no HTTP, no pods.

Shreedhar and Varghese, "Efficient Fair Queuing Using Deficit Round Robin", SIGCOMM 1995: in every round a tenant may start work for a
quantum times its weight, and what it does not use of that is its deficit in the next round. So over time each tenant that waits gets
work in proportion to its weight, however large its requests are, and a tenant that comes waits for one round of the others at most.
"""

from __future__ import annotations

import math
from bisect import insort
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Literal

from mmd_api.tenants import Priority

QUANTUM_SECONDS = 0.02
"""Of work that weight 1 may start in a round."""
WEIGHTS: dict[Priority, int] = {"High": 16, "Normal": 4, "Low": 1}
"""Shares of tenants by priority: weighted, not strict, so that no priority starves another."""
RESENT_BYTES_PER_SECOND = 10e6
"""At which a client is assumed to send a refused request again."""

LOOKED_AT = 4
"""Requests of a lane that are looked at, where those before them lack room in decode alone: they may be smaller."""
MAX_DEBT_SECONDS = 60.0
"""What a tenant has had beyond its turns, at most: estimates of work may be wrong by any amount."""

Lane = Literal["text", "media", "small_media"]
"""Requests without media, and those with: the latter wait for encoders as well, and hold up no text. Small media, which prefill pods encode
too, have more pods than others: in one lane they would always leave those no place.
"""
Need = Lane | Literal["decode"]
"""Room in the window of a lane, and in decode."""


@dataclass(slots=True, eq=False)
class Waiting:
    """A request that waits. `work_seconds`: of the whole deployment, estimated. `arrived` and `deadline`: each on a clock of its own."""

    tenant: str
    weight: int
    lane: Lane
    work_seconds: float
    num_bytes: int
    arrived: float
    deadline: float
    number: int = 0

    @property
    def order(self) -> tuple[float, int]:
        """Within its tenant and lane: the earliest deadline first, of equals the first that came."""
        return self.deadline, self.number


@dataclass(slots=True)
class _Line:
    """What waits of one tenant, by lane and in order."""

    weight: int
    deficit_seconds: float = 0.0
    lanes: dict[Lane, list[Waiting]] = field(default_factory=dict)

    def entries(self) -> Iterator[Waiting]:
        for lane in self.lanes.values():
            yield from lane

    @property
    def work_seconds(self) -> float:
        return math.fsum(entry.work_seconds for entry in self.entries())

    @property
    def num_bytes(self) -> int:
        return sum(entry.num_bytes for entry in self.entries())


class FairQueue:
    """The requests that wait, by tenant. The tenant whose turn it is stands first.

    Bounded by the caller: after `add` it takes `excess` entries out until there are none.
    """

    def __init__(self) -> None:
        self._lines: dict[str, _Line] = {}
        self._numbers = 0
        self.length = 0

    def add(self, entry: Waiting) -> None:
        """Let a request wait."""
        self._numbers += 1
        entry.number = self._numbers
        line = self._lines.setdefault(entry.tenant, _Line(entry.weight))
        line.weight = entry.weight
        insort(line.lanes.setdefault(entry.lane, []), entry, key=lambda one: one.order)
        self.length += 1

    def remove(self, entry: Waiting) -> bool:
        """Let a request wait no more; False: it did not wait. A tenant without any loses its deficit, so that nobody saves up turns."""
        line = self._lines.get(entry.tenant)
        lane = line.lanes.get(entry.lane, []) if line else []
        if line is None or entry not in lane:
            return False
        lane.remove(entry)
        self.length -= 1
        if not any(line.lanes.values()):
            del self._lines[entry.tenant]
        return True

    def next(self, lacks: Callable[[Waiting], Need | None]) -> Waiting | None:
        """Take the request that starts next; None: nothing waits, or nothing of it may start.

        `lacks`: the room in the pools that a request lacks; None: it may start. Only the first of each tenant's lanes are asked for, and
        a tenant of which none may start gains nothing meanwhile.
        """
        ready = {name: first for name, line in self._lines.items() if (first := _first(line, lacks))}
        if not ready:
            return None
        rounds = min(map(self._rounds_until, ready.values()))
        if rounds:
            for name in ready:
                line = self._lines[name]
                line.deficit_seconds += rounds * line.weight * QUANTUM_SECONDS
        chosen = next(entry for entry in ready.values() if not self._rounds_until(entry))
        line = self._lines[chosen.tenant]
        line.deficit_seconds -= chosen.work_seconds
        self.remove(chosen)
        if (first := _first(line, lacks)) is None or self._rounds_until(first):
            self._to_the_end(chosen.tenant)
        return chosen

    def take(self, entry: Waiting) -> None:
        """Take a request whose turn it may not be. Its tenant makes up for that in its next turns."""
        self.charge(entry.tenant, entry.work_seconds)
        self.remove(entry)

    def charge(self, tenant: str, seconds: float) -> None:
        """A tenant that waits has had so much more work than its turns have given it; or less, which pays for what was more."""
        if (line := self._lines.get(tenant)) is not None:
            charged = line.deficit_seconds - seconds
            most = max(0.0, line.deficit_seconds)
            line.deficit_seconds = min(most, max(-MAX_DEBT_SECONDS, charged))

    def heads(self) -> Iterator[Waiting]:
        """The first of each lane of each tenant, in the order of turns."""
        for line in self._lines.values():
            yield from (lane[0] for lane in line.lanes.values() if lane)

    def excess(self, max_seconds: float, max_bytes: int, now: float) -> Waiting | None:
        """The request to refuse while more waits than these bounds allow; None: it does not, or only one request waits.

        It is one of the tenant that has the most waiting for its weight, and of these the one of which least is lost: it came last, and
        is soon sent again.
        """
        seconds, size = self.work_seconds(), self.num_bytes()
        if self.length < 2 or (seconds <= max_seconds and size <= max_bytes):
            return None
        by_bytes = size > max_bytes
        most = max(
            self._lines,
            key=lambda name: (
                (self.num_bytes(name) if by_bytes else self.work_seconds(name)) / self._lines[name].weight
            ),
        )
        return self.least_loss(most, now)

    def least_loss(self, tenant: str, now: float) -> Waiting | None:
        """The request of a tenant whose refusal loses least; None: none of it waits."""
        line = self._lines.get(tenant)
        if line is None:
            return None
        return min(line.entries(), key=lambda entry: (loss_seconds(entry, now), -entry.number))

    def entries(self) -> Iterator[Waiting]:
        """Everything that waits, in no order."""
        for line in self._lines.values():
            yield from line.entries()

    def tenants(self) -> dict[str, int]:
        """The tenants that wait, with their weights."""
        return {name: line.weight for name, line in self._lines.items()}

    def work_seconds(self, tenant: str | None = None) -> float:
        """Work that waits, of one tenant or of all."""
        return math.fsum(line.work_seconds for line in self._of(tenant))

    def num_bytes(self, tenant: str | None = None) -> int:
        """What the requests of one tenant, or of all, hold at the gateway while they wait."""
        return sum(line.num_bytes for line in self._of(tenant))

    def _of(self, tenant: str | None) -> list[_Line]:
        if tenant is None:
            return list(self._lines.values())
        return [self._lines[tenant]] if tenant in self._lines else []

    def _rounds_until(self, entry: Waiting) -> int:
        """Rounds after which its tenant may start it."""
        line = self._lines[entry.tenant]
        missing = entry.work_seconds - line.deficit_seconds
        return max(0, math.ceil(missing / (line.weight * QUANTUM_SECONDS) - 1e-9))

    def _to_the_end(self, tenant: str) -> None:
        if (line := self._lines.pop(tenant, None)) is not None:
            self._lines[tenant] = line


def loss_seconds(entry: Waiting, now: float) -> float:
    """What a refusal costs its client: the time for which it has waited, and that of sending the request again."""
    return now - entry.arrived + entry.num_bytes / RESENT_BYTES_PER_SECOND


def _first(line: _Line, lacks: Callable[[Waiting], Need | None]) -> Waiting | None:
    found = []
    for lane in line.lanes.values():
        for entry in lane[:LOOKED_AT]:
            need = lacks(entry)
            if need is None:
                found.append(entry)
            if need != "decode":
                break
    return min(found, key=lambda entry: entry.order, default=None)
