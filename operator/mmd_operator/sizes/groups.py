"""Presents a replica of several pods as one pod: its leader, with what its followers lack. Pure.

Also lets a pool of such replicas grow by one group at a time (`next_size`).
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace

from mmd_operator.observed.observed import Child, Observed, PodView
from mmd_operator.sizes.replacement import group_names


def as_one(pod: PodView, observed: Observed) -> PodView:
    """A replica, represented by its leader.

    While the leader is not Ready, it has the scheduling state of the pod that has waited longest for a node, and it fails if any pod of the
    replica fails.
    """
    followers = _followers(pod, observed)
    if pod.ready or not followers:
        return pod
    waiting = [member for member in (pod, *followers) if member.unschedulable_since is not None]
    longest = min(waiting, key=lambda member: member.unschedulable_since or 0.0, default=pod)
    return replace(
        pod,
        unschedulable=longest.unschedulable,
        unschedulable_since=longest.unschedulable_since,
        starting_since=max(member.starting_since for member in (pod, *followers)),
        failing=any(member.failing for member in (pod, *followers)),
    )


def with_its_start(pod: PodView, observed: Observed) -> PodView:
    """A pod; a leader starts with the last of its followers, and not before that follower has a node."""
    follower_starts = [
        math.inf if follower.unschedulable is not None else follower.starting_since
        for follower in _followers(pod, observed)
    ]
    return replace(pod, starting_since=max(pod.starting_since, *follower_starts)) if follower_starts else pod


def next_size(child: Child, wanted: int, observed: Observed) -> int:
    """The size up to `wanted` allowed for a pool now.

    A pool of groups may have one group more than those whose pods all have nodes. Nothing gives a group all its nodes at once, so several
    waiting groups could each keep what the others need for ever.
    """
    workload = child.workload
    if workload is None or workload.group_size == 1 or wanted <= workload.replicas:
        return wanted
    placed: Counter[str | None] = Counter(
        pod.group for pod in observed.pods if pod.scheduled and not pod.deleting
    )
    complete = sum(placed[name] >= workload.group_size for name in group_names(child))
    return max(workload.replicas, min(wanted, complete + 1))


def _followers(pod: PodView, observed: Observed) -> list[PodView]:
    """The followers of a leader; none for any other pod."""
    if pod.group != pod.name:
        return []
    return [
        member
        for member in observed.pods
        if member.group == pod.name and not member.leads and not member.deleting
    ]
