"""The pools of a spec, and their sizes. Pure."""

from __future__ import annotations

from typing import cast

from mmd_api.contract.pools import POOL_NAMES, PoolName
from mmd_api.spec.deployment import MultimodalDeploymentSpec
from mmd_api.spec.pools import Pool


def pools_in(spec: MultimodalDeploymentSpec) -> tuple[PoolName, ...]:
    """The pools of the spec, upstream first."""
    return tuple(name for name in POOL_NAMES if getattr(spec, name) is not None)


def pool_in(spec: MultimodalDeploymentSpec, component: str | None) -> Pool | None:
    """The pool of a component; None if it is not a pool, or the spec does not have it."""
    return cast("Pool | None", getattr(spec, component)) if component in POOL_NAMES else None


def wanted_replicas(pool: Pool, present: int) -> int:
    """The size of a pool: the spec's, or, for a pool that scales, the present size within its bounds."""
    if pool.autoscaling is not None:
        low, high = pool.autoscaling.min_replicas, pool.autoscaling.max_replicas
        return min(max(present, low), high)
    return pool.min_replicas


def affordable(present: int, wanted: int, gpus: int, free: int | None) -> int:
    """The size allowed by the free GPUs (None: no budget): `wanted`, or less if too few are free for growth. `gpus`: GPUs per replica."""
    if free is None or not gpus or wanted <= present:
        return wanted
    return min(wanted, present + max(0, free) // gpus)
