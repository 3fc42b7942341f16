"""Carries out a step of a rollout: applies, resizes, replaces, removes. `rollout` decides which step."""

from __future__ import annotations

import time

from mmd_operator.apply import Applier
from mmd_operator.cluster import RefusedError
from mmd_operator.context import PassContext
from mmd_operator.growth import PendingGrowth
from mmd_operator.observed import (
    SCALER_FIELD_MANAGER,
    SURGE_FIELD_MANAGER,
    Body,
    Child,
    ObjectKey,
    Observed,
    manifest_key,
)
from mmd_operator.problems import Problem
from mmd_operator.resizes import Resizes
from mmd_operator.resources.exposure import EXPOSING_KINDS
from mmd_operator.resources.naming import Manifest
from mmd_operator.rollout import Step


class Execution:
    """Carries out steps for one deployment (one UID)."""

    def __init__(self, context: PassContext, uid: str, growth: PendingGrowth) -> None:
        self._context = context
        self._growth = growth
        self._applier = Applier(context.cluster, context.namespace, context.name, uid, growth, context.pauses)
        self._resizes = Resizes(context, growth)
        self.awaits_secret = False
        """Whether there was a problem with a Secret when `carry_out` was last called."""

    async def carry_out(
        self, body: Body, step: Step, secrets: list[Manifest], observed: Observed
    ) -> tuple[list[Problem], bool]:
        """Returns problems, and whether the observed state is the applied one; until it is, nothing is switched or removed."""
        problems: list[Problem] = []
        done: dict[str, list[str]] = {}
        settled = True
        self.awaits_secret = False
        changed: set[ObjectKey] = set()
        kept: set[ObjectKey] = (
            set()
        )  # the server must not start with users that its Secret has no passwords for
        try:
            for secret in secrets:
                outcome, problem = await self._applier.keep_secret(secret, time.monotonic())
                if outcome in ("Created", "Changed"):
                    done.setdefault(outcome, []).append(f"Secret {secret['metadata']['name']}")
                if problem is not None:
                    problems.append(problem)
                    self.awaits_secret = True
                    kept |= {(kind, secret["metadata"]["name"]) for kind in ("ConfigMap", "StatefulSet")}
            for manifest in step.apply:
                if not settled and manifest["kind"] == "Deployment" and step.stage == "SwitchingGateway":
                    continue
                child = observed.children.get(manifest_key(manifest))
                if child is not None and child.key in kept:
                    continue
                outcome, problem = await self._applier.apply(manifest, child, time.monotonic())
                if outcome != "Refused" or manifest["kind"] not in EXPOSING_KINDS:
                    settled = settled and outcome == "Unchanged"
                if problem is not None:
                    problems.append(problem)
                if outcome == "Refused":
                    self._context.metrics.objects.labels("refused").inc()
                elif outcome not in ("Unchanged", "Unseen", "Contested"):
                    if problem is not None:
                        self._context.report_contest(body, problem)
                    changed.add(manifest_key(manifest))
                    done.setdefault(outcome, []).append(f"{manifest['kind']} {manifest['metadata']['name']}")
            for name, replicas in step.sizes.items():
                present = observed.sized(name)
                before = present.workload.replicas if present and present.workload else 0
                if present is None or replicas < before:
                    continue  # its pods drain first: see `scaling`
                if self._growth.forbids(name, replicas):
                    continue
                surge = name in step.replace and step.replace[name].replicas is not None
                manager = SURGE_FIELD_MANAGER if surge else SCALER_FIELD_MANAGER
                problems += await self._resizes.resize(body, present.key, present, replicas, manager)
            for key, replicas in step.restore.items():
                if key not in changed:  # else the observed size is outdated
                    problems += await self._resizes.resize(body, key, observed.children.get(key), replicas)
            pods = [pod for found in step.replace.values() for pod in found.delete]
            for pod in pods if settled else ():
                await self._context.cluster.delete_pod(self._context.namespace, pod.name, pod.uid)
                done.setdefault("Replaced", []).append(f"pod {pod.name}")
            for child in step.remove:
                if not settled and child.kind not in EXPOSING_KINDS:  # what lets clients in goes at once
                    continue
                try:
                    await self.delete(child)
                except RefusedError as error:
                    problems.append(self._context.refused(child, error))
                    continue
                done.setdefault("Removed", []).append(f"{child.kind} {child.name}")
        finally:
            for what, names in done.items():
                self._context.events.report(body, what, f"{len(names)}: {', '.join(names)}")
                self._context.metrics.objects.labels(what.lower()).inc(len(names))
        return problems, settled

    async def delete(self, child: Child) -> None:
        """Delete an object, and forget what was applied of it."""
        await self._context.cluster.delete(child.kind, self._context.namespace, child.name, child.uid)
        self._growth.forget(child.name)
        self._applier.forget(child.key)
        self._resizes.forget(child.key)
