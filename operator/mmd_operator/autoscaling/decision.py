"""Decisions of the autoscaler: a pool's size, the signal that asks for it, and the rules that changed it, in words."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Literal, Self, get_args

from mmd_api.contract.pools import PoolName
from mmd_api.status import RuleEffect, ScalingDecision
from mmd_operator.resources.sentences import sentence_of

if TYPE_CHECKING:
    from mmd_operator.autoscaling.history import History

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
    "External",
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

LIMITS: tuple[Limit, ...] = get_args(Limit)
HARD_LIMITS: frozenset[Limit] = frozenset(
    {"MaxReplicas", "Unschedulable", "PodsNotStarting", "GpuBudget", "DownstreamSaturated"}
)
"""Limits that waiting does not lift: a person or another pool must act. They set the condition ScalingLimited to True."""


@dataclass(frozen=True, slots=True)
class Signal:
    """One reason for a size. `observed` and `target` are per replica; `need` replicas would just meet the target.

    The present load would use up `full` replicas entirely. `seconds`: seconds of work waiting in total, if known. `metric` and
    `words`: the name and the sentence from the signal's rule.
    """

    observed: float
    target: float
    need: float
    full: float
    seconds: float = 0.0
    metric: str = ""
    words: str = ""


@dataclass(frozen=True, slots=True)
class AppliedRule:
    """Effect of a rule on a decision: the rule's sentence with the numbers of the case, and the limit imposed, if any."""

    rule: str
    message: str
    limit: Limit | None = None

    @classmethod
    def of(cls, rule: Callable[..., object], numbers: str, limit: Limit | None = None) -> Self:
        """Effect of a rule, in the words of its docstring."""
        return cls(rule.__name__, f"{sentence_of(rule)} ({numbers})", limit)

    def status(self) -> RuleEffect:
        """The effect as the resource's status reports it."""
        return RuleEffect(rule=self.rule, limit=self.limit, message=self.message)


@dataclass(frozen=True, slots=True)
class Decision:
    """How many replicas a pool should have, and why.

    `wanted`: the size that the signals ask for, before any limit. `valid`: False if needed data was missing or stale (named in
    `missing`); the pool is then never lowered. `effects`: effects of the rules, in order of application. `act`: False in Shadow
    mode, which reports the decision and changes nothing. `history` includes this tick. `unplaced` pods have waited for a node
    beyond their deadline; `stuck` pods have not become Ready within theirs. `external`: another client asks for `wanted`, and no
    signal does.
    """

    pool: PoolName
    at: float
    spec_replicas: int
    current: int
    ready: int
    wanted: int
    replicas: int
    reason: ScalingReason
    effects: tuple[AppliedRule, ...]
    valid: bool
    act: bool
    minimum: int
    signal: Signal | None
    signals: tuple[Signal, ...]
    missing: tuple[str, ...]
    panicking: bool
    idle: bool
    foreign_replicas: int | None
    history: History = field(repr=False)
    unplaced: int = 0
    stuck: int = 0
    external: bool = False

    @property
    def limits(self) -> tuple[Limit, ...]:
        """Limits that rules imposed, in order of application: each once, the deciding limit last."""
        limits: list[Limit] = []
        for effect in self.effects:
            if effect.limit is not None:
                limits = [*(other for other in limits if other != effect.limit), effect.limit]
        return tuple(limits)

    @property
    def limited_by(self) -> Limit | None:
        """The last limit, which determined the size."""
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
        """Pods of the size in force that serve or can be expected to."""
        return max(0, self.in_force - self.unplaced - self.stuck)

    @property
    def short(self) -> bool:
        """Whether the load needs more pods than serve or can be expected to."""
        return self.wanted > self.current - self.unplaced - self.stuck

    @property
    def hard_limit(self) -> Limit | None:
        """The limit that keeps the pool below its need, if waiting does not lift it."""
        return self.limited_by if self.limited_by in HARD_LIMITS and self.short else None

    @property
    def next_history(self) -> History:
        """History for the next decision: `history`, with this decision carried out unless `act` is False."""
        if not self.act:
            return self.history
        return self.history.acted(self.at, self.current, self.spec_replicas, self.replicas)

    def limited(self, replicas: int, effect: AppliedRule, reason: ScalingReason | None = None) -> Decision:
        """The same decision, cut to a size by a rule about the whole deployment."""
        if reason is None:
            reason = "Steady" if replicas == self.current else self.reason
        other_effects = (other for other in self.effects if other.rule != effect.rule)
        return replace(self, replicas=replicas, effects=(*other_effects, effect), reason=reason)

    def status(self) -> ScalingDecision:
        """The decision as the resource's status reports it."""
        signal = None if self.external else self.signal
        return ScalingDecision(
            time=datetime.fromtimestamp(self.at, UTC),
            from_replicas=self.current,
            to_replicas=self.replicas,
            reason=self.reason,
            metric=signal.metric if signal else None,
            observed_milli=round(signal.observed * 1000) if signal else None,
            target_milli=round(signal.target * 1000) if signal else None,
            limited_by=self.limited_by,
            effects=[effect.status() for effect in self.effects],
            message=str(self)[:1024],
        )

    def __str__(self) -> str:
        verb = (
            f"scales from {self.current} to {self.replicas} replicas"
            if self.replicas != self.current
            else f"stays at {in_replicas(self.current)}"
        )
        if not self.act:
            verb = verb.replace("scales", "would scale").replace("stays", "would stay")
        parts = [f"{self.pool} {verb} ({self.reason})"]
        if self.external:
            parts.append(f"its MultimodalPool asks for {in_replicas(self.wanted)}")
        elif self.signal is not None:
            parts.append(f"{self.signal.words}, which needs {in_replicas(self.wanted)}")
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
            parts.append(f"another client set {in_replicas(self.foreign_replicas)}")
        return "; ".join(parts)


def in_replicas(count: int) -> str:
    """A size in words."""
    return f"{count} replica" if count == 1 else f"{count} replicas"
