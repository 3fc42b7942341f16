"""What an autoscaler reads from a gateway: held requests, work for encoders, how long clients waited. Decides nothing."""

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
    """The newest depth of the encode queue, and times to first token of the last half minute."""

    def __init__(self, percentile: int) -> None:
        self.percentile = percentile
        self._first_tokens: deque[tuple[float, float]] = deque(maxlen=KEPT_FIRST_TOKENS)
        self._waiting: dict[Modality, float] | None = None
        self._read_at = 0.0

    def first_token(self, seconds: float) -> None:
        """A client saw its first token this long after its request arrived; negative where the clock was set back in between."""
        self._first_tokens.append((time.monotonic(), max(0.0, seconds)))

    def queue_read(self, depths: Mapping[Modality, QueueDepth]) -> None:
        """Work that no encoder has taken: of each modality, the jobs' mean work times the jobs not taken."""
        self._read_at = time.monotonic()
        self._waiting = {
            modality: depth.work * max(0, depth.jobs - depth.running_jobs) / depth.jobs if depth.jobs else 0.0
            for modality, depth in depths.items()
        }

    @property
    def waiting_work(self) -> Mapping[Modality, float]:
        """Work that no encoder has taken, as read last; empty where that has failed."""
        return self._waiting or {}

    def queue_unreadable(self) -> None:
        """The depth of the queue is unknown, which is not zero."""
        self._waiting = None

    def report(self, pod: str, revision: str, held: Mapping[Role, int]) -> GatewayStatus:
        """What `/demand` answers. `held`: requests by the role that is missing."""
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
            ttft=FirstTokens.of((s for _, s in self._first_tokens), self.percentile, WINDOW_SECONDS),
        )
