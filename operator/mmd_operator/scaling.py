"""One deployment's autoscaler on a cluster: collects reports, decides, drains and resizes pools, and keeps a record of each.

The decisions are those of `autoscaling`; this file only brings facts to them and carries out their actions.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import Generic, TypeVar

from pydantic import BaseModel, ValidationError

from mmd_api.contract import paths
from mmd_api.contract.annotations import DRAIN_ANNOTATION
from mmd_api.contract.pools import POOL_NAMES, PoolName
from mmd_api.spec.deployment import MultimodalDeploymentSpec
from mmd_api.spec.pools import Pool
from mmd_api.status import PoolThroughput, ScalingDecision
from mmd_operator.apply import UNSEEN_SECONDS
from mmd_operator.autoscaling import (
    MAX_REPORT_BYTES,
    Decision,
    DeploymentDecision,
    DeploymentPolicy,
    PodFacts,
    PoolFacts,
    ReportError,
    ScaleActions,
    Scaler,
    gateway_report,
    worker_report,
)
from mmd_operator.cluster import Cluster
from mmd_operator.conditions import Scaling
from mmd_operator.contest import Contests
from mmd_operator.gpu_budget import gpus_held, grown, serving_budget
from mmd_operator.growth import PendingGrowth
from mmd_operator.metrics import DRAIN_OUTCOMES, USUAL_DECISIONS, Counts, Direction, OperatorMetrics
from mmd_operator.observed import Body, Child, Observed, PodView, PoolGrowth
from mmd_operator.pod_client import NoAnswerError, ReportFetcher
from mmd_operator.problems import contested
from mmd_operator.replacement import outdated_pods

logger = logging.getLogger(__name__)

TICK_SECONDS = 2.0
THROUGHPUT_STEP = 0.1
"""A measured throughput is written again once it has changed by this share."""
STEADY_TICKS = 3
"""Decisions that change no size, missing reports and the bottleneck change in the status once they have been the same for this many ticks."""
_AGE = re.compile(r" for -?[0-9.]+ s$")
"""The age at the end of a missing report's description; it changes with every tick."""
Events = list[tuple[str, str]]
Shape = tuple[object, ...]
"""What of a decision is worth a write of the status: its sizes, reason, metric and rules, not its numbers."""
T = TypeVar("T")
M = TypeVar("M", bound=BaseModel)


class Debounced(Generic[T]):
    """A value that is published once it has been the same for some ticks."""

    def __init__(self, published: T) -> None:
        self._published, self._last, self._ticks = published, published, 0

    def update(self, value: T) -> T:
        """The published value, after a tick with this one."""
        self._ticks = self._ticks + 1 if self._ticks and value == self._last else 1
        self._last = value
        if self._ticks >= STEADY_TICKS:
            self._published = value
        return self._published


@dataclass(slots=True)
class PoolRecord:
    """What is kept of one pool from tick to tick. `decision`: of the last tick, if the pool is scaled; `bounds`: its replicas.

    `change`: the decision that began the present change of size; `announced`: the sizes and the limit of the last Event about them;
    `counted`: the size whose change has been counted; `draining`: since when, by uid; `overdue`: pods with an Event about it;
    `steady`: the shape of the decisions of the last ticks; `last_decision`, `last_change` and `throughput`: as in the status.
    """

    bounds: tuple[int, int] | None = None
    decision: Decision | None = None
    change: Decision | None = None
    announced: tuple[int, int, str | None] | None = None
    counted: int | None = None
    draining: dict[str, float] = field(default_factory=dict)
    overdue: set[str] = field(default_factory=set)
    steady: Debounced[Shape | None] = field(default_factory=lambda: Debounced(None))
    last_decision: ScalingDecision | None = None
    last_change: ScalingDecision | None = None
    throughput: PoolThroughput | None = None


