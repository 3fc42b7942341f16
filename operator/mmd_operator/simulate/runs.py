"""Runs of one trace under several scalers: their cost and SLO attainment, and the static split or policy that an SLO needs.

Everything is one simulation after the other; nothing else is estimated.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace

import numpy as np

from mmd_api.contract.pools import MODALITIES, PoolName
from mmd_api.spec.deployment import MultimodalDeploymentSpec
from mmd_api.spec.pools import Pool
from mmd_operator.autoscaling import DeploymentPolicy
from mmd_operator.simulate.calibration import Calibration
from mmd_operator.simulate.model import Pipeline, SizingPolicy
from mmd_operator.simulate.placing import Placing
from mmd_operator.simulate.policies import Autoscaler, Hpa, QueueLength, Static, Utilization
from mmd_operator.simulate.results import RunResult
from mmd_operator.simulate.traces import Trace

TRIAL_REQUESTS = 20_000
UTILIZATIONS_PERCENT = (50, 65, 80)
BACKLOG_SHARES_OF_TTFT = (0.1, 0.25, 0.5, 1.0)
DEFAULT_BACKLOG_SECONDS = 1.0


@dataclass(frozen=True, slots=True)
class Run:
    """One policy on one trace. `sizes`: sizes of a static policy. `bottleneck_share`: share of all ticks, per pool."""

    policy: str
    result: RunResult
    ttft_slo_seconds: float | None
    itl_slo_seconds: float | None
    sizes: Mapping[PoolName, int] | None = None
    changes: tuple[str, ...] = ()
    bottleneck_share: Mapping[PoolName, float] | None = None

    @property
    def attainment(self) -> float:
        """Share of requests within the SLO."""
        return self.result.attainment(self.ttft_slo_seconds, self.itl_slo_seconds)

    @property
    def cost_hours(self) -> float:
        """GPU-hours; replica-hours where no pool has GPUs."""
        return (self.result.gpu_seconds or sum(self.result.replica_seconds.values())) / 3600

    def summary(self) -> dict[str, object]:
        """The run as numbers, for JSON."""
        result = self.result
        return {
            "policy": self.policy,
            "sizes": None if self.sizes is None else dict(self.sizes),
            "requests": len(result.ttft_seconds),
            "lost": dict(result.lost),
            "attainment": self.attainment,
            "gpu_hours": result.gpu_seconds / 3600,
            "replica_hours": {pool: s / 3600 for pool, s in result.replica_seconds.items()},
            "ttft_seconds": _percentiles(result.ttft_seconds),
            "itl_seconds": _percentiles(result.itl_seconds),
            "waited_seconds": dict(result.waited_seconds),
            "bottleneck_share": {p: share for p, share in (self.bottleneck_share or {}).items()},
            "resizes": len(self.changes),
            "decisions": list(self.changes[-20:]),
            "replicas": {"seconds": _thin(result.ticks)}
            | {str(pool): _thin(sizes) for pool, sizes in result.replicas.items()},
        }


def _percentiles(values: np.ndarray[tuple[int], np.dtype[np.float64]]) -> dict[str, float]:
    valid = values[~np.isnan(values)]
    if not len(valid):
        return {}
    return {f"p{p}": float(np.percentile(valid, p)) for p in (50, 90, 95, 99)}


def _thin(values: np.ndarray[tuple[int], np.dtype[np.generic]], max_points: int = 500) -> list[float]:
    step = max(1, math.ceil(len(values) / max_points))
    return [float(v) for v in values[::step].tolist()]


@dataclass(frozen=True, slots=True)
class Planner:
    """A deployment, a trace and a calibration, ready to be run under any policy."""

    spec: MultimodalDeploymentSpec
    trace: Trace
    calibration: Calibration
    interval_seconds: float = 2.0
    placing: Callable[[MultimodalDeploymentSpec, Trace, Calibration], Placing] | None = None
    """Makes the placer of a run's requests; None: they wait in one queue."""

    def autoscaler(self, name: str = "autoscaler") -> Run:
        """Run under the project's own autoscaler, with the policy of the spec."""
        scaler = Autoscaler(DeploymentPolicy.of(self.spec))
        result = self._run(scaler)
        ticks = max(1, len(result.ticks))
        return self._as_run(
            name,
            result,
            changes=tuple(f"{d.at:.0f} s: {d}" for d in scaler.changes),
            bottleneck_share={pool: n / ticks for pool, n in scaler.bottleneck_ticks.items()},
        )

    def hpa(self, metric: Utilization, target: float = 0.75) -> Run:
        """Run under an HPA on CPU or GPU utilisation."""
        return self._as_run(f"{metric}-hpa", self._run(Hpa(DeploymentPolicy.of(self.spec), metric, target)))

    def queue_length(self, scale: float = 1.0) -> Run:
        """Run under KEDA, with targets of two jobs, two requests and half the places of a decode replica, times `scale`."""
        targets: dict[PoolName, float] = {
            "encoder": 2 * scale,
            "prefill": 2 * scale,
            "decode": self.spec.decode.max_sequences / 2 * scale,
        }
        return self._as_run("queue-length", self._run(QueueLength(DeploymentPolicy.of(self.spec), targets)))

    def static(self, sizes: Mapping[PoolName, int]) -> Run:
        """Run with sizes that never change."""
        return self._as_run("static", self._run(Static(), sizes), sizes=sizes)

    def compared(self) -> Iterator[Run]:
        """Run the spec's policy, the policies in common use, and a static split of the same cost or a little more."""
        own_run = self.autoscaler()
        yield own_run
        yield self.hpa("cpu")
        if any(rules.gpus for rules in DeploymentPolicy.of(self.spec).pools.values()):
            yield self.hpa("gpu")
        yield self.queue_length()
        yield self.static({pool: max(1, math.ceil(n.mean())) for pool, n in own_run.result.replicas.items()})

    def static_split(self, attainment: float) -> Run:
        """Search for the smallest split that keeps the SLO for this share of requests; the best split if the budget does not suffice.

        Starts with the smallest sizes that carry the mean load, grows the pool that helps most per GPU, then takes back replicas that are
        not needed. Searches on the busiest stretch of at most 20,000 requests; the result covers the whole trace.
        """
        trial = self._busiest()
        policy = DeploymentPolicy.of(self.spec)
        sizes = trial.least_sizes()
        best = trial.static(sizes)
        while best.attainment < attainment:
            grown = [
                trial.static({**sizes, pool: sizes[pool] + 1})
                for pool in sizes
                if sizes[pool] < _most(policy, pool) and _fits(policy, {**sizes, pool: sizes[pool] + 1})
            ]
            if not grown:
                break
            best = max(grown, key=lambda run: (run.attainment, -float(np.nanmean(run.result.ttft_seconds))))
            assert best.sizes is not None
            sizes = dict(best.sizes)
        goal = min(attainment, best.attainment)
        for pool in sorted(sizes, key=lambda p: -policy.pools[p].gpus):
            while sizes[pool] > 1 and trial.static({**sizes, pool: sizes[pool] - 1}).attainment >= goal:
                sizes[pool] -= 1
        return self.static(sizes)

    def tuned(self, attainment: float) -> tuple[Run, MultimodalDeploymentSpec]:
        """Find the cheapest of a grid of autoscaling targets that keeps the SLO for this share of requests, or else the best."""
        ttft = self.spec.slo.ttft_milliseconds
        base = ttft / 1000 if ttft else DEFAULT_BACKLOG_SECONDS
        trials = []
        for utilization in UTILIZATIONS_PERCENT:
            for share in BACKLOG_SHARES_OF_TTFT:
                changed = _with_targets(self.spec, utilization, max(1, round(base * share * 1000)))
                planner = replace(self, spec=changed)
                trials.append(
                    (planner.autoscaler(f"autoscaler at {utilization} %, {base * share:g} s"), changed)
                )
        sufficient = [entry for entry in trials if entry[0].attainment >= attainment]
        if sufficient:
            return min(sufficient, key=lambda entry: entry[0].cost_hours)
        return max(trials, key=lambda entry: (entry[0].attainment, -entry[0].cost_hours))

    def least_sizes(self) -> dict[PoolName, int]:
        """Replicas that the mean load would use up entirely, at least one of each pool."""
        seconds: dict[PoolName, float] = dict.fromkeys(DeploymentPolicy.of(self.spec).pools, 0.0)
        encoder, trace = self.calibration.encoder, self.trace
        work = sum(
            float(trace.media[m].sum()) * self.calibration.media[m] / encoder.work_per_second[m]
            for m in MODALITIES
        )
        tokens = float(trace.context_tokens.sum()) / self.calibration.prefill.tokens_per_second
        front: PoolName = "prefill" if "prefill" in seconds else "decode"
        seconds["encoder" if "encoder" in seconds else front] += work
        seconds[front] += tokens
        span = max(trace.seconds, 1.0)
        policy = DeploymentPolicy.of(self.spec)
        sizes = {pool: max(1, min(math.ceil(s / span), _most(policy, pool))) for pool, s in seconds.items()}
        while not _fits(policy, sizes) and max(sizes.values()) > 1:
            largest = max(sizes, key=lambda p: sizes[p])
            sizes[largest] -= 1
        return sizes

    def _busiest(self) -> Planner:
        count = len(self.trace)
        if count <= TRIAL_REQUESTS:
            return self
        at = self.trace.arrivals
        first = int(np.argmin(at[TRIAL_REQUESTS:] - at[:-TRIAL_REQUESTS]))
        part = self.trace.between(float(at[first]), float(at[first + TRIAL_REQUESTS]))
        return replace(self, trace=part)

    def _run(self, scaler: SizingPolicy, sizes: Mapping[PoolName, int] | None = None) -> RunResult:
        parts = self.spec, self.trace, self.calibration
        placing = self.placing(*parts) if self.placing is not None else None
        return Pipeline(*parts, scaler, self.interval_seconds, sizes, placing).run()

    def _as_run(
        self,
        name: str,
        result: RunResult,
        sizes: Mapping[PoolName, int] | None = None,
        changes: tuple[str, ...] = (),
        bottleneck_share: Mapping[PoolName, float] | None = None,
    ) -> Run:
        slo = self.spec.slo
        return Run(
            policy=name,
            result=result,
            ttft_slo_seconds=slo.ttft_milliseconds / 1000 if slo.ttft_milliseconds else None,
            itl_slo_seconds=slo.itl_milliseconds / 1000 if slo.itl_milliseconds else None,
            sizes=sizes,
            changes=changes,
            bottleneck_share=bottleneck_share,
        )


def _most(policy: DeploymentPolicy, pool: PoolName) -> int:
    """Largest size in a static split: the bound of an autoscaled pool; for a fixed pool, whatever the budget allows."""
    rules = policy.pools[pool]
    return 1000 if rules.fixed else rules.max_replicas


def _fits(policy: DeploymentPolicy, sizes: Mapping[PoolName, int]) -> bool:
    used = sum(size * policy.pools[pool].gpus for pool, size in sizes.items())
    return policy.gpu_budget is None or used <= policy.gpu_budget


def _with_targets(
    spec: MultimodalDeploymentSpec, utilization_percent: int, backlog_milliseconds: int
) -> MultimodalDeploymentSpec:
    targets = {
        "target_utilization_percent": utilization_percent,
        "target_backlog_milliseconds": min(backlog_milliseconds, 600_000),
    }
    pools: dict[str, Pool] = {}
    for name in DeploymentPolicy.of(spec).pools:
        part: Pool = getattr(spec, name)
        scaling = part.autoscaling
        if scaling is not None:
            pools[name] = part.model_copy(update={"autoscaling": scaling.model_copy(update=targets)})
    return spec.model_copy(update=pools)
