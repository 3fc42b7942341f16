"""What the GPU budget leaves a new revision next to the one that serves. Pure."""

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
    """Sizes of the new revision's pools where the budget cuts them. `blocked`: it leaves too little for one pod of each."""

    sizes: Mapping[str, int] = field(default_factory=dict)
    words: str = ""
    blocked: bool = False


def gpu_share(
    spec: MultimodalDeploymentSpec, revision: str, serving: str | None, observed: Observed
) -> GpuShare:
    """At least one pod for each pool, else the rollout waits; then one more for the pool that is furthest from its size."""
    budget = spec.gpu_budget
    if budget is None or serving is None or serving == revision:
        return GpuShare()
    held = gpus_held(observed) - gpus_held(observed, revision)
    wanted: dict[str, int] = {}
    gpus: dict[str, int] = {}
    for name in pools_in(spec):
        pool: Pool = getattr(spec, name)
        old = next(
            (
                c.workload.replicas
                for c in observed.children.values()
                if c.is_sized and c.component == name and c.revision == serving and c.workload
            ),
            1,
        )
        wanted[name] = max(1, wanted_replicas(pool, old)) if pool.autoscaling else wanted_replicas(pool, old)
        gpus[name] = spec.replica_gpus(name)
    needed = sum(gpus[name] for name, size in wanted.items() if size)
    holder = f"revision {serving} holds {held} of the {budget} GPUs of spec.gpuBudget"
    if needed > budget - held:
        return GpuShare(
            words=f"revision {revision} needs {needed} GPUs for one pod of each pool, but {holder}; raise spec.gpuBudget to "
            f"{held + needed} or reduce a pool",
            blocked=True,
        )
    sizes = {name: min(1, size) for name, size in wanted.items()}
    room = budget - held - needed
    while True:
        short = [n for n, size in sizes.items() if size < wanted[n] and gpus[n] <= room]
        if not short:
            break
        chosen = min(short, key=lambda n: sizes[n] / wanted[n])
        sizes[chosen] += 1
        room -= gpus[chosen]
    cut = {n: size for n, size in sizes.items() if size < wanted[n]}
    if not cut:
        return GpuShare()
    parts = ", ".join(f"{size} of {wanted[n]} {n} pods" for n, size in cut.items())
    return GpuShare(
        cut, f"starting with {parts} because {holder}; the rest start when that revision is removed"
    )
