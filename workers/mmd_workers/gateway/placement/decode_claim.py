"""Reserves freed room in decode for a waiting request, so that smaller ones do not take it for ever. Pure: time is an argument."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

from mmd_workers.gateway.placement.fair_queue import Need, Waiting

PATIENCE_SECONDS = 10.0
"""How long a request beyond its tenant's share waits before it may get a claim."""
PAUSE_FACTOR = 4
"""Pause after such a claim, as a multiple of its duration, because slots stay empty meanwhile."""


class DecodeClaim:
    """At most one request has the claim. It starts next, as soon as decode has room for it."""

    def __init__(self) -> None:
        self.holder: Waiting | None = None
        self._since = 0.0
        self._is_within_share = False
        self._rested_at = -math.inf  # end of the pause after a claim beyond a tenant's share

    def choose(
        self,
        heads: Iterable[Waiting],
        lacks: Callable[[Waiting], Need | None],
        is_within_share: Callable[[Waiting], bool],
        patience_seconds: float,
        now: float,
    ) -> bool:
        """Give the free claim to a waiting request that lacks only room in decode. Returns False if none gets it.

        A request within its tenant's share of decode comes first. Otherwise the one that has waited longest gets the claim, if it has waited
        `patience_seconds`.

        `heads`: the first requests of their lines, in the order of turns. `now`: on the clock of `arrived`.
        """
        stuck = [head for head in heads if lacks(head) == "decode"]
        within_share = next((head for head in stuck if is_within_share(head)), None)
        oldest = min(stuck, key=lambda head: head.arrived, default=None)
        if within_share is not None:
            self.holder = within_share
        elif oldest is not None and now >= max(self._rested_at, oldest.arrived + patience_seconds):
            self.holder = oldest
        self._since, self._is_within_share = now, within_share is not None
        return self.holder is not None

    def end(self, entry: Waiting, now: float) -> None:
        """Take the claim from a request that has started, no longer waits, or lacks other room than decode."""
        if entry is not self.holder:
            return
        self.holder = None
        if not self._is_within_share:
            self._rested_at = now + max(PATIENCE_SECONDS, PAUSE_FACTOR * (now - self._since))
