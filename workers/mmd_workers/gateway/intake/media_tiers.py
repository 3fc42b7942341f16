"""Chooses the tier of `spec.gateway.media.underLoad` for new requests. Pure: heartbeats and time are arguments."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from mmd_api.contract.load import PodLoad
from mmd_api.contract.pools import Modality
from mmd_api.spec.quality import QualityTier, UnderLoad
from mmd_workers.gateway.placement.work import Encoders
from mmd_workers.wire.messages.every_pod import Heartbeat

NEVER_PERCENT = 100
"""A memory threshold that is never exceeded: memory neither starts nor keeps such a tier."""


@dataclass(frozen=True, slots=True)
class Pressure:
    """The load of the pools. `memory`: share in use of the scarcest kind, at most 1; `backlog_seconds`: of all encoders."""

    memory: float = 0.0
    backlog_seconds: float = 0.0

    @classmethod
    def of(cls, pods: Sequence[Heartbeat], waiting_work: Mapping[Modality, float]) -> Pressure:
        """Compute the pressure on these pods, which are all Ready. `waiting_work`: encoder work that no pod has taken."""
        prefill = [pod.load for pod in pods if "prefill" in pod.roles]
        decode = [pod.load for pod in pods if "decode" in pod.roles]
        loads = [pod.load for pod in pods]
        memory = max(
            _used(prefill, _kv_used, _kv_total),
            _used(decode, _kv_used, _kv_total),
            _used(loads, lambda load: load.feature_bytes_needed, lambda load: load.feature_bytes_budget),
            _used(loads, lambda load: load.media_bytes_used, lambda load: load.media_bytes_budget),
        )
        encoding = [pod for pod in pods if "encode" in pod.roles or pod.encodes_small_media]
        if not encoding:  # pods are starting, and fewer pixels would not speed that up
            return cls(memory)
        encoders = Encoders.of(encoding)
        queues = [waiting_work, *(pod.load.encode_queued_work for pod in encoding)]
        return cls(memory, sum(encoders.seconds(queued) for queued in queues))


class MediaTiers:
    """Chooses the tier by load. Tier 0 is full quality.

    A higher tier begins when an observation exceeds one of its thresholds. A tier ends when load has stayed within the lower recovery
    thresholds for the whole hold time. Then comes the highest tier that this time would have kept.
    """

    def __init__(self, spec: UnderLoad) -> None:
        self.spec = spec
        self.number = 0
        self._calm_since: float | None = None
        self._calm_number = 0  # highest tier that load since then would keep

    @property
    def tier(self) -> QualityTier | None:
        """The tier of new requests; None: full quality."""
        return self.spec.tiers[self.number - 1] if self.number else None

    def observe(self, pressure: Pressure, now: float) -> None:
        """Update the tier from the load. `now`: seconds on a monotonic clock."""
        exceeded_tier = self._exceeded(pressure, 100)
        kept_tier = self._exceeded(pressure, self.spec.recovery_percent)
        if exceeded_tier > self.number:
            self.number = exceeded_tier
        if kept_tier >= self.number:
            self._calm_since = None
            return
        if self._calm_since is None:
            self._calm_since, self._calm_number = now, kept_tier
        self._calm_number = max(self._calm_number, kept_tier)
        if now - self._calm_since >= self.spec.hold_seconds:
            self.number = self._calm_number
            self._calm_since = None

    def _exceeded(self, pressure: Pressure, percent: int) -> int:
        """The last tier with a threshold of which this percentage is exceeded; 0: none."""
        share = percent / 100
        return max(
            (
                number
                for number, tier in enumerate(self.spec.tiers, 1)
                if pressure.backlog_seconds * 1000 > tier.backlog_milliseconds * share
                or (
                    tier.memory_percent < NEVER_PERCENT
                    and pressure.memory * 100 > tier.memory_percent * share
                )
            ),
            default=0,
        )


def _kv_used(load: PodLoad) -> int:
    return load.kv_blocks_total - load.kv_blocks_free


def _kv_total(load: PodLoad) -> int:
    return load.kv_blocks_total


def _used(loads: Sequence[PodLoad], used: Callable[[PodLoad], int], total: Callable[[PodLoad], int]) -> float:
    """The share in use of the joint total of these pods; 0 if the total is 0."""
    capacity = sum(map(total, loads))
    return min(1.0, max(0, sum(map(used, loads))) / capacity) if capacity else 0.0
