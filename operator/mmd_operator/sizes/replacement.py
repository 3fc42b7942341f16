"""Decides which pods of a pool are replaced now because their inputs have changed. Pure.

The StatefulSets of pools have the update strategy OnDelete: a changed template reaches only pods that start later. A running pod is
replaced only here, when the part of the spec that it reads has changed (see `mmd_api.readers`). A template that a newer operator
writes differently, or that names the image by its digest, therefore replaces no pod. A deleted pod drains on SIGTERM.
Groups of pods are replaced by their LeaderWorkerSet, one at a time; `applier` changes its template for the same reasons alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from mmd_operator.observed.observed import Child, Observed, PodView


@dataclass(frozen=True, slots=True)
class Replacement:
    """The next action for one pool. `outdated`: pods still to be replaced, if any."""

    outdated: tuple[str, ...] = ()
    delete: tuple[PodView, ...] = ()
    replicas: int | None = None
    waiting: str = ""


def pods_of(child: Child, observed: Observed) -> tuple[PodView, ...]:
    """The pods of a workload, the lowest ordinal first; for groups, the leaders."""
    prefix = f"{child.name}-"
    pods = [pod for pod in observed.pods if pod.name.startswith(prefix) and pod.name[len(prefix) :].isdigit()]
    return tuple(sorted(pods, key=_ordinal))


def members_of(child: Child, observed: Observed) -> tuple[PodView, ...]:
    """All pods of a workload, including the followers in groups."""
    leaders = pods_of(child, observed)
    groups = {leader.name for leader in leaders} | set(group_names(child))
    return (*leaders, *(pod for pod in observed.pods if not pod.leads and pod.group in groups))


def group_names(child: Child) -> tuple[str, ...]:
    """Names of the desired groups of a workload; none if its replicas are single pods."""
    workload = child.workload
    if workload is None or workload.group_size == 1:
        return ()
    return tuple(f"{child.name}-{ordinal}" for ordinal in range(workload.replicas))


def short_groups(child: Child, observed: Observed) -> tuple[str, ...]:
    """Names of incomplete groups: the leader exists, but not all other pods."""
    size = child.workload.group_size if child.workload is not None else 1
    names = set(group_names(child))
    pod_groups = [pod.group for pod in observed.pods if pod.group in names]
    return tuple(sorted(name for name in names if 0 < pod_groups.count(name) < size))


def outdated_pods(child: Child, observed: Observed) -> tuple[PodView, ...]:
    """The pods with inputs other than those of their workload's present template."""
    if child.workload is None:
        return ()
    return tuple(pod for pod in pods_of(child, observed) if pod.inputs != child.workload.inputs)


def replacement(
    child: Child,
    wanted: int,
    observed: Observed,
    free_gpus: int | None,
    now: float,
    scheduling_deadline_seconds: float,
) -> Replacement:
    """The next action for one pool with the desired size `wanted`. `free_gpus`: GPUs left by the budget (None: no budget); `now`: Unix seconds.

    At most one pod of `wanted` is away at any time. The only pod of a pool goes when another is Ready, unless the GPU budget has no room
    for another, a quota none either, or no node takes it before its deadline: it may well be waiting for what the only pod holds.
    """
    outdated = outdated_pods(child, observed)
    workload = child.workload
    if not outdated or workload is None:
        return Replacement()
    names = tuple(pod.name for pod in outdated)
    pods = pods_of(child, observed)
    if (more := len(pods) - workload.replicas) > 0:
        return Replacement(names, waiting=f"pods beyond the pool's size that have not ended: {more}")
    surge_is_refused = more == -1 and workload.surged and child.name in observed.refused
    if (more < 0 and not surge_is_refused) or not workload.seen or any(pod.deleting for pod in pods):
        ready = sum(pod.ready and not pod.deleting for pod in pods)
        return Replacement(names, waiting=f"{ready} of {workload.replicas} pods are Ready")
    if useless := [pod for pod in outdated if not pod.ready]:
        return Replacement(names, (useless[-1],))  # takes no work, and the change may be what it needs
    unready = [pod for pod in pods if not pod.ready]
    unplaced = [pod for pod in unready if pod.unplaced(now, scheduling_deadline_seconds)]
    if starting := [pod for pod in unready if pod not in unplaced]:
        return Replacement(names, waiting=f"pod {starting[0].name} is not Ready")
    # More than a surge: the pool would drop two below its size.
    if len(unplaced) > max(0, len(pods) - wanted):
        return Replacement(names, waiting=f"no node takes pod {unplaced[0].name}")
    has_room = free_gpus is None or workload.gpus <= free_gpus
    if workload.replicas == wanted == 1 and has_room:
        return Replacement(names, replicas=2)
    return Replacement(names, (outdated[-1],))


def waiting_words(pools: Mapping[str, Replacement]) -> str:
    """The pods to replace by pool, and the reasons for waiting, in words."""
    parts = [
        f"{pool} pods to replace: {len(r.outdated)}" + (f" ({r.waiting})" if r.waiting else "")
        for pool, r in pools.items()
        if r.outdated
    ]
    return ", ".join(parts)


def _ordinal(pod: PodView) -> int:
    return int(pod.name.rpartition("-")[2])
