"""The autoscaler of one deployment across ticks: the latest reports, one decision for all pools, and the actions towards it.

Pure but for its memory: time, reports and facts come in, actions go out. The caller collects reports, drains pods and sets sizes.
A pool shrinks in this order: the pods with the highest ordinals are asked to drain, report that they are empty, and only then leave.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from mmd_api.contract.load import GatewayStatus, WorkerStatus
from mmd_api.contract.pools import Modality, PoolName
from mmd_operator.autoscaling.coordinate import DeploymentDecision, coordinate
from mmd_operator.autoscaling.decision import Decision
from mmd_operator.autoscaling.history import History
from mmd_operator.autoscaling.policy import DeploymentPolicy, PoolPolicy
from mmd_operator.autoscaling.samples import Demand, Latency, PodSample, PodState, PoolSamples

EMPTY: frozenset[PodState] = frozenset({"unschedulable", "starting", "loading", "drained"})
"""States in which a pod holds no work."""


@dataclass(frozen=True, slots=True)
class PodFacts:
    """One pod as the cluster knows it. `ready`: result of its probe. `drain_requested_at`: time of the drain request, if known.
    `waiting_since`, `failing`: see `PodSample`. `lost`: its node does not confirm that it has ended, so it holds no requests.
    """

    name: str
    ordinal: int
    created_at: float
    ready: bool = False
    unschedulable: bool = False
    deleting: bool = False
    lost: bool = False
    drain_requested: bool = False
    drain_requested_at: float | None = None
    waiting_since: float | None = None
    failing: bool = False


@dataclass(frozen=True, slots=True)
class PoolFacts:
    """A pool now: its wanted size and its pods.

    `surge`: how many of `replicas` only join the others while they are replaced. `requested`: the size that another client asks for,
    if known.
    """

    replicas: int
    pods: tuple[PodFacts, ...] = ()
    drain_seconds: float = 120.0
    surge: int = 0
    requested: int | None = None


@dataclass(frozen=True, slots=True)
class ScaleActions:
    """Actions on a pool now: pods to drain, a new size, drained pods to replace, and pods that drain for too long.

    `keep_surge`: the present size, surge included, becomes the pool's size.
    """

    drain: tuple[str, ...] = ()
    replicas: int | None = None
    renew: tuple[str, ...] = ()
    overdue: tuple[str, ...] = ()
    keep_surge: bool = False


class Scaler:
    """Autoscaler with its memory between ticks. A new scaler lowers no pool before it has observed a full window."""

    def __init__(
        self, policy: DeploymentPolicy, throughput: Mapping[PoolName, Mapping[str, float]] | None = None
    ) -> None:
        """`throughput`: work per second of one replica of each pool, by kind, as known from before; fresh loads replace it."""
        self.policy = policy
        self._histories = {name: History(throughput=rates) for name, rates in (throughput or {}).items()}
        self._workers: dict[str, tuple[float, WorkerStatus]] = {}
        self._gateways: dict[str, tuple[float, GatewayStatus]] = {}

    def record_report(self, pod: str, now: float, report: WorkerStatus) -> None:
        """Record a worker's report."""
        self._workers[pod] = (now, report)

    def record_gateway_report(self, pod: str, now: float, report: GatewayStatus) -> None:
        """Record a gateway's report."""
        self._gateways[pod] = (now, report)

    def forget_sizes(self) -> None:
        """Forget the sizes that it has set: other pools serve now, and nobody else has changed theirs."""
        self._histories = {name: replace(past, written=None) for name, past in self._histories.items()}

    def tick(
        self, now: float, pools: Mapping[PoolName, PoolFacts], gateways: frozenset[str]
    ) -> DeploymentDecision:
        """Decide the sizes of all pools. `gateways`: pods whose report is needed before any pool may be lowered."""
        pod_names = {pod.name for facts in pools.values() for pod in facts.pods}
        self._workers = {name: entry for name, entry in self._workers.items() if name in pod_names}
        self._gateways = {name: entry for name, entry in self._gateways.items() if name in gateways}
        samples = {
            name: PoolSamples(
                replicas=facts.replicas - facts.surge,
                pods=tuple(
                    replace(
                        self._sample(now, self.policy.pools[name], pod),
                        surge=facts.surge > 0 and pod.ordinal >= facts.replicas - facts.surge,
                    )
                    for pod in facts.pods
                ),
                demand=self._demand(now, self.policy.pools[name], gateways),
                latency=self._latency(now, self.policy.pools[name]),
                requested=facts.requested,
            )
            for name, facts in pools.items()
        }
        decision = coordinate(now, self.policy, samples, self._histories)
        self._histories = decision.histories
        return decision

    def actions(self, now: float, decision: Decision, facts: PoolFacts) -> ScaleActions:
        """The actions that bring a pool towards a decision. The same facts give the same actions: they can be repeated.

        In Shadow mode the size is the present one. A surge leaves all the same, since no autoscaler wanted it, and pods that were
        drained before are replaced.
        """
        target = decision.in_force
        rules = self.policy.pools[decision.pool]
        states = {pod.name: self._sample(now, rules, pod).state for pod in facts.pods}
        pods = {pod.ordinal: pod for pod in facts.pods}
        leaving = [pod for pod in facts.pods if target <= pod.ordinal < facts.replicas and not pod.deleting]
        overdue = tuple(
            pod.name
            for pod in leaving
            if states[pod.name] not in EMPTY
            and pod.drain_requested_at is not None
            and now - pod.drain_requested_at > facts.drain_seconds
        )
        next_size = facts.replicas
        while next_size > target:
            last = pods.get(next_size - 1)
            if last is not None and not (last.lost or states[last.name] in EMPTY or last.name in overdue):
                break
            next_size -= 1
        return ScaleActions(
            drain=tuple(
                p.name
                for p in leaving
                if not p.drain_requested and states[p.name] not in EMPTY and p.ordinal < next_size
            ),
            replicas=max(next_size, target) if max(next_size, target) != facts.replicas else None,
            renew=tuple(
                p.name
                for p in facts.pods
                if p.drain_requested and p.ordinal < target and not p.deleting and states[p.name] == "drained"
            ),
            overdue=tuple(
                name for name in overdue if any(p.name == name and p.ordinal >= next_size for p in leaving)
            ),
            keep_surge=bool(facts.surge) and target == facts.replicas,
        )

    def _sample(self, now: float, rules: PoolPolicy, pod: PodFacts) -> PodSample:
        at, report = self._workers.get(pod.name, (None, None))
        if at is not None and at < pod.created_at:
            at, report = None, None  # from an earlier pod of this name
        fresh = at is not None and now - at <= rules.stale_after_seconds
        state: PodState
        if pod.deleting:
            state = "draining"
        elif pod.unschedulable:
            state = "unschedulable"
        elif report is None or not (pod.ready or fresh):
            state = "starting" if not pod.ready else "ready"
        elif pod.drain_requested and report.state == "ready":
            state = "draining"
        else:
            state = report.state
        load = report.load if report else None
        return PodSample(
            pod.name,
            state,
            pod.created_at,
            at,
            load,
            pod.waiting_since,
            pod.failing,
            ordinal=pod.ordinal,
            lost=pod.lost,
        )

    def _demand(self, now: float, rules: PoolPolicy, gateways: frozenset[str]) -> Demand | None:
        """Demand for a pool, as far as gateways report it. What is not known lowers no pool, and keeps none from growing."""
        known = self._fresh(now, rules) or self._gateways
        if not gateways or not known:
            return None
        missing = [f"no report from gateway {name}" for name in sorted(gateways - known.keys())]
        reports = list(known.values())
        received_at, work = min(at for at, _ in reports), dict[Modality, float]()
        if rules.roles == ("encode",):
            queue_reports = [(at - r.queue.age_seconds, r.queue.waiting_work) for at, r in reports if r.queue]
            queue_at, queued_work = max(queue_reports, key=lambda report: report[0], default=(now, {}))
            if not queue_reports:
                missing.append("no queue report")
            elif not abs(now - queue_at) <= rules.stale_after_seconds:
                missing.append(f"no queue report for {now - queue_at:.1f} s")
            else:
                work = dict(queued_work)
        waiting = [report.waiting for _, report in reports]
        if "encode" in rules.roles:
            for queued in waiting:
                for modality, amount in queued.encode_work.items():
                    work[modality] = work.get(modality, 0.0) + amount
        return Demand(
            received_at,
            work,
            held_requests=sum(report.held.get(role, 0) for _, report in reports for role in rules.roles),
            prompt_tokens=sum(queued.prompt_tokens for queued in waiting) if "prefill" in rules.roles else 0,
            sequences=sum(queued.sequences for queued in waiting) if "decode" in rules.roles else 0,
            missing=tuple(missing),
        )

    def _latency(self, now: float, rules: PoolPolicy) -> Latency | None:
        """Latency over the gateways that report: the mean of their percentiles, weighted by requests."""
        reports = list(self._fresh(now, rules).values())
        if not reports:
            return None
        requests = sum(report.ttft.requests for _, report in reports)
        weighted = sum(report.ttft.seconds * report.ttft.requests for _, report in reports)
        return Latency(
            received_at=min(at for at, _ in reports),
            window_seconds=max(report.ttft.window_seconds for _, report in reports),
            requests=requests,
            ttft_seconds=weighted / requests if requests else 0.0,
        )

    def _fresh(self, now: float, rules: PoolPolicy) -> dict[str, tuple[float, GatewayStatus]]:
        return {n: r for n, r in self._gateways.items() if abs(now - r[0]) <= rules.stale_after_seconds}