class PoolScaling:
    """Runs the autoscaler's ticks for one deployment."""

    def __init__(
        self,
        cluster: Cluster,
        report_fetcher: ReportFetcher,
        metrics: OperatorMetrics,
        namespace: str,
        growth: PendingGrowth,
    ) -> None:
        self._cluster, self._report_fetcher, self._metrics = cluster, report_fetcher, metrics
        self._namespace, self._growth = namespace, growth
        self._scaler: Scaler | None = None
        self._spec: MultimodalDeploymentSpec | None = None
        self._drain_requests = Contests()
        self._asked_at: dict[str, float] = {}  # Unix seconds at which a pod was asked to drain, by uid
        self._records = {name: PoolRecord() for name in POOL_NAMES}
        self._missing: Debounced[tuple[str, ...]] = Debounced(())
        self._bottleneck: Debounced[PoolName | None] = Debounced(None)
        self.report = Scaling()
        self.counts = Counts()

    @property
    def decisions(self) -> dict[PoolName, Decision]:
        """Of the last tick, of the pools that are scaled."""
        return {name: r.decision for name, r in self._records.items() if r.decision is not None}

    @property
    def bounds(self) -> dict[PoolName, tuple[int, int]]:
        """The least and most replicas of each pool."""
        return {name: r.bounds for name, r in self._records.items() if r.bounds is not None}

    def suspend(self) -> None:
        """Nothing is scaled now: there are no decisions."""
        for record in self._records.values():
            record.decision = None

    def needed(self, spec: MultimodalDeploymentSpec, observed: Observed, revision: str) -> bool:
        """Whether there is anything to decide or to drain."""
        for name in POOL_NAMES:
            pool: Pool | None = getattr(spec, name)
            child = _stateful_set(observed, name, revision)
            if pool is None or child is None or child.workload is None:
                continue
            if pool.autoscaling is not None:
                return True
            if child.workload.replicas > pool.min_replicas or any(
                p.drain_requested_at for p in observed.pods_of(name)
            ):
                return True
        return False

    def watch_drains(self, observed: Observed, now: float) -> None:
        """Pods that were requested to drain and have been removed have ended their drain. `now`: Unix seconds."""
        present = {pod.uid for pod in observed.pods}
        self._asked_at = {uid: at for uid, at in self._asked_at.items() if uid in present}
        for name, record in self._records.items():
            pods = observed.pods_of(name)
            for uid in record.draining.keys() - {pod.uid for pod in pods}:
                requested = record.draining.pop(uid)
                self.counts.drains[name, "ended"] += 1
                self._metrics.drain_seconds.labels(name).observe(max(0.0, now - requested))
            record.draining |= {
                pod.uid: pod.drain_requested_at for pod in pods if pod.drain_requested_at is not None
            }

    async def tick(
        self, now: float, spec: MultimodalDeploymentSpec, observe: Callable[[], Observed], revision: str
    ) -> tuple[Events, bool]:
        """Collect reports, decide, act. Returns what to report as Events, and whether `report` changed.

        Nothing is awaited from the observation that it decides from to the record of what it decided.

        Raises:
            BusyError, RefusedError: an action could not be carried out; the next tick tries again.
        """
        scaler = self._scaler_for(spec)
        faults = await self._collect(scaler, observe(), revision, now)
        observed = observe()
        sets = {
            name: child
            for name in scaler.policy.pools
            if (child := _stateful_set(observed, name, revision)) and child.workload
        }
        if sets.keys() != scaler.policy.pools.keys():
            return [], False  # a pool does not exist yet
        scaler.policy = replace(scaler.policy, gpu_budget=serving_budget(spec, observed, revision))
        pods = {
            name: [
                p
                for p in observed.pods_of(name)
                if p.revision == revision and p.name.startswith(f"{child.name}-")
            ]
            for name, child in sets.items()
        }
        facts = {
            name: PoolFacts(
                replicas=child.workload.replicas if child.workload else 0,
                pods=tuple(_facts(pod) for pod in pods[name]),
                drain_seconds=float(getattr(spec, name).drain_seconds),
                surge=int(child.workload.surged) if child.workload else 0,
            )
            for name, child in sets.items()
        }
        decided = scaler.tick(now, facts, frozenset(p.name for p in _gateways(observed, revision)))
        before = self.report
        events: Events = []
        self._record(decided, faults, spec, events)
        free = None if spec.gpu_budget is None else spec.gpu_budget - gpus_held(observed)
        actions: dict[PoolName, ScaleActions] = {}
        for name, decision in decided.decisions.items():
            wanted = scaler.actions(now, decision, facts[name])
            deadline = getattr(spec, name).scheduling_deadline_seconds
            allowed = without_loss(wanted, sets[name], observed, pods[name], now, deadline)
            actions[name], free = growth_within(free, allowed, sets[name], observed)
        with self._growth.deciding(_growth(actions, sets)):
            for name, decision in decided.decisions.items():
                await self._carry_out(actions[name], sets[name], facts[name], pods[name], decision, events)
        return events, self.report != before

    def remember(self, status: Body) -> None:
        """Restore the last decisions and throughputs from the status after a start."""
        for name, record in self._records.items():
            kept = status.get("pools", {}).get(name, {})
            record.last_decision = _restored(ScalingDecision, kept, "lastDecision")
            record.last_change = _restored(ScalingDecision, kept, "lastChange")
            record.throughput = _restored(PoolThroughput, kept, "throughput")
        self.report = replace(
            self.report,
            decisions=self._last_decisions(),
            changes=self._last_changes(),
            throughput=self._throughputs(),
        )

    def _last_decisions(self) -> dict[PoolName, ScalingDecision]:
        return {name: r.last_decision for name, r in self._records.items() if r.last_decision is not None}

    def _last_changes(self) -> dict[PoolName, ScalingDecision]:
        return {name: r.last_change for name, r in self._records.items() if r.last_change is not None}

    def _throughputs(self) -> dict[PoolName, PoolThroughput]:
        return {name: r.throughput for name, r in self._records.items() if r.throughput is not None}

    def _scaler_for(self, spec: MultimodalDeploymentSpec) -> Scaler:
        if self._scaler is None or self._spec is not spec:
            policy = DeploymentPolicy.of(spec)
            if self._scaler is None:
                known = {name: kept.rates for name, kept in self._throughputs().items()}
                self._scaler = Scaler(policy, known)
            self._scaler.policy, self._spec = policy, spec
            for name, rules in policy.pools.items():
                self._records[name].bounds = (rules.min_replicas, rules.max_replicas)
                for outcome in DRAIN_OUTCOMES:
                    self.counts.drains[name, outcome] += 0
                for direction, reasons in USUAL_DECISIONS.items() if getattr(spec, name).autoscaling else ():
                    for reason in reasons:
                        self.counts.decisions[name, direction, reason] += 0
        return self._scaler

    async def _collect(self, scaler: Scaler, observed: Observed, revision: str, now: float) -> dict[str, str]:
        """Collect the report of every pod that can answer. Returns what was wrong with them, by pod."""
        faults: dict[str, str] = {}

        async def worker(pod: PodView) -> None:
            body = await self._report_fetcher.get(
                pod.address or "", pod.report_port, paths.WORKER_STATE, MAX_REPORT_BYTES
            )
            scaler.record_report(pod.name, now, worker_report(body, pod.name, revision))

        async def gateway(pod: PodView) -> None:
            body = await self._report_fetcher.get(
                pod.address or "", pod.report_port, paths.GATEWAY_DEMAND, MAX_REPORT_BYTES
            )
            scaler.record_gateway_report(pod.name, now, gateway_report(body, pod.name, revision))

        async def collect(pod: PodView) -> None:
            try:
                await (gateway(pod) if pod.component == "gateway" else worker(pod))
                self._metrics.load_reports.labels("answered").inc()
            except NoAnswerError as error:
                if pod.ready:
                    faults[pod.name] = f"pod {pod.name} {error}"
                    self._metrics.load_reports.labels("silent").inc()
            except ReportError as error:
                faults[pod.name] = str(error)
                self._metrics.load_reports.labels("invalid").inc()

        pods = [p for name in scaler.policy.pools for p in observed.pods_of(name) if p.revision == revision]
        pods += _gateways(observed, revision)
        await asyncio.gather(*(collect(pod) for pod in pods if pod.address))
        return faults

    async def _carry_out(
        self,
        actions: ScaleActions,
        child: Child,
        facts: PoolFacts,
        pods: list[PodView],
        decision: Decision,
        events: Events,
    ) -> None:
        pool, record = decision.pool, self._records[decision.pool]
        uids = {pod.name: pod.uid for pod in pods}
        if decision.replicas != decision.current:
            record.change = decision
        begun = record.change
        why = begun if begun is not None and begun.replicas == decision.replicas else decision
        if actions.replicas is not None:
            with self._growth.writing(child.name, actions.replicas):
                await self._cluster.scale("StatefulSet", self._namespace, child.name, actions.replicas)
            sizes = f"from {facts.replicas} to {actions.replicas} pods"
            events.append(("Scaled", f"StatefulSet {child.name} {sizes}; {why}"))
        elif actions.keep_surge:
            await self._cluster.hand_over_replicas(self._namespace, child.name, facts.replicas)
            words = f"keeps all {facts.replicas} pods after the replacement"
            events.append(("Scaled", f"StatefulSet {child.name} {words}; {why}"))
        for name in actions.drain:
            if decision.at - self._asked_at.get(uids[name], 0.0) < UNSEEN_SECONDS:
                continue  # the watch may not show the annotation yet
            if self._drain_requests.pause(uids[name], decision.at) > 0:
                continue  # another client keeps removing the annotation
            await self._cluster.ask_to_drain(self._namespace, name, uids[name], datetime.now(UTC))
            self._drain_requests.repaired(uids[name], decision.at, None)
            self._asked_at[uids[name]] = decision.at
            self.counts.drains[pool, "begun"] += 1
            events.append(
                (
                    "Draining",
                    f"pod {name} is draining: it finishes its requests and accepts no new ones; {why}",
                )
            )
            if rival := self._drain_requests.against(uids[name], decision.at):
                problem = contested(pool, f"the annotation {DRAIN_ANNOTATION} of pod {name}", rival)
                events.append((problem.reason, f"{problem.seen}; {problem.remedy}"))
        for name in actions.renew:
            await self._cluster.delete_pod(self._namespace, name, uids[name])
            self.counts.drains[pool, "renewed"] += 1
            events.append(("Renewed", f"drained pod {name} is needed again and is being replaced"))
        for name in actions.overdue:
            if name not in record.overdue:
                record.overdue.add(name)
                self.counts.drains[pool, "overdue"] += 1
                message = (
                    f"pod {name} did not finish draining within {facts.drain_seconds:.0f} s and is removed"
                )
                events.append(("DrainDeadlineExceeded", message))
        record.overdue &= uids.keys() | set(actions.overdue)

    def _record(
        self,
        decided: DeploymentDecision,
        faults: Mapping[str, str],
        spec: MultimodalDeploymentSpec,
        events: Events,
    ) -> None:
        """Bring the records and `report` up to date; what changed for good becomes an Event."""
        scaled = {n: d for n, d in decided.decisions.items() if getattr(spec, n).autoscaling is not None}
        for name, record in self._records.items():
            record.decision = scaled.get(name)
            record.last_decision = record.last_decision if name in scaled else None
            record.throughput = _refreshed(record.throughput, decided.decisions.get(name))
        for name, decision in scaled.items():
            self._count(decision)
            self._announce(self._records[name], decision, events)
            self._keep(self._records[name], decision)
        hard = [d for d in scaled.values() if d.hard_limit]
        missing = sorted({_AGE.sub("", words) for d in scaled.values() for words in d.missing})
        bottleneck = decided.bottleneck
        self.report = Scaling(
            decisions=self._last_decisions(),
            changes=self._last_changes(),
            throughput=self._throughputs(),
            pools=tuple(scaled),
            shadow=tuple(name for name, d in scaled.items() if not d.act),
            missing=self._missing.update(tuple(_explained(words, faults) for words in missing)),
            limited=tuple(_size_words(d) for d in hard),
            limit=hard[0].hard_limit if hard else None,
            bottleneck=self._bottleneck.update(bottleneck.pool if bottleneck else None),
        )

    def _announce(self, record: PoolRecord, decision: Decision, events: Events) -> None:
        """An Event for a change that is not carried out, and for a limit that waiting does not lift; each once."""
        changes = decision.replicas != decision.current
        news = (decision.current, decision.replicas, decision.hard_limit)
        if (changes or decision.hard_limit) and record.announced != news:
            if changes:
                record.last_change = decision.status()
            if not decision.act or not changes:
                events.append(("ScalingLimited" if decision.act else "WouldScale", str(decision)))
        if changes or decision.hard_limit or not decision.missing:
            record.announced = news

    def _keep(self, record: PoolRecord, decision: Decision) -> None:
        """Keep the decision for the status if it is another than the one there: a change at once, anything else once it is steady."""
        status = decision.status()
        shape = _shape(status)
        steady = record.steady.update(shape) == shape
        changes = decision.act and decision.replicas != decision.current
        if (steady or changes) and (record.last_decision is None or _shape(record.last_decision) != shape):
            record.last_decision = status

    def _count(self, decision: Decision) -> None:
        """Count a decision once, however many ticks it takes to carry it out."""
        record = self._records[decision.pool]
        if decision.replicas == decision.current or not decision.act:
            record.counted = None
        elif record.counted != decision.replicas:
            record.counted = decision.replicas
            direction: Direction = "up" if decision.replicas > decision.current else "down"
            self.counts.decisions[decision.pool, direction, decision.reason] += 1


