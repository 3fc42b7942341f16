"""Finds workloads ignored by their controller. Users install LeaderWorkerSet's controller; if it is broken, nothing else shows that."""

from __future__ import annotations

from mmd_operator.observed.observed import ObjectKey, Observed
from mmd_operator.observed.problems import Problem, not_acted_on
from mmd_operator.resources.workload_kinds import WORKLOADS

SILENT_SECONDS = 60.0


class SilentControllers:
    """Tracks the workloads of one deployment (one UID) that wait for their controller, and since when."""

    def __init__(self) -> None:
        self._since: dict[tuple[ObjectKey, str], float] = {}

    def problems(self, observed: Observed, now: float) -> list[Problem]:
        """One problem per workload after a minute of waiting. `now`: monotonic seconds."""
        waiting = {
            (child.key, child.uid): child
            for child in observed.children.values()
            if child.workload is not None
            and not child.workload.seen
            and not child.deleting
            and WORKLOADS[child.kind].installed_by_users
        }
        self._since = {key: self._since.get(key, now) for key in waiting}
        return [
            not_acted_on(child.component or child.kind, *child.key, SILENT_SECONDS, child.revision)
            for key, child in waiting.items()
            if now - self._since[key] >= SILENT_SECONDS
        ]
