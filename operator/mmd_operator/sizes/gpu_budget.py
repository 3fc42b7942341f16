"""GPU budgets: the GPUs held by a deployment, and those still available to a pool. Pure."""

from __future__ import annotations

from mmd_api.spec.deployment import MultimodalDeploymentSpec
from mmd_operator.observed.observed import Child, Observed
from mmd_operator.sizes.pool_sizes import affordable
from mmd_operator.sizes.replacement import members_of, pods_of


def gpus_held(observed: Observed, revision: str | None = None) -> int:
    """GPUs held by one revision, or by all revisions (None).

    Counted are pods, which hold their GPUs until they have ended, pods about to be created, and growth that the watch does not show yet.
    """
    total = sum(pod.gpus for pod in observed.pods if revision in (None, pod.revision))
    for child in observed.children.values():
        if child.is_sized and child.workload is not None and revision in (None, child.revision):
            size = child.workload.group_size
            missing = child.workload.replicas * size - len(members_of(child, observed))
            total += max(0, missing) * child.workload.gpus // size
    return total + sum(
        gpus_growing(observed, name)
        for name, growth in observed.growth.items()
        if revision in (None, growth.revision)
    )


def gpus_growing(observed: Observed, name: str) -> int:
    """GPUs of a pool's decided growth, beyond the part shown by the watch."""
    growth = observed.growth.get(name)
    if growth is None:
        return 0
    child = observed.sized(name)
    shown_replicas = 0
    if child is not None and child.workload is not None:
        shown_replicas = max(child.workload.replicas, len(pods_of(child, observed)))
    return max(0, growth.replicas - shown_replicas) * growth.gpus


def grown(child: Child, wanted: int, observed: Observed, free: int | None) -> tuple[int, int | None]:
    """The size up to `wanted` allowed by the free GPUs (None: no budget), and the GPUs left over.

    Growth that the pool was given before is its own. A pool that shrinks gives nothing back here: its pods hold their GPUs until they have
    ended.
    """
    if free is None or child.workload is None:
        return wanted, free
    present, gpus, pending = child.workload.replicas, child.workload.gpus, gpus_growing(observed, child.name)
    size = affordable(present, wanted, gpus, free + pending)
    return size, free - max(0, (size - present) * gpus - pending)


def serving_budget(spec: MultimodalDeploymentSpec, observed: Observed, revision: str) -> int | None:
    """GPUs for the sizes of the serving revision.

    GPUs held by other revisions and by ending pods are not available for growth, but nothing shrinks because of them.
    """
    if spec.gpu_budget is None:
        return None
    serving_gpus = sum(
        child.workload.replicas * child.workload.gpus + gpus_growing(observed, child.name)
        for child in observed.children.values()
        if child.is_sized and child.revision == revision and child.workload is not None
    )
    return max(spec.gpu_budget - (gpus_held(observed) - serving_gpus), min(serving_gpus, spec.gpu_budget))
