"""Which pods of a pool are replaced now because what they were made from has changed. Pure.

The StatefulSets of pools have the update strategy OnDelete: a changed template reaches pods that start later, and a running pod is
replaced only here, when the part of the spec that it reads has changed (see `mmd_api.readers`). A template that a newer operator
writes differently, or that names the image by its digest, therefore replaces no pod. A pod that is deleted drains on SIGTERM.
Groups of pods are replaced by their LeaderWorkerSet, one at a time, whose template `apply` changes for the same reasons alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from mmd_operator.observed.observed import Child, Observed, PodView


@dataclass(frozen=True, slots=True)
class Replacement:
    """What to do about one pool now. `outdated`: pods still to be replaced, if any."""

    outdated: tuple[str, ...] = ()
    delete: tuple[PodView, ...] = ()
    replicas: int | None = None
    waiting: str = ""


def pods_of(child: Child, observed: Observed) -> tuple[PodView, ...]:
    """Pods of a workload, the lowest ordinal first; of groups, the leaders."""
    prefix = f"{child.name}-"
    found = [p for p in observed.pods if p.name.startswith(prefix) and p.name[len(prefix) :].isdigit()]
    return tuple(sorted(found, key=_ordinal))


def members_of(child: Child, observed: Observed) -> tuple[PodView, ...]:
    """All pods of a workload: of a group, the followers too."""
    leaders = pods_of(child, observed)
    groups = {leader.name for leader in leaders} | set(group_names(child))
    return (*leaders, *(pod for pod in observed.pods if not pod.leads and pod.group in groups))


def group_names(child: Child) -> tuple[str, ...]:
    """The groups that a workload should have; none where its replicas are single pods."""
    workload = child.workload
    if workload is None or workload.group_size == 1:
        return ()
    return tuple(f"{child.name}-{ordinal}" for ordinal in range(workload.replicas))


def short_groups(child: Child, observed: Observed) -> tuple[str, ...]:
    """Groups that lack followers: the leader is there, and not all of the others."""
    size = child.workload.group_size if child.workload is not None else 1
    names = set(group_names(child))
    found = [pod.group for pod in observed.pods if pod.group in names]
    return tuple(sorted(name for name in names if 0 < found.count(name) < size))


def outdated_pods(child: Child, observed: Observed) -> tuple[PodView, ...]:
    """Pods that were made from other inputs than the template of their workload now has."""
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
    """The next step for one pool, whose size should be `wanted`. `free_gpus`: what the GPU budget leaves; `now`: Unix seconds.

    At most one pod of `wanted` is away at any time. The only pod of a pool goes when another is Ready, unless the GPU budget has no
    room for one or no node takes it before its deadline: it may well be waiting for what the only pod holds.
    """
    outdated = outdated_pods(child, observed)
    workload = child.workload
    if not outdated or workload is None:
        return Replacement()
    names = tuple(pod.name for pod in outdated)
    pods = pods_of(child, observed)
    if (more := len(pods) - workload.replicas) > 0:
        return Replacement(names, waiting=f"pods beyond the pool's size that have not ended: {more}")
    if more < 0 or not workload.seen or any(pod.deleting for pod in pods):
        ready = sum(pod.ready and not pod.deleting for pod in pods)
        return Replacement(names, waiting=f"{ready} of {workload.replicas} pods are Ready")
    if useless := [pod for pod in outdated if not pod.ready]:
        return Replacement(names, (useless[-1],))  # takes no work, and what it lacks may be what has changed
    away = [pod for pod in pods if not pod.ready]
    unplaced = [pod for pod in away if pod.unplaced(now, scheduling_deadline_seconds)]
    if starting := [pod for pod in away if pod not in unplaced]:
        return Replacement(names, waiting=f"pod {starting[0].name} is not Ready")
    if len(unplaced) > max(
        0, len(pods) - wanted
    ):  # more than a surge: the pool would drop two below its size
        return Replacement(names, waiting=f"no node takes pod {unplaced[0].name}")
    room = free_gpus is None or workload.gpus <= free_gpus
    if workload.replicas == wanted == 1 and room:
        return Replacement(names, replicas=2)
    return Replacement(names, (outdated[-1],))


def waiting_words(pools: Mapping[str, Replacement]) -> str:
    """What pools with pods to replace wait for."""
    parts = [
        f"{pool} pods to replace: {len(r.outdated)}" + (f" ({r.waiting})" if r.waiting else "")
        for pool, r in pools.items()
        if r.outdated
    ]
    return ", ".join(parts)


def _ordinal(pod: PodView) -> int:
    return int(pod.name.rpartition("-")[2])
