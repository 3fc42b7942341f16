"""The finalizer of a deployment: added before any object is created, removed after all objects are gone."""

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
    """Maintains the finalizer of one deployment (one UID)."""

    def __init__(self, context: PassContext) -> None:
        self._context = context
        self._contests = Contests(context.pauses)
        self._added = False

    async def ensure(self, body: Body) -> bool:
        """Add the finalizer if it is missing. Returns whether it was added now.

        False if it is present, or if another client keeps removing it: work then continues without it until the next attempt.
        """
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
            self._contests.repaired(_KEY, now, None)  # a removal does not record its client
            for problem in self.problems():
                self._context.report_contest(body, problem)
        self._added = True
        return True

    async def remove(self, body: Body) -> None:
        """Remove the finalizer, so that the deployment's deletion can complete."""
        metadata = body["metadata"]
        if FINALIZER in (finalizers := list(metadata.get("finalizers", ()))):
            remaining = [finalizer for finalizer in finalizers if finalizer != FINALIZER]
            await self._context.cluster.set_finalizers(
                self._context.namespace, self._context.name, remaining, metadata["resourceVersion"]
            )

    def problems(self) -> list[Problem]:
        """Report another client that keeps changing the finalizer."""
        rival = self._contests.against(_KEY, time.monotonic())
        return [contested(KIND, f"the {_KEY} of {KIND} {self._context.name}", rival)] if rival else []
