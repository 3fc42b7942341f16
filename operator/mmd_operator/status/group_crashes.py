"""Why groups of pods ended. A LeaderWorkerSet recreates a whole group as soon as a container of it has ended, and with the pods goes what
they reported: without a memory a group that cannot serve would start over and over without a reason.
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
    """`pods`: by name, the UIDs of those that ended; `last`: why the latest did."""

    last: Problem
    pods: dict[str, set[str]] = field(default_factory=dict)

    @property
    def times(self) -> int:
        return max(map(len, self.pods.values()), default=0)


class GroupCrashes:
    """The groups of one deployment (one UID) that ended and have not been Ready since."""

    def __init__(self) -> None:
        self._groups: dict[str, _Crashes] = {}

    def problems(self, observed: Observed) -> list[Problem]:
        """One for each group, in the words of the pod that ended first. None while a pod of it still reports that itself."""
        broken = {
            name
            for child in observed.children.values()
            for name in group_names(child)
            if not _is_ready(name, child, observed)
        }
        self._groups = {name: one for name, one in self._groups.items() if name in broken}
        ended = [pod for pod in observed.pods if pod.group in broken and _failed(pod)]
        for pod in ended:
            self._note(pod)
        reported = {pod.group for pod in ended if not pod.deleting}
        return [
            Problem(
                one.last.reason,
                one.last.component,
                f"{one.last.seen}; its group {name} has been recreated {_times(one.times)}",
                one.last.remedy,
                revision=one.last.revision,
            )
            for name, one in self._groups.items()
            if name not in reported
        ]

    def _note(self, pod: PodView) -> None:
        reason, seen, remedy = crashed(pod)
        problem = Problem(reason, pod.component, seen, remedy, revision=pod.revision)
        one = self._groups.setdefault(str(pod.group), _Crashes(problem))
        before, known = one.times, one.pods.setdefault(pod.name, set())
        known.add(pod.uid)
        if one.times > before or (RELAYED in one.last.seen and RELAYED not in seen):
            one.last = problem  # the others of the group end as a consequence, and report whose


def _failed(pod: PodView) -> bool:
    """Whether its container ended, and not because the pod is being deleted."""
    asked_to = pod.deleting and pod.exit_code in _ENDED_BY_SIGNAL and pod.exit_reason != "OOMKilled"
    return pod.exit_code not in (None, 0) and not asked_to


def _is_ready(group: str, child: Child, observed: Observed) -> bool:
    """Whether all pods of a group are there and Ready. The leader alone may still be, moments after another has ended."""
    members = [pod for pod in observed.pods if pod.group == group]
    size = child.workload.group_size if child.workload is not None else 1
    return len(members) == size and all(pod.ready and not pod.deleting for pod in members)


def _times(count: int) -> str:
    return "once" if count == 1 else f"{count} times"
