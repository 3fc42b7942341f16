"""Scalers to compare: the project's own, and models of what people use today. Each sees only what its real counterpart could.

The Horizontal Pod Autoscaler follows its documented algorithm (tolerance 10 %, sync every 15 s, five minutes of
stabilisation downwards, at most doubling or four pods per 15 s). KEDA drives the same algorithm with queue lengths that it
polls every 30 s.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from mmd_api.pools import PoolName
from mmd_operator.autoscaling import Bottleneck, Decision, DeploymentPolicy, History, coordinate
from mmd_operator.simulate.model import Pipeline

SYNC_SECONDS = 15.0
KEDA_POLL_SECONDS = 30.0
STABILIZATION_SECONDS = 300.0
TOLERANCE = 0.1
PODS_PER_PERIOD = 4


@dataclass(slots=True)
class Autoscaler:
    """The project's own code, fed with what pods and gateways would report. `changes` keeps the newest decisions that acted."""

    policy: DeploymentPolicy
    histories: dict[PoolName, History] = field(default_factory=dict)
    changes: list[Decision] = field(default_factory=list)
    bottleneck_ticks: dict[PoolName, int] = field(default_factory=dict)
    last_bottleneck: Bottleneck | None = None

    def sizes(self, now: float, pipeline: Pipeline) -> Mapping[PoolName, int]:
        """See `Scaler`."""
        samples = {pool: pipeline.samples(pool) for pool in self.policy.pools}
        verdict = coordinate(now, self.policy, samples, self.histories)
        self.histories = verdict.histories
        if verdict.bottleneck is not None:
            pool = verdict.bottleneck.pool
            self.bottleneck_ticks[pool] = self.bottleneck_ticks.get(pool, 0) + 1
            self.last_bottleneck = verdict.bottleneck
        acting = {pool: d for pool, d in verdict.decisions.items() if d.act}
        self.changes += [d for d in acting.values() if d.replicas != d.current]
        return {pool: d.replicas for pool, d in acting.items()}


@dataclass(slots=True)
class Static:
    """The sizes that the run began with."""

    def sizes(self, now: float, pipeline: Pipeline) -> Mapping[PoolName, int]:
        """See `Scaler`."""
        return {}


@dataclass(slots=True)
class _HpaBehaviour:
    """The HPA's default behaviour for one pool: desired sizes in, sizes out."""

    minimum: int
    maximum: int
    wanted: list[tuple[float, int]] = field(default_factory=list)

    def size(self, now: float, current: int, desired: int) -> int:
        self.wanted = [(at, n) for at, n in self.wanted if at >= now - STABILIZATION_SECONDS]
        self.wanted.append((now, desired))
        if desired < current:
            desired = min(current, max(n for _, n in self.wanted))
        most = max(2 * current, current + PODS_PER_PERIOD)
        return max(self.minimum, min(desired, most, self.maximum))


@dataclass(slots=True)
class CpuHpa:
    """An HPA on processor utilisation: `target` of the pods' time in which they do anything at all."""

    policy: DeploymentPolicy
    target: float = 0.75
    synced: float = -math.inf
    pools: dict[PoolName, _HpaBehaviour] = field(default_factory=dict)

    def sizes(self, now: float, pipeline: Pipeline) -> Mapping[PoolName, int]:
        """See `Scaler`. Pods that are not ready count as idle when the pool would grow, as in the HPA."""
        if now - self.synced < SYNC_SECONDS:
            return {}
        self.synced = now
        sizes: dict[PoolName, int] = {}
        for name, rules in self.policy.pools.items():
            current = pipeline.size(name)
            behaviour = self.pools.setdefault(
                name, _HpaBehaviour(max(1, rules.min_replicas), rules.max_replicas)
            )
            use, ready = pipeline.utilization(name)
            if ready == 0:
                continue
            ratio = use / self.target
            if ratio > 1 and ready < current:
                ratio = max(1.0, ratio * ready / current)
                ready = current
            desired = current if abs(ratio - 1) <= TOLERANCE else math.ceil(ratio * ready - 1e-9)
            sizes[name] = behaviour.size(now, current, desired)
        return _within_budget(self.policy, sizes, pipeline)


@dataclass(slots=True)
class QueueLength:
    """KEDA with one target per pool: messages a replica (jobs, waiting requests, sequences)."""

    policy: DeploymentPolicy
    targets: Mapping[PoolName, float]
    polled: float = -math.inf
    lengths: dict[PoolName, int] = field(default_factory=dict)
    synced: float = -math.inf
    pools: dict[PoolName, _HpaBehaviour] = field(default_factory=dict)

    def sizes(self, now: float, pipeline: Pipeline) -> Mapping[PoolName, int]:
        """See `Scaler`."""
        if now - self.polled >= KEDA_POLL_SECONDS:
            self.polled = now
            self.lengths = {name: pipeline.queue_length(name) for name in self.policy.pools}
        if now - self.synced < SYNC_SECONDS:
            return {}
        self.synced = now
        sizes: dict[PoolName, int] = {}
        for name, rules in self.policy.pools.items():
            behaviour = self.pools.setdefault(name, _HpaBehaviour(rules.min_replicas, rules.max_replicas))
            desired = math.ceil(self.lengths[name] / self.targets[name])
            sizes[name] = behaviour.size(now, pipeline.size(name), desired)
        return _within_budget(self.policy, sizes, pipeline)


def _within_budget(
    policy: DeploymentPolicy, sizes: dict[PoolName, int], pipeline: Pipeline
) -> dict[PoolName, int]:
    """Separate scalers know of no budget: whoever asks first gets the GPUs, the pods of the others stay pending (left out)."""
    if policy.gpu_budget is None:
        return sizes
    used = sum(pipeline.size(name) * rules.gpus for name, rules in policy.pools.items())
    allowed: dict[PoolName, int] = {}
    for name, size in sizes.items():
        gpus, have = policy.pools[name].gpus, pipeline.size(name)
        growth = size - have
        if growth > 0 and gpus:
            growth = max(0, min(growth, (policy.gpu_budget - used) // gpus))
        allowed[name] = have + growth
        used += growth * gpus
    return allowed
