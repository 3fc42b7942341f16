"""The pools of a spec, and the sizes that it gives them. Pure."""

from __future__ import annotations

from typing import cast

from mmd_api.contract.pools import POOL_NAMES, PoolName
from mmd_api.spec.deployment import MultimodalDeploymentSpec
from mmd_api.spec.pools import Pool


def pools_in(spec: MultimodalDeploymentSpec) -> tuple[PoolName, ...]:
    """Pools that the spec holds, upstream first."""
    return tuple(name for name in POOL_NAMES if getattr(spec, name) is not None)


def pool_in(spec: MultimodalDeploymentSpec, component: str | None) -> Pool | None:
    """The pool of a component; None where it is not a pool, or the spec has none."""
    return cast("Pool | None", getattr(spec, component)) if component in POOL_NAMES else None


def wanted_replicas(pool: Pool, present: int) -> int:
    """Size of a pool: the spec's, or the present one within the bounds of a pool that scales."""
    if pool.autoscaling is not None:
        low, high = pool.autoscaling.min_replicas, pool.autoscaling.max_replicas
        return min(max(present, low), high)
    return pool.min_replicas


def affordable(present: int, wanted: int, gpus: int, free: int | None) -> int:
    """The size that a pool of pods with so many GPUs can have now: `wanted`, or less where too few GPUs are free for growth."""
    if free is None or not gpus or wanted <= present:
        return wanted
    return min(wanted, present + max(0, free) // gpus)