def growth_within(
    free: int | None, actions: ScaleActions, child: Child, observed: Observed
) -> tuple[ScaleActions, int | None]:
    """A pool grows by what is free now, and later by what pods that leave others give back. Returns what remains free."""
    if child.workload is None or actions.replicas is None:
        return actions, free
    replicas, free = grown(child, actions.replicas, observed, free)
    return replace(actions, replicas=replicas if replicas != child.workload.replicas else None), free


def _growth(
    actions: Mapping[PoolName, ScaleActions], sets: Mapping[PoolName, Child]
) -> dict[str, PoolGrowth]:
    """By StatefulSet: the pools that become larger."""
    return {
        child.name: PoolGrowth(size, child.workload.gpus, child.revision, child.uid)
        for name, child in sets.items()
        if child.workload is not None
        and (size := actions[name].replicas) is not None
        and size > child.workload.replicas
    }


def without_loss(
    actions: ScaleActions,
    child: Child,
    observed: Observed,
    pods: list[PodView],
    now: float,
    scheduling_deadline_seconds: float,
) -> ScaleActions:
    """No Ready pod leaves while pods of its pool are being replaced, and no surge. The last Ready pod never leaves before those that stay,
    unless all of them have waited for a GPU beyond their deadline: it may be the one that the leaving pod holds. `now`: Unix seconds.
    """
    size = child.workload.replicas if child.workload else 0
    target = size if actions.replicas is None else actions.replicas
    beyond = [pod for pod in pods if _facts(pod).ordinal >= target]
    if outdated_pods(child, observed):
        surged = child.workload is not None and child.workload.surged
        if target > size or not (surged or any(pod.ready for pod in beyond)):
            return replace(actions, drain=())
        return replace(actions, drain=(), replicas=None, overdue=())
    leaving = {pod.name for pod in beyond} | set(actions.drain)
    staying = [pod for pod in pods if pod.name not in leaving]
    leaves_none = any(p.ready for p in pods if p.name in leaving) and not any(
        p.ready and not p.deleting for p in staying
    )
    if leaves_none and not all(
        pod.unplaced(now, scheduling_deadline_seconds) and pod.lacks_gpu for pod in staying
    ):
        return replace(actions, drain=(), replicas=actions.replicas if target > size else None, overdue=())
    return actions


