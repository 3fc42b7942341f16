"""What an autoscaler asks a gateway: who is held back, what waits for encoders, how long clients waited. Decides nothing."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Mapping
from typing import Any

from mmd_workers.wire.jobs import QueueDepth
from mmd_workers.wire.messages import Modality

WINDOW_SECONDS = 30.0
KEPT_FIRST_TOKENS = 8192


class Demand:
    """The newest depth of the encode queue, and times to first token of the last half minute."""

    def __init__(self, percentile: int) -> None:
        self._percentile = percentile
        self._first_tokens: deque[tuple[float, float]] = deque(maxlen=KEPT_FIRST_TOKENS)
        self._waiting: dict[str, float] | None = None
        self._read_at = 0.0

    def first_token(self, seconds: float) -> None:
        """A client saw its first token this long after its request arrived."""
        self._first_tokens.append((time.monotonic(), seconds))

    def queue_read(self, depths: Mapping[Modality, QueueDepth]) -> None:
        """Work that no encoder has taken: of each modality, the jobs' mean work times the jobs that are with none."""
        self._read_at = time.monotonic()
        self._waiting = {
            modality: depth.work * max(0, depth.jobs - depth.running_jobs) / depth.jobs if depth.jobs else 0.0
            for modality, depth in depths.items()
        }

    def queue_unreadable(self) -> None:
        """Nobody knows what waits: that is not nothing."""
        self._waiting = None

    def report(self, pod: str, revision: str, held: Mapping[str, int]) -> dict[str, Any]:
        """What `/demand` answers. `held`: requests by the role that is missing."""
        now = time.monotonic()
        while self._first_tokens and self._first_tokens[0][0] < now - WINDOW_SECONDS:
            self._first_tokens.popleft()
        waited = sorted(seconds for _, seconds in self._first_tokens)
        place = math.ceil(len(waited) * self._percentile / 100) - 1
        queue = None
        if self._waiting is not None:
            queue = {"age_seconds": now - self._read_at, "waiting_work": self._waiting}
        return {
            "pod": pod,
            "revision": revision,
            "held": dict(held),
            "queue": queue,
            "ttft": {
                "window_seconds": WINDOW_SECONDS,
                "requests": len(waited),
                "seconds": waited[place] if waited else 0.0,
            },
        }
