"""Prometheus metrics of the operator and of every deployment that it manages. Independent of the API server.

The operator's own counts live in prometheus-client's metrics. The numbers of a deployment are read from its loop at every scrape, so
that no number outlives its deployment.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import ClassVar, Literal, get_args

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from mmd_api.contract.metric_table import (
    LONG_SECONDS,
    SHORT_SECONDS,
    MetricTable,
    counter,
    family,
    gauge,
    histogram,
    section,
)
from mmd_api.contract.pools import POOL_NAMES, PoolName
from mmd_api.status import ConditionType, PoolStatus
from mmd_operator.autoscaling import LIMITS, SIGNAL_METRICS, Decision
from mmd_operator.observed.condition_state import ConditionState
from mmd_operator.observed.problems import Problem

Direction = Literal["up", "down"]
DrainOutcome = Literal["begun", "ended", "overdue", "renewed"]
DRAIN_OUTCOMES: tuple[DrainOutcome, ...] = get_args(DrainOutcome)
USUAL_DECISIONS: dict[Direction, tuple[str, ...]] = {
    "up": ("LoadRose", "Panic", "Woken", "ScheduleOpened", "OutOfBounds", "External"),
    "down": ("LoadFell", "Idle", "OverBudget", "OutOfBounds", "External"),
}
"""Series exported at 0 before the first decision: a series that begins at 1 has no rate."""


Family = GaugeMetricFamily | CounterMetricFamily


@dataclass(slots=True)
class Counts:
    """Counts of one deployment since this operator first saw it."""

    decisions: Counter[tuple[PoolName, Direction, str]] = field(default_factory=Counter)  # str: the reason
    drains: Counter[tuple[PoolName, DrainOutcome]] = field(default_factory=Counter)


@dataclass(frozen=True, slots=True)
class DeploymentSnapshot:
    """State of one deployment now. `bounds`: minimum and maximum replicas of each scaled pool."""

    namespace: str
    name: str
    conditions: tuple[ConditionState, ...] = ()
    pools: Mapping[PoolName, PoolStatus] = field(default_factory=dict)
    problems: tuple[Problem, ...] = ()
    decisions: Mapping[PoolName, Decision] = field(default_factory=dict)
    bounds: Mapping[PoolName, tuple[int, int]] = field(default_factory=dict)
    counts: Counts = field(default_factory=Counts)
    failing_seconds: float = 0.0  # time for which every pass has failed


class OperatorMetrics(MetricTable):
    """The operator's part of the metric catalogue. `deployments` and `unread` are called at every scrape."""

    LABELS: ClassVar[Mapping[str, str]] = {
        "namespace": "of the deployment",
        "deployment": "its name",
        "pool": "encoder, prefill, decode",
    }

    _operator = section("The operator itself")
    leading = gauge(
        "mmd_operator_leading", "1 on the operator replica that holds the lease", moved_by="deployment"
    )
    passes = counter(
        "mmd_operator_passes_total",
        "Passes over a single deployment: reconcile passes and autoscaler ticks",
        "loop: reconcile, scale",
        "outcome: done, busy, refused, failed: busy and refused come from the API server, failed is a bug",
        moved_by="deployment",
    )
    pass_seconds = histogram(
        "mmd_operator_pass_seconds",
        "Duration of one reconcile pass, without queueing",
        LONG_SECONDS,
        moved_by="deployment",
    )
    oldest_pass = gauge(
        "mmd_operator_oldest_pass_seconds",
        "Time since the last pass, successful or not, of the deployment that has waited longest, or since the operator saw it; 0 without deployments",
        moved_by="deployment",
    )
    _unread = family(
        "mmd_operator_unread_seconds",
        "Time for which the API server has refused to let the leader read a namespace that it serves; 0 while it may",
        "namespace: a served namespace",
        moved_by="trouble",
    )
    api_calls = counter(
        "mmd_operator_api_calls_total",
        "API server calls, except watches",
        "verb: get, post, put, patch, delete",
        "result: ok, absent, conflict, throttled, refused, failed, unreachable, cancelled: 404, 409, 429, other 4xx, 5xx, no response, abandoned",
        moved_by="deployment",
    )
    api_seconds = histogram(
        "mmd_operator_api_seconds",
        "Duration of one API server call",
        SHORT_SECONDS,
        "verb: get, post, put, patch, delete",
        moved_by="deployment",
    )
    objects = counter(
        "mmd_operator_objects_total",
        "Objects of deployments written or removed",
        "outcome: created, changed, repaired, refused, removed, replaced: replaced pods were made from older settings, repaired ones had been changed or deleted by another client",
        moved_by="deployment",
    )
    events = counter(
        "mmd_operator_events_total",
        "Events about deployments; a repeated Event counts as written when the count of the first was raised",
        "outcome: written, dropped: dropped when there are too many or the API server rejects them",
        moved_by="deployment",
    )
    load_reports = counter(
        "mmd_operator_load_reports_total",
        "Requests for load reports, by the autoscaler; only Ready pods count as silent",
        "outcome: answered, silent, invalid",
        moved_by="scaling",
    )
    drain_seconds = histogram(
        "mmd_operator_drain_seconds",
        "Time from the drain request to the removal of the pod",
        LONG_SECONDS,
        "pool",
        moved_by="scaling",
    )

    _deployments = section("Deployments, as the operator sees them")
    _conditions = family(
        "mmd_deployment_condition",
        "1 if the status condition is True, else 0",
        "namespace",
        "deployment",
        f"condition: {', '.join(get_args(ConditionType))}",
        "reason: reason of the condition, as listed in troubleshooting.md",
    )
    _failing = family(
        "mmd_deployment_reconcile_failing_seconds",
        "Time for which every reconcile pass over the deployment has failed; 0 after a successful one",
        "namespace",
        "deployment",
        moved_by="trouble",
    )
    _problems = family(
        "mmd_deployment_problem_pods",
        "Pods (or objects) with this problem; absent if there are none",
        "namespace",
        "deployment",
        "component: encoder, prefill, decode, gateway, nats, or an object's kind",
        "reason: NoGpu, Unschedulable, CrashLoop … as in troubleshooting.md",
        moved_by="trouble",
    )
    _replicas = family(
        "mmd_pool_replicas",
        "Pods of a pool over all revisions",
        "namespace",
        "deployment",
        "pool",
        "state: desired, ready, draining",
    )

    _scaling_section = section("Decisions of the autoscaler (pools that it sizes)")
    _sizes = family(
        "mmd_scaling_replicas",
        "Replicas wanted by load, decided, and the bounds",
        "namespace",
        "deployment",
        "pool",
        "size: wanted, decided, minimum, maximum",
        moved_by="scaling",
    )
    _signals = family(
        "mmd_scaling_signal",
        "Measured load per replica: seconds, a ratio or sequences, depending on the signal",
        "namespace",
        "deployment",
        "pool",
        f"signal: {', '.join(SIGNAL_METRICS)}",
        moved_by="scaling",
    )
    _targets = family(
        "mmd_scaling_signal_target",
        "Target load per replica; absent for HeldRequests, where one is enough",
        "namespace",
        "deployment",
        "pool",
        "signal: as above",
        moved_by="scaling",
    )
    _limits = family(
        "mmd_scaling_limited",
        "1 for each limit that keeps the decision from reaching the wanted size; absent if there is none",
        "namespace",
        "deployment",
        "pool",
        f"limit: {', '.join(LIMITS)}",
        moved_by="scaling",
    )
    _missing = family(
        "mmd_scaling_missing_samples",
        "Pods and gateways whose reports are missing or stale; above 0, scale-down is on hold",
        "namespace",
        "deployment",
        "pool",
        moved_by="trouble",
    )
    _decisions = family(
        "mmd_scaling_decisions_total",
        "Applied decisions to change the size of a pool",
        "namespace",
        "deployment",
        "pool",
        "direction: up, down",
        "reason: LoadRose, LoadFell, Idle, Woken, Panic, ScheduleOpened, OutOfBounds, OverBudget, External",
        moved_by="scaling",
    )
    _drains = family(
        "mmd_drains_total",
        "Drained pods, by outcome",
        "namespace",
        "deployment",
        "pool",
        f"outcome: {', '.join(DRAIN_OUTCOMES)}: overdue pods are removed with the requests they hold, renewed ones are replaced",
        moved_by="scaling",
    )

    def __init__(self) -> None:
        super().__init__()
        self.deployments: Callable[[], Iterable[DeploymentSnapshot]] = tuple
        self.unread: Callable[[], Mapping[str, float]] = dict
        for pool in POOL_NAMES:
            self.drain_seconds.labels(pool)
        self.registry.register(_Families(self))

    def empty_families(self) -> dict[str, Family]:
        """All families, without samples."""
        return {
            name: (CounterMetricFamily if name.endswith("_total") else GaugeMetricFamily)(
                name, text, labels=labels
            )
            for name, (text, labels) in self.families.items()
        }

    def of_deployments(self) -> Iterator[Metric]:
        """Families read from the deployments' loops, filled with their current values."""
        families = self.empty_families()
        for namespace, seconds in self.unread().items():
            families[self._unread].add_metric([namespace], seconds)
        for snapshot in self.deployments():
            deployment_labels = [snapshot.namespace, snapshot.name]
            for condition in snapshot.conditions:
                truth = float(condition.status == "True")
                families[self._conditions].add_metric(
                    [*deployment_labels, condition.type, condition.reason], truth
                )
            families[self._failing].add_metric(deployment_labels, snapshot.failing_seconds)
            pods = Counter[tuple[str, str]]()
            for problem in snapshot.problems:
                pods[problem.component, problem.reason] += problem.pods
            for labels, count in pods.items():
                families[self._problems].add_metric([*deployment_labels, *labels], count)
            for pool, status in snapshot.pools.items():
                counts = {"desired": status.desired, "ready": status.ready, "draining": status.draining}
                for state, count in counts.items():
                    families[self._replicas].add_metric([*deployment_labels, pool, state], count)
            self._scaling(families, snapshot, deployment_labels)
            for decision_labels, count in snapshot.counts.decisions.items():
                families[self._decisions].add_metric([*deployment_labels, *decision_labels], count)
            for drain_labels, count in snapshot.counts.drains.items():
                families[self._drains].add_metric([*deployment_labels, *drain_labels], count)
        yield from families.values()

    def _scaling(
        self, families: Mapping[str, Family], snapshot: DeploymentSnapshot, deployment_labels: list[str]
    ) -> None:
        for pool, decision in snapshot.decisions.items():
            minimum, maximum = snapshot.bounds[pool]
            sizes = {
                "wanted": decision.wanted,
                "decided": decision.replicas,
                "minimum": minimum,
                "maximum": maximum,
            }
            for size, count in sizes.items():
                families[self._sizes].add_metric([*deployment_labels, pool, size], count)
            for signal in decision.signals:
                families[self._signals].add_metric([*deployment_labels, pool, signal.metric], signal.observed)
                if signal.target:
                    families[self._targets].add_metric(
                        [*deployment_labels, pool, signal.metric], signal.target
                    )
            if decision.limited_by is not None:
                families[self._limits].add_metric([*deployment_labels, pool, decision.limited_by], 1)
            families[self._missing].add_metric([*deployment_labels, pool], len(decision.missing))


class _Families(Collector):
    """Stateless collector: metrics are filled at every scrape."""

    def __init__(self, table: OperatorMetrics) -> None:
        self._table = table

    def describe(self) -> Iterable[Metric]:
        """Metrics without values, for the registry's list of names."""
        return self._table.empty_families().values()

    def collect(self) -> Iterable[Metric]:
        """Metrics with their current values."""
        return self._table.of_deployments()
