"""The target of a deployment's passes: its spec, or an earlier one while a rollout has failed or is paused.

The spec itself is never written. State is kept in the status, so that another process continues from there.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from pydantic import ValidationError

from mmd_api.faults import Fault
from mmd_api.history import restored, spec_digest
from mmd_api.pipeline import pipeline_revision
from mmd_api.resource import MultimodalDeployment
from mmd_api.spec.deployment import MultimodalDeploymentSpec
from mmd_api.status import RolledBack, RolloutProgress
from mmd_operator.kube.context import PassContext
from mmd_operator.observed.observed import Body, Observed
from mmd_operator.observed.problems import Problem, format_problems
from mmd_operator.observed.stored_spec import Reading, read
from mmd_operator.rollout.next_step import Step
from mmd_operator.rollout.rollout_deadline import (
    advanced,
    clock_of,
    fallback_revision,
    new_pods,
    progress_deadline_seconds,
    seconds_left,
)
from mmd_operator.rollout.spec_history import RecordedSpec, SpecHistory, last_good

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Target:
    """The target for one generation of the spec. `digest`: digest of the spec in effect."""

    generation: object
    digest: str
    reading: Reading


class RolloutTarget:
    """The target of one deployment (one UID).

    `overdue_seconds`: the deadline that the rollout has missed, or None; `not_rolled_back`: why it has not been rolled back although the spec
    asks for that.
    """

    def __init__(self, context: PassContext, uid: str) -> None:
        self._context = context
        self.history = SpecHistory(context, uid)
        self.progress: RolloutProgress | None = None
        self.rolled_back: RolledBack | None = None
        self.overdue_seconds: float | None = None
        self._target: _Target | None = None
        self._digest: tuple[MultimodalDeploymentSpec, str] | None = None
        self.not_rolled_back = ""
        self._no_return: object = None  # progress, serving revision and entries without a way back

    def remember(self, status: Mapping[str, Any]) -> None:
        """Restore the progress and the rollback from the status after a start."""
        try:
            if (progress := status.get("rolloutProgress")) is not None:
                self.progress = RolloutProgress.model_validate(progress)
            if (rolled_back := status.get("rolledBack")) is not None:
                self.rolled_back = RolledBack.model_validate(rolled_back)
        except ValidationError as error:
            logger.warning("the status of a rollout is invalid and is ignored: %s", error)

    def of(self, body: Body, own: Reading) -> Reading:
        """The spec in effect if `find` has determined it for this generation; otherwise `own`, the deployment's own."""
        target = self._target
        return target.reading if target and target.generation == body["metadata"].get("generation") else own

    @property
    def digest(self) -> str | None:
        """Digest of the spec in effect."""
        return self._target.digest if self._target else None

    async def find(self, body: Body, spec: MultimodalDeploymentSpec, own: Reading) -> Reading:
        """The spec in effect now. `spec`: the deployment's own, as in `own`.

        If a recorded spec should be in effect but is missing or invalid, the result has its faults: the deployment's own spec is not rolled
        out in its place.

        Raises:
            RefusedError, BusyError: a recorded spec cannot be read.
        """
        generation, digest = body["metadata"].get("generation"), self._digest_of(spec)
        if (rollback := self.rolled_back) is not None and rollback.generation != generation:
            self.progress = RolloutProgress(spec=rollback.spec, revision=rollback.to_revision, complete=True)
            self.rolled_back = None
        target_digest = digest
        if self.rolled_back is not None:
            target_digest = self.rolled_back.spec
        elif spec.rollout.paused and self.progress is not None:
            target_digest = self.progress.spec
        target = self._target
        is_valid = target is not None and target.reading.deployment is not None
        if (
            target is None
            or not is_valid
            or (target.generation, target.digest) != (generation, target_digest)
        ):
            reading = (
                own
                if target_digest == digest
                else self._in_place(await self._recorded(body, target_digest), target_digest)
            )
            self._target = target = _Target(generation, target_digest, reading)
        return target.reading

    def _in_place(self, recorded: Reading | None, digest: str) -> Reading:
        """The recorded spec to put in effect, or its faults and their remedy."""
        if recorded is not None and recorded.deployment is not None:
            return recorded
        paused = self.rolled_back is None
        name = self._context.name
        field = "spec.rollout.paused" if paused else "spec.rollout.onFailure"
        why = "while the rollout is paused" if paused else "since the rollout failed"
        what = f"recorded spec {digest}, in effect {why}, is"
        resume = f"run `mmd rollout resume {name}` to roll out the present spec"
        again = "change the spec in any field, with a fix of what failed, to roll it out"
        remedy = f"nothing is changed or scaled until then; {resume if paused else again}"
        if recorded is None:
            return Reading(None, (Fault(field, f"{what} missing"),), (), remedy)
        faults = tuple(
            Fault(fault.field, f"{fault.message} ({what} invalid with it)") for fault in recorded.faults
        )
        return Reading(None, faults, recorded.unknown, remedy)

    def _digest_of(self, spec: MultimodalDeploymentSpec) -> str:
        """The digest of a spec, computed once per reading."""
        if self._digest is None or self._digest[0] is not spec:
            self._digest = spec, spec_digest(spec)
        return self._digest[1]

    async def _recorded(self, body: Body, digest: str) -> Reading | None:
        """A recorded spec with the present sizes, or None if it is missing."""
        spec = await self.history.spec_of(digest)
        return read({**body, "spec": restored(body.get("spec", {}), spec)}) if spec is not None else None

    async def deployment_of(self, body: Body, revision: str) -> MultimodalDeployment | None:
        """The deployment as it was with a pipeline revision, with the present sizes; None if no recorded spec makes that revision.

        Raises:
            RefusedError, BusyError: a recorded spec cannot be read.
        """
        entry = last_good(self.history.entries, revision, "")
        return await self._recorded_deployment(body, entry, revision) if entry is not None else None

    async def _recorded_deployment(
        self, body: Body, entry: RecordedSpec, revision: str
    ) -> MultimodalDeployment | None:
        reading = await self._recorded(body, entry.digest)
        if reading is None or reading.deployment is None:
            return None
        return reading.deployment if pipeline_revision(reading.deployment.spec) == revision else None

    async def advance(
        self,
        body: Body,
        spec: MultimodalDeploymentSpec,
        step: Step,
        observed: Observed,
        problems: Iterable[Problem],
        now: datetime,
        *,
        downloading: bool,
    ) -> float:
        """Take the progress of a pass into account, and decide whether the rollout has failed.

        `spec`: the spec in effect; `downloading`: its weights are not there yet, and may still come. Returns the seconds until the deadline is
        over if nothing happens before.

        Raises:
            RefusedError, BusyError: a recorded spec cannot be read.
        """
        self.overdue_seconds, self.not_rolled_back = None, ""
        if self.rolled_back is not None or self._target is None:
            return math.inf
        if spec.paused:  # nothing is applied: what looks complete is the previous spec
            if self.progress is not None:
                self.progress = self.progress.model_copy(update={"since": None})
            return math.inf
        clock = clock_of(step, observed, paused=spec.rollout.paused, downloading=downloading)
        pods = new_pods(step.revision, observed)
        self.progress = advanced(self.progress, self._target.digest, step.revision, clock, pods, now)
        deadline = progress_deadline_seconds(spec)
        remaining_seconds = seconds_left(self.progress, deadline, now)
        if remaining_seconds is None or remaining_seconds >= 0:
            # Times in the status are whole seconds, so the deadline may pass up to a second later.
            return math.inf if remaining_seconds is None else remaining_seconds + 1
        self.overdue_seconds = deadline
        if spec.rollout.on_failure == "RollBack":
            self.not_rolled_back = await self._roll_back(body, step, observed, problems, now)
        return math.inf

    async def _roll_back(
        self, body: Body, step: Step, observed: Observed, problems: Iterable[Problem], now: datetime
    ) -> str:
        """Roll back to a recorded spec. Returns why that is impossible now, or an empty string. The next pass tries again."""
        serving, digest = fallback_revision(step, observed), self.digest
        if serving is None:
            return "no gateway pod of another revision is Ready"
        if not self.history.listed or digest is None:
            return "the recorded specs have not been read yet"
        key, why = (
            (self.progress, serving, self.history.entries),
            f"no recorded spec makes revision {serving}",
        )
        if key == self._no_return:
            return why
        fallback = last_good(self.history.entries, serving, digest)
        if fallback is None or await self._recorded_deployment(body, fallback, serving) is None:
            self._no_return = self.progress, serving, self.history.entries
            logger.warning(
                "%s/%s: rollout of revision %s has failed, and %s",
                *(self._context.namespace, self._context.name, step.revision, why),
            )
            return why
        message = _failed(step.revision, self.overdue_seconds or 0.0, serving, fallback, problems)
        self.rolled_back = RolledBack(
            generation=body["metadata"].get("generation", 0),
            from_revision=step.revision,
            to_revision=serving,
            spec=fallback.digest,
            history_revision=fallback.number,
            time=now,
            reason="ProgressDeadlineExceeded",
            message=message[:1024],
        )
        self._context.events.report(body, "RolledBack", message, warning=True)
        return ""

    async def keep(self, body: Body, spec: MultimodalDeploymentSpec, serving: str | None) -> list[Problem]:
        """Record the deployment's own spec."""
        return await self.history.keep(
            body["spec"],
            self._digest_of(spec),
            pipeline_revision(spec),
            spec.rollout.revision_history_limit,
            serving,
            self.digest,
        )


def _failed(
    revision: str, seconds: float, serving: str, fallback: RecordedSpec, problems: Iterable[Problem]
) -> str:
    stopping = [
        problem for problem in problems if problem.stops_pods and problem.revision in (None, revision)
    ]
    why = format_problems(stopping[:2])
    return (
        f"revision {revision} made no progress for {seconds:.0f} s{f' ({why})' if why else ''} and was removed; revision {serving} serves "
        f"with spec {fallback.number} of `mmd rollout history`; change the spec to try again"
    )
