"""Carries out a step of a rollout: applies, resizes, replaces, removes. `next_step` decides which step."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from mmd_operator.kube.cluster import RefusedError
from mmd_operator.kube.context import PassContext
from mmd_operator.observed.observed import (
    SCALER_FIELD_MANAGER,
    SURGE_FIELD_MANAGER,
    Body,
    Child,
    ObjectKey,
    Observed,
    manifest_key,
)
from mmd_operator.observed.problems import Problem, refusal
from mmd_operator.resources.exposure import EXPOSING_KINDS
from mmd_operator.resources.naming import REVISION_LABEL, Manifest
from mmd_operator.rollout.applier import Applier
from mmd_operator.rollout.next_step import Step
from mmd_operator.rollout.resizes import Resizes
from mmd_operator.sizes.pending_growth import PendingGrowth


@dataclass(slots=True)
class _Outcome:
    """The results of a step so far.

    `done`: objects by action. `changed`: objects written now. `withheld`: objects waiting for a Secret. `gateway_revision`: the revision in
    the gateway's template, if it was applied.
    """

    problems: list[Problem] = field(default_factory=list)
    done: dict[str, list[str]] = field(default_factory=dict)
    changed: set[ObjectKey] = field(default_factory=set)
    withheld: set[ObjectKey] = field(default_factory=set)
    settled: bool = True
    gateway_revision: str | None = None

    def note(self, action: str, name: str) -> None:
        """Note an action on an object."""
        self.done.setdefault(action, []).append(name)


class Execution:
    """Carries out steps for one deployment (one UID)."""

    def __init__(self, context: PassContext, uid: str, growth: PendingGrowth) -> None:
        self._context = context
        self._growth = growth
        self._applier = Applier(context.cluster, context.namespace, context.name, uid, growth, context.pauses)
        self._resizes = Resizes(context, growth)
        self.awaits_secret = False
        """Whether the last `carry_out` met a problem with a Secret."""
        self.gateway_revision: str | None = None
        """The revision to which the last `carry_out` set the gateway, or None."""

    async def carry_out(
        self, body: Body, step: Step, secrets: list[Manifest], observed: Observed
    ) -> tuple[list[Problem], bool]:
        """Carry out a step. Returns problems, and whether the observed state is the applied one.

        Until it is, nothing is switched or removed.
        """
        outcome = _Outcome()
        try:
            await self._keep_secrets(secrets, outcome)
            await self._apply(body, step, observed, outcome)
            await self._resize(body, step, observed, outcome)
            await self._replace_pods(step, outcome)
            await self._remove(step, outcome)
        finally:
            self.awaits_secret = bool(outcome.withheld)
            self.gateway_revision = outcome.gateway_revision
            for action, names in outcome.done.items():
                self._context.events.report(body, action, f"{len(names)}: {', '.join(names)}")
                self._context.metrics.objects.labels(action.lower()).inc(len(names))
        return outcome.problems, outcome.settled

    async def _keep_secrets(self, secrets: list[Manifest], outcome: _Outcome) -> None:
        """Create and repair Secrets. A server must not start with users whose passwords its Secret lacks."""
        for secret in secrets:
            result, problem = await self._applier.keep_secret(secret, time.monotonic())
            name = secret["metadata"]["name"]
            if result in ("Created", "Changed"):
                outcome.note(result, f"Secret {name}")
            if problem is not None:
                outcome.problems.append(problem)
                outcome.withheld |= {(kind, name) for kind in ("ConfigMap", "StatefulSet")}

    async def _apply(self, body: Body, step: Step, observed: Observed, outcome: _Outcome) -> None:
        """Write the step's objects. Clients switch to other gateways only after all earlier objects have settled."""
        for manifest in step.apply:
            key = kind, name = manifest_key(manifest)
            child = observed.children.get(key)
            switches = kind == "Deployment" and step.stage == "SwitchingGateway" and child is not None
            if switches and not outcome.settled:
                continue
            if child is not None and child.key in outcome.withheld:
                continue
            result, problem = await self._applier.apply(manifest, child, time.monotonic())
            if result != "Refused" or kind not in EXPOSING_KINDS:
                outcome.settled = outcome.settled and result == "Unchanged"
            if problem is not None:
                outcome.problems.append(problem)
            if kind == "Deployment" and result not in ("Refused", "Contested"):
                outcome.gateway_revision = manifest["spec"]["template"]["metadata"]["labels"][REVISION_LABEL]
            if result == "Refused":
                self._context.metrics.objects.labels("refused").inc()
            elif result not in ("Unchanged", "Unseen", "Contested"):
                if problem is not None:
                    self._context.report_contest(body, problem)
                outcome.changed.add(key)
                outcome.note(result, f"{kind} {name}")

    async def _resize(self, body: Body, step: Step, observed: Observed, outcome: _Outcome) -> None:
        """Grow workloads, and restore sizes that others changed. Pods of a shrinking workload drain first: see `scaling`."""
        for name, replicas in step.sizes.items():
            child = observed.sized(name)
            present_replicas = child.workload.replicas if child and child.workload else 0
            if child is None or replicas < present_replicas or self._growth.forbids(name, replicas):
                continue
            surge = name in step.replace and step.replace[name].replicas is not None
            manager = SURGE_FIELD_MANAGER if surge else SCALER_FIELD_MANAGER
            outcome.problems += await self._resizes.resize(body, child.key, child, replicas, manager)
        for key, replicas in step.restore.items():
            if key not in outcome.changed:  # otherwise the observed size is outdated
                restored = observed.children.get(key)
                outcome.problems += await self._resizes.resize(body, key, restored, replicas)

    async def _replace_pods(self, step: Step, outcome: _Outcome) -> None:
        """Delete pods with outdated settings; their workloads create new ones."""
        if not outcome.settled:
            return
        for replacement in step.replace.values():
            for pod in replacement.delete:
                try:
                    await self._context.cluster.delete_pod(self._context.namespace, pod.name, pod.uid)
                except RefusedError as error:
                    outcome.problems.append(refusal(pod.component, str(error), pod.revision))
                    continue
                outcome.note("Replaced", f"pod {pod.name}")

    async def _remove(self, step: Step, outcome: _Outcome) -> None:
        """Delete objects that are no longer needed: those that let clients in at once, others after everything has settled."""
        for child in step.remove:
            if not outcome.settled and child.kind not in EXPOSING_KINDS:
                continue
            try:
                await self.delete(child)
            except RefusedError as error:
                outcome.problems.append(self._context.refused(child, error))
                continue
            outcome.note("Removed", f"{child.kind} {child.name}")

    async def delete(self, child: Child) -> None:
        """Delete an object, and forget its applied state."""
        await self._context.cluster.delete(child.kind, self._context.namespace, child.name, child.uid)
        self._growth.forget(child.name)
        self._applier.forget(child.key)
        self._resizes.forget(child.key)
