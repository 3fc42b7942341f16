"""What the autoscaler returns: the size of a pool, the signal that asks for it and the rules that changed it, in words."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Literal, get_args

from mmd_api.contract.pools import PoolName
from mmd_api.status import ScalingDecision

if TYPE_CHECKING:
    from mmd_operator.autoscaling.history import History

Metric = Literal[
    "BacklogSeconds",
    "BusyFraction",
    "TtftSeconds",
    "KvUtilization",
    "Sequences",
    "ItlSeconds",
    "HeldRequests",
]
ScalingReason = Literal[
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

SIGNAL_METRICS: tuple[Metric, ...] = get_args(Metric)
LIMITS: tuple[Limit, ...] = get_args(Limit)
HARD_LIMITS: frozenset[Limit] = frozenset(
    {"MaxReplicas", "Unschedulable", "PodsNotStarting", "GpuBudget", "DownstreamSaturated"}
)
"""Limits that waiting does not lift: a person or another pool must act. They make the condition ScalingLimited true."""


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
    (named in `missing`): then the pool is never lowered. `limits` are those that changed what was wanted, in the order in which
    their rules applied. `act` is False in Shadow mode: report it, change nothing.
    `unplaced` pods have waited for a node beyond their deadline; `stuck` pods have not become Ready within theirs.
    """

    pool: PoolName
    at: float
    spec_replicas: int
    current: int
    ready: int
    wanted: int
    replicas: int
    reason: ScalingReason
    limits: tuple[Limit, ...]
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
    unplaced: int = 0
    stuck: int = 0

    @property
    def limited_by(self) -> Limit | None:
        """The last limit: the one that determined the size."""
        return self.limits[-1] if self.limits else None

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
        """The size that the pool will actually have: in Shadow mode, its current one."""
        return self.replicas if self.act else self.current

    @property
    def capacity(self) -> int:
        """Pods at that size that serve or can be expected to."""
        return max(0, self.in_force - self.unplaced - self.stuck)

    @property
    def short(self) -> bool:
        """Whether the load needs more than the pods that serve or can be expected to."""
        return self.wanted > self.current - self.unplaced - self.stuck

    @property
    def hard_limit(self) -> Limit | None:
        """The limit that keeps the pool below what the load needs, if waiting does not lift it."""
        return self.limited_by if self.limited_by in HARD_LIMITS and self.short else None

    @property
    def history(self) -> History:
        """What the next decision must remember, given that this one is carried out (unless `act` is False)."""
        if not self.act:
            return self.observed
        return self.observed.acted(self.at, self.current, self.spec_replicas, self.replicas)

    def limited(self, replicas: int, limit: Limit, reason: ScalingReason | None = None) -> Decision:
        """The same decision cut to a size by a limit that only the whole deployment knows."""
        if reason is None:
            reason = "Steady" if replicas == self.current else self.reason
        before = (other for other in self.limits if other != limit)
        return replace(self, replicas=replicas, limits=(*before, limit), reason=reason)

    def status(self) -> ScalingDecision:
        """The decision as the resource's status reports it."""
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
            f"scales from {self.current} to {self.replicas} replicas"
            if self.replicas != self.current
            else f"stays at {_replicas(self.current)}"
        )
        if not self.act:
            verb = verb.replace("scales", "would scale").replace("stays", "would stay")
        parts = [f"{self.pool} {verb} ({self.reason})"]
        if self.signal is not None:
            parts.append(f"{_sentence(self.signal, self.ready)}, which needs {_replicas(self.wanted)}")
        elif self.idle:
            parts.append("the pool is idle")
        if self.limits:
            parts.append(f"limited by {', then '.join(self.limits)}")
        if self.unplaced:
            parts.append(f"{self.unplaced} of its pods cannot be scheduled")
        if self.stuck:
            parts.append(f"{self.stuck} of its pods {'is' if self.stuck == 1 else 'are'} not starting")
        if self.missing:
            shown = ", ".join(self.missing[:3])
            more = f" and {len(self.missing) - 3} more" if len(self.missing) > 3 else ""
            parts.append(f"{shown}{more}")
        if self.foreign_replicas is not None:
            parts.append(f"another client set {_replicas(self.foreign_replicas)}")
        return "; ".join(parts)


def _replicas(count: int) -> str:
    return f"{count} replica" if count == 1 else f"{count} replicas"


def _sentence(signal: Signal, ready: int) -> str:
    each = f"per replica ({ready} ready)"
    match signal.metric:
        case "BacklogSeconds":
            return f"backlog is {signal.observed:.2f} s, target {signal.target:.2f} s {each}"
        case "TtftSeconds":
            return (
                f"time to first token is {signal.observed:.3f} s, SLO {signal.target:.3f} s ({ready} ready)"
            )
        case "ItlSeconds":
            return (
                f"inter-token latency is {signal.observed:.4f} s, SLO {signal.target:.4f} s ({ready} ready)"
            )
        case "Sequences":
            return f"sequences: {signal.observed:.1f}, target {signal.target:.1f} {each}"
        case "HeldRequests":
            return f"requests held at the gateway: {signal.observed:.0f} ({ready} ready)"
        case "BusyFraction" | "KvUtilization":
            name = "busy time" if signal.metric == "BusyFraction" else "KV utilization"
            return f"{name} is {signal.observed:.0%}, target {signal.target:.0%} {each}"
