"""A gateway's demand as an autoscaler reads it: held requests, encoder work, clients' waiting times. Decides nothing."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping

from mmd_api.contract.load import EncodeQueueStatus, FirstTokens, GatewayStatus
from mmd_api.contract.pools import Modality, Role
from mmd_workers.wire.jobs import QueueDepth

WINDOW_SECONDS = 30.0
KEPT_FIRST_TOKENS = 8192


class GatewayDemand:
    """The latest depth of the encode queue, and times to first token of the last half minute."""

    def __init__(self) -> None:
        self._first_tokens: deque[tuple[float, float]] = deque(maxlen=KEPT_FIRST_TOKENS)
        self._waiting: dict[Modality, float] | None = None
        self._read_at = 0.0

    def first_token(self, seconds: float) -> None:
        """Note a client's time from arrival to first token; negative if the clock was set back in between."""
        self._first_tokens.append((time.monotonic(), max(0.0, seconds)))

    def queue_read(self, depths: Mapping[Modality, QueueDepth]) -> None:
        """Note the depth of the queue. For each modality, the work no encoder has taken is mean work per job times jobs not taken."""
        self._read_at = time.monotonic()
        self._waiting = {
            modality: depth.work * max(0, depth.jobs - depth.running_jobs) / depth.jobs if depth.jobs else 0.0
            for modality, depth in depths.items()
        }

    @property
    def waiting_work(self) -> Mapping[Modality, float]:
        """Work that no encoder has taken, as last read; empty if reading failed."""
        return self._waiting or {}

    def queue_unreadable(self) -> None:
        """Note that the depth of the queue is unknown, which is not zero."""
        self._waiting = None

    def report(self, pod: str, revision: str, held: Mapping[Role, int], percentile: int) -> GatewayStatus:
        """The response of `/demand`. `held`: requests by the missing role. `percentile`: of the time to first token."""
        now = time.monotonic()
        while self._first_tokens and self._first_tokens[0][0] < now - WINDOW_SECONDS:
            self._first_tokens.popleft()
        waiting = self._waiting
        return GatewayStatus(
            pod=pod,
            revision=revision,
            held=dict(held),
            queue=None
            if waiting is None
            else EncodeQueueStatus(age_seconds=now - self._read_at, waiting_work=waiting),
            ttft=FirstTokens.of((s for _, s in self._first_tokens), percentile, WINDOW_SECONDS),
        )
