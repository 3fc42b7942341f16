"""What the autoscaler is told and what it answers: samples of pods and queues in, a decision that explains itself out.

Knows no wire, no cluster and no clock. Times are Unix seconds of the machine that decides, so that a pod's wrong clock
changes nothing; work of media is in the units of the calibrated throughput (patches, mel frames).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Literal

from mmd_api.pools import PoolName
from mmd_api.status import ScalingDecision

if TYPE_CHECKING:
    from mmd_operator.autoscaling.history import History

PodState = Literal["unschedulable", "starting", "loading", "ready", "draining", "drained"]
Metric = Literal[
    "BacklogSeconds",
    "BusyFraction",
    "TtftSeconds",
    "KvUtilization",
    "Sequences",
    "ItlSeconds",
    "HeldRequests",
]
Reason = Literal[
    "LoadRose",
    "LoadFell",
    "Steady",
    "Idle",
    "Woken",
    "Panic",
    "MetricsMissing",
    "ScheduleOpened",
    "OutOfBounds",
    "OverBudget",
]
Limit = Literal[
    "MaxReplicas",
    "MinReplicas",
    "Schedule",
    "Stabilization",
    "RateLimit",
    "Cooldown",
    "PanicHold",
    "WindowNotSeen",
    "MetricsMissing",
    "Unschedulable",
    "PodsNotStarting",
    "GpuBudget",
    "DownstreamSaturated",
    "UpstreamBusy",
]

HARD_LIMITS: frozenset[Limit] = frozenset(
    {"MaxReplicas", "Unschedulable", "PodsNotStarting", "GpuBudget", "DownstreamSaturated"}
)
"""Limits that waiting does not lift: a person or another pool must act. They make the condition ScalingLimited true."""


LARGEST_BELIEVABLE = 1e15
"""A larger amount of work, tokens or blocks is a broken counter."""


def _believable(number: float) -> bool:
    return 0 <= number <= LARGEST_BELIEVABLE  # NaN is not


@dataclass(frozen=True, slots=True)
class PodLoad:
    """What one pod has to do, as it reported it. Zero where a role is not held; None where a pod does not measure it."""

    encode_queued_work: Mapping[str, float] = field(default_factory=dict)  # work units, by modality
    encode_work_per_second: Mapping[str, float] = field(default_factory=dict)  # calibrated, by modality
    encode_busy_fraction: float = 0.0
    prefill_waiting_tokens: float = 0.0
    prefill_blocked_tokens: float = 0.0  # those of them that wait for media to be encoded
    prefill_tokens_per_second: float = 0.0
    prefill_busy_fraction: float | None = None
    decode_running: float = 0.0
    decode_waiting: float = 0.0
    decode_max_sequences: float = 0.0
    kv_blocks_total: float = 0.0
    kv_blocks_free: float = 0.0
    itl_seconds: float = 0.0

    def fault(self) -> str | None:
        """Why these numbers cannot be true (no number, negative, absurdly large, more free than there is), or None."""
        for name in _LOAD_FIELDS:
            value = getattr(self, name)
            for number in value.values() if isinstance(value, Mapping) else (value,):
                if number is not None and not _believable(number):
                    return f"{name} is {number}"
        if self.kv_blocks_free > self.kv_blocks_total:
            return f"kv_blocks_free is {self.kv_blocks_free:g} of {self.kv_blocks_total:g}"
        return None


_LOAD_FIELDS = tuple(f.name for f in fields(PodLoad))


@dataclass(frozen=True, slots=True)
class PodSample:
    """One pod that exists: its state as the cluster and the pod itself tell it, and the newest load it sent.

    `received_at` is when that load arrived here; None with `load` None for a pod that has not reported yet.
    """

    pod: str
    state: PodState
    created_at: float
    received_at: float | None = None
    load: PodLoad | None = None


@dataclass(frozen=True, slots=True)
class Demand:
    """Work for a pool that no pod of it holds yet: encode jobs in the queue, requests that gateways hold back."""

    received_at: float
    encode_work: Mapping[str, float] = field(default_factory=dict)  # work units, by modality
    prompt_tokens: float = 0.0
    held_requests: int = 0

    def fault(self) -> str | None:
        """Why these numbers cannot be true, or None."""
        for number in (*self.encode_work.values(), self.prompt_tokens, self.held_requests):
            if not _believable(number):
                return f"a queue of {number}"
        return None


@dataclass(frozen=True, slots=True)
class Latency:
    """Time to the first token as gateways saw it, at the percentile of the SLO, over requests of the last `window_seconds`."""

    received_at: float
    window_seconds: float
    requests: int
    ttft_seconds: float


@dataclass(frozen=True, slots=True)
class PoolSamples:
    """All that is known of a pool now. `replicas` is `spec.replicas` as it stands; `demand` None: the queue cannot be read."""

    replicas: int
    pods: tuple[PodSample, ...] = ()
    demand: Demand | None = None
    latency: Latency | None = None


@dataclass(frozen=True, slots=True)
class Signal:
    """One reason for a size. `observed` and `target` are of one replica; `need` replicas would just meet the target.

    `full` replicas would be used up entirely by the present load. `seconds` of work wait in all, where that is known.
    """

    metric: Metric
    observed: float
    target: float
    need: float
    full: float
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class Decision:
    """How many replicas a pool should have, and why.

    `wanted` is what the signals ask for before any limit. `valid` is False when something needed was missing or stale
    (named in `missing`): then the pool is never lowered. `act` is False in Shadow mode: report it, change nothing.
    """

    pool: PoolName
    at: float
    spec_replicas: int
    current: int
    ready: int
    wanted: int
    replicas: int
    reason: Reason
    limited_by: Limit | None
    valid: bool
    act: bool
    minimum: int
    signal: Signal | None
    signals: tuple[Signal, ...]
    missing: tuple[str, ...]
    panicking: bool
    idle: bool
    foreign_replicas: int | None
    observed: History = field(repr=False)

    @property
    def need(self) -> float:
        """Replicas, unrounded, that would just meet the target of the strongest signal."""
        return max((s.need for s in self.signals), default=0.0)

    @property
    def full(self) -> float:
        """Replicas, unrounded, that the present load would use up entirely."""
        return max((s.full for s in self.signals), default=0.0)

    @property
    def in_force(self) -> int:
        """The size the pool will really have: in Shadow mode the one it has."""
        return self.replicas if self.act else self.current

    @property
    def history(self) -> History:
        """What the next decision must remember, given that this one is carried out (unless `act` is False)."""
        if not self.act:
            return self.observed
        return self.observed.acted(self.at, self.current, self.spec_replicas, self.replicas)

    def limited(self, replicas: int, limit: Limit, reason: Reason | None = None) -> Decision:
        """The same decision cut to a size by a limit that only the whole deployment knows."""
        if reason is None:
            reason = "Steady" if replicas == self.current else self.reason
        return replace(self, replicas=replicas, limited_by=limit, reason=reason)

    def status(self) -> ScalingDecision:
        """The decision as it stands in the resource's status."""
        signal = self.signal
        return ScalingDecision(
            time=datetime.fromtimestamp(self.at, UTC),
            from_replicas=self.current,
            to_replicas=self.replicas,
            reason=self.reason,
            metric=signal.metric if signal else None,
            observed_milli=round(signal.observed * 1000) if signal else None,
            target_milli=round(signal.target * 1000) if signal else None,
            limited_by=self.limited_by,
            message=str(self)[:1024],
        )

    def __str__(self) -> str:
        verb = (
            f"goes from {self.current} to {self.replicas} replicas"
            if self.replicas != self.current
            else f"stays at {_replicas(self.current)}"
        )
        if not self.act:
            verb = verb.replace("goes", "would go").replace("stays", "would stay")
        parts = [f"{self.pool} {verb} ({self.reason})"]
        if self.signal is not None:
            parts.append(f"{_sentence(self.signal, self.ready)}, which asks for {_replicas(self.wanted)}")
        elif self.idle:
            parts.append("there is no work")
        if self.limited_by is not None:
            parts.append(f"limited by {self.limited_by}")
        if self.missing:
            shown = ", ".join(self.missing[:3])
            more = f" and {len(self.missing) - 3} more" if len(self.missing) > 3 else ""
            parts.append(f"without {shown}{more}")
        if self.foreign_replicas is not None:
            parts.append(f"somebody else set {_replicas(self.foreign_replicas)}")
        return "; ".join(parts)


def _replicas(count: int) -> str:
    return f"{count} replica" if count == 1 else f"{count} replicas"


def _sentence(signal: Signal, ready: int) -> str:
    each = f"a replica, with {ready} ready"
    match signal.metric:
        case "BacklogSeconds":
            return f"backlog is {signal.observed:.2f} s, target {signal.target:.2f} s {each}"
        case "TtftSeconds":
            return f"time to first token is {signal.observed:.3f} s, SLO {signal.target:.3f} s, with {ready} ready"
        case "ItlSeconds":
            return f"time between tokens is {signal.observed:.4f} s, SLO {signal.target:.4f} s, with {ready} ready"
        case "Sequences":
            return f"sequences are {signal.observed:.1f}, target {signal.target:.1f} {each}"
        case "HeldRequests":
            return f"{signal.observed:.0f} requests are held at the gateway, with {ready} ready"
        case "BusyFraction" | "KvUtilization":
            name = "busy time" if signal.metric == "BusyFraction" else "KV use"
            return f"{name} is {signal.observed:.0%}, target {signal.target:.0%} {each}"
