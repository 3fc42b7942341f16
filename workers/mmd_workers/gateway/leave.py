"""When a gateway that is asked to go may end. Independent of HTTP, signals and the network."""

from __future__ import annotations

import math
import time
from collections.abc import Callable

from mmd_workers.gateway.gateway import Gateway

QUIET_SECONDS = 2.0
"""Without a new request, and since the gateway was asked where another serves: then clients have found that one."""
ALONE_SECONDS = 15.0
"""The same where no other gateway serves: its replacement may still start, and nodes send requests here until that is Ready."""
MOST_ALONE_SECONDS = 60.0
"""Afterwards no replacement is expected: the deployment may be about to be deleted."""
TAKEOVER_SECONDS = 8.0
"""From another gateway's first heartbeat until nodes send requests there: its probes, and what nodes take to learn of it."""
STALLED_SECONDS = 30.0
"""A client that reads nothing of a finished answer for so long will not."""


class Leave:
    """Asked again and again from the moment at which the gateway was asked to go.

    `undelivered_bytes`: what clients have not received of finished answers. `expects_another`: whether something replaces this gateway.
    """

    def __init__(
        self,
        gateway: Gateway,
        undelivered_bytes: Callable[[], int],
        expects_another: bool,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._gateway, self._undelivered_bytes = gateway, undelivered_bytes
        self._expects_another, self._clock = expects_another, clock
        self._began = clock() if expects_another else -math.inf
        self._another_since: float | None = -math.inf if self._sees_another() else None
        self._left: int | None = None
        self._fell = 0.0

    def may_end(self) -> bool:
        """Whether nothing is left to do, and nobody seems to count on this gateway."""
        now = self._clock()
        since_request = now - max(self._gateway.last_request, self._began)
        wanted = since_request < self._patience(now) or self._gateway.running
        if wanted:
            self._left = None
            return False
        return self._is_delivered(now)

    def _patience(self, now: float) -> float:
        """Seconds without a request that show that clients do not need this gateway."""
        if not self._sees_another():
            self._another_since = None
        elif self._another_since is None:
            self._another_since = now
        taken_over = self._another_since is not None and now - self._another_since >= TAKEOVER_SECONDS
        if taken_over or not self._expects_another or now - self._began >= MOST_ALONE_SECONDS:
            return QUIET_SECONDS
        return ALONE_SECONDS

    def _sees_another(self) -> bool:
        own, ready = self._gateway.pod, self._gateway.directory.pods()
        return any(beat.pool == "gateway" and beat.pod != own for beat in ready)

    def _is_delivered(self, now: float) -> bool:
        left = self._undelivered_bytes()
        if self._left is None or left < self._left:
            self._fell = now
        self._left = left
        return not left or now - self._fell >= STALLED_SECONDS
