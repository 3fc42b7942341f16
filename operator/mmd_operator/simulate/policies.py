"""Scalers to compare: the project's own, and models of those in common use. Each sees only what its real counterpart could see.

The Horizontal Pod Autoscaler follows https://kubernetes.io/docs/concepts/workloads/autoscaling/horizontal-pod-autoscale/#algorithm-details:
desired = ceil(current x utilisation / target), no change within a tolerance of 10 %, pods that are not ready count as idle when a pool
would grow, no action without a metric; sync every 15 s, five minutes of stabilisation downwards, at most doubling or four pods per 15 s
upwards.
KEDA drives the same algorithm with queue lengths that it polls every 30 s.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from mmd_api.contract.pools import PoolName
from mmd_operator.autoscaling import (
    Bottleneck,
    Decision,
    DeploymentPolicy,
    Scaler,
    gateway_report,
    worker_report,
)
from mmd_operator.simulate.telemetry import GATEWAY, REVISION, Telemetry

SYNC_SECONDS = 15.0
KEDA_POLL_SECONDS = 30.0
STABILIZATION_SECONDS = 300.0
TOLERANCE = 0.1
PODS_PER_PERIOD = 4


class Autoscaler:
    """The project's own scaler. It reads the answers of pods and gateways exactly as the operator does.

    `decisions`: decisions of the last tick. `changes`: all decisions that changed a size.
    """

    def __init__(self, policy: DeploymentPolicy) -> None:
        self.changes: list[Decision] = []
        self.decisions: Mapping[PoolName, Decision] = {}
        self.bottleneck_ticks: dict[PoolName, int] = {}
        self.last_bottleneck: Bottleneck | None = None
        self._scaler = Scaler(policy)

    def sizes(self, now: float, telemetry: Telemetry) -> Mapping[PoolName, int]:
        """See `SizingPolicy`."""
        scaler = self._scaler
        for pool in scaler.policy.pools:
            for pod, answer in telemetry.worker_answers(pool):
                scaler.record_report(pod, now, worker_report(answer, pod, REVISION))
        scaler.record_gateway_report(
            GATEWAY, now, gateway_report(telemetry.gateway_answer(), GATEWAY, REVISION)
        )
        facts = {pool: telemetry.facts(pool) for pool in scaler.policy.pools}
        decision = scaler.tick(now, facts, frozenset({GATEWAY}))
        self.decisions = decision.decisions
        if decision.bottleneck is not None:
            pool = decision.bottleneck.pool
            self.bottleneck_ticks[pool] = self.bottleneck_ticks.get(pool, 0) + 1
            self.last_bottleneck = decision.bottleneck
        acting = {pool: d for pool, d in decision.decisions.items() if d.act}
        self.changes += [d for d in acting.values() if d.replicas != d.current]
        return {pool: d.replicas for pool, d in acting.items()}


@dataclass(slots=True)
class Static:
    """Scaler that keeps the sizes that the run began with."""

    def sizes(self, now: float, telemetry: Telemetry) -> Mapping[PoolName, int]:
        """See `SizingPolicy`."""
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
        ceiling = max(2 * current, current + PODS_PER_PERIOD)
        return max(self.minimum, min(desired, ceiling, self.maximum))


Utilization = Literal["cpu", "gpu"]


@dataclass(slots=True)
class Hpa:
    """An HPA on the mean utilisation of CPUs (of the cores requested) or GPUs (`DCGM_FI_DEV_GPU_UTIL` through a metrics adapter)."""

    policy: DeploymentPolicy
    metric: Utilization = "cpu"
    target: float = 0.75
    synced: float = -math.inf
    pools: dict[PoolName, _HpaBehaviour] = field(default_factory=dict)

    def sizes(self, now: float, telemetry: Telemetry) -> Mapping[PoolName, int]:
        """See `SizingPolicy`."""
        if now - self.synced < SYNC_SECONDS:
            return {}
        self.synced = now
        utilization_of = telemetry.cpu_utilization if self.metric == "cpu" else telemetry.gpu_utilization
        sizes: dict[PoolName, int] = {}
        for name, rules in self.policy.pools.items():
            behaviour = self.pools.setdefault(
                name, _HpaBehaviour(max(1, rules.min_replicas), rules.max_replicas)
            )
            current, utilization = telemetry.size(name), utilization_of(name)
            if utilization is not None:
                desired = desired_replicas(current, telemetry.ready(name), utilization, self.target)
                sizes[name] = behaviour.size(now, current, desired)
        return _within_budget(self.policy, sizes, telemetry)


def desired_replicas(current: int, ready: int, utilization: float, target: float) -> int:
    """The HPA's size for a mean `utilization` of the `ready` pods."""
    ratio, counted = utilization / target, ready
    if ratio > 1 and ready < current:
        ratio, counted = ratio * ready / current, current
        if ratio < 1:
            return current
    if abs(ratio - 1) <= TOLERANCE:
        return current
    return math.ceil(ratio * counted - 1e-9)


@dataclass(slots=True)
class QueueLength:
    """KEDA with one target per pool: messages per replica (jobs, waiting requests, sequences)."""

    policy: DeploymentPolicy
    targets: Mapping[PoolName, float]
    polled: float = -math.inf
    lengths: dict[PoolName, int] = field(default_factory=dict)
    synced: float = -math.inf
    pools: dict[PoolName, _HpaBehaviour] = field(default_factory=dict)

    def sizes(self, now: float, telemetry: Telemetry) -> Mapping[PoolName, int]:
        """See `SizingPolicy`."""
        if now - self.polled >= KEDA_POLL_SECONDS:
            self.polled = now
            self.lengths = {name: telemetry.queue_length(name) for name in self.policy.pools}
        if now - self.synced < SYNC_SECONDS:
            return {}
        self.synced = now
        sizes: dict[PoolName, int] = {}
        for name, rules in self.policy.pools.items():
            behaviour = self.pools.setdefault(name, _HpaBehaviour(rules.min_replicas, rules.max_replicas))
            desired = math.ceil(self.lengths[name] / self.targets[name])
            sizes[name] = behaviour.size(now, telemetry.size(name), desired)
        return _within_budget(self.policy, sizes, telemetry)


def _within_budget(
    policy: DeploymentPolicy, sizes: dict[PoolName, int], telemetry: Telemetry
) -> dict[PoolName, int]:
    """Sizes that fit the GPU budget. Separate scalers know of none: the first to grow gets the GPUs, and other pods stay pending (left out)."""
    if policy.gpu_budget is None:
        return sizes
    used = sum(telemetry.size(name) * rules.gpus for name, rules in policy.pools.items())
    allowed: dict[PoolName, int] = {}
    for name, size in sizes.items():
        gpus, present = policy.pools[name].gpus, telemetry.size(name)
        growth = size - present
        if growth > 0 and gpus:
            growth = max(0, min(growth, (policy.gpu_budget - used) // gpus))
        allowed[name] = present + growth
        used += growth * gpus
    return allowed
