"""When a gateway that is asked to go may end. Independent of HTTP, signals and the network."""

from __future__ import annotations

import math
import time
from collections.abc import Callable

from mmd_workers.gateway.api.gateway import Gateway
from mmd_workers.wire.peers import PeerEvent

QUIET_SECONDS = 2.0
"""Without a new request: then clients have found another gateway."""
ALONE_SECONDS = 15.0
"""The same where fewer other gateways serve than there should be: its replacement may still start. Nodes send requests here until one is
Ready, and for a moment even after this one has ended: if the last other one is deleted just then, those requests would be refused.
"""
MOST_ALONE_SECONDS = 300.0
"""Afterwards no replacement is expected: the deployment may be about to be deleted."""
TAKEOVER_SECONDS = 8.0
"""From another gateway's first heartbeat until nodes send requests there: its probes, and what nodes take to learn of it."""
STALLED_SECONDS = 60.0
"""A client that has read less of finished answers for so long will not read the rest."""
STALLED_BYTES = 4 << 10
"""Of answers that were sent in few large pieces, a client that follows at 20 tokens a second reads some 200 bytes a second."""


class OtherGateways:
    """Those that are ready, and since when. To be given every event of the pods from this process's start.

    `replicas`: how many there should be when another has taken this one's place.
    """

    def __init__(self, own: str, replicas: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._own, self.replicas, self._clock = own, replicas, clock
        self._since: dict[str, float] = {}

    def note(self, event: PeerEvent) -> None:
        """A pod has appeared, changed or gone."""
        beat = event.heartbeat
        if beat.pool != "gateway" or beat.pod == self._own:
            return
        if event.kind == "lost" or beat.state != "ready":
            self._since.pop(beat.pod, None)
        else:
            self._since[beat.pod] = self._clock()

    def count(self) -> int:
        """How many are ready."""
        return len(self._since)

    def names(self) -> list[str]:
        """The pods that are ready."""
        return list(self._since)

    def suffice(self) -> bool:
        """Whether nodes send requests to as many as there should be."""
        serving = sum(self._clock() - since >= TAKEOVER_SECONDS for since in self._since.values())
        return serving >= self.replicas


class Leave:
    """Asked again and again from the moment at which the gateway was asked to go.

    `undelivered_bytes`: what clients have not received of finished answers. `is_replaced`: whether another gateway is to take its place.
    """

    def __init__(
        self,
        gateway: Gateway,
        others: OtherGateways,
        undelivered_bytes: Callable[[], int],
        is_replaced: bool,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._gateway, self._others, self._undelivered_bytes = gateway, others, undelivered_bytes
        self._is_replaced, self._clock = is_replaced, clock
        self._began = clock() if is_replaced else -math.inf
        self._lowest: int | None = None
        self._fell = 0.0

    def may_end(self) -> bool:
        """Whether nothing is left to do, and nobody seems to count on this gateway."""
        now = self._clock()
        since_request = now - max(self._gateway.last_request, self._last_pick(), self._began)
        if since_request < self._patience(now) or self._gateway.running:
            self._lowest = None
            return False
        return self._is_delivered(now)

    def _last_pick(self) -> float:
        """Proxies that still ask its picker do not know that it goes, and fail requests about which they cannot ask."""
        return -math.inf if self._gateway.picker is None else self._gateway.picker.last_pick

    def _patience(self, now: float) -> float:
        """Seconds without a request that show that clients do not need this gateway."""
        if not self._is_replaced:
            return QUIET_SECONDS
        if not self._others.suffice() and now - self._began < MOST_ALONE_SECONDS:
            return ALONE_SECONDS
        # Another that was killed counts as ready until its heartbeats are missed.
        return max(QUIET_SECONDS, min(ALONE_SECONDS, self._gateway.directory.timeout_seconds + 0.5))

    def _is_delivered(self, now: float) -> bool:
        left = self._undelivered_bytes()
        if self._lowest is None or left <= self._lowest - STALLED_BYTES:
            self._lowest, self._fell = left, now
        return not left or now - self._fell >= STALLED_SECONDS