def _restored(model: type[M], kept: Body, key: str) -> M | None:
    """What a pool's status has under a key; None if an operator of another release wrote what this one cannot read."""
    if (value := kept.get(key)) is None:
        return None
    try:
        return model.model_validate(value)
    except ValidationError as error:
        logger.warning("%s in the status of a pool is invalid and is dropped: %s", key, error)
        return None


def _refreshed(kept: PoolThroughput | None, decision: Decision | None) -> PoolThroughput | None:
    """With what was measured since, where it differs enough to be worth a write. A pool that is gone has none."""
    if decision is None:
        return None
    now = PoolThroughput.of(decision.history.throughput, datetime.fromtimestamp(decision.at, UTC))
    if kept is not None and not _differ(kept.rates, now.rates):
        return kept
    return now if now.rates else None


def _differ(before: Mapping[str, float], now: Mapping[str, float]) -> bool:
    return any(
        kind not in before or abs(rate - before[kind]) > THROUGHPUT_STEP * before[kind]
        for kind, rate in now.items()
    )


def _shape(decision: ScalingDecision) -> Shape:
    rules = tuple((effect.rule, effect.limit) for effect in decision.effects)
    return decision.from_replicas, decision.to_replicas, decision.reason, decision.metric, rules


def _size_words(decision: Decision) -> str:
    """`encoder at 4 (2 unschedulable)`."""
    faulty = [(decision.unplaced, "unschedulable"), (decision.stuck, "not starting")]
    words = ", ".join(f"{count} {what}" for count, what in faulty if count)
    return f"{decision.pool} at {decision.replicas}" + (f" ({words})" if words else "")


def _explained(words: str, faults: Mapping[str, str]) -> str:
    """What is missing, with the fault of its pod's report if there was one."""
    return next((f"{words} ({fault})" for pod, fault in faults.items() if words.endswith(pod)), words)


def _stateful_set(observed: Observed, pool: PoolName, revision: str) -> Child | None:
    return next(
        (
            child
            for child in observed.children.values()
            if child.kind == "StatefulSet"
            and child.component == pool
            and child.revision == revision
            and not child.deleting
        ),
        None,
    )


def _gateways(observed: Observed, revision: str) -> list[PodView]:
    return [p for p in observed.pods_of("gateway") if p.revision == revision and p.ready and not p.deleting]


def _facts(pod: PodView) -> PodFacts:
    ordinal = pod.name.rpartition("-")[2]
    return PodFacts(
        name=pod.name,
        ordinal=int(ordinal) if ordinal.isdigit() else -1,
        created_at=pod.created_at,
        ready=pod.ready,
        unschedulable=pod.unschedulable is not None,
        deleting=pod.deleting,
        drain_requested=pod.drain_requested_at is not None,
        drain_requested_at=pod.drain_requested_at,
        waiting_since=pod.unschedulable_since or pod.starting_since,
        failing=pod.failing,
    )
