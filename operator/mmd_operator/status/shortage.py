"""Workloads with fewer pods than they should have, and why: quota and admission show nowhere but in Events."""

from __future__ import annotations

import logging
import time

from mmd_operator.kube.cluster import BusyError, RefusedError
from mmd_operator.kube.context import PassContext
from mmd_operator.observed.observed import Child, Observed
from mmd_operator.observed.problems import Problem, refusal
from mmd_operator.sizes.replacement import group_names, short_groups

logger = logging.getLogger(__name__)

SHORT_OF_PODS_SECONDS = 3.0


class Shortage:
    """Finds the shortages of one deployment (one UID)."""

    def __init__(self, context: PassContext) -> None:
        self._context = context
        self._short_since: dict[str, float] = {}
        self._warned: dict[str, tuple[float, Problem | None]] = {}

    @property
    def lasts(self) -> bool:
        """Whether a workload was short of pods when `problems` was last called."""
        return bool(self._short_since)

    async def problems(self, observed: Observed) -> list[Problem]:
        """Why a workload has fewer pods than it should, in its controller's words: quota and admission show nowhere else."""
        now = time.monotonic()
        short = {
            child.name: child
            for child in observed.children.values()
            if child.workload is not None
            and child.workload.seen
            and not child.deleting
            and (child.workload.current < child.workload.replicas or short_groups(child, observed))
        }
        self._short_since = {name: self._short_since.get(name, now) for name in short}
        self._warned = {name: seen for name, seen in self._warned.items() if name in short}
        problems = []
        for name, child in short.items():
            component = child.component or child.kind
            if child.workload is not None and child.workload.failure:
                problems.append(refusal(component, child.workload.failure, child.workload.template_revision))
                continue
            if now - self._short_since[name] < SHORT_OF_PODS_SECONDS:
                continue
            asked, problem = self._warned.get(name, (float("-inf"), None))
            if now - asked >= self._context.pauses.warnings_seconds:
                try:
                    warnings = [
                        warning
                        for kind, maker in _makers(child, observed)
                        for warning in await self._context.cluster.warnings_about(
                            self._context.namespace, kind, maker
                        )
                    ]
                except (BusyError, RefusedError) as error:  # the explanation is missing, the work goes on
                    logger.warning(
                        "%s/%s: failed to read Events about %s: %s",
                        self._context.namespace,
                        self._context.name,
                        name,
                        error,
                    )
                else:
                    words = [w.get("message", "") for w in warnings if w.get("reason") == "FailedCreate"]
                    problem = refusal(component, words[-1], child.revision) if words else None
                self._warned[name] = (now, problem)
            if problem is not None:
                problems.append(problem)
        return problems


def _makers(child: Child, observed: Observed) -> list[tuple[str, str]]:
    """Kind and name of what makes a workload's pods. A LeaderWorkerSet has StatefulSets: one makes leaders, and one for each group its
    followers."""
    if not group_names(child):
        return [(child.kind, child.name)]
    return [("StatefulSet", name) for name in (*short_groups(child, observed)[:1], child.name)]
