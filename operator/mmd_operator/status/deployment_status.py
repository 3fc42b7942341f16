"""The status of a deployment, from the facts of a pass and its conditions. Pure."""

from __future__ import annotations

from typing import Literal

from mmd_api.contract.pools import POOL_NAMES, PoolName
from mmd_api.status import Condition, ModelStatus, MultimodalDeploymentStatus, PoolsStatus, PoolStatus
from mmd_operator.resources.naming import GATEWAY_PORT
from mmd_operator.status.facts import Facts


def status_of(facts: Facts, conditions: list[Condition], generation: int) -> MultimodalDeploymentStatus:
    """The whole status."""
    revision = facts.last_serving or facts.serving
    pools = PoolsStatus(**{pool: _pool_status(facts, pool, revision) for pool in facts.pools})
    return MultimodalDeploymentStatus(
        observed_generation=generation,
        pipeline_revision=revision,
        pinned=list(facts.pinned),
        conditions=conditions,
        model=ModelStatus(weights=facts.weights) if facts.weights is not None else None,
        pools=pools,
        pools_summary=pools.summary,
        bottleneck=_bottleneck(facts),
        rollout=list(facts.step.effects) if facts.step is not None and not facts.paused else [],
        rollout_progress=facts.progress,
        rolled_back=facts.rolled_back,
        endpoint=f"{'https' if facts.tls else 'http'}://{facts.name}-gateway.{facts.namespace}.svc:{GATEWAY_PORT}",
    )


def pools_of(status: MultimodalDeploymentStatus) -> dict[PoolName, PoolStatus]:
    """The pools in a status, by name."""
    pools = {name: getattr(status.pools, name) for name in POOL_NAMES}
    return {name: pool for name, pool in pools.items() if pool is not None}


def _bottleneck(facts: Facts) -> Literal["Encoder", "Prefill", "Decode", "None"] | None:
    if not facts.scaling.pools:
        return None
    names: dict[PoolName, Literal["Encoder", "Prefill", "Decode"]] = {
        "encoder": "Encoder",
        "prefill": "Prefill",
        "decode": "Decode",
    }
    return names[facts.scaling.bottleneck] if facts.scaling.bottleneck else "None"


def _pool_status(facts: Facts, pool: PoolName, revision: str | None) -> PoolStatus:
    workloads = facts.workloads(pool)
    return PoolStatus(
        desired=sum(workload.replicas for workload in workloads.values()),
        ready=sum(workload.ready for workload in workloads.values()),
        draining=sum(
            1 for pod in facts.observed.pods_of(pool) if pod.deleting or pod.drain_requested_at is not None
        ),
        revision=revision if revision in workloads else None,
        last_decision=facts.scaling.decisions.get(pool),
        last_change=facts.scaling.changes.get(pool),
        throughput=facts.scaling.throughput.get(pool),
    )
