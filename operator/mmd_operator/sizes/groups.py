"""Replicas of several pods seen as one: their leader, with what its followers lack. Pure."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace

from mmd_operator.observed.observed import Child, Observed, PodView
from mmd_operator.sizes.replacement import group_names


def as_one(pod: PodView, observed: Observed) -> PodView:
    """A replica by its leader. While it is not Ready it waits for what the pod of it lacks that has waited for a node for longest, and
    fails where any of its pods does."""
    followers = _followers(pod, observed)
    if pod.ready or not followers:
        return pod
    waiting = [one for one in (pod, *followers) if one.unschedulable_since is not None]
    longest = min(waiting, key=lambda one: one.unschedulable_since or 0.0, default=pod)
    return replace(
        pod,
        unschedulable=longest.unschedulable,
        unschedulable_since=longest.unschedulable_since,
        starting_since=max(one.starting_since for one in (pod, *followers)),
        failing=any(one.failing for one in (pod, *followers)),
    )


def with_its_start(pod: PodView, observed: Observed) -> PodView:
    """A pod, and a leader as one that starts with the last of its followers: not before that has a node."""
    begun = [
        math.inf if one.unschedulable is not None else one.starting_since for one in _followers(pod, observed)
    ]
    return replace(pod, starting_since=max(pod.starting_since, *begun)) if begun else pod


def next_size(child: Child, wanted: int, observed: Observed) -> int:
    """The size up to `wanted` that a pool may have now: of groups, one more than those whose pods all have nodes. Nothing gives a group
    its nodes at once, so several that wait for some could keep what the others need for ever."""
    workload = child.workload
    if workload is None or workload.group_size == 1 or wanted <= workload.replicas:
        return wanted
    placed: Counter[str | None] = Counter(
        pod.group for pod in observed.pods if pod.scheduled and not pod.deleting
    )
    complete = sum(placed[name] >= workload.group_size for name in group_names(child))
    return max(workload.replicas, min(wanted, complete + 1))


def _followers(pod: PodView, observed: Observed) -> list[PodView]:
    """Of a leader; none of any other pod."""
    if pod.group != pod.name:
        return []
    return [one for one in observed.pods if one.group == pod.name and not one.leads and not one.deleting]
