"""Finds workloads with too few pods, and the reason: refusals by quota and admission show only in Events."""

from __future__ import annotations

import logging
import time

from mmd_operator.kube.cluster import BusyError, RefusedError, last_seen
from mmd_operator.kube.context import PassContext
from mmd_operator.observed.observed import Child, Observed
from mmd_operator.observed.problems import Problem, refusal
from mmd_operator.resources.naming import Manifest
from mmd_operator.sizes.replacement import group_names, short_groups

logger = logging.getLogger(__name__)

SHORT_OF_PODS_SECONDS = 3.0
REFUSED_SECONDS = 60.0
"""Pods that end may leave room in a quota before something is done about its refusal."""


class Shortage:
    """Finds the shortages of one deployment (one UID)."""

    def __init__(self, context: PassContext) -> None:
        self._context = context
        self._short_since: dict[str, float] = {}
        self._warned: dict[str, tuple[float, Problem | None]] = {}
        self._refused_since: dict[str, float] = {}

    @property
    def lasts(self) -> bool:
        """Whether the last call of `problems` found a workload short of pods."""
        return bool(self._short_since)

    @property
    def refused(self) -> frozenset[str]:
        """Names of workloads with pods that a quota has had no room for, for `REFUSED_SECONDS`."""
        now = time.monotonic()
        return frozenset(name for name, at in self._refused_since.items() if now - at >= REFUSED_SECONDS)

    async def problems(self, observed: Observed) -> list[Problem]:
        """Report why workloads have too few pods, in their controllers' words: refusals by quota and admission show nowhere else."""
        now = time.monotonic()
        short_workloads = {
            child.name: child
            for child in observed.children.values()
            if child.workload is not None
            and child.workload.seen
            and not child.deleting
            and (child.workload.current < child.workload.replicas or short_groups(child, observed))
        }
        self._short_since = {name: self._short_since.get(name, now) for name in short_workloads}
        self._refused_since = {
            name: at for name, at in self._refused_since.items() if name in short_workloads
        }
        self._warned = {
            name: last_warning for name, last_warning in self._warned.items() if name in short_workloads
        }
        problems = []
        for name, child in short_workloads.items():
            component = child.component or child.kind
            if child.workload is not None and child.workload.failure:
                problems.append(refusal(component, child.workload.failure, child.workload.template_revision))
                continue
            if now - self._short_since[name] < SHORT_OF_PODS_SECONDS:
                continue
            asked_at, problem = self._warned.get(name, (float("-inf"), None))
            if now - asked_at >= self._context.pauses.warnings_seconds:
                try:
                    warnings = [
                        warning
                        for kind, maker in _makers(child, observed)
                        for warning in await self._context.cluster.warnings_about(
                            self._context.namespace, kind, maker
                        )
                    ]
                except (BusyError, RefusedError) as error:  # only the explanation is missing
                    logger.warning(
                        "%s/%s: failed to read Events about %s: %s",
                        self._context.namespace,
                        self._context.name,
                        name,
                        error,
                    )
                else:
                    messages = [
                        event.get("message", "")
                        for event in warnings
                        if event.get("reason") == "FailedCreate"
                    ]
                    since = time.time() - (now - self._short_since[name])
                    if any(_is_refusal(event, since) for event in warnings):
                        self._refused_since.setdefault(name, now)
                    problem = refusal(component, messages[-1], child.revision) if messages else None
                self._warned[name] = (now, problem)
            if problem is not None:
                problems.append(problem)
        return problems


def _is_refusal(event: Manifest, since: float) -> bool:
    """Whether an Event says that a quota had no room for a pod since then, in Unix seconds. Times in Events are whole seconds.

    What a webhook or a policy refuses, it would refuse in place of a pod that is gone, too.
    """
    no_room = "exceeded quota" in event.get("message", "")
    return event.get("reason") == "FailedCreate" and no_room and last_seen(event) >= since - 1


def _makers(child: Child, observed: Observed) -> list[tuple[str, str]]:
    """Kinds and names of the objects creating a workload's pods.

    A LeaderWorkerSet has StatefulSets: one creates the leaders, and one for each group its followers.
    """
    if not group_names(child):
        return [(child.kind, child.name)]
    return [("StatefulSet", name) for name in (*short_groups(child, observed)[:1], child.name)]
