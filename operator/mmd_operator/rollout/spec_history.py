"""Records each spec of a deployment as a ControllerRevision, for `mmd rollout undo` and for failed rollouts.

ControllerRevisions are listed when the spec or the serving revision changes, not watched. A spec that cannot be recorded is a problem, and
holds nothing up.
"""

from __future__ import annotations

import hashlib
import logging
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from mmd_api.history import COMPLETED_ANNOTATION, SPEC_LABEL
from mmd_api.resource import API_VERSION, KIND
from mmd_operator.kube.cluster import BusyError, RefusedError
from mmd_operator.kube.context import PassContext
from mmd_operator.kube.status_time import now
from mmd_operator.observed.observed import MANAGED_BY_LABEL, Body, controlling_owner
from mmd_operator.observed.problems import Problem, not_recorded
from mmd_operator.resources.naming import DEPLOYMENT_LABEL, REVISION_LABEL, Manifest

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class RecordedSpec:
    """A ControllerRevision of a deployment. `revision`: the pipeline revision of the spec."""

    name: str
    number: int
    digest: str
    revision: str | None
    completed: bool

    @classmethod
    def of(cls, body: Body) -> RecordedSpec:
        """The projection of a ControllerRevision."""
        metadata = body["metadata"]
        labels = metadata["labels"]
        completed = COMPLETED_ANNOTATION in metadata.get("annotations", {})
        return cls(
            metadata["name"], body["revision"], labels[SPEC_LABEL], labels.get(REVISION_LABEL), completed
        )


def last_good(entries: Iterable[RecordedSpec], revision: str, failed: str) -> RecordedSpec | None:
    """The newest complete spec of a pipeline revision; without a complete one, the newest. `failed`: digest of a spec to leave out."""
    candidates = [entry for entry in entries if entry.revision == revision and entry.digest != failed]
    return max(candidates, key=lambda entry: (entry.completed, entry.number), default=None)


def unneeded(entries: Iterable[RecordedSpec], limit: int, needed: Iterable[str]) -> list[RecordedSpec]:
    """Entries beyond the `limit` newest, not counting those with a digest in `needed`."""
    needed_digests = set(needed)
    others = sorted(
        (entry for entry in entries if entry.digest not in needed_digests),
        key=lambda entry: entry.number,
        reverse=True,
    )
    return others[limit:]


