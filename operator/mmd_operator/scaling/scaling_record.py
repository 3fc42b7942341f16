"""Remembers the autoscaler's decisions from tick to tick, and reports them to status, Events and metrics."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import Generic, TypeVar

from pydantic import BaseModel, ValidationError

from mmd_api.contract.pools import POOL_NAMES, PoolName
from mmd_api.spec.deployment import MultimodalDeploymentSpec
from mmd_api.status import PoolThroughput, ScalingDecision
from mmd_operator.autoscaling import Decision, DeploymentDecision, DeploymentPolicy
from mmd_operator.kube.events import Events
from mmd_operator.kube.metrics import DRAIN_OUTCOMES, USUAL_DECISIONS, Counts, Direction
from mmd_operator.observed.observed import Body
from mmd_operator.status.facts import Scaling

logger = logging.getLogger(__name__)

THROUGHPUT_STEP = 0.1
"""A measured throughput is written again once it has changed by this fraction."""
STEADY_TICKS = 3
"""The status shows a new bottleneck, missing reports, or a decision without a size change only after this many identical ticks."""
_AGE = re.compile(r" for -?[0-9.]+ s$")
"""The age at the end of a missing report's description; it changes with every tick."""
Shape = tuple[object, ...]
"""The parts of a decision worth a write of the status: its sizes, reason, metric and rules, not its numbers."""
T = TypeVar("T")
M = TypeVar("M", bound=BaseModel)


class Debounced(Generic[T]):
    """A value, published once it has been the same for `STEADY_TICKS` ticks."""

    def __init__(self, published: T) -> None:
        self._published, self._last, self._ticks = published, published, 0

    def update(self, value: T) -> T:
        """Take the value of a tick. Returns the published value."""
        self._ticks = self._ticks + 1 if self._ticks and value == self._last else 1
        self._last = value
        if self._ticks >= STEADY_TICKS:
            self._published = value
        return self._published


@dataclass(slots=True)
class PoolRecord:
    """The record of one pool. `decision`: the last tick's, if the pool is scaled; `bounds`: its minimum and maximum replicas.

    `announced`: the sizes and the limit in the last Event about them; `counted`: the size whose change has been counted; `steady`: the
    shape of the last ticks' decisions; `last_decision`, `last_change` and `throughput`: as in the status.
    """

    bounds: tuple[int, int] | None = None
    decision: Decision | None = None
    announced: tuple[int, int, str | None] | None = None
    counted: int | None = None
    steady: Debounced[Shape | None] = field(default_factory=lambda: Debounced(None))
    last_decision: ScalingDecision | None = None
    last_change: ScalingDecision | None = None
    throughput: PoolThroughput | None = None


