"""Remembers why groups of pods ended.

A LeaderWorkerSet recreates a whole group as soon as one of its containers has ended, and the pods' reports are lost with the pods. Without a
memory, a group that cannot serve would start over and over without a reason.
"""

from __future__ import annotations

import signal
from dataclasses import dataclass, field

from mmd_api.contract.logs import RELAYED
from mmd_operator.observed.observed import Child, Observed, PodView
from mmd_operator.observed.problems import Problem, crashed
from mmd_operator.sizes.replacement import group_names

_ENDED_BY_SIGNAL = (128 + signal.SIGTERM, 128 + signal.SIGKILL)


@dataclass(slots=True)
class _Crashes:
    """The crashes of one group. `pods`: UIDs of the pods that ended, by name; `last`: why the latest one ended."""

    last: Problem
    pods: dict[str, set[str]] = field(default_factory=dict)

    @property
    def times(self) -> int:
        return max(map(len, self.pods.values()), default=0)


class GroupCrashes:
    """Tracks the groups of one deployment (one UID) that ended and have not been Ready since."""

    def __init__(self) -> None:
        self._groups: dict[str, _Crashes] = {}

    def problems(self, observed: Observed) -> list[Problem]:
        """One problem per group, in the words of the pod that ended first. A group has none while one of its pods still reports it."""
        broken = {
            name
            for child in observed.children.values()
            for name in group_names(child)
            if not _is_ready(name, child, observed)
        }
        self._groups = {name: crashes for name, crashes in self._groups.items() if name in broken}
        ended = [pod for pod in observed.pods if pod.group in broken and _failed(pod)]
        for pod in ended:
            self._note(pod)
        reported = {pod.group for pod in ended if not pod.deleting}
        return [
            Problem(
                crashes.last.reason,
                crashes.last.component,
                f"{crashes.last.seen}; its group {name} has been recreated {_times(crashes.times)}",
                crashes.last.remedy,
                revision=crashes.last.revision,
            )
            for name, crashes in self._groups.items()
            if name not in reported
        ]

    def _note(self, pod: PodView) -> None:
        reason, seen, remedy = crashed(pod)
        problem = Problem(reason, pod.component, seen, remedy, revision=pod.revision)
        crashes = self._groups.setdefault(str(pod.group), _Crashes(problem))
        times_before, uids = crashes.times, crashes.pods.setdefault(pod.name, set())
        uids.add(pod.uid)
        if crashes.times > times_before or (RELAYED in crashes.last.seen and RELAYED not in seen):
            crashes.last = problem  # the group's other pods end as a consequence, and report the cause


def _failed(pod: PodView) -> bool:
    """Whether the pod's container ended, and not because of the pod's deletion."""
    was_stopped = pod.deleting and pod.exit_code in _ENDED_BY_SIGNAL and pod.exit_reason != "OOMKilled"
    return pod.exit_code not in (None, 0) and not was_stopped


def _is_ready(group: str, child: Child, observed: Observed) -> bool:
    """Whether all pods of a group exist and are Ready. The leader alone may still be Ready moments after another pod has ended."""
    members = [pod for pod in observed.pods if pod.group == group]
    size = child.workload.group_size if child.workload is not None else 1
    return len(members) == size and all(pod.ready and not pod.deleting for pod in members)


def _times(count: int) -> str:
    return "once" if count == 1 else f"{count} times"
