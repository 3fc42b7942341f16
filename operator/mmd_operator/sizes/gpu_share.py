"""The share of the GPU budget for a new revision next to the serving one. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from mmd_api.spec.deployment import MultimodalDeploymentSpec
from mmd_api.spec.pools import Pool
from mmd_operator.observed.observed import Observed
from mmd_operator.sizes.gpu_budget import gpus_held
from mmd_operator.sizes.pool_sizes import pools_in, wanted_replicas


@dataclass(frozen=True, slots=True)
class GpuShare:
    """Sizes of the new revision's pools where the budget cuts them. `blocked`: the budget leaves too little for one pod of each."""

    sizes: Mapping[str, int] = field(default_factory=dict)
    words: str = ""
    blocked: bool = False


def gpu_share(
    spec: MultimodalDeploymentSpec, revision: str, serving: str | None, observed: Observed, uid: str
) -> GpuShare:
    """Give one pod to each pool, or let the rollout wait; then add pods one by one to the pool furthest from its size.

    `uid`: the deployment's UID.
    """
    budget = spec.gpu_budget
    if budget is None or serving is None or serving == revision:
        return GpuShare()
    held = gpus_held(observed) - gpus_held(observed, revision)
    full_sizes: dict[str, int] = {}
    gpus: dict[str, int] = {}
    for name in pools_in(spec):
        pool: Pool = getattr(spec, name)
        serving_size = next(
            (
                child.workload.replicas
                for child in observed.children.values()
                if child.is_sized
                and child.component == name
                and child.revision == serving
                and child.owner_uid == uid
                and child.workload
            ),
            1,
        )
        full_sizes[name] = (
            max(1, wanted_replicas(pool, serving_size))
            if pool.autoscaling
            else wanted_replicas(pool, serving_size)
        )
        gpus[name] = spec.replica_gpus(name)
    needed = sum(gpus[name] for name, size in full_sizes.items() if size)
    holder = f"revision {serving} holds {held} of the {budget} GPUs of spec.gpuBudget"
    if needed > budget - held:
        return GpuShare(
            words=f"revision {revision} needs {needed} GPUs for one pod of each pool, but {holder}; raise spec.gpuBudget to "
            f"{held + needed} or reduce a pool",
            blocked=True,
        )
    sizes = {name: min(1, size) for name, size in full_sizes.items()}
    free_gpus = budget - held - needed
    while True:
        growable = [n for n, size in sizes.items() if size < full_sizes[n] and gpus[n] <= free_gpus]
        if not growable:
            break
        chosen = min(growable, key=lambda n: sizes[n] / full_sizes[n])
        sizes[chosen] += 1
        free_gpus -= gpus[chosen]
    reduced = {n: size for n, size in sizes.items() if size < full_sizes[n]}
    if not reduced:
        return GpuShare()
    parts = ", ".join(f"{size} of {full_sizes[n]} {n} pods" for n, size in reduced.items())
    return GpuShare(
        reduced, f"starting with {parts} because {holder}; the rest start when that revision is removed"
    )
