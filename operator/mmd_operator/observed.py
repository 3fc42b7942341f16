"""What the operator has seen of a deployment's objects and pods: small frozen projections of what the API server sent.

Pure: knows neither kopf nor a Kubernetes client, and keeps nothing that no decision reads.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from mmd_api.resource import DRAIN_ANNOTATION
from mmd_operator.resources.naming import DEPLOYMENT_LABEL, REVISION_LABEL

FIELD_MANAGER = "multimodal-operator"
SCALER_FIELD_MANAGER = "multimodal-operator-scaler"
COMPONENT_LABEL = "app.kubernetes.io/component"
MANAGED_BY_LABEL = "app.kubernetes.io/managed-by"
MAX_TEXT_CHARACTERS = 400
Body = Mapping[str, Any]
ObjectKey = tuple[str, str]
"""Kind and name of an object in the deployment's namespace."""


@dataclass(frozen=True, slots=True)
class Workload:
    """Where a StatefulSet or Deployment stands. Counts are of pods; those that are being deleted are in none of them."""

    replicas: int
    current: int
    ready: int
    updated: int
    seen: bool  # the controller has acted on the newest spec
    template_revision: str | None  # pipeline revision of the pods it makes
    handed_over: bool  # `spec.replicas` would survive an apply that leaves it out
    failure: str | None  # why it cannot make pods, where it says so itself

    @property
    def rolled(self) -> bool:
        """Whether every pod is of the newest template, ready, and none is left of an older one."""
        return self.seen and self.updated == self.ready == self.current == self.replicas


@dataclass(frozen=True, slots=True)
class Child:
    """One object with the labels of a deployment."""

    kind: str
    name: str
    uid: str
    resource_version: str
    owner_uid: str | None  # of the controlling owner
    component: str | None
    revision: str | None  # pipeline revision it comes and goes with
    fingerprint: str  # of everything but status, sizes and bookkeeping
    deleting: bool
    workload: Workload | None

    @property
    def key(self) -> ObjectKey:
        """Kind and name."""
        return self.kind, self.name


@dataclass(frozen=True, slots=True)
class PodView:
    """One pod: whether it takes work, and what it says when it does not."""

    name: str
    uid: str
    created_at: float  # Unix seconds
    address: str | None
    drain_asked: float | None  # Unix seconds at which it was asked to drain
    component: str
    revision: str | None
    ready: bool
    deleting: bool
    scheduled: bool
    unschedulable: str | None  # the scheduler's words
    waiting_reason: str | None  # of the first container that waits
    waiting_message: str
    restarts: int
    exit_code: int | None  # of the last run that ended
    exit_reason: str | None
    last_words: str  # what the container wrote when it ended


@dataclass(frozen=True, slots=True)
class Observed:
    """All of one deployment."""

    children: Mapping[ObjectKey, Child] = field(default_factory=dict)
    pods: tuple[PodView, ...] = ()

    def stateful_set(self, name: str) -> Child | None:
        """A StatefulSet by name."""
        return self.children.get(("StatefulSet", name))

    def pods_of(self, component: str) -> tuple[PodView, ...]:
        """Pods of one component over all revisions."""
        return tuple(pod for pod in self.pods if pod.component == component)


def deployment_key(body: Body) -> tuple[str, str]:
    """Namespace and name of the deployment that an object's labels name."""
    metadata = body["metadata"]
    return metadata["namespace"], metadata["labels"][DEPLOYMENT_LABEL]


def child_of(kind: str, body: Body) -> Child:
    """The projection of an owned object."""
    metadata = body["metadata"]
    labels = metadata.get("labels", {})
    return Child(
        kind=kind,
        name=metadata["name"],
        uid=metadata["uid"],
        resource_version=metadata["resourceVersion"],
        owner_uid=controlling_owner(metadata),
        component=labels.get(COMPONENT_LABEL),
        revision=labels.get(REVISION_LABEL),
        fingerprint=fingerprint(body),
        deleting="deletionTimestamp" in metadata,
        workload=_workload(body) if kind in ("StatefulSet", "Deployment") else None,
    )


def controlling_owner(metadata: Body) -> str | None:
    """UID of the owner that controls an object."""
    return next((o["uid"] for o in metadata.get("ownerReferences", ()) if o.get("controller")), None)


