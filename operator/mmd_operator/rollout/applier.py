"""Writes one deployment's objects, each only when necessary. It remembers what it applied and how the object looked afterwards."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from mmd_api.resource import API_VERSION, KIND
from mmd_operator.kube.cluster import Cluster, NotServedError, RefusedError
from mmd_operator.kube.contests import Contests
from mmd_operator.kube.pauses import Pauses
from mmd_operator.observed.observed import (
    MANAGED_BY_LABEL,
    Child,
    ObjectKey,
    child_of,
    digest,
    fingerprint,
    manifest_key,
    rival_of_template,
)
from mmd_operator.observed.problems import (
    Problem,
    contested,
    not_ours,
    not_served,
    refusal,
    secret_incomplete,
)
from mmd_operator.resources.naming import (
    APPLIED_ANNOTATION,
    BUILT_ANNOTATION,
    COMPONENT_LABEL,
    DEPLOYMENT_LABEL,
    INPUTS_ANNOTATION,
    REVISION_LABEL,
    Manifest,
)
from mmd_operator.resources.nats import password_changes, password_keys, with_passwords
from mmd_operator.resources.workload_kinds import POOL_KINDS, WORKLOADS
from mmd_operator.sizes.pending_growth import PendingGrowth

logger = logging.getLogger(__name__)

ApplyResult = Literal["Unchanged", "Unseen", "Created", "Changed", "Repaired", "Contested", "Refused"]
"""Unseen: applied, but not shown by the watch yet. Repaired: another client had changed or deleted the object. Contested: another client
did so repeatedly, and the next repair waits."""
UNSEEN_SECONDS = 5.0
"""The watch may take this long to show an applied object, before the object counts as changed by another client."""


@dataclass(slots=True)
class _Record:
    """An applied object: its plan, its fingerprint afterwards, and whether the watch has shown that fingerprint."""

    plan: str
    fingerprint: str
    version_before: str | None  # the version in the watch at the time of the apply
    at: float
    seen: bool = False


@dataclass(frozen=True, slots=True)
class _SecretSeen:
    """The last check of a Secret, and when to check again: changes of Secrets are not watched."""

    plan: str
    due: float
    pause: float  # seconds from the check at `due` to the next
    problem: Problem | None


class Applier:
    """Applies the objects of one deployment (one UID). An unchanged object costs no call."""

    def __init__(
        self,
        cluster: Cluster,
        namespace: str,
        name: str,
        uid: str,
        growth: PendingGrowth,
        pauses: Pauses,
    ) -> None:
        self._cluster, self._growth, self._pauses = cluster, growth, pauses
        self._namespace, self._name, self._uid = namespace, name, uid
        self._records: dict[ObjectKey, _Record] = {}
        self._repairs = Contests(pauses)  # writes that changed something
        self._writes = Contests(pauses)  # all repeated writes of an applied plan
        self._secrets: dict[ObjectKey, _SecretSeen] = {}

    async def apply(
        self, manifest: Manifest, child: Child | None, now: float
    ) -> tuple[ApplyResult, Problem | None]:
        """Make one object match its manifest. `child`: the object in the watch; `now`: monotonic seconds.

        Raises:
            BusyError: nothing can be written now.
        """
        key = kind, name = manifest_key(manifest)
        plan = digest(_without_replicas(manifest))
        record = self._records.get(key)
        version = child.resource_version if child else None
        applied_before = record is not None and record.plan == plan
        try:
            if record is not None and applied_before:
                if child is not None and child.fingerprint == record.fingerprint:
                    record.seen = True
                    return "Unchanged", self._contested(manifest, now)
                as_before = version == record.version_before and not record.seen
                if as_before and now - record.at < UNSEEN_SECONDS:
                    return "Unseen", None
                # A deletion is never a harmless change.
                contests = self._repairs if child is None else self._writes
                if contests.pause(key, now) > 0:
                    problem = self._contested(manifest, now)  # None: others write fields that are not ours
                    return "Contested" if problem else "Unchanged", problem
                stored = await self._cluster.get(kind, self._namespace, name)
                if stored is not None and fingerprint(stored) == record.fingerprint:
                    self._growth.confirmed(child_of(kind, stored), child)
                    record.version_before, record.at, record.seen = version, now, False
                    return "Unseen", None  # the watch lags; nothing has changed
                child = self._adoptable(kind, stored) if stored is not None else None
            outcome, fingerprint_after = await self._write(manifest, child, applied_before=applied_before)
        except _NotOursError:
            return "Refused", not_ours(*key)
        except RefusedError as error:
            labels = manifest["metadata"]["labels"]
            component = labels.get(COMPONENT_LABEL, manifest["kind"])
            revision = labels.get(REVISION_LABEL)
            if isinstance(error, NotServedError):
                return "Refused", not_served(component, kind, revision)
            return "Refused", refusal(component, str(error), revision)
        self._records[key] = _Record(plan, fingerprint_after, version, now)
        rival = child.rival if child else None
        if applied_before:
            self._writes.repaired(key, now, rival)
        if outcome == "Repaired":
            self._repairs.repaired(key, now, rival)
        return outcome, self._contested(manifest, now)

    def _contested(self, manifest: Manifest, now: float) -> Problem | None:
        kind, name = key = manifest_key(manifest)
        rival = self._repairs.against(key, now)
        labels = manifest["metadata"]["labels"]
        component = labels.get(COMPONENT_LABEL, kind)
        return contested(component, f"{kind} {name}", rival) if rival else None

    async def keep_secret(self, secret: Manifest, now: float) -> tuple[ApplyResult, Problem | None]:
        """Create a missing Secret with new passwords; add missing keys to ours, and rotate it for another generation.

        The operator may not read Secrets, so it cannot see a deletion or change: it checks at growing intervals, and often while there is
        a problem. A Secret that the operator did not create is left unchanged, and is a problem while it lacks a key. `now`: monotonic
        seconds.

        Raises:
            BusyError: nothing can be written now.
        """
        key, plan = manifest_key(secret), digest(secret)
        check = self._secrets.get(key)
        if check is None or check.plan != plan:
            check = _SecretSeen(plan, now, self._pauses.first_secret_seconds, None)
        if now < check.due:
            return ("Refused" if check.problem else "Unchanged"), check.problem
        try:
            outcome, problem = await self._keep_secret(secret)
        except RefusedError as error:
            outcome, problem = "Refused", refusal("nats", str(error), None)
        if problem is not None:
            due, pause = now + self._pauses.bad_secret_seconds, self._pauses.first_secret_seconds
        else:
            due, pause = now + check.pause, min(2 * check.pause, self._pauses.last_secret_seconds)
        self._secrets[key] = _SecretSeen(plan, due, pause, problem)
        return outcome, problem

    async def _keep_secret(self, secret: Manifest) -> tuple[ApplyResult, Problem | None]:
        """Check before creating: a namespace at its quota of Secrets rejects a create even if the Secret exists."""
        name = secret["metadata"]["name"]
        present = await self._cluster.secret_metadata(self._namespace, name)
        if present is None:
            await self._cluster.create_secret(with_passwords(self._owned(secret)), self._namespace)
            return "Created", None
        if all(owner["uid"] != self._uid for owner in present.get("ownerReferences", ())):
            lacking = await self._cluster.secret_lacks(self._namespace, name, password_keys(secret))
            return ("Refused", secret_incomplete(name, lacking)) if lacking else ("Unchanged", None)
        changes = password_changes(secret, present.get("annotations", {}))
        if not changes:
            return "Unchanged", None
        await self._cluster.patch_secret(self._namespace, name, changes, present["resourceVersion"])
        return "Changed", None

    def forget(self, key: ObjectKey) -> None:
        """Forget a removed object."""
        self._records.pop(key, None)
        self._repairs.forget(key)
        self._writes.forget(key)

    async def _write(
        self, manifest: Manifest, child: Child | None, *, applied_before: bool
    ) -> tuple[ApplyResult, str]:
        """Write an object. Returns what the write did, and the object's fingerprint afterwards."""
        kind, name = manifest_key(manifest)
        if child is None:
            stored = await self._cluster.get(kind, self._namespace, name)
            if stored is not None:
                child = self._adoptable(kind, stored)
                self._growth.confirmed(child, None)
        elif child.owner_uid not in (self._uid, None):
            raise _NotOursError
        if child is not None and _only_builder_changed(manifest, child):
            manifest = await self._with_present_template(manifest, child)
        body = self._owned(manifest)
        sized = kind in POOL_KINDS
        if child is not None and sized and child.workload is not None:
            if not child.workload.replicas_released:
                await self._cluster.release_replicas(kind, self._namespace, name, child.workload.replicas)
            body = _without_replicas(body)
        if child is None and sized:
            with self._growth.writing(name, body["spec"]["replicas"]):
                result = await self._applied(body, child)
            self._growth.confirmed(child_of(kind, result), None)
            await self._cluster.release_replicas(kind, self._namespace, name, body["spec"]["replicas"])
        else:
            result = await self._applied(body, child)
        fingerprint_after = fingerprint(result)
        if child is None:
            return "Repaired" if applied_before else "Created", fingerprint_after
        if result["metadata"]["resourceVersion"] == child.resource_version:
            return "Unchanged", fingerprint_after
        return (
            "Repaired" if applied_before and fingerprint_after != child.fingerprint else "Changed",
            fingerprint_after,
        )

    async def _applied(self, body: Manifest, child: Child | None) -> Manifest:
        """Apply an object. Returns the result, annotated with its template's digest if the template may be kept."""
        if BUILT_ANNOTATION not in body["metadata"].get("annotations", {}):
            return await self._cluster.apply(body, self._namespace)
        if child is not None and child.applied is not None:
            body = _annotated(body, APPLIED_ANNOTATION, child.applied)
        result = await self._cluster.apply(body, self._namespace)
        # The result's templates include the API server's defaults.
        template_digest = digest(WORKLOADS[body["kind"]].templates(result))
        if result["metadata"]["annotations"].get(APPLIED_ANNOTATION) == template_digest:
            return result
        return await self._cluster.apply(
            _annotated(body, APPLIED_ANNOTATION, template_digest), self._namespace
        )

    async def _with_present_template(self, manifest: Manifest, child: Child) -> Manifest:
        """The manifest with the object's present pod template, so that its pods stay as they are.

        The manifest keeps its own template if the image has been pinned since, or if another client has changed the template since the
        operator applied it. If an earlier release stored no digest of the template, the owners of its fields decide.
        """
        kind, name = manifest_key(manifest)
        present = await self._cluster.get(kind, self._namespace, name)
        if present is None:
            return manifest
        workload = WORKLOADS[kind]
        template = workload.templates(present)
        if _image_was_pinned(workload.pod_template(present), workload.pod_template(manifest)):
            return manifest  # later pods must not pull whatever the tag names by then
        applied = present["metadata"].get("annotations", {}).get(APPLIED_ANNOTATION)
        rival = rival_of_template(kind, present["metadata"].get("managedFields", ()))
        if rival is not None if applied is None else applied != digest(template):
            logger.warning(
                "%s %s/%s: pod template was changed by %s; replacing it",
                kind,
                self._namespace,
                name,
                rival or child.rival or "an unknown client",
            )
            return manifest
        merged = {**manifest, "spec": {**manifest["spec"], workload.template_field: template}}
        return _annotated(merged, BUILT_ANNOTATION, str(child.built))

    def _adoptable(self, kind: str, body: Mapping[str, Any]) -> Child:
        """The projection of an object with our labels, not shown by the watch yet. Any other object is not ours."""
        labels = body["metadata"].get("labels", {})
        child = child_of(kind, body)
        ours = (
            labels.get(DEPLOYMENT_LABEL) == self._name
            and labels.get(MANAGED_BY_LABEL) == "multimodal-operator"
        )
        if not ours or child.owner_uid not in (self._uid, None):
            raise _NotOursError
        return child

    def _owned(self, manifest: Manifest) -> Manifest:
        owner = {
            "apiVersion": API_VERSION,
            "kind": KIND,
            "name": self._name,
            "uid": self._uid,
            "controller": True,
        }
        return {**manifest, "metadata": {**manifest["metadata"], "ownerReferences": [owner]}}


