"""The autoscaler of one deployment from tick to tick: what pods last said, one decision for all pools, and the moves towards it.

Pure but for its memory: time and facts come in, moves go out; whoever calls it asks pods, drains them and sets sizes. A pool is
made smaller in this order: the highest ordinals are told to drain, report that they are empty, and only then leave.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from mmd_api.pools import PoolName, Role
from mmd_operator.autoscaling.coordinate import Verdict, coordinate
from mmd_operator.autoscaling.history import History
from mmd_operator.autoscaling.policy import DeploymentPolicy, PoolPolicy
from mmd_operator.autoscaling.reports import GatewayReport, WorkerReport
from mmd_operator.autoscaling.types import Decision, Demand, Latency, PodSample, PodState, PoolSamples

EMPTY: frozenset[PodState] = frozenset({"unschedulable", "starting", "loading", "drained"})
"""States in which a pod holds no work."""


@dataclass(frozen=True, slots=True)
class PodFacts:
    """One pod as its cluster knows it. `ready`: its probe says so. `asked`: it was told to drain, at `asked_at` if that is known."""

    name: str
    ordinal: int
    created_at: float
    ready: bool = False
    unschedulable: bool = False
    deleting: bool = False
    asked: bool = False
    asked_at: float | None = None


@dataclass(frozen=True, slots=True)
class PoolFacts:
    """A pool as it stands: the size that was asked for, and its pods."""

    replicas: int
    pods: tuple[PodFacts, ...] = ()
    drain_seconds: float = 120.0


@dataclass(frozen=True, slots=True)
class Moves:
    """What to do to a pool now: pods to tell to drain, a size to set, drained pods to start afresh, pods that drain for too long."""

    drain: tuple[str, ...] = ()
    replicas: int | None = None
    renew: tuple[str, ...] = ()
    overdue: tuple[str, ...] = ()


class Scaler:
    """Holds what must be remembered between ticks. One that has just begun lowers nothing before it has seen a whole window."""

    def __init__(
        self, policy: DeploymentPolicy, throughput: Mapping[PoolName, Mapping[str, float]] | None = None
    ) -> None:
        """`throughput`: what one replica of a pool does in a second, by kind of work, as known from before; fresh loads replace it."""
        self.policy = policy
        self._histories = {name: History(throughput=rates) for name, rates in (throughput or {}).items()}
        self._workers: dict[str, tuple[float, WorkerReport]] = {}
        self._gateways: dict[str, tuple[float, GatewayReport]] = {}

    def heard(self, pod: str, now: float, report: WorkerReport) -> None:
        """A worker answered."""
        self._workers[pod] = (now, report)

    def gateway_heard(self, pod: str, now: float, report: GatewayReport) -> None:
        """A gateway answered."""
        self._gateways[pod] = (now, report)

    def tick(self, now: float, pools: Mapping[PoolName, PoolFacts], gateways: frozenset[str]) -> Verdict:
        """Decide. `gateways`: pods whose word is needed before anything may be lowered."""
        present = {pod.name for facts in pools.values() for pod in facts.pods}
        self._workers = {name: said for name, said in self._workers.items() if name in present}
        self._gateways = {name: said for name, said in self._gateways.items() if name in gateways}
        samples = {
            name: PoolSamples(
                replicas=facts.replicas,
                pods=tuple(self._sample(now, self.policy.pools[name], pod) for pod in facts.pods),
                demand=self._demand(self.policy.pools[name].roles, gateways),
                latency=self._latency(),
            )
            for name, facts in pools.items()
        }
        verdict = coordinate(now, self.policy, samples, self._histories)
        self._histories = verdict.histories
        return verdict

    def moves(self, now: float, decision: Decision, facts: PoolFacts) -> Moves:
        """The moves from a pool as it stands towards a decision. The same facts give the same moves: they can be made twice."""
        if not decision.act:
            return Moves()
        target = decision.replicas
        rules = self.policy.pools[decision.pool]
        states = {pod.name: self._sample(now, rules, pod).state for pod in facts.pods}
        pods = {pod.ordinal: pod for pod in facts.pods}
        leaving = [pod for pod in facts.pods if target <= pod.ordinal < facts.replicas and not pod.deleting]
        overdue = tuple(
            pod.name
            for pod in leaving
            if states[pod.name] not in EMPTY
            and pod.asked_at is not None
            and now - pod.asked_at > facts.drain_seconds
        )
        keep = facts.replicas
        while keep > target:
            last = pods.get(keep - 1)
            if last is not None and states[last.name] not in EMPTY and last.name not in overdue:
                break
            keep -= 1
        return Moves(
            drain=tuple(
                p.name for p in leaving if not p.asked and states[p.name] not in EMPTY and p.ordinal < keep
            ),
            replicas=max(keep, target) if max(keep, target) != facts.replicas else None,
            renew=tuple(
                p.name
                for p in facts.pods
                if p.asked and p.ordinal < target and not p.deleting and states[p.name] == "drained"
            ),
            overdue=tuple(
                name for name in overdue if any(p.name == name and p.ordinal >= keep for p in leaving)
            ),
        )

    def _sample(self, now: float, rules: PoolPolicy, pod: PodFacts) -> PodSample:
        at, report = self._workers.get(pod.name, (None, None))
        fresh = at is not None and now - at <= rules.stale_after_seconds
        state: PodState
        if pod.deleting:
            state = "draining"
        elif pod.unschedulable:
            state = "unschedulable"
        elif report is None or not (pod.ready or fresh):
            state = "starting" if not pod.ready else "ready"
        elif pod.asked and report.state == "ready":
            state = "draining"
        else:
            state = report.state
        return PodSample(pod.name, state, pod.created_at, at, report.load if report else None)

    def _demand(self, roles: tuple[Role, ...], gateways: frozenset[str]) -> Demand | None:
        """None where a gateway was not heard, or cannot read the queue that the pool works from."""
        if not gateways or gateways - self._gateways.keys():
            return None
        said = [self._gateways[name] for name in gateways]
        held = sum(report.held.get(role, 0) for _, report in said for role in roles)
        received_at, work = min(at for at, _ in said), {}
        if roles == ("encode",):
            readers = [
                (at - r.queue_age_seconds, r.waiting_work) for at, r in said if r.waiting_work is not None
            ]
            if not readers:
                return None
            queue_at, newest = max(readers, key=lambda reader: reader[0])
            received_at, work = min(received_at, queue_at), dict(newest)
        return Demand(received_at, work, held_requests=held)

    def _latency(self) -> Latency | None:
        """Over all gateways: the mean of their percentiles, weighted by requests."""
        said = list(self._gateways.values())
        if not said:
            return None
        requests = sum(report.requests for _, report in said)
        weighted = sum(report.ttft_seconds * report.requests for _, report in said)
        return Latency(
            received_at=min(at for at, _ in said),
            window_seconds=max(report.window_seconds for _, report in said),
            requests=requests,
            ttft_seconds=weighted / requests if requests else 0.0,
        )
