"""Writes the status of a deployment, and reports its changes as Events. Decides nothing: see `conditions`."""

from __future__ import annotations

import logging
import time
from dataclasses import replace
from typing import Any

from mmd_api.resource import KIND
from mmd_operator.kube.cluster import BusyError, RefusedError
from mmd_operator.kube.contests import Contests
from mmd_operator.kube.context import PassContext
from mmd_operator.kube.metrics import DeploymentSnapshot
from mmd_operator.kube.status_time import now
from mmd_operator.observed.condition_state import ConditionState
from mmd_operator.observed.observed import Body, rival_of
from mmd_operator.observed.problems import Problem, contested
from mmd_operator.rollout.applier import UNSEEN_SECONDS
from mmd_operator.status.conditions import current_conditions, dated, removing
from mmd_operator.status.deployment_status import pools_of, status_of
from mmd_operator.status.facts import Facts

logger = logging.getLogger(__name__)

_KEY = "status"


class StatusWriter:
    """Writes the status of one deployment (one UID). `snapshot`: the last published state, for metrics."""

    def __init__(self, context: PassContext) -> None:
        self._context = context
        self.snapshot = DeploymentSnapshot(context.namespace, context.name)
        self._written: dict[str, Any] | None = None
        self._stored: dict[str, Any] = {}  # the status as the API server returned it
        self._written_at = 0.0
        self._version_before = ""  # the deployment's version when its status was written
        self._contests = Contests(context.pauses)

    async def publish(self, body: Body, facts: Facts) -> None:
        """Write the status if it changed, and report an Event for every condition that changed."""
        states = current_conditions(facts)
        previous = self._previous(body)
        generation = body["metadata"].get("generation", 0)
        conditions = dated(states, previous, generation, now())
        status = status_of(facts, conditions, generation)
        self.snapshot = DeploymentSnapshot(
            self._context.namespace, self._context.name, states, pools_of(status), facts.problems
        )
        await self._write(body, status.model_dump(mode="json", by_alias=True, exclude_none=True))
        self._report_transitions(body, states, previous)

    async def publish_failure(self, body: Body, failing: ConditionState) -> None:
        """Report why no pass succeeds, leaving the other conditions unchanged. Best effort."""
        others = tuple(state for state in self.snapshot.conditions if state.type != failing.type)
        self.snapshot = replace(
            self.snapshot, namespace=self._context.namespace, conditions=(*others, failing)
        )
        previous = self._previous(body)
        (condition,) = dated([failing], previous, body["metadata"].get("generation", 0), now())
        unchanged = [entry for entry in previous if entry["type"] != failing.type]
        conditions = [*unchanged, condition.model_dump(mode="json", by_alias=True)]
        status = self._written if self._written is not None else body.get("status", {})
        self._context.events.report(body, failing.reason, failing.message, warning=True)
        try:
            await self._write(body, {**status, "conditions": conditions})
        except (BusyError, RefusedError) as refused:
            logger.warning(
                "%s/%s: failed to write the status: %s", self._context.namespace, self._context.name, refused
            )

    async def publish_removing(self, body: Body, stage: str, message: str) -> None:
        """Report the progress of the deletion."""
        generation = body["metadata"].get("generation", 0)
        self.snapshot = DeploymentSnapshot(
            self._context.namespace, self._context.name, removing(stage, message)
        )
        previous = self._previous(body)
        dated_conditions = dated(self.snapshot.conditions, previous, generation, now())
        conditions = [entry.model_dump(mode="json", by_alias=True) for entry in dated_conditions]
        if [(entry["type"], entry["reason"]) for entry in previous] == [
            (entry["type"], entry["reason"]) for entry in conditions
        ]:
            return
        await self._write(body, {**body.get("status", {}), "conditions": conditions})
        self._context.events.report(body, stage, message)

    def problems(self) -> list[Problem]:
        """Report another client that keeps changing the status."""
        rival = self._contests.against(_KEY, time.monotonic())
        return [contested(KIND, f"the {_KEY} of {KIND} {self._context.name}", rival)] if rival else []

    def _previous(self, body: Body) -> list[dict[str, Any]]:
        status = self._written if self._written is not None else body.get("status", {})
        return list(status.get("conditions", ()))

    async def _write(self, body: Body, status: dict[str, Any]) -> None:
        """Write a status that changed or that another client has overwritten; the latter ever more rarely."""
        present, monotonic_now = body.get("status", {}), time.monotonic()
        version = body["metadata"]["resourceVersion"]
        changed = status != (present if self._written is None else self._written)
        overwritten = not changed and self._written is not None and present != self._stored
        if not changed and not overwritten:
            return
        rival = None
        if overwritten:
            if version == self._version_before and monotonic_now - self._written_at <= UNSEEN_SECONDS:
                return  # the watch does not show our own write yet
            if self._contests.pause(_KEY, monotonic_now) > 0:
                return
            read_back = await self._context.cluster.deployment(self._context.namespace, self._context.name)
            if read_back is None or read_back.get("status", {}) == self._stored:
                self._written_at, self._version_before = monotonic_now, version
                return  # the watch lags
            rival = rival_of(read_back["metadata"].get("managedFields", ()), of_status=True)
        self._stored = await self._context.cluster.apply_status(
            self._context.namespace, self._context.name, status
        )
        self._written, self._written_at, self._version_before = status, monotonic_now, version
        if overwritten:
            self._contests.repaired(_KEY, monotonic_now, rival)
            for problem in self.problems():
                self._context.report_contest(body, problem)

    def _report_transitions(
        self, body: Body, states: tuple[ConditionState, ...], previous: list[dict[str, Any]]
    ) -> None:
        previous_by_type = {entry["type"]: (entry["status"], entry["reason"]) for entry in previous}
        for condition in states:
            if condition.type not in ("Ready", "Progressing", "Degraded"):
                continue
            previous_state = previous_by_type.get(condition.type)
            if previous_state == (condition.status, condition.reason) or (
                previous_state is None and condition.type != "Progressing"
            ):
                continue
            if (
                condition.type == "Ready"
                and previous_state is not None
                and previous_state[0] == condition.status
            ):
                continue
            bad = (condition.type == "Degraded") == (condition.status == "True")
            bad = bad and condition.reason not in ("Complete", "Paused", "RolloutPaused", "Deleting")
            if (
                condition.type == "Progressing"
                and bad
                and condition.reason not in ("RolloutStuck", "ProgressDeadlineExceeded")
            ):
                continue  # Degraded reports the same
            reason = {"Ready": "Ready" if not bad else "NotReady"}.get(condition.type, condition.reason)
            self._context.events.report(body, reason, condition.message, warning=bad)
