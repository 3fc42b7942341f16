"""Writes the sizes of workloads: each once, then at growing intervals while a rival changes it."""

from __future__ import annotations

import time

from mmd_operator.kube.cluster import RefusedError
from mmd_operator.kube.contests import Contests
from mmd_operator.kube.context import PassContext
from mmd_operator.observed.observed import SCALER_FIELD_MANAGER, Body, Child, ObjectKey, child_of
from mmd_operator.observed.problems import Problem, contested
from mmd_operator.rollout.applier import UNSEEN_SECONDS
from mmd_operator.sizes.pending_growth import PendingGrowth


class Resizes:
    """Resizes the workloads of one deployment."""

    def __init__(self, context: PassContext, growth: PendingGrowth) -> None:
        self._context = context
        self._growth = growth
        self._contests = Contests(context.pauses)
        self._last_writes: dict[ObjectKey, tuple[str | None, int, float]] = {}

    async def resize(
        self,
        body: Body,
        key: ObjectKey,
        present: Child | None,
        replicas: int,
        field_manager: str = SCALER_FIELD_MANAGER,
    ) -> list[Problem]:
        """Scale one workload, unless the watch does not show an earlier resize yet, or another client keeps undoing it."""
        (kind, name), now = key, time.monotonic()
        workload = present.workload if present else None
        before, rival = (workload.replicas, workload.sized_by) if workload else (0, None)
        version = present.resource_version if present else None
        written = self._last_writes.get(key)
        if written and written[:2] == (version, replicas) and now - written[2] < UNSEEN_SECONDS:
            return []  # the watch does not show it yet
        problems = []
        if rival is not None:  # otherwise the operator itself set the present size
            client = self._contests.against(key, now)
            component = (present and present.component) or kind
            problems = [contested(component, f"the size of {kind} {name}", client)] if client else []
            # A size that the user has just set does not wait.
            is_repeat = written is not None and written[1] == replicas
            if is_repeat and self._contests.pause(key, now) > 0:
                return problems
        try:
            if written is not None and written[1] == replicas:
                stored = await self._context.cluster.get(kind, self._context.namespace, name)
                if stored is not None and stored["spec"].get("replicas") == replicas:
                    self._growth.confirmed(child_of(kind, stored), present)
                    self._last_writes[key] = (version, replicas, now)
                    return []  # the watch lags
            with self._growth.writing(name, replicas):
                await self._context.cluster.scale(
                    kind, self._context.namespace, name, replicas, field_manager
                )
        except RefusedError as error:
            return [self._context.refused(present, error)]
        self._last_writes[key] = (version, replicas, now)
        if rival is not None:
            self._contests.repaired(key, now, rival)
        self._context.events.report(
            body,
            "Scaled",
            f"{kind} {name} from {before} to {replicas} {workload.unit if workload else 'pods'}",
        )
        for problem in problems:
            self._context.report_contest(body, problem)
        return problems

    def forget(self, key: ObjectKey) -> None:
        """Forget a workload that is being deleted."""
        self._last_writes.pop(key, None)
