"""What the operator tells Prometheus of itself and of every deployment that it manages. Knows no API server.

Counted events of the operator live in prometheus-client's own metrics. What belongs to one deployment is read off its loop at every
scrape, so that nothing of a deployment outlives it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import ClassVar, Literal

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from mmd_api.metric_table import LONG_SECONDS, SHORT_SECONDS, MetricTable, Moves
from mmd_api.pools import POOL_NAMES, PoolName
from mmd_api.status import PoolStatus
from mmd_operator.autoscaling import Decision
from mmd_operator.conditions import Verdict
from mmd_operator.problems import Problem

Direction = Literal["up", "down"]
DrainOutcome = Literal["begun", "ended", "overdue", "renewed"]
DRAIN_OUTCOMES: tuple[DrainOutcome, ...] = ("begun", "ended", "overdue", "renewed")
USUAL_DECISIONS: dict[Direction, tuple[str, ...]] = {
    "up": ("LoadRose", "Panic", "Woken", "ScheduleOpened", "OutOfBounds"),
    "down": ("LoadFell", "Idle", "OverBudget", "OutOfBounds"),
}
"""Their series are there, at 0, before the first one: a series that begins at 1 has no rate."""


@dataclass(slots=True)
class Counts:
    """What was counted of one deployment since this operator first saw it."""

    decisions: Counter[tuple[PoolName, Direction, str]] = field(default_factory=Counter)  # with the reason
    drains: Counter[tuple[PoolName, DrainOutcome]] = field(default_factory=Counter)


@dataclass(frozen=True, slots=True)
class Shown:
    """One deployment as it stands. `bounds` are the least and most replicas of the pools that are scaled."""

    namespace: str
    name: str
    conditions: tuple[Verdict, ...] = ()
    pools: Mapping[PoolName, PoolStatus] = field(default_factory=dict)
    problems: tuple[Problem, ...] = ()
    decisions: Mapping[PoolName, Decision] = field(default_factory=dict)
    bounds: Mapping[PoolName, tuple[int, int]] = field(default_factory=dict)
    counts: Counts = field(default_factory=Counts)


class OperatorMetrics(MetricTable):
    """The operator's part of the catalogue. `deployments` is asked at every scrape."""

    LABELS: ClassVar[Mapping[str, str]] = {
        "namespace": "of the deployment",
        "deployment": "its name",
        "pool": "encoder, prefill, decode",
    }

    def __init__(self) -> None:
        super().__init__()
        self.deployments: Callable[[], Iterable[Shown]] = tuple
        counter, gauge, histogram = self._counter, self._gauge, self._histogram

        self._open("The operator itself")
        self.leading = gauge(
            "mmd_operator_leading", "1 on the operator that holds the lease and acts", moves="deployment"
        )
        self.passes = counter(
            "mmd_operator_passes_total",
            "Passes over one deployment: those that reconcile it, and ticks of its autoscaler",
            "loop: reconcile, scale",
            "outcome: done, busy, refused, failed: busy and refused by the API server, failed by a bug",
            moves="deployment",
        )
        self.pass_seconds = histogram(
            "mmd_operator_pass_seconds",
            "One reconcile pass, without the wait for its turn",
            LONG_SECONDS,
            moves="deployment",
        )
        self.oldest_pass = gauge(
            "mmd_operator_oldest_pass_seconds",
            "Since the deployment that waits longest was last brought up to date; 0 without deployments",
            moves="deployment",
        )
        self.api_calls = counter(
            "mmd_operator_api_calls_total",
            "Calls of the API server, watches apart",
            "verb: get, post, put, patch, delete",
            "result: ok, absent, conflict, throttled, refused, failed, unreachable, cancelled: 404, 409, 429, other 4xx, 5xx, no answer, not waited for",
            moves="deployment",
        )
        self.api_seconds = histogram(
            "mmd_operator_api_seconds",
            "One call of the API server",
            SHORT_SECONDS,
            "verb: get, post, put, patch, delete",
            moves="deployment",
        )
        self.objects = counter(
            "mmd_operator_objects_total",
            "Objects of deployments written or removed",
            "outcome: created, changed, repaired, refused, removed: repaired after somebody else changed or deleted it",
            moves="deployment",
        )
        self.asked = counter(
            "mmd_operator_asked_pods_total",
            "Pods asked how they are, for the autoscaler; only ready ones count as silent",
            "outcome: answered, silent, unbelievable",
            moves="scaling",
        )
        self.drain_seconds = histogram(
            "mmd_operator_drain_seconds",
            "From the request to drain until the pod was gone",
            LONG_SECONDS,
            "pool",
            moves="scaling",
        )
        for pool in POOL_NAMES:
            self.drain_seconds.labels(pool)

        self._open("Deployments, as the operator sees them")
        self._families = _Families(self)
        family = self._families.add
        self._conditions = family(
            "mmd_deployment_condition",
            "1 where the condition of the resource's status is True, else 0",
            "namespace",
            "deployment",
            "condition: Ready, Progressing, Degraded, EncoderReady, PrefillReady, DecodeReady, ScalingActive, ScalingLimited, MetricsFresh",
            "reason: the condition's, one of those that troubleshooting.md names",
        )
        self._problems = family(
            "mmd_deployment_problem_pods",
            "Pods (or objects) with this problem; absent without any",
            "namespace",
            "deployment",
            "component: encoder, prefill, decode, gateway, nats, or an object's kind",
            "reason: NoGpu, Unschedulable, CrashLoop … as in troubleshooting.md",
            moves="trouble",
        )
        self._replicas = family(
            "mmd_pool_replicas",
            "Pods of a pool over all revisions",
            "namespace",
            "deployment",
            "pool",
            "state: desired, ready, draining",
        )

        self._open("Decisions of the autoscaler (pools that it sizes)")
        self._sizes = family(
            "mmd_scaling_replicas",
            "What the load asks for, what was decided, and the bounds",
            "namespace",
            "deployment",
            "pool",
            "size: wanted, decided, minimum, maximum",
            moves="scaling",
        )
        self._signals = family(
            "mmd_scaling_signal",
            "What the autoscaler measured of a replica: seconds, a share, or sequences, as the signal says",
            "namespace",
            "deployment",
            "pool",
            "signal: BacklogSeconds, BusyFraction, TtftSeconds, KvUtilization, Sequences, ItlSeconds, HeldRequests",
            moves="scaling",
        )
        self._targets = family(
            "mmd_scaling_signal_target",
            "What a replica may have of it; absent for HeldRequests, of which one is enough",
            "namespace",
            "deployment",
            "pool",
            "signal: as above",
            moves="scaling",
        )
        self._limits = family(
            "mmd_scaling_limited",
            "1 for what keeps the decision from what the load asks for; absent without",
            "namespace",
            "deployment",
            "pool",
            "limit: MaxReplicas, MinReplicas, Schedule, Stabilization, RateLimit, Cooldown, PanicHold, WindowNotSeen, MetricsMissing, Unschedulable, PodsNotStarting, GpuBudget, DownstreamSaturated, UpstreamBusy",
            moves="scaling",
        )
        self._missing = family(
            "mmd_scaling_missing_samples",
            "Pods and gateways whose numbers are missing or stale: above 0 the pool is not made smaller",
            "namespace",
            "deployment",
            "pool",
            moves="trouble",
        )
        self._decisions = family(
            "mmd_scaling_decisions_total",
            "Decisions to change the size of a pool, carried out",
            "namespace",
            "deployment",
            "pool",
            "direction: up, down",
            "reason: LoadRose, LoadFell, Idle, Woken, Panic, ScheduleOpened, OutOfBounds, OverBudget",
            moves="scaling",
        )
        self._drains = family(
            "mmd_drains_total",
            "Pods that were asked to drain, and what became of it",
            "namespace",
            "deployment",
            "pool",
            f"outcome: {', '.join(DRAIN_OUTCOMES)}: overdue ones are removed with what they hold, renewed ones start afresh",
            moves="scaling",
        )
        self.registry.register(self._families)
        self._process()

    def of_deployments(self) -> Iterator[Metric]:
        """The families that are read off the loops, filled with what the loops show now."""
        made = self._families.empty()
        for shown in self.deployments():
            whose = [shown.namespace, shown.name]
            for verdict in shown.conditions:
                truth = float(verdict.status == "True")
                made[self._conditions].add_metric([*whose, verdict.type, verdict.reason], truth)
            pods = Counter[tuple[str, str]]()
            for problem in shown.problems:
                pods[problem.component, problem.reason] += problem.pods
            for told, count in pods.items():
                made[self._problems].add_metric([*whose, *told], count)
            for pool, status in shown.pools.items():
                counts = {"desired": status.desired, "ready": status.ready, "draining": status.draining}
                for state, count in counts.items():
                    made[self._replicas].add_metric([*whose, pool, state], count)
            self._scaling(made, shown, whose)
            for decided, count in shown.counts.decisions.items():
                made[self._decisions].add_metric([*whose, *decided], count)
            for drained, count in shown.counts.drains.items():
                made[self._drains].add_metric([*whose, *drained], count)
        yield from made.values()

    def _scaling(self, made: Mapping[str, Family], shown: Shown, whose: list[str]) -> None:
        for pool, decision in shown.decisions.items():
            least, most = shown.bounds[pool]
            sizes = {
                "wanted": decision.wanted,
                "decided": decision.replicas,
                "minimum": least,
                "maximum": most,
            }
            for size, count in sizes.items():
                made[self._sizes].add_metric([*whose, pool, size], count)
            for signal in decision.signals:
                made[self._signals].add_metric([*whose, pool, signal.metric], signal.observed)
                if signal.target:
                    made[self._targets].add_metric([*whose, pool, signal.metric], signal.target)
            if decision.limited_by is not None:
                made[self._limits].add_metric([*whose, pool, decision.limited_by], 1)
            made[self._missing].add_metric([*whose, pool], len(decision.missing))


Family = GaugeMetricFamily | CounterMetricFamily


class _Families(Collector):
    """Metrics without a memory of their own: declared once, filled at every scrape."""

    def __init__(self, table: OperatorMetrics) -> None:
        self._table = table
        self._declared: dict[str, tuple[str, list[str]]] = {}

    def add(self, name: str, text: str, *labels: str, moves: Moves = "deployment") -> str:
        """Declare one; its name is how to find it."""
        kind = "counter" if name.endswith("_total") else "gauge"
        names = self._table._enter(name, kind, text, self._table._labels(labels), moves)
        self._declared[name] = (text, names)
        return name

    def empty(self) -> dict[str, Family]:
        """All of them, without a sample."""
        made: dict[str, Family] = {}
        for name, (text, labels) in self._declared.items():
            kind = CounterMetricFamily if name.endswith("_total") else GaugeMetricFamily
            made[name] = kind(name, text, labels=labels)
        return made

    def describe(self) -> Iterable[Metric]:
        """The names that are taken, for the registry."""
        return self.empty().values()

    def collect(self) -> Iterable[Metric]:
        """What stands now."""
        return self._table.of_deployments()