class SpecHistory:
    """The recorded specs of one deployment (one UID)."""

    def __init__(self, context: PassContext, uid: str) -> None:
        self._context, self._uid = context, uid
        self.entries: tuple[RecordedSpec, ...] = ()
        self.listed = False  # whether the entries have been listed at least once
        self._last_recorded: object = None
        self._problems: list[Problem] = []  # problems of the last attempt
        self._due = 0.0  # monotonic seconds

    async def keep(
        self,
        spec: Mapping[str, Any],
        digest: str,
        revision: str,
        limit: int,
        serving: str | None,
        in_effect: str | None,
    ) -> list[Problem]:
        """Record a spec as the newest, and remove specs beyond the limit that neither serve nor are in effect.

        `revision`: its pipeline revision; `serving`: the serving pipeline revision; `in_effect`: digest of the spec in effect.
        """
        key = digest, revision, limit, serving, in_effect, self._is_complete(digest)
        if self._last_recorded == key:
            return []
        if time.monotonic() < self._due:
            return self._problems
        try:
            await self._keep(spec, digest, revision, limit, serving, in_effect)
        except (BusyError, RefusedError) as error:
            self._failed(error)
        else:
            self._last_recorded, self._problems = key, []
        return self._problems

    async def complete(self, digest: str) -> None:
        """Mark a recorded spec complete: all its pods are Ready."""
        entry = self.entry(digest)
        if entry is None or entry.completed or time.monotonic() < self._due:
            return
        annotations = {COMPLETED_ANNOTATION: now().isoformat().replace("+00:00", "Z")}
        change = {"metadata": {"annotations": annotations}}
        try:
            await self._context.cluster.patch_recorded(self._context.namespace, entry.name, change)
        except (BusyError, RefusedError) as error:
            self._failed(error)
        else:
            self._replace(replace(entry, completed=True))

    def _is_complete(self, digest: str) -> bool:
        return (entry := self.entry(digest)) is not None and entry.completed

    def entry(self, digest: str) -> RecordedSpec | None:
        """The entry of a spec."""
        return next((entry for entry in self.entries if entry.digest == digest), None)

    async def spec_of(self, digest: str) -> Mapping[str, Any] | None:
        """A recorded spec as the API server returned it, or None if there is none.

        Raises:
            RefusedError, BusyError: the API server refused the request, or could not answer now.
        """
        bodies = await self._list()
        return next(
            (body["data"]["spec"] for body in bodies if body["metadata"]["labels"][SPEC_LABEL] == digest),
            None,
        )

    def _failed(self, error: BusyError | RefusedError) -> None:
        refused = isinstance(error, RefusedError)
        pauses = self._context.pauses
        self._due = time.monotonic() + (
            pauses.refused_record_seconds if refused else pauses.record_retry_seconds
        )
        self._problems = [not_recorded(str(error))] if refused else []
        logger.warning(
            "%s/%s: failed to record the spec: %s", self._context.namespace, self._context.name, error
        )

    async def _keep(
        self,
        spec: Mapping[str, Any],
        digest: str,
        revision: str,
        limit: int,
        serving: str | None,
        in_effect: str | None,
    ) -> None:
        cluster, namespace = self._context.cluster, self._context.namespace
        await self._list()
        newest = max((entry.number for entry in self.entries), default=0)
        present = self.entry(digest)
        if present is None:
            manifest = self._manifest(spec, digest, revision, newest + 1)
            self._replace(RecordedSpec.of(await cluster.create_recorded(namespace, manifest)))
        elif present.number < newest or present.revision != revision:
            number = newest + 1 if present.number < newest else present.number
            change = {"revision": number, "metadata": {"labels": {REVISION_LABEL: revision}}}
            await cluster.patch_recorded(namespace, present.name, change)
            self._replace(replace(present, number=number, revision=revision))
        fallback = last_good(self.entries, serving, digest) if serving else None
        others = [entry for entry in self.entries if entry.completed and entry.digest != digest]
        last_complete = max(others, key=lambda entry: entry.number, default=None)
        if self._is_complete(digest):  # until then, old gateways may still serve the previous spec
            last_complete = None
        needed = (digest, in_effect, *(entry.digest for entry in (fallback, last_complete) if entry))
        for entry in unneeded(self.entries, limit, filter(None, needed)):
            await cluster.delete_recorded(namespace, entry.name)
            self.entries = tuple(other for other in self.entries if other.name != entry.name)

    async def _list(self) -> list[Manifest]:
        selector = f"{DEPLOYMENT_LABEL}={self._context.name},{SPEC_LABEL}"
        bodies = await self._context.cluster.recorded(self._context.namespace, selector)
        owned = [body for body in bodies if controlling_owner(body["metadata"]) == self._uid]
        self.entries, self.listed = tuple(RecordedSpec.of(body) for body in owned), True
        return owned

    def _replace(self, entry: RecordedSpec) -> None:
        self.entries = (*(other for other in self.entries if other.name != entry.name), entry)

    def _manifest(self, spec: Mapping[str, Any], digest: str, revision: str, number: int) -> Manifest:
        name = self._context.name
        suffix = hashlib.sha256(f"{self._uid} {digest}".encode()).hexdigest()[:10]
        owner = {"apiVersion": API_VERSION, "kind": KIND, "name": name, "uid": self._uid, "controller": True}
        return {
            "apiVersion": "apps/v1",
            "kind": "ControllerRevision",
            "metadata": {
                "name": f"{name}.spec-{suffix}",
                "namespace": self._context.namespace,
                "labels": {
                    "app.kubernetes.io/name": "multimodal-deployment",
                    "app.kubernetes.io/instance": name,
                    MANAGED_BY_LABEL: "multimodal-operator",
                    DEPLOYMENT_LABEL: name,
                    REVISION_LABEL: revision,
                    SPEC_LABEL: digest,
                },
                "ownerReferences": [owner],
            },
            "revision": number,
            "data": {"spec": dict(spec)},
        }