def fingerprint(body: Body) -> str:
    """Changes when anybody changes the object, except its status, its size and its bookkeeping."""
    metadata = {
        key: value
        for key, value in body["metadata"].items()
        if key not in ("managedFields", "resourceVersion", "generation")
    }
    rest = {
        key: value for key, value in body.items() if key not in ("metadata", "status", "kind", "apiVersion")
    }
    if "template" in rest.get("spec", {}):
        rest["spec"] = {key: value for key, value in rest["spec"].items() if key != "replicas"}
    return digest([metadata, rest])


def digest(content: object) -> str:
    """Short hash of JSON-like content."""
    text = json.dumps(content, sort_keys=True, separators=(",", ":"), default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:20]


def pod_of(body: Body) -> PodView:
    """The projection of a pod."""
    metadata, status = body["metadata"], body.get("status", {})
    labels = metadata.get("labels", {})
    conditions = {c["type"]: c for c in status.get("conditions", ())}
    scheduled = conditions.get("PodScheduled", {})
    states = [s for s in status.get("containerStatuses", ()) if s]
    waiting: Body = next((s["state"]["waiting"] for s in states if s.get("state", {}).get("waiting")), {})
    ended: Body = next((t for s in states if (t := _last_end(s))), {})
    return PodView(
        name=metadata["name"],
        uid=metadata["uid"],
        created_at=_unix(metadata.get("creationTimestamp")) or 0.0,
        address=status.get("podIP"),
        drain_asked=_unix(metadata.get("annotations", {}).get(DRAIN_ANNOTATION)),
        component=labels.get(COMPONENT_LABEL, ""),
        revision=labels.get(REVISION_LABEL),
        ready=conditions.get("Ready", {}).get("status") == "True",
        deleting="deletionTimestamp" in metadata,
        scheduled=scheduled.get("status") == "True",
        unschedulable=_text(scheduled.get("message")) if scheduled.get("reason") == "Unschedulable" else None,
        waiting_reason=waiting.get("reason"),
        waiting_message=_text(waiting.get("message")),
        restarts=max((s.get("restartCount", 0) for s in states), default=0),
        exit_code=ended.get("exitCode"),
        exit_reason=ended.get("reason"),
        last_words=_last_words(ended.get("message")),
    )


def _unix(time: str | None) -> float | None:
    """Seconds of a time as Kubernetes writes it; of one that is no time, 0."""
    if time is None:
        return None
    try:
        return datetime.fromisoformat(time).timestamp()
    except ValueError:
        return 0.0


def _last_end(container: Body) -> Body:
    for state in (container.get("state", {}), container.get("lastState", {})):
        if ended := state.get("terminated"):
            return dict(ended)
    return {}


def _text(message: str | None) -> str:
    return " ".join((message or "").split())[:MAX_TEXT_CHARACTERS]


def _last_words(message: str | None) -> str:
    """The end of what a container wrote: an exception stands in the last lines."""
    return " ".join((message or "").split())[-MAX_TEXT_CHARACTERS:]


def _workload(body: Body) -> Workload:
    spec, status, metadata = body["spec"], body.get("status", {}), body["metadata"]
    failure = next(
        (
            _text(c.get("message"))
            for c in status.get("conditions", ())
            if c["type"] == "ReplicaFailure" and c["status"] == "True"
        ),
        None,
    )
    return Workload(
        replicas=spec.get("replicas", 1),
        current=status.get("replicas", 0),
        ready=status.get("readyReplicas", 0),
        updated=status.get("updatedReplicas", 0),
        seen=status.get("observedGeneration", 0) >= metadata.get("generation", 0),
        template_revision=spec["template"]["metadata"].get("labels", {}).get(REVISION_LABEL),
        handed_over=_handed_over(metadata.get("managedFields", ())),
        failure=failure,
    )


def _handed_over(managed_fields: Any) -> bool:
    """Whether somebody other than the applier owns `spec.replicas`, or the applier does not."""
    owners = {
        entry.get("manager")
        for entry in managed_fields
        if "f:replicas" in entry.get("fieldsV1", {}).get("f:spec", {})
    }
    return FIELD_MANAGER not in owners or len(owners) > 1
