"""Decides when a gateway that was asked to stop may end. Independent of HTTP, signals and the network."""

from __future__ import annotations

import math
import time
from collections.abc import Callable

from mmd_workers.gateway.api.gateway import Gateway
from mmd_workers.wire.peers import PeerEvent

QUIET_SECONDS = 2.0
"""After this time without a new request, clients have found another gateway."""
ALONE_SECONDS = 15.0
"""The same if fewer other gateways serve than there should be, because a replacement may still be starting. Nodes send requests here until one is
Ready, and for a moment even after this gateway has ended; if the last other gateway is deleted just then, those requests are refused.
"""
MOST_ALONE_SECONDS = 300.0
"""After this time no replacement is expected: the deployment may be about to be deleted."""
TAKEOVER_SECONDS = 8.0
"""The time from another gateway's first heartbeat until nodes send requests there: its probes, and the update of the nodes."""
STALLED_SECONDS = 60.0
"""A client that has read less than `STALLED_BYTES` of finished answers for this long will not read the rest."""
STALLED_BYTES = 4 << 10
"""A client that follows at 20 tokens per second reads about 200 bytes per second of answers sent in few large pieces."""


class OtherGateways:
    """The other ready gateways, each with the time it became ready. It must see every pod event from this process's start.

    `replicas`: how many gateways there should be when another has replaced this one.
    """

    def __init__(self, own: str, replicas: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._own_pod, self.replicas, self._clock = own, replicas, clock
        self._since: dict[str, float] = {}

    def note(self, event: PeerEvent) -> None:
        """Note that a pod has appeared, changed or gone."""
        beat = event.heartbeat
        if beat.pool != "gateway" or beat.pod == self._own_pod:
            return
        if event.kind == "lost" or beat.state != "ready":
            self._since.pop(beat.pod, None)
        else:
            self._since[beat.pod] = self._clock()

    def count(self) -> int:
        """The number of other ready gateways."""
        return len(self._since)

    def names(self) -> list[str]:
        """The pods of the other ready gateways."""
        return list(self._since)

    def suffice(self) -> bool:
        """True if nodes send requests to as many other gateways as there should be."""
        serving = sum(self._clock() - since >= TAKEOVER_SECONDS for since in self._since.values())
        return serving >= self.replicas


class Leave:
    """Tells whether the gateway may end. It is asked repeatedly from the moment the gateway was asked to stop.

    `undelivered_bytes`: returns how many bytes of finished answers clients have not received. `is_replaced`: another gateway is to replace this one.
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
        self._started = clock() if is_replaced else -math.inf
        self._fewest_undelivered: int | None = None
        self._last_progress = 0.0

    def may_end(self) -> bool:
        """True if nothing is left to do, and no client seems to depend on this gateway."""
        now = self._clock()
        since_request = now - max(self._gateway.last_request, self._last_pick(), self._started)
        if since_request < self._patience(now) or self._gateway.running:
            self._fewest_undelivered = None
            return False
        return self._is_delivered(now)

    def _last_pick(self) -> float:
        """The time of the last pick. Proxies that still ask the picker do not know that it is leaving, and fail requests when they cannot ask."""
        return -math.inf if self._gateway.picker is None else self._gateway.picker.last_pick

    def _patience(self, now: float) -> float:
        """The seconds without a request after which clients do not need this gateway."""
        if not self._is_replaced:
            return QUIET_SECONDS
        if not self._others.suffice() and now - self._started < MOST_ALONE_SECONDS:
            return ALONE_SECONDS
        # Another gateway that was killed counts as ready until its heartbeats are missed.
        return max(QUIET_SECONDS, min(ALONE_SECONDS, self._gateway.directory.timeout_seconds + 0.5))

    def _is_delivered(self, now: float) -> bool:
        undelivered = self._undelivered_bytes()
        if self._fewest_undelivered is None or undelivered <= self._fewest_undelivered - STALLED_BYTES:
            self._fewest_undelivered, self._last_progress = undelivered, now
        return not undelivered or now - self._last_progress >= STALLED_SECONDS
