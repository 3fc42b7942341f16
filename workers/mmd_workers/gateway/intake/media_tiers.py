"""Which tier of `spec.gateway.media.underLoad` new requests get. Pure: heartbeats and time come in as arguments."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from mmd_api.contract.load import PodLoad
from mmd_api.contract.pools import Modality
from mmd_api.spec.quality import QualityTier, UnderLoad
from mmd_workers.gateway.placement.work import Encoders
from mmd_workers.wire.messages.every_pod import Heartbeat

NEVER_PERCENT = 100
"""A threshold of memory that nothing exceeds: such a tier neither starts nor stays because of memory."""


@dataclass(frozen=True, slots=True)
class Pressure:
    """How loaded the pools are. `memory`: the part in use of that which is scarcest, at most 1; `backlog_seconds`: of all encoders."""

    memory: float = 0.0
    backlog_seconds: float = 0.0

    @classmethod
    def of(cls, pods: Sequence[Heartbeat], waiting_work: Mapping[Modality, float]) -> Pressure:
        """Of these pods, which are all Ready. `waiting_work`: for encoders, beside what they have taken."""
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
        if not encoding:  # they are on their way: fewer pixels would not bring them sooner
            return cls(memory)
        encoders = Encoders.of(encoding)
        queues = [waiting_work, *(pod.load.encode_queued_work for pod in encoding)]
        return cls(memory, sum(encoders.seconds(queued) for queued in queues))


class MediaTiers:
    """A higher tier begins with the first observation that exceeds one of its thresholds. It ends when load has not exceeded the lower thresholds
    of recovery for the whole hold time, and then the highest tier follows that this time would have kept. Tier 0 is full quality.
    """

    def __init__(self, spec: UnderLoad) -> None:
        self.spec = spec
        self.number = 0
        self._calm_since: float | None = None
        self._calm_number = 0  # the highest that load since then would keep

    @property
    def tier(self) -> QualityTier | None:
        """What applies to new requests; None: full quality."""
        return self.spec.tiers[self.number - 1] if self.number else None

    def observe(self, pressure: Pressure, now: float) -> None:
        """Take the load at a time in seconds, which never goes back."""
        begun = self._exceeded(pressure, 100)
        kept = self._exceeded(pressure, self.spec.recovery_percent)
        if begun > self.number:
            self.number = begun
        if kept >= self.number:
            self._calm_since = None
            return
        if self._calm_since is None:
            self._calm_since, self._calm_number = now, kept
        self._calm_number = max(self._calm_number, kept)
        if now - self._calm_since >= self.spec.hold_seconds:
            self.number = self._calm_number
            self._calm_since = None

    def _exceeded(self, pressure: Pressure, percent: int) -> int:
        """The last tier of which `percent` of a threshold is exceeded; 0: none."""
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
    """The part in use of what these pods have together; 0 where none has any."""
    whole = sum(map(total, loads))
    return min(1.0, max(0, sum(map(used, loads))) / whole) if whole else 0.0