class ScalingRecord:
    """The record of one deployment. `report`: the autoscaler's part of the status."""

    def __init__(self, counts: Counts) -> None:
        self._counts = counts
        self._pools = {name: PoolRecord() for name in POOL_NAMES}
        self._missing: Debounced[tuple[str, ...]] = Debounced(())
        self._bottleneck: Debounced[PoolName | None] = Debounced(None)
        self.report = Scaling()

    @property
    def decisions(self) -> dict[PoolName, Decision]:
        """Decisions of the last tick, for scaled pools."""
        return {name: r.decision for name, r in self._pools.items() if r.decision is not None}

    @property
    def bounds(self) -> dict[PoolName, tuple[int, int]]:
        """The minimum and maximum replicas of each pool."""
        return {name: r.bounds for name, r in self._pools.items() if r.bounds is not None}

    def suspend(self) -> None:
        """Drop the decisions: nothing is scaled now."""
        for record in self._pools.values():
            record.decision = None

    def begin(self, policy: DeploymentPolicy, spec: MultimodalDeploymentSpec) -> None:
        """Set the bounds of a new spec, and create its counters before they count anything."""
        for name, rules in policy.pools.items():
            self._pools[name].bounds = (rules.min_replicas, rules.max_replicas)
            for outcome in DRAIN_OUTCOMES:
                self._counts.drains[name, outcome] += 0
            for direction, reasons in USUAL_DECISIONS.items() if getattr(spec, name).autoscaling else ():
                for reason in reasons:
                    self._counts.decisions[name, direction, reason] += 0

    def remember(self, status: Body) -> None:
        """Restore the last decisions and throughputs from the status after a start."""
        for name, record in self._pools.items():
            pool_status = status.get("pools", {}).get(name, {})
            record.last_decision = _restored(ScalingDecision, pool_status, "lastDecision")
            record.last_change = _restored(ScalingDecision, pool_status, "lastChange")
            record.throughput = _restored(PoolThroughput, pool_status, "throughput")
        self.report = replace(
            self.report,
            decisions=self._last_decisions(),
            changes=self._last_changes(),
            throughput=self.throughputs(),
        )

    def _last_decisions(self) -> dict[PoolName, ScalingDecision]:
        return {name: r.last_decision for name, r in self._pools.items() if r.last_decision is not None}

    def _last_changes(self) -> dict[PoolName, ScalingDecision]:
        return {name: r.last_change for name, r in self._pools.items() if r.last_change is not None}

    def throughputs(self) -> dict[PoolName, PoolThroughput]:
        """The measured throughput per second of one replica, by pool."""
        return {name: r.throughput for name, r in self._pools.items() if r.throughput is not None}

    def update(
        self,
        decided: DeploymentDecision,
        faults: Mapping[str, str],
        spec: MultimodalDeploymentSpec,
        events: Events,
    ) -> None:
        """Bring the records and `report` up to date; `events` receives lasting changes. `faults`: faults of reports, by pod."""
        scaled = {n: d for n, d in decided.decisions.items() if getattr(spec, n).autoscaling is not None}
        for name, record in self._pools.items():
            record.decision = scaled.get(name)
            record.last_decision = record.last_decision if name in scaled else None
            record.throughput = _refreshed(record.throughput, decided.decisions.get(name))
        for name, decision in scaled.items():
            self._count(decision)
            self._announce(self._pools[name], decision, events)
            self._keep(self._pools[name], decision)
        hard = [d for d in scaled.values() if d.hard_limit]
        missing = sorted({_AGE.sub("", words) for d in scaled.values() for words in d.missing})
        bottleneck = decided.bottleneck
        self.report = Scaling(
            decisions=self._last_decisions(),
            changes=self._last_changes(),
            throughput=self.throughputs(),
            pools=tuple(scaled),
            shadow=tuple(name for name, d in scaled.items() if not d.act),
            missing=self._missing.update(tuple(_explained(words, faults) for words in missing)),
            limited=tuple(_size_words(d) for d in hard),
            limit=hard[0].hard_limit if hard else None,
            bottleneck=self._bottleneck.update(bottleneck.pool if bottleneck else None),
        )

    def _announce(self, record: PoolRecord, decision: Decision, events: Events) -> None:
        """Report an Event for a change that is not carried out, and for a limit that waiting does not lift; each once."""
        changes = decision.replicas != decision.current
        announcement = (decision.current, decision.replicas, decision.hard_limit)
        if (changes or decision.hard_limit) and record.announced != announcement:
            if changes:
                record.last_change = decision.status()
            if not decision.act or not changes:
                events.append(("ScalingLimited" if decision.act else "WouldScale", str(decision)))
        if changes or decision.hard_limit or not decision.missing:
            record.announced = announcement

    def _keep(self, record: PoolRecord, decision: Decision) -> None:
        """Keep the decision for the status if it differs from the last one: a size change at once, anything else once it is steady."""
        status = decision.status()
        shape = _shape(status)
        steady = record.steady.update(shape) == shape
        changes = decision.act and decision.replicas != decision.current
        if (steady or changes) and (record.last_decision is None or _shape(record.last_decision) != shape):
            record.last_decision = status

    def _count(self, decision: Decision) -> None:
        """Count a decision once, however many ticks it takes to carry it out."""
        record = self._pools[decision.pool]
        if decision.replicas == decision.current or not decision.act:
            record.counted = None
        elif record.counted != decision.replicas:
            record.counted = decision.replicas
            direction: Direction = "up" if decision.replicas > decision.current else "down"
            self._counts.decisions[decision.pool, direction, decision.reason] += 1


def _restored(model: type[M], pool_status: Body, key: str) -> M | None:
    """A value of a pool's status; None if it is missing, or if another release wrote it and this one cannot read it."""
    if (value := pool_status.get(key)) is None:
        return None
    try:
        return model.model_validate(value)
    except ValidationError as error:
        logger.warning("%s in the status of a pool is invalid and is dropped: %s", key, error)
        return None


def _refreshed(reported: PoolThroughput | None, decision: Decision | None) -> PoolThroughput | None:
    """The throughput to report: the new measurement if it differs enough to be worth a write. A pool that is gone has none."""
    if decision is None:
        return None
    measured = PoolThroughput.of(decision.history.throughput, datetime.fromtimestamp(decision.at, UTC))
    if reported is not None and not _differ(reported.rates, measured.rates):
        return reported
    return measured if measured.rates else None


def _differ(before: Mapping[str, float], now: Mapping[str, float]) -> bool:
    return any(
        kind not in before or abs(rate - before[kind]) > THROUGHPUT_STEP * before[kind]
        for kind, rate in now.items()
    )


def _shape(decision: ScalingDecision) -> Shape:
    rules = tuple((effect.rule, effect.limit) for effect in decision.effects)
    return decision.from_replicas, decision.to_replicas, decision.reason, decision.metric, rules


def _size_words(decision: Decision) -> str:
    """A pool's size in words: `encoder at 4 (2 unschedulable)`."""
    faulty = [(decision.unplaced, "unschedulable"), (decision.stuck, "not starting")]
    words = ", ".join(f"{count} {what}" for count, what in faulty if count)
    return f"{decision.pool} at {decision.replicas}" + (f" ({words})" if words else "")


def _explained(words: str, faults: Mapping[str, str]) -> str:
    """The words about a missing report, with the fault of that pod's report if there was one."""
    return next((f"{words} ({fault})" for pod, fault in faults.items() if words.endswith(pod)), words)
