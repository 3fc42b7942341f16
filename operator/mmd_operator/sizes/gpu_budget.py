"""What a deployment holds of its GPU budget, and what a pool may take of the rest. Pure."""

from __future__ import annotations

from mmd_api.spec.deployment import MultimodalDeploymentSpec
from mmd_operator.observed.observed import Child, Observed
from mmd_operator.sizes.pool_sizes import affordable
from mmd_operator.sizes.replacement import members_of, pods_of


def gpus_held(observed: Observed, revision: str | None = None) -> int:
    """GPUs of one revision or (None) of all: those of pods, which hold them until they have ended, those of pods that are
    about to be created, and those of growth that the watch does not show yet."""
    held = sum(pod.gpus for pod in observed.pods if revision in (None, pod.revision))
    for child in observed.children.values():
        if child.is_sized and child.workload is not None and revision in (None, child.revision):
            size = child.workload.group_size
            missing = child.workload.replicas * size - len(members_of(child, observed))
            held += max(0, missing) * child.workload.gpus // size
    return held + sum(
        gpus_growing(observed, name)
        for name, growth in observed.growth.items()
        if revision in (None, growth.revision)
    )


def gpus_growing(observed: Observed, name: str) -> int:
    """GPUs of a pool's growth that was decided, beyond what the watch shows of it."""
    growth = observed.growth.get(name)
    if growth is None:
        return 0
    child = observed.sized(name)
    shown = 0
    if child is not None and child.workload is not None:
        shown = max(child.workload.replicas, len(pods_of(child, observed)))
    return max(0, growth.replicas - shown) * growth.gpus


def grown(child: Child, wanted: int, observed: Observed, free: int | None) -> tuple[int, int | None]:
    """The size up to `wanted` that the free GPUs (None: no budget) allow a pool now, and what it leaves of them.

    What the pool was given before is its own. A pool that shrinks gives nothing back here: its pods hold theirs until they have ended.
    """
    if free is None or child.workload is None:
        return wanted, free
    present, gpus, own = child.workload.replicas, child.workload.gpus, gpus_growing(observed, child.name)
    size = affordable(present, wanted, gpus, free + own)
    return size, free - max(0, (size - present) * gpus - own)


def serving_budget(spec: MultimodalDeploymentSpec, observed: Observed, revision: str) -> int | None:
    """GPUs for the sizes of the revision that serves: those that others and pods that are ending hold are not there for growth, and
    nothing shrinks for them."""
    if spec.gpu_budget is None:
        return None
    own = sum(
        child.workload.replicas * child.workload.gpus + gpus_growing(observed, child.name)
        for child in observed.children.values()
        if child.is_sized and child.revision == revision and child.workload is not None
    )
    return max(spec.gpu_budget - (gpus_held(observed) - own), min(own, spec.gpu_budget))
