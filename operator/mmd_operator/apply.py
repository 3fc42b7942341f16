"""Writes one deployment's objects, each only when it must be: remembers what it applied and what that looked like afterwards."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from mmd_api.resource import API_VERSION, KIND
from mmd_operator.cluster import Cluster, RefusedError
from mmd_operator.observed import MANAGED_BY_LABEL, Child, ObjectKey, child_of, digest, fingerprint
from mmd_operator.problems import Problem, not_ours, refusal
from mmd_operator.resources.naming import DEPLOYMENT_LABEL, REVISION_LABEL, Manifest
from mmd_operator.resources.nats import with_passwords
from mmd_operator.rollout import manifest_key

Outcome = Literal["Unchanged", "Unseen", "Created", "Changed", "Repaired", "Refused"]
"""Unseen: applied, and the watch does not show it yet. Repaired: somebody had changed or deleted it."""
FIRST_SECRET_PAUSE_SECONDS = 5.0
LAST_SECRET_PAUSE_SECONDS = 600.0
UNSEEN_SECONDS = 5.0
"""How long a watch may take to show an object as it was applied, before it counts as changed by somebody."""


@dataclass(slots=True)
class _Record:
    """What was applied, how the object looked afterwards, and whether the watch has shown it so."""

    plan: str
    fingerprint: str
    version_before: str | None  # that the watch showed when it was applied
    at: float
    seen: bool = False


class Applier:
    """The objects of one deployment (one UID). Costs no call for an object that is as it was left."""

    def __init__(self, cluster: Cluster, namespace: str, name: str, uid: str) -> None:
        self._cluster = cluster
        self._namespace, self._name, self._uid = namespace, name, uid
        self._records: dict[ObjectKey, _Record] = {}
        self._secrets: dict[
            ObjectKey, tuple[float, float]
        ] = {}  # when to try again, and the pause after that

    async def apply(
        self, manifest: Manifest, child: Child | None, now: float
    ) -> tuple[Outcome, Problem | None]:
        """Bring one object to its manifest. `child`: as the watch shows it; `now`: monotonic seconds.

        Raises:
            BusyError: nothing can be written now.
        """
        key = manifest_key(manifest)
        plan = digest(_without_replicas(manifest))
        record = self._records.get(key)
        if record is not None and record.plan == plan:
            if child is not None and child.fingerprint == record.fingerprint:
                record.seen = True
                return "Unchanged", None
            as_before = (child.resource_version if child else None) == record.version_before
            if as_before and not record.seen and now - record.at < UNSEEN_SECONDS:
                return "Unseen", None
        known = record is not None and record.plan == plan
        try:
            return await self._write(manifest, child, plan, now, known=known), None
        except _NotOursError:
            return "Refused", not_ours(*key)
        except RefusedError as error:
            labels = manifest["metadata"]["labels"]
            component = labels.get("app.kubernetes.io/component", manifest["kind"])
            return "Refused", refusal(component, str(error), labels.get(REVISION_LABEL))

    async def create_once(self, secret: Manifest, now: float) -> tuple[bool, Problem | None]:
        """Make a Secret with new passwords unless there is one. `now`: monotonic seconds.

        The operator may not read Secrets, so it cannot see that one was deleted: it tries again, ever more rarely.

        Raises:
            BusyError: nothing can be written now.
        """
        key = manifest_key(secret)
        due, pause = self._secrets.get(key, (now, FIRST_SECRET_PAUSE_SECONDS))
        if now < due:
            return False, None
        try:
            created = await self._cluster.create_secret(with_passwords(self._owned(secret)), self._namespace)
        except RefusedError as error:
            return False, refusal("nats", str(error), None)
        self._secrets[key] = (now + pause, min(2 * pause, LAST_SECRET_PAUSE_SECONDS))
        return created, None

    def forget(self, key: ObjectKey) -> None:
        """An object was removed."""
        self._records.pop(key, None)

    async def _write(
        self, manifest: Manifest, child: Child | None, plan: str, now: float, *, known: bool
    ) -> Outcome:
        kind, name = manifest_key(manifest)
        version_before = child.resource_version if child else None
        if child is None:
            found = await self._cluster.get(kind, self._namespace, name)
            if found is not None:
                child = self._adoptable(kind, found)
        elif child.owner_uid not in (self._uid, None):
            raise _NotOursError
        body = self._owned(manifest)
        sized = kind == "StatefulSet"
        if child is not None and sized and child.workload is not None:
            if not child.workload.handed_over:
                await self._cluster.hand_over_replicas(self._namespace, name, child.workload.replicas)
            body = _without_replicas(body)
        after = await self._cluster.apply(body, self._namespace)
        if child is None and sized:
            await self._cluster.hand_over_replicas(self._namespace, name, body["spec"]["replicas"])
        self._records[manifest_key(manifest)] = _Record(plan, fingerprint(after), version_before, now)
        if child is None:
            return "Repaired" if known else "Created"
        if after["metadata"]["resourceVersion"] == child.resource_version:
            return "Unchanged"
        return "Repaired" if known and fingerprint(after) != child.fingerprint else "Changed"

    def _adoptable(self, kind: str, found: Mapping[str, Any]) -> Child:
        """An object of our labels that the watch has not shown yet; anything else is somebody's."""
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
    """The object belongs to somebody else."""


def _without_replicas(manifest: Manifest) -> Manifest:
    if manifest["kind"] != "StatefulSet":
        return manifest
    spec = {key: value for key, value in manifest["spec"].items() if key != "replicas"}
    return {**manifest, "spec": spec}
