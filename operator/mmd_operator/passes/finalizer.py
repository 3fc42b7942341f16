"""The finalizer of a deployment: added before anything is made, removed when everything is gone."""

from __future__ import annotations

import time

from mmd_api.resource import GROUP, KIND
from mmd_operator.kube.contests import Contests
from mmd_operator.kube.context import PassContext
from mmd_operator.observed.observed import Body
from mmd_operator.observed.problems import Problem, contested

FINALIZER = f"{GROUP}/drain"
_KEY = "finalizer"


class Finalizer:
    """Keeps the finalizer of one deployment (one UID)."""

    def __init__(self, context: PassContext) -> None:
        self._context = context
        self._contests = Contests(context.pauses)
        self._added = False

    async def ensure(self, body: Body) -> bool:
        """Add it if it is missing. False: it is there, or another client keeps removing it and work continues without it until the next attempt."""
        metadata, now = body["metadata"], time.monotonic()
        finalizers = list(metadata.get("finalizers", ()))
        if FINALIZER in finalizers:
            self._added = True
            return False
        if self._contests.pause(_KEY, now) > 0:
            return False
        await self._context.cluster.set_finalizers(
            self._context.namespace, self._context.name, [*finalizers, FINALIZER], metadata["resourceVersion"]
        )
        if self._added:
            self._contests.repaired(_KEY, now, None)  # a removal leaves no trace of who made it
            for problem in self.problems():
                self._context.report_contest(body, problem)
        self._added = True
        return True

    async def remove(self, body: Body) -> None:
        """Let the deletion of the deployment end."""
        metadata = body["metadata"]
        if FINALIZER in (finalizers := list(metadata.get("finalizers", ()))):
            rest = [f for f in finalizers if f != FINALIZER]
            await self._context.cluster.set_finalizers(
                self._context.namespace, self._context.name, rest, metadata["resourceVersion"]
            )

    def problems(self) -> list[Problem]:
        """Whether another client keeps changing the finalizer."""
        rival = self._contests.against(_KEY, time.monotonic())
        return [contested(KIND, f"the {_KEY} of {KIND} {self._context.name}", rival)] if rival else []
