"""For which waiting request room in decode is kept as it frees up, so that smaller ones do not take it for ever. Pure: time is an argument."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

from mmd_workers.gateway.placement.fair_queue import Need, Waiting

PATIENCE_SECONDS = 10.0
"""After which a request that is more than its tenant's share gets a claim as well."""
PAUSE_FACTOR = 4
"""Times as long as such a claim lasted none follows: slots are empty meanwhile."""


class DecodeClaim:
    """At most one request has the claim: it starts next, as soon as decode has room for it."""

    def __init__(self) -> None:
        self.holder: Waiting | None = None
        self._since = 0.0
        self._is_within_share = False
        self._rested_at = -math.inf  # when a request beyond its tenant's share may have the next claim

    def choose(
        self,
        heads: Iterable[Waiting],
        lacks: Callable[[Waiting], Need | None],
        is_within_share: Callable[[Waiting], bool],
        patience_seconds: float,
        now: float,
    ) -> bool:
        """Give the claim, which nothing has, to one of those that wait, of which only decode has no room for it: one of a tenant that has no more than its share
        with it, or else the one that has waited longest, if that is `patience_seconds`. False: none gets it.

        `heads`: those that are first in their lines, in the order of turns. `now`: as they have it in `arrived`.
        """
        stuck = [head for head in heads if lacks(head) == "decode"]
        within = next((head for head in stuck if is_within_share(head)), None)
        oldest = min(stuck, key=lambda head: head.arrived, default=None)
        if within is not None:
            self.holder = within
        elif oldest is not None and now >= max(self._rested_at, oldest.arrived + patience_seconds):
            self.holder = oldest
        self._since, self._is_within_share = now, within is not None
        return self.holder is not None

    def end(self, entry: Waiting, now: float) -> None:
        """A request has started, waits no more, or waits for something else than decode."""
        if entry is not self.holder:
            return
        self.holder = None
        if not self._is_within_share:
            self._rested_at = now + max(PATIENCE_SECONDS, PAUSE_FACTOR * (now - self._since))