class _NotOursError(Exception):
    """The object belongs to another owner."""


def _only_builder_changed(manifest: Manifest, child: Child) -> bool:
    """Whether an operator of another release wrote the template, from the same part of the spec.

    If so, pods that their controller replaces after any change of the template keep their present template.
    """
    planned_digest = manifest["metadata"].get("annotations", {}).get(BUILT_ANNOTATION)
    if planned_digest is None or child.built in (None, planned_digest) or child.workload is None:
        return False
    template = WORKLOADS[child.kind].pod_template(manifest)
    inputs = template["metadata"]["annotations"][INPUTS_ANNOTATION]
    return bool(child.workload.inputs == inputs)


def _image_was_pinned(present: Mapping[str, Any], planned: Mapping[str, Any]) -> bool:
    """Whether the planned template names its image by digest and the present one by tag.

    All other differences come from the cluster: injected containers, a mirror of the registry.
    """
    images = {container["name"]: container["image"] for container in present["spec"]["containers"]}
    planned_container = planned["spec"]["containers"][0]
    return "@" in planned_container["image"] and "@" not in images.get(planned_container["name"], "")


def _annotated(manifest: Manifest, annotation: str, value: str) -> Manifest:
    metadata = manifest["metadata"]
    annotations = {**metadata.get("annotations", {}), annotation: value}
    return {**manifest, "metadata": {**metadata, "annotations": annotations}}


def _without_replicas(manifest: Manifest) -> Manifest:
    if manifest["kind"] not in POOL_KINDS:
        return manifest
    spec = {key: value for key, value in manifest["spec"].items() if key != "replicas"}
    return {**manifest, "spec": spec}
