"""Chooses the waiting request that starts next: deficit round robin over tenants, by seconds of work. Pure: no clock, no HTTP, no pods.

Shreedhar and Varghese, "Efficient Fair Queuing Using Deficit Round Robin", SIGCOMM 1995. In every round a tenant may start work for a
quantum times its weight. Any unused part is its deficit in the next round. So over time each waiting tenant gets work in proportion to
its weight, however large its requests are, and a new tenant waits for at most one round of the others.
"""

from __future__ import annotations

import math
from bisect import insort
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Literal

from mmd_api.tenants import Priority

QUANTUM_SECONDS = 0.02
"""Work that a tenant of weight 1 may start in a round."""
WEIGHTS: dict[Priority, int] = {"High": 16, "Normal": 4, "Low": 1}
"""Shares of tenants by priority: weighted, not strict, so that no priority starves another."""
RESENT_BYTES_PER_SECOND = 10e6
"""Assumed rate at which a client sends a refused request again."""

LOOKED_AT = 4
"""How many requests of a lane are tried if those before them lack only room in decode; later ones may be smaller."""
MAX_DEBT_SECONDS = 60.0
"""Most work a tenant can owe beyond its turns: estimates of work may be wrong by any amount."""

Lane = Literal["text", "media", "small_media"]
"""Requests without media, with media, and with small media.

Media wait for encoders as well, and must not delay text. Prefill pods also encode small media, which thus have more pods than others; in
a common lane, small media would always leave the others no room.
"""
Need = Lane | Literal["decode"]
"""The room that a request may lack: in the window of its lane, or in decode."""


@dataclass(slots=True, eq=False)
class Waiting:
    """A waiting request. `work_seconds`: estimated, for the whole deployment. `arrived` and `deadline` are on different clocks."""

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
        """Sort key within its tenant and lane: the earliest deadline first, then the order of arrival."""
        return self.deadline, self.number


@dataclass(slots=True)
class _Line:
    """The waiting requests of one tenant, by lane and in order."""

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
    """The waiting requests, by tenant. The tenant whose turn it is comes first.

    The caller keeps the queue bounded: after `add`, it removes `excess` entries until there are none.
    """

    def __init__(self) -> None:
        self._lines: dict[str, _Line] = {}
        self._numbers = 0
        self.length = 0

    def add(self, entry: Waiting) -> None:
        """Add a request to the queue."""
        self._numbers += 1
        entry.number = self._numbers
        line = self._lines.setdefault(entry.tenant, _Line(entry.weight))
        line.weight = entry.weight
        insort(line.lanes.setdefault(entry.lane, []), entry, key=lambda item: item.order)
        self.length += 1

    def remove(self, entry: Waiting) -> bool:
        """Remove a request; False if it did not wait. A tenant without requests loses its deficit, so that nobody saves up turns."""
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
        """Take the request that starts next; None if nothing waits, or nothing that waits may start.

        `lacks`: the room in the pools that a request lacks; None: it may start. Only the first requests of each lane are tried. A tenant
        that may start none of them gains no deficit meanwhile.
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
        """Take a request whose turn it may not be. Its next turns make up for that."""
        self.charge(entry.tenant, entry.work_seconds)
        self.remove(entry)

    def charge(self, tenant: str, seconds: float) -> None:
        """Charge a waiting tenant for work beyond its turns; negative seconds repay earlier charges."""
        if (line := self._lines.get(tenant)) is not None:
            charged = line.deficit_seconds - seconds
            limit = max(0.0, line.deficit_seconds)
            line.deficit_seconds = min(limit, max(-MAX_DEBT_SECONDS, charged))

    def heads(self) -> Iterator[Waiting]:
        """The first request of each lane of each tenant, in the order of turns."""
        for line in self._lines.values():
            yield from (lane[0] for lane in line.lanes.values() if lane)

    def excess(self, max_seconds: float, max_bytes: int, now: float) -> Waiting | None:
        """The request to refuse while the queue exceeds these bounds; None if it does not, or only one request waits.

        It belongs to the tenant with the most waiting for its weight. Of that tenant's requests it loses least: it came last, and is soon
        sent again.
        """
        seconds, size = self.work_seconds(), self.num_bytes()
        if self.length < 2 or (seconds <= max_seconds and size <= max_bytes):
            return None
        by_bytes = size > max_bytes
        tenant = max(
            self._lines,
            key=lambda name: (
                (self.num_bytes(name) if by_bytes else self.work_seconds(name)) / self._lines[name].weight
            ),
        )
        return self.least_loss(tenant, now)

    def least_loss(self, tenant: str, now: float) -> Waiting | None:
        """The request of a tenant whose refusal loses least; None if the tenant has none waiting."""
        line = self._lines.get(tenant)
        if line is None:
            return None
        return min(line.entries(), key=lambda entry: (loss_seconds(entry, now), -entry.number))

    def entries(self) -> Iterator[Waiting]:
        """All waiting requests, in no particular order."""
        for line in self._lines.values():
            yield from line.entries()

    def tenants(self) -> dict[str, int]:
        """The waiting tenants, with their weights."""
        return {name: line.weight for name, line in self._lines.items()}

    def work_seconds(self, tenant: str | None = None) -> float:
        """Waiting work, of one tenant or of all."""
        return math.fsum(line.work_seconds for line in self._of(tenant))

    def num_bytes(self, tenant: str | None = None) -> int:
        """Bytes that the waiting requests of one tenant, or of all, hold at the gateway."""
        return sum(line.num_bytes for line in self._of(tenant))

    def _of(self, tenant: str | None) -> list[_Line]:
        if tenant is None:
            return list(self._lines.values())
        return [self._lines[tenant]] if tenant in self._lines else []

    def _rounds_until(self, entry: Waiting) -> int:
        """Rounds until its tenant may start the request."""
        line = self._lines[entry.tenant]
        missing = entry.work_seconds - line.deficit_seconds
        return max(0, math.ceil(missing / (line.weight * QUANTUM_SECONDS) - 1e-9))

    def _to_the_end(self, tenant: str) -> None:
        if (line := self._lines.pop(tenant, None)) is not None:
            self._lines[tenant] = line


def loss_seconds(entry: Waiting, now: float) -> float:
    """Time that a refusal costs the client: the time already waited, and the time to send the request again."""
    return now - entry.arrived + entry.num_bytes / RESENT_BYTES_PER_SECOND


def _first(line: _Line, lacks: Callable[[Waiting], Need | None]) -> Waiting | None:
    candidates = []
    for lane in line.lanes.values():
        for entry in lane[:LOOKED_AT]:
            need = lacks(entry)
            if need is None:
                candidates.append(entry)
            if need != "decode":
                break
    return min(candidates, key=lambda entry: entry.order, default=None)
