"""The tick of one deployment's autoscaler on a cluster: collects reports, decides, acts, and keeps a record.

`autoscaling` decides. A tick takes its input from `scaling_facts` and `load_reports`, acts with `scaling_limits` and `pool_actions`, and
remembers and reports with `scaling_record`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from mmd_api.contract.pools import POOL_NAMES, PoolName
from mmd_api.spec.deployment import MultimodalDeploymentSpec
from mmd_api.spec.pools import Pool
from mmd_operator.autoscaling import (
    Decision,
    DeploymentPolicy,
    ScaleActions,
    Scaler,
)
from mmd_operator.kube.cluster import Cluster
from mmd_operator.kube.events import Events
from mmd_operator.kube.metrics import Counts, OperatorMetrics
from mmd_operator.kube.pauses import Pauses
from mmd_operator.kube.pod_client import ReportFetcher
from mmd_operator.observed.observed import Body, Child, Observed, PoolGrowth
from mmd_operator.scaling.load_reports import LoadReports
from mmd_operator.scaling.pool_actions import PoolActions
from mmd_operator.scaling.scaling_facts import pods_in, pool_facts, pool_workload, ready_gateways
from mmd_operator.scaling.scaling_limits import growth_within, without_loss
from mmd_operator.scaling.scaling_record import ScalingRecord
from mmd_operator.sizes.gpu_budget import gpus_held, serving_budget
from mmd_operator.sizes.pending_growth import PendingGrowth
from mmd_operator.status.facts import Scaling


@dataclass(frozen=True, slots=True)
class ScalingView:
    """The input of a tick at one moment: the spec, the serving revision, the observed state, and the deployment's UID."""

    spec: MultimodalDeploymentSpec
    revision: str
    observed: Observed
    uid: str


class PoolScaling:
    """Runs the autoscaler's ticks for one deployment."""

    def __init__(
        self,
        cluster: Cluster,
        report_fetcher: ReportFetcher,
        metrics: OperatorMetrics,
        namespace: str,
        growth: PendingGrowth,
        pauses: Pauses,
    ) -> None:
        self._growth = growth
        self._scaler: Scaler | None = None
        self._spec: MultimodalDeploymentSpec | None = None
        self._revision: str | None = None  # the last tick was about this one
        self.counts = Counts()
        self._record = ScalingRecord(self.counts)
        self._reports = LoadReports(report_fetcher, metrics)
        self._actions = PoolActions(cluster, metrics, namespace, growth, self.counts, pauses)

    @property
    def report(self) -> Scaling:
        """The autoscaler's part of the status."""
        return self._record.report

    @property
    def decisions(self) -> dict[PoolName, Decision]:
        """Decisions of the last tick, for scaled pools."""
        return self._record.decisions

    @property
    def bounds(self) -> dict[PoolName, tuple[int, int]]:
        """The minimum and maximum replicas of each pool."""
        return self._record.bounds

    def suspend(self) -> None:
        """Drop the decisions: nothing is scaled now."""
        self._record.suspend()

    def remember(self, status: Body) -> None:
        """Restore the last decisions and throughputs from the status after a start."""
        self._record.remember(status)

    def needed(self, view: ScalingView) -> bool:
        """True if a pool is autoscaled, over its minimum, draining, or has surge pods to resolve."""
        for name in POOL_NAMES:
            pool: Pool | None = getattr(view.spec, name)
            child = pool_workload(view.observed, name, view.revision, view.uid)
            if pool is None or child is None or child.workload is None:
                continue
            if pool.autoscaling is not None:
                return True
            if (
                child.workload.surged
                or child.workload.replicas > pool.min_replicas
                or any(pod.drain_requested_at for pod in view.observed.pods_of(name))
            ):
                return True
        return False

    def watch_drains(self, observed: Observed, now: float) -> None:
        """Count the drains of removed pods as ended, and note new drain requests. `now`: Unix seconds."""
        self._actions.watch_drains(observed, now)

    async def tick(self, now: float, look: Callable[[], ScalingView | None]) -> tuple[Events, bool]:
        """Collect reports, decide, act. Returns the Events to report, and whether `report` changed.

        `look` returns the present view, or None while nothing may be scaled. No `await` between reading the view (taken after collection) and
        recording the decision.

        Raises:
            BusyError, RefusedError: an action could not be carried out; the next tick tries again.
        """
        if (first_view := look()) is None:
            return [], False
        revision = first_view.revision
        scaler = self._scaler_for(first_view.spec)
        faults = await self._reports.collect(scaler, first_view.observed, revision, now)
        view = look()
        if view is None or view.revision != revision:
            return [], False  # the reports belong to another revision, or nothing may be scaled any more
        spec, observed = view.spec, view.observed
        scaler = self._scaler_for(spec)
        workloads = {
            name: child
            for name in scaler.policy.pools
            if (child := pool_workload(observed, name, revision, view.uid)) and child.workload
        }
        if workloads.keys() != scaler.policy.pools.keys():
            return [], False  # a pool does not exist yet
        if revision != self._revision:
            scaler.forget_sizes()
            self._revision = revision
        scaler.policy = replace(scaler.policy, gpu_budget=serving_budget(spec, observed, revision))
        pods = {name: pods_in(child, name, observed) for name, child in workloads.items()}
        facts = {
            name: pool_facts(child, pods[name], getattr(spec, name), now, observed.requested_for(child))
            for name, child in workloads.items()
        }
        gateways = frozenset(gateway.name for gateway in ready_gateways(observed, revision))
        outcome = scaler.tick(now, facts, gateways)
        previous_report = self.report
        events: Events = []
        self._record.update(outcome, faults, spec, events)
        free_gpus = None if spec.gpu_budget is None else spec.gpu_budget - gpus_held(observed)
        actions: dict[PoolName, ScaleActions] = {}
        for name, decision in outcome.decisions.items():
            proposed = scaler.actions(now, decision, facts[name])
            deadline = getattr(spec, name).scheduling_deadline_seconds
            allowed = without_loss(proposed, workloads[name], observed, pods[name], now, deadline)
            actions[name], free_gpus = growth_within(free_gpus, allowed, workloads[name], observed)
        with self._growth.deciding(_growth(actions, workloads)):
            for name, decision in outcome.decisions.items():
                await self._actions.carry_out(
                    actions[name], workloads[name], facts[name], pods[name], decision, events
                )
        return events, self.report != previous_report

    def _scaler_for(self, spec: MultimodalDeploymentSpec) -> Scaler:
        if self._scaler is None or self._spec is not spec:
            policy = DeploymentPolicy.of(spec)
            if self._scaler is None:
                known_rates = {
                    name: throughput.rates for name, throughput in self._record.throughputs().items()
                }
                self._scaler = Scaler(policy, known_rates)
            self._scaler.policy, self._spec = policy, spec
            self._record.begin(policy, spec)
        return self._scaler


def _growth(
    actions: Mapping[PoolName, ScaleActions], workloads: Mapping[PoolName, Child]
) -> dict[str, PoolGrowth]:
    """Growth of the enlarged pools, by workload name."""
    return {
        child.name: growth
        for name, child in workloads.items()
        if (size := actions[name].replicas) is not None and (growth := PoolGrowth.to(size, child)) is not None
    }
