"""Writes one deployment's objects, each only when necessary: remembers what it applied and how the object looked afterwards."""

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
"""Unseen: applied, and the watch does not show it yet. Repaired: another client had changed or deleted it. Contested: a client did so again
and again, and the next repair waits."""
UNSEEN_SECONDS = 5.0
"""How long a watch may take to show an object as it was applied, before it counts as changed by another client."""


@dataclass(slots=True)
class _Record:
    """What was applied, how the object looked afterwards, and whether the watch has shown it so."""

    plan: str
    fingerprint: str
    version_before: str | None  # that the watch showed when it was applied
    at: float
    seen: bool = False


@dataclass(frozen=True, slots=True)
class _SecretSeen:
    """How a Secret was found, and when to look again: its changes are not watched."""

    plan: str
    due: float
    pause: float  # after that
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
        self._writes = Contests(pauses)  # all writes of what is already applied
        self._secrets: dict[ObjectKey, _SecretSeen] = {}

    async def apply(
        self, manifest: Manifest, child: Child | None, now: float
    ) -> tuple[ApplyResult, Problem | None]:
        """Make one object match its manifest. `child`: as the watch shows it; `now`: monotonic seconds.

        Raises:
            BusyError: nothing can be written now.
        """
        key = kind, name = manifest_key(manifest)
        plan = digest(_without_replicas(manifest))
        record = self._records.get(key)
        version = child.resource_version if child else None
        known = record is not None and record.plan == plan
        try:
            if record is not None and known:
                if child is not None and child.fingerprint == record.fingerprint:
                    record.seen = True
                    return "Unchanged", self._contested(manifest, now)
                as_before = version == record.version_before and not record.seen
                if as_before and now - record.at < UNSEEN_SECONDS:
                    return "Unseen", None
                contests = (
                    self._repairs if child is None else self._writes
                )  # what is gone is no harmless change
                if contests.pause(key, now) > 0:
                    problem = self._contested(manifest, now)  # None: what others write there is not ours
                    return "Contested" if problem else "Unchanged", problem
                found = await self._cluster.get(kind, self._namespace, name)
                if found is not None and fingerprint(found) == record.fingerprint:
                    self._growth.confirmed(child_of(kind, found), child)
                    record.version_before, record.at, record.seen = version, now, False
                    return "Unseen", None  # the watch lags; nothing has changed
                child = self._adoptable(kind, found) if found is not None else None
            outcome, after = await self._write(manifest, child, known=known)
        except _NotOursError:
            return "Refused", not_ours(*key)
        except RefusedError as error:
            labels = manifest["metadata"]["labels"]
            component = labels.get(COMPONENT_LABEL, manifest["kind"])
            revision = labels.get(REVISION_LABEL)
            if isinstance(error, NotServedError):
                return "Refused", not_served(component, kind, revision)
            return "Refused", refusal(component, str(error), revision)
        self._records[key] = _Record(plan, after, version, now)
        rival = child.rival if child else None
        if known:
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
        """Create a Secret with new passwords unless it exists; add keys that ours lacks; rotate it for another generation.

        The operator may not read Secrets, so it cannot see that one was deleted or changed: it checks at growing intervals, and often while
        there is a problem. `now`: monotonic seconds. A Secret that the operator did not create is left unchanged, and is a problem while it
        lacks a key.

        Raises:
            BusyError: nothing can be written now.
        """
        key, plan = manifest_key(secret), digest(secret)
        seen = self._secrets.get(key)
        if seen is None or seen.plan != plan:
            seen = _SecretSeen(plan, now, self._pauses.first_secret_seconds, None)
        if now < seen.due:
            return ("Refused" if seen.problem else "Unchanged"), seen.problem
        try:
            outcome, problem = await self._keep_secret(secret)
        except RefusedError as error:
            outcome, problem = "Refused", refusal("nats", str(error), None)
        if problem is not None:
            due, pause = now + self._pauses.bad_secret_seconds, self._pauses.first_secret_seconds
        else:
            due, pause = now + seen.pause, min(2 * seen.pause, self._pauses.last_secret_seconds)
        self._secrets[key] = _SecretSeen(plan, due, pause, problem)
        return outcome, problem

    async def _keep_secret(self, secret: Manifest) -> tuple[ApplyResult, Problem | None]:
        """Checks first: a namespace at its quota of Secrets rejects a create even if the Secret exists."""
        name = secret["metadata"]["name"]
        present = await self._cluster.secret_metadata(self._namespace, name)
        if present is None:
            await self._cluster.create_secret(with_passwords(self._owned(secret)), self._namespace)
            return "Created", None
        if all(o["uid"] != self._uid for o in present.get("ownerReferences", ())):
            lacking = await self._cluster.secret_lacks(self._namespace, name, password_keys(secret))
            return ("Refused", secret_incomplete(name, lacking)) if lacking else ("Unchanged", None)
        changes = password_changes(secret, present.get("annotations", {}))
        if not changes:
            return "Unchanged", None
        await self._cluster.patch_secret(self._namespace, name, changes, present["resourceVersion"])
        return "Changed", None

    def forget(self, key: ObjectKey) -> None:
        """An object was removed."""
        self._records.pop(key, None)
        self._repairs.forget(key)
        self._writes.forget(key)

    async def _write(
        self, manifest: Manifest, child: Child | None, *, known: bool
    ) -> tuple[ApplyResult, str]:
        """What that was, and the fingerprint of the object afterwards."""
        kind, name = manifest_key(manifest)
        if child is None:
            found = await self._cluster.get(kind, self._namespace, name)
            if found is not None:
                child = self._adoptable(kind, found)
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
                after = await self._applied(body, child)
            self._growth.confirmed(child_of(kind, after), None)
            await self._cluster.release_replicas(kind, self._namespace, name, body["spec"]["replicas"])
        else:
            after = await self._applied(body, child)
        left = fingerprint(after)
        if child is None:
            return "Repaired" if known else "Created", left
        if after["metadata"]["resourceVersion"] == child.resource_version:
            return "Unchanged", left
        return "Repaired" if known and left != child.fingerprint else "Changed", left

    async def _applied(self, body: Manifest, child: Child | None) -> Manifest:
        """Apply an object; returns the result, with the digest of its template if it is one that may be kept."""
        if BUILT_ANNOTATION not in body["metadata"].get("annotations", {}):
            return await self._cluster.apply(body, self._namespace)
        if child is not None and child.applied is not None:
            body = _annotated(body, APPLIED_ANNOTATION, child.applied)
        after = await self._cluster.apply(body, self._namespace)
        found = digest(WORKLOADS[body["kind"]].templates(after))  # with the API server's defaults
        if after["metadata"]["annotations"].get(APPLIED_ANNOTATION) == found:
            return after
        return await self._cluster.apply(_annotated(body, APPLIED_ANNOTATION, found), self._namespace)

    async def _with_present_template(self, manifest: Manifest, child: Child) -> Manifest:
        """The manifest with the pod template that the object has, so that its pods stay as they are; unless its image has been pinned
        since, or another client has changed it since the operator applied it. Where an earlier release stored no digest of
        it, the owners of its fields decide."""
        kind, name = manifest_key(manifest)
        present = await self._cluster.get(kind, self._namespace, name)
        if present is None:
            return manifest
        workload = WORKLOADS[kind]
        template = workload.templates(present)
        if _image_was_pinned(workload.pod_template(present), workload.pod_template(manifest)):
            return manifest  # pods that start later must not pull what the tag names then
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
        kept = {**manifest, "spec": {**manifest["spec"], workload.template_field: template}}
        return _annotated(kept, BUILT_ANNOTATION, str(child.built))

    def _adoptable(self, kind: str, found: Mapping[str, Any]) -> Child:
        """An object with our labels that the watch has not shown yet; any other is not ours."""
        labels = found["metadata"].get("labels", {})
        child = child_of(kind, found)
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
    """Whether an operator of another release wrote the template, from the same part of the spec. Pods that their controller
    replaces whenever the template changes keep theirs then."""
    wanted = manifest["metadata"].get("annotations", {}).get(BUILT_ANNOTATION)
    if wanted is None or child.built in (None, wanted) or child.workload is None:
        return False
    template = WORKLOADS[child.kind].pod_template(manifest)
    inputs = template["metadata"]["annotations"][INPUTS_ANNOTATION]
    return bool(child.workload.inputs == inputs)


def _image_was_pinned(present: Mapping[str, Any], wanted: Mapping[str, Any]) -> bool:
    """Whether a template should name its image by a digest and names it by a tag. Anything else that differs is what the cluster
    makes of templates: injected containers, a mirror of the registry."""
    images = {container["name"]: container["image"] for container in present["spec"]["containers"]}
    own = wanted["spec"]["containers"][0]
    return "@" in own["image"] and "@" not in images.get(own["name"], "")


def _annotated(manifest: Manifest, annotation: str, value: str) -> Manifest:
    metadata = manifest["metadata"]
    annotations = {**metadata.get("annotations", {}), annotation: value}
    return {**manifest, "metadata": {**metadata, "annotations": annotations}}


def _without_replicas(manifest: Manifest) -> Manifest:
    if manifest["kind"] not in POOL_KINDS:
        return manifest
    spec = {key: value for key, value in manifest["spec"].items() if key != "replicas"}
    return {**manifest, "spec": spec}
