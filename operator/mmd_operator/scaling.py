"""One deployment's autoscaler on a cluster: asks its pods, decides, drains, resizes, and keeps what there is to say about it.

The decisions are those of `autoscaling`; this file only brings facts to them and carries out their moves.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any, cast

from mmd_api.pools import POOL_NAMES, PoolName
from mmd_api.spec import MultimodalDeploymentSpec, Pool
from mmd_api.status import PoolThroughput, ScalingDecision
from mmd_operator.ask import Asker, NoAnswerError
from mmd_operator.autoscaling import (
    GATEWAY_PATH,
    HARD_LIMITS,
    MAX_REPORT_BYTES,
    WORKER_PATH,
    Bottleneck,
    Decision,
    DeploymentPolicy,
    Moves,
    PodFacts,
    PoolFacts,
    ReportError,
    Scaler,
    Verdict,
    gateway_report,
    worker_report,
)
from mmd_operator.cluster import Cluster
from mmd_operator.conditions import Scaling
from mmd_operator.metrics import DRAIN_OUTCOMES, USUAL_DECISIONS, Counts, Direction, OperatorMetrics
from mmd_operator.observed import Child, Observed, PodView
from mmd_operator.resources.naming import GATEWAY_PORT, WORKER_PORT

TICK_SECONDS = 2.0
THROUGHPUT_STEP = 0.1
"""A measured throughput is written anew when it has changed by this share."""
STEADY_TICKS = 3
"""What is said of metrics and of the bottleneck changes when it has been so for this many ticks."""
Body = Mapping[str, Any]
Events = list[tuple[str, str]]


class PoolScaling:
    """Ticks of one deployment."""

    def __init__(self, cluster: Cluster, asker: Asker, metrics: OperatorMetrics, namespace: str) -> None:
        self._cluster, self._asker, self._metrics, self._namespace = cluster, asker, metrics, namespace
        self._scaler: Scaler | None = None
        self._spec: MultimodalDeploymentSpec | None = None
        self._said: dict[PoolName, tuple[int, int, str | None]] = {}
        self._steady: dict[str, tuple[object, int]] = {}
        self._overdue: set[str] = set()
        self._why: dict[PoolName, Decision] = {}
        self._aims: dict[PoolName, int] = {}
        self._draining: dict[str, tuple[PoolName, float]] = {}
        self.report = Scaling()
        self.decisions: dict[PoolName, Decision] = {}
        """Of the last tick, of the pools that are scaled."""
        self.bounds: dict[PoolName, tuple[int, int]] = {}
        self.counts = Counts()

    def needed(self, spec: MultimodalDeploymentSpec, observed: Observed, revision: str) -> bool:
        """Whether there is anything to decide or to drain."""
        for name in POOL_NAMES:
            pool: Pool | None = getattr(spec, name)
            child = _stateful_set(observed, name, revision)
            if pool is None or child is None or child.workload is None:
                continue
            if pool.autoscaling is not None:
                return True
            size = 1 if pool.replicas is None else pool.replicas
            if child.workload.replicas > size or any(p.drain_asked for p in observed.pods_of(name)):
                return True
        return False

    def watch_drains(self, observed: Observed, now: float) -> None:
        """Pods that were asked to drain and are gone have ended their drain. `now`: Unix seconds."""
        present = {pod.uid: pod for name in POOL_NAMES for pod in observed.pods_of(name)}
        for uid, (pool, asked) in list(self._draining.items()):
            if uid not in present:
                del self._draining[uid]
                self.counts.drains[pool, "ended"] += 1
                self._metrics.drain_seconds.labels(pool).observe(max(0.0, now - asked))
        for name in POOL_NAMES:
            for pod in observed.pods_of(name):
                if pod.drain_asked is not None:
                    self._draining[pod.uid] = (name, pod.drain_asked)

    async def tick(
        self, now: float, spec: MultimodalDeploymentSpec, observed: Observed, revision: str
    ) -> tuple[Events, bool]:
        """Ask, decide, act. Returns what to report as Events, and whether `report` changed.

        Raises:
            BusyError, RefusedError: a move could not be made; the next tick makes it again.
        """
        scaler = self._scaler_for(spec)
        sets = {
            name: child
            for name in scaler.policy.pools
            if (child := _stateful_set(observed, name, revision)) and child.workload
        }
        if sets.keys() != scaler.policy.pools.keys():
            return [], False  # a pool is not made yet
        faults = await self._ask(scaler, observed, revision, now)
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
                drain_seconds=float(getattr(spec, name).template.termination_grace_period_seconds),
            )
            for name, child in sets.items()
        }
        verdict = scaler.tick(now, facts, frozenset(p.name for p in _gateways(observed, revision)))
        before = self.report
        events: Events = []
        self._note(verdict, faults, spec, events)
        for name, decision in verdict.decisions.items():
            moves = scaler.moves(now, decision, facts[name])
            await self._make(moves, sets[name], facts[name], pods[name], decision, events)
        return events, self.report != before

    def remember(self, status: Body) -> None:
        """After a start: the last decisions and what a replica does stand in the status."""
        found: dict[PoolName, ScalingDecision] = {}
        for name in POOL_NAMES:
            last = status.get("pools", {}).get(name, {}).get("lastDecision")
            if last is not None:
                found[name] = ScalingDecision.model_validate(last)
        self.report = replace(self.report, decisions=found, throughput=_throughput_in(status))

    def _scaler_for(self, spec: MultimodalDeploymentSpec) -> Scaler:
        if self._scaler is None or self._spec is not spec:
            policy = DeploymentPolicy.of(spec)
            if self._scaler is None:
                known = {name: kept.rates for name, kept in self.report.throughput.items()}
                self._scaler = Scaler(policy, known)
            self._scaler.policy, self._spec = policy, spec
            for name, rules in policy.pools.items():
                self.bounds[name] = (rules.min_replicas, rules.max_replicas)
                for outcome in DRAIN_OUTCOMES:
                    self.counts.drains[name, outcome] += 0
                for direction, reasons in USUAL_DECISIONS.items() if getattr(spec, name).autoscaling else ():
                    for reason in reasons:
                        self.counts.decisions[name, direction, reason] += 0
        return self._scaler

    async def _ask(self, scaler: Scaler, observed: Observed, revision: str, now: float) -> dict[str, str]:
        """Ask every pod that can answer. Returns what was wrong with the answers, by pod."""
        faults: dict[str, str] = {}

        async def worker(pod: PodView) -> None:
            body = await self._asker.get(pod.address or "", WORKER_PORT, WORKER_PATH, MAX_REPORT_BYTES)
            scaler.heard(pod.name, now, worker_report(body, pod.name, revision))

        async def gateway(pod: PodView) -> None:
            body = await self._asker.get(pod.address or "", GATEWAY_PORT, GATEWAY_PATH, MAX_REPORT_BYTES)
            scaler.gateway_heard(pod.name, now, gateway_report(body, pod.name, revision))

        async def heard(pod: PodView) -> None:
            try:
                await (gateway(pod) if pod.component == "gateway" else worker(pod))
                self._metrics.asked.labels("answered").inc()
            except NoAnswerError as error:
                if pod.ready:
                    faults[pod.name] = f"pod {pod.name} {error}"
                    self._metrics.asked.labels("silent").inc()
            except ReportError as error:
                faults[pod.name] = str(error)
                self._metrics.asked.labels("unbelievable").inc()

        asked = [p for name in scaler.policy.pools for p in observed.pods_of(name) if p.revision == revision]
        asked += _gateways(observed, revision)
        await asyncio.gather(*(heard(pod) for pod in asked if pod.address))
        return faults

    async def _make(
        self,
        moves: Moves,
        child: Child,
        facts: PoolFacts,
        pods: list[PodView],
        decision: Decision,
        events: Events,
    ) -> None:
        uids = {pod.name: pod.uid for pod in pods}
        if decision.replicas != decision.current:
            self._why[decision.pool] = decision
        begun = self._why.get(decision.pool, decision)
        why = begun if begun.replicas == decision.replicas else decision
        if moves.replicas is not None:
            await self._cluster.scale(self._namespace, child.name, moves.replicas)
            events.append(
                (
                    "Scaled",
                    f"StatefulSet {child.name} from {facts.replicas} to {moves.replicas} pods; {why}",
                )
            )
        for name in moves.drain:
            await self._cluster.ask_to_drain(self._namespace, name, uids[name], datetime.now(UTC))
            self.counts.drains[decision.pool, "begun"] += 1
            events.append(("Draining", f"pod {name} finishes what it holds and takes nothing more; {why}"))
        for name in moves.renew:
            await self._cluster.delete_pod(self._namespace, name, uids[name])
            self.counts.drains[decision.pool, "renewed"] += 1
            events.append(("Renewed", f"pod {name} had drained and is needed again: it starts afresh"))
        for name in moves.overdue:
            if name not in self._overdue:
                self._overdue.add(name)
                self.counts.drains[decision.pool, "overdue"] += 1
                seconds = f"{facts.drain_seconds:.0f} s"
                events.append(
                    (
                        "DrainDeadlineExceeded",
                        f"pod {name} did not become empty within {seconds}; it is removed",
                    )
                )
        self._overdue &= {pod.name for pod in pods} | set(moves.overdue)

    def _note(
        self, verdict: Verdict, faults: Mapping[str, str], spec: MultimodalDeploymentSpec, events: Events
    ) -> None:
        """Bring `report` up to date; what changed for good becomes an Event."""
        decisions = dict(self.report.decisions)
        scaled = tuple(n for n in verdict.decisions if getattr(spec, n).autoscaling is not None)
        self.decisions = {name: verdict.decisions[name] for name in scaled}
        for name in scaled:
            self._count(verdict.decisions[name])
        for name in scaled:
            decision = verdict.decisions[name]
            changes = decision.replicas != decision.current
            now_said = (decision.current, decision.replicas, _hard(decision))
            if (changes or _hard(decision)) and self._said.get(name) != now_said:
                if changes:
                    decisions[name] = decision.status()
                if not decision.act or not changes:
                    events.append(("WouldScale" if not decision.act else "ScalingLimited", str(decision)))
            if changes or _hard(decision) or not decision.missing:
                self._said[name] = now_said
        hard = [verdict.decisions[n] for n in scaled if _hard(verdict.decisions[n])]
        missing = sorted({m.split(" since ")[0] for n in scaled for m in verdict.decisions[n].missing})
        missing = [_explained(words, faults) for words in missing]
        bottleneck: Bottleneck | None = verdict.bottleneck
        settled = self._settled("missing", tuple(missing))
        pool = self._settled("bottleneck", bottleneck.pool if bottleneck else None)
        self.report = Scaling(
            decisions=decisions,
            throughput=_refreshed(self.report.throughput, verdict),
            pools=scaled,
            shadow=tuple(n for n in scaled if not verdict.decisions[n].act),
            missing=cast("tuple[str, ...]", settled if settled is not ... else self.report.missing),
            limited=tuple(f"{d.pool} at {d.replicas}" for d in hard),
            limit=_hard(hard[0]) if hard else None,
            bottleneck=cast("PoolName | None", pool if pool is not ... else self.report.bottleneck),
        )

    def _count(self, decision: Decision) -> None:
        """Count a decision once, however many ticks it takes to carry it out."""
        if decision.replicas == decision.current or not decision.act:
            self._aims.pop(decision.pool, None)
        elif self._aims.get(decision.pool) != decision.replicas:
            self._aims[decision.pool] = decision.replicas
            direction: Direction = "up" if decision.replicas > decision.current else "down"
            self.counts.decisions[decision.pool, direction, decision.reason] += 1

    def _settled(self, what: str, value: object) -> object:
        """The value, once it has been the same for some ticks; `...` until then."""
        last, count = self._steady.get(what, (value, 0))
        count = count + 1 if last == value else 1
        self._steady[what] = (value, count)
        return value if count >= STEADY_TICKS else ...


def _throughput_in(status: Body) -> dict[PoolName, PoolThroughput]:
    found = {name: status.get("pools", {}).get(name, {}).get("throughput") for name in POOL_NAMES}
    return {name: PoolThroughput.model_validate(kept) for name, kept in found.items() if kept is not None}


def _refreshed(kept: Mapping[PoolName, PoolThroughput], verdict: Verdict) -> dict[PoolName, PoolThroughput]:
    """With what was measured since, where it differs enough to be worth a write."""
    fresh: dict[PoolName, PoolThroughput] = {}
    for name, decision in verdict.decisions.items():
        now = PoolThroughput.of(decision.observed.throughput, datetime.fromtimestamp(decision.at, UTC))
        before = kept.get(name)
        if before is not None and not _differ(before.rates, now.rates):
            fresh[name] = before
        elif now.rates:
            fresh[name] = now
    return fresh


def _differ(before: Mapping[str, float], now: Mapping[str, float]) -> bool:
    return any(
        kind not in before or abs(rate - before[kind]) > THROUGHPUT_STEP * before[kind]
        for kind, rate in now.items()
    )


def _hard(decision: Decision) -> str | None:
    return (
        decision.limited_by
        if decision.limited_by in HARD_LIMITS and decision.wanted > decision.current
        else None
    )


def _explained(words: str, faults: Mapping[str, str]) -> str:
    """What is missing, with what its pod answered instead where it did."""
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
        asked=pod.drain_asked is not None,
        asked_at=pod.drain_asked,
    )
