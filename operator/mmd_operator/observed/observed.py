"""Observed state of a deployment's objects and pods: small frozen projections of what the API server sent.

Pure: independent of kopf and Kubernetes clients. Keeps only what some decision reads.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from mmd_api.contract.annotations import DRAIN_ANNOTATION
from mmd_api.contract.logs import last_reason
from mmd_api.pool_resource import POOL_KIND
from mmd_api.spec.pools import NVIDIA_GPU
from mmd_operator.resources.naming import (
    ADMIN_PORT,
    ADMIN_PORT_NAME,
    APPLIED_ANNOTATION,
    BUILT_ANNOTATION,
    COMPONENT_LABEL,
    DEPLOYMENT_LABEL,
    GPU_RESOURCE_ANNOTATION,
    GPUS_ANNOTATION,
    INPUTS_ANNOTATION,
    KEYS_VOLUME,
    PICKER_PORT_NAME,
    REVISION_LABEL,
    TLS_VOLUME,
    container_name,
)
from mmd_operator.resources.workload_kinds import POOL_KINDS, WORKER_INDEX_LABEL, WORKLOADS

FIELD_MANAGER = "multimodal-operator"
SCALER_FIELD_MANAGER = "multimodal-operator-scaler"
SURGE_FIELD_MANAGER = "multimodal-operator-surge"
"""Sole owner of the size of a pool that has one pod more while its only pod is replaced."""
OUR_FIELD_MANAGERS = frozenset({FIELD_MANAGER, SCALER_FIELD_MANAGER, SURGE_FIELD_MANAGER})
MANAGED_BY_LABEL = "app.kubernetes.io/managed-by"
MAX_TEXT_CHARACTERS = 400
TERMINATION_MARGIN_SECONDS = 60.0
NO_CLAIM = "cannot allocate all claims"
"""The scheduler's words about a pod whose ResourceClaims no node can serve."""
CREATION_SECONDS = 600.0
"""Grace of a scheduled pod without any container yet: its image is pulled and its volumes are mounted. Then its start counts."""
LEFT_READY_SECONDS = 60.0
"""A container that ended no longer than this before its pod stopped being Ready may be the cause of that."""
FAILING_RESTARTS = 3
"""Restarts from which a container is failing. Fewer may have a temporary cause, such as NATS still starting."""
Body = Mapping[str, Any]
ObjectKey = tuple[str, str]
"""Kind and name of an object in the deployment's namespace."""


def manifest_key(manifest: Body) -> ObjectKey:
    """Kind and name of the object that a manifest describes."""
    return manifest["kind"], manifest["metadata"]["name"]


@dataclass(frozen=True, slots=True)
class Workload:
    """State of a Deployment, StatefulSet or LeaderWorkerSet.

    Counts are in replicas, each a pod or a group of pods, and leave out those that are being deleted.
    """

    replicas: int
    current: int
    ready: int
    updated: int
    seen: bool  # the controller has acted on the newest spec
    template_revision: str | None  # pipeline revision of the pods it creates
    replicas_released: bool  # `spec.replicas` would survive an apply that leaves it out
    failure: str | None  # why it cannot create pods, if its status says so
    inputs: str | None = None  # hash of what the pods of its template are made from
    gpus: int = 0  # GPUs per replica
    group_size: int = 1  # pods per replica
    sized_by: str | None = None  # field manager, other than ours, that set its present size
    on_delete: bool = False  # the operator replaces its pods, and its controller does not
    surged: bool = False  # it has one pod more than its size while its only pod is replaced

    @property
    def rolled(self) -> bool:
        """Whether every pod exists and is Ready, and no pod remains of an older template that its controller replaces."""
        return self.up_to_date and self.ready == self.current == self.replicas

    @property
    def up_to_date(self) -> bool:
        """Whether the controller has acted on the newest spec, and no pod remains of an older template that it replaces."""
        return self.seen and (self.on_delete or self.updated == self.replicas)

    @property
    def unit(self) -> str:
        """Unit of the counts, for messages."""
        return "pods" if self.group_size == 1 else f"groups of {self.group_size} pods"


@dataclass(frozen=True, slots=True)
class ParentReport:
    """Report of a Gateway API controller about an object and one of its parents.

    `verdicts`: status and message by condition type, without conditions about an older spec.
    """

    namespace: str
    name: str
    section: str | None
    verdicts: Mapping[str, tuple[str, str]]


@dataclass(frozen=True, slots=True)
class RequestedSize:
    """Requested size of a MultimodalPool, the field manager other than ours that set it, and the object's status."""

    replicas: int
    set_by: str | None
    status: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class JobState:
    """Outcome of a Job, if it has ended. `failed_at`: Unix seconds. `failure`: the controller's words."""

    complete: bool = False
    failed_at: float | None = None
    failure: str = ""


@dataclass(frozen=True, slots=True)
class Child:
    """One object with the labels of a deployment."""

    kind: str
    name: str
    uid: str
    resource_version: str
    owner_uid: str | None  # UID of the controlling owner
    component: str | None
    revision: str | None  # pipeline revision it comes and goes with
    fingerprint: str  # hash of everything but status, sizes and bookkeeping
    deleting: bool
    workload: Workload | None
    built: str | None = None  # digest of the pod template as its builder wrote it
    applied: str | None = None  # digest of the pod template as the operator's last apply left it
    rival: str | None = None  # field manager, other than ours, that changed it last
    parents: tuple[ParentReport, ...] = ()  # reports about a route
    requested: RequestedSize | None = None  # set for a MultimodalPool
    job: JobState | None = None  # set for a Job

    @property
    def key(self) -> ObjectKey:
        """Kind and name."""
        return self.kind, self.name

    @property
    def is_sized(self) -> bool:
        """Whether pools are made of its kind."""
        return self.kind in POOL_KINDS


@dataclass(frozen=True, slots=True)
class PodView:
    """One pod: whether it takes work, and the reason if it does not."""

    name: str
    uid: str
    resource_version: str
    created_at: float  # Unix seconds
    address: str | None
    drain_requested_at: float | None  # Unix seconds at which it was asked to drain
    component: str
    revision: str | None
    ready: bool
    deleting: bool
    scheduled: bool
    unschedulable: str | None  # the scheduler's words
    unschedulable_since: float | None  # Unix seconds
    starting_since: (
        float  # Unix seconds at which the present attempt to become Ready began, or will at the latest
    )
    failing: bool  # its container ended several times, the last time without having become Ready
    waiting_reason: str | None  # reason of the first waiting container
    waiting_message: str
    restarts: int
    exit_code: int | None  # exit code of the last run that ended, unless the pod has been Ready since
    exit_reason: str | None
    last_words: str  # what the container wrote when it ended
    inputs: str | None = None  # hash of what it was made from
    image_id: str | None = None  # image of its own container, by digest, not of an injected one
    report_port: int = ADMIN_PORT  # port of its load reports
    gpus: int = 0  # its own number, which its template may no longer have
    gpu_resource: str = NVIDIA_GPU  # the scheduler's name for its GPUs
    keys_secret: str | None = None  # Secret of its API keys, which its template may no longer name
    tls_secret: str | None = None  # Secret of its TLS certificate, which its template may no longer name
    has_run: bool = True  # a container of it runs, or has ended
    finished: bool = False  # its containers have ended for good, as after an eviction
    failure: str = ""  # why it failed as a whole: reason, node, and the kubelet's words
    ends_at: float | None = None  # Unix seconds of the end of its grace period, if it is being deleted
    has_picker: bool = False  # Gateways may ask it which gateway pod takes a request
    group_rank: int | None = None  # place in its group of pods; None: it has no group

    @property
    def leads(self) -> bool:
        """Whether it stands for its replica, takes work and reports: it is the only pod, or the first of its group."""
        return not self.group_rank

    @property
    def group(self) -> str | None:
        """Name of its group, which is its leader's name."""
        if self.group_rank is None:
            return None
        return self.name if self.leads else self.name.rpartition("-")[0]

    def unplaced(self, now: float, deadline_seconds: float) -> bool:
        """Whether no node has taken it within the deadline. `now`: Unix seconds."""
        return self.unschedulable_since is not None and now - self.unschedulable_since > deadline_seconds

    def gone(self, now: float) -> bool:
        """Whether it has ended, or is still being deleted a minute after its grace period, as on a dead node. `now`: Unix seconds."""
        overdue = self.ends_at is not None and now - self.ends_at > TERMINATION_MARGIN_SECONDS
        return self.finished or overdue

    @property
    def lacks_gpu(self) -> bool:
        """Whether a node could take it if it had a GPU to spare."""
        words = self.unschedulable
        return words is not None and (self.gpu_resource in words or NO_CLAIM in words)


@dataclass(frozen=True, slots=True)
class PoolGrowth:
    """A new size of a pool, larger than its previous one."""

    replicas: int
    gpus: int  # GPUs per replica
    revision: str | None
    uid: str | None  # UID of the pool's workload; None: the workload is created with this size

    @classmethod
    def to(cls, replicas: int, child: Child) -> PoolGrowth | None:
        """Growth of an existing pool; None if it does not become larger."""
        if child.workload is None or replicas <= child.workload.replicas:
            return None
        return cls(replicas, child.workload.gpus, child.revision, child.uid)


@dataclass(frozen=True, slots=True)
class Observed:
    """All objects and pods of one deployment.

    `growth`: decided sizes that the watch does not show yet, by workload name. `refused`: workloads with pods that a
    quota has no room for.
    """

    children: Mapping[ObjectKey, Child] = field(default_factory=dict)
    pods: tuple[PodView, ...] = ()
    growth: Mapping[str, PoolGrowth] = field(default_factory=dict)
    refused: frozenset[str] = frozenset()

    def sized(self, name: str) -> Child | None:
        """A StatefulSet or LeaderWorkerSet by name. No two of them have the same name."""
        return next((c for kind in POOL_KINDS if (c := self.children.get((kind, name))) is not None), None)

    def requested(self, name: str) -> Child | None:
        """A MultimodalPool by name, since anybody may copy labels."""
        return self.children.get((POOL_KIND, name))

    def requested_for(self, workload: Child) -> Child | None:
        """The MultimodalPool of this workload's pool: the one with the same owner."""
        return next(
            (
                child
                for child in self.children.values()
                if child.kind == POOL_KIND
                and child.component == workload.component
                and child.owner_uid == workload.owner_uid
            ),
            None,
        )

    def pods_of(self, component: str) -> tuple[PodView, ...]:
        """Pods of one component across all revisions; for each group, only the leader."""
        return tuple(pod for pod in self.pods if pod.component == component and pod.leads)


def deployment_key(body: Body) -> tuple[str, str]:
    """Namespace and name of the deployment in an object's labels."""
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
        workload=_workload(kind, body) if kind in WORKLOADS else None,
        built=metadata.get("annotations", {}).get(BUILT_ANNOTATION),
        applied=metadata.get("annotations", {}).get(APPLIED_ANNOTATION),
        rival=rival_of(metadata.get("managedFields", ())),
        parents=_parent_reports(body),
        requested=_requested_size(body) if kind == POOL_KIND else None,
        job=_job_state(body) if kind == "Job" else None,
    )


def _job_state(body: Body) -> JobState:
    conditions = {
        c["type"]: c for c in body.get("status", {}).get("conditions") or () if c["status"] == "True"
    }
    failed = conditions.get("Failed")
    if failed is None:
        return JobState(complete="Complete" in conditions)
    words = _text(f"{failed.get('reason', '')}: {failed.get('message', '')}")
    return JobState(failed_at=unix_seconds(failed.get("lastTransitionTime")) or 0.0, failure=words)


def _requested_size(body: Body) -> RequestedSize:
    return RequestedSize(
        replicas=body["spec"]["replicas"],
        set_by=_sized_by(body["metadata"].get("managedFields", ())),
        status=body.get("status", {}),
    )


def _parent_reports(body: Body) -> tuple[ParentReport, ...]:
    """Reports about a route's parents; objects of other kinds have none."""
    generation = body["metadata"].get("generation", 0)
    return tuple(
        ParentReport(
            namespace=parent["parentRef"].get("namespace", body["metadata"].get("namespace")),
            name=parent["parentRef"]["name"],
            section=parent["parentRef"].get("sectionName"),
            verdicts={
                c["type"]: (c["status"], _text(f"{c.get('reason', '')}: {c.get('message', '')}"))
                for c in parent.get("conditions") or ()
                if c.get("observedGeneration", generation) >= generation
            },
        )
        for parent in body.get("status", {}).get("parents") or ()
    )


def rival_of(managed_fields: Any, *, of_status: bool = False) -> str | None:
    """The field manager, other than ours, that last wrote an object or its status; None if none has since ours.

    A client that only removed something leaves no trace there.
    """
    writes = [
        (str(entry.get("time", "")), str(entry["manager"]))
        for entry in managed_fields
        if entry.get("manager") is not None and (entry.get("subresource") == "status") == of_status
    ]
    last_own_write = max((time for time, manager in writes if manager == FIELD_MANAGER), default="")
    others = [
        (time, manager)
        for time, manager in writes
        if manager not in OUR_FIELD_MANAGERS and time >= last_own_write
    ]
    return max(others)[1] if others else None


def controlling_owner(metadata: Body) -> str | None:
    """UID of an object's controlling owner."""
    return next((o["uid"] for o in metadata.get("ownerReferences", ()) if o.get("controller")), None)


def fingerprint(body: Body) -> str:
    """Hash that changes when any client changes the object, except for status, size and bookkeeping."""
    metadata = {
        key: value
        for key, value in body["metadata"].items()
        if key not in ("managedFields", "resourceVersion", "generation")
    }
    rest = {
        key: value for key, value in body.items() if key not in ("metadata", "status", "kind", "apiVersion")
    }
    if any(kind.template_field in rest.get("spec", {}) for kind in WORKLOADS.values()):
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
    no_node = scheduled.get("reason") == "Unschedulable" and scheduled.get("status") != "True"
    created = unix_seconds(metadata.get("creationTimestamp")) or 0.0
    states = [s for s in status.get("containerStatuses", ()) if s]
    own_container = container_name(labels.get(COMPONENT_LABEL, ""))
    running_starts = (unix_seconds(s.get("state", {}).get("running", {}).get("startedAt")) for s in states)
    running_since = [at for at in running_starts if at]
    ready_changed_at = unix_seconds(conditions.get("Ready", {}).get("lastTransitionTime")) or created
    scheduled_at = unix_seconds(scheduled.get("lastTransitionTime")) or created
    waiting: Body = next((s["state"]["waiting"] for s in states if s.get("state", {}).get("waiting")), {})
    terminated: Body = next((t for s in states if (t := _last_end(s))), {})
    began, ended_at = unix_seconds(terminated.get("startedAt")), unix_seconds(terminated.get("finishedAt"))
    has_run = bool(running_since or terminated)
    finished = status.get("phase") in ("Succeeded", "Failed")  # such a pod may still say that it is Ready
    if ended_at is not None and ended_at < ready_changed_at - LEFT_READY_SECONDS:
        terminated = {}  # it has been Ready since
    restarts = max((s.get("restartCount", 0) for s in states), default=0)
    return PodView(
        name=metadata["name"],
        uid=metadata["uid"],
        resource_version=metadata.get("resourceVersion", ""),
        created_at=created,
        address=status.get("podIP"),
        drain_requested_at=unix_seconds(metadata.get("annotations", {}).get(DRAIN_ANNOTATION)),
        component=labels.get(COMPONENT_LABEL, ""),
        revision=labels.get(REVISION_LABEL),
        ready=conditions.get("Ready", {}).get("status") == "True" and not finished,
        deleting="deletionTimestamp" in metadata,
        scheduled=scheduled.get("status") == "True",
        unschedulable=_text(scheduled.get("message")) if no_node else None,
        unschedulable_since=(unix_seconds(scheduled.get("lastTransitionTime")) or created)
        if no_node
        else None,
        starting_since=max(
            ready_changed_at,
            scheduled_at + (0.0 if has_run else CREATION_SECONDS),
            ended_at or 0.0,
            *running_since,
        ),
        failing=restarts >= FAILING_RESTARTS and began is not None and began >= ready_changed_at,
        waiting_reason=waiting.get("reason"),
        waiting_message=_text(waiting.get("message")),
        restarts=restarts,
        exit_code=terminated.get("exitCode"),
        exit_reason=terminated.get("reason"),
        last_words=_last_words(terminated.get("message")),
        inputs=metadata.get("annotations", {}).get(INPUTS_ANNOTATION),
        image_id=next(
            (s["imageID"] for s in states if s.get("name") == own_container and s.get("imageID")), None
        ),
        report_port=_report_port(body),
        gpus=_gpus(body),
        gpu_resource=metadata.get("annotations", {}).get(GPU_RESOURCE_ANNOTATION, NVIDIA_GPU),
        keys_secret=_secret_of(KEYS_VOLUME, body),
        tls_secret=_secret_of(TLS_VOLUME, body),
        has_run=has_run,
        finished=finished,
        failure=_failure(body),
        ends_at=unix_seconds(metadata.get("deletionTimestamp")),
        has_picker=PICKER_PORT_NAME in _ports(body),
        group_rank=int(rank) if (rank := labels.get(WORKER_INDEX_LABEL, "")).isdecimal() else None,
    )


def _failure(pod: Body) -> str:
    """Why a pod failed as a whole, where not its containers ended by themselves."""
    status = pod.get("status", {})
    if status.get("phase") != "Failed" or not status.get("reason"):
        return ""
    node = pod.get("spec", {}).get("nodeName")
    return _text(f"{status['reason']}{f' on node {node}' if node else ''}: {status.get('message', '')}")


def _report_port(pod: Body) -> int:
    """The admin port if the pod has one. Workers, and gateways of releases before it, have one port for everything."""
    ports = _ports(pod)
    return ports.get(ADMIN_PORT_NAME) or ports.get("http") or ADMIN_PORT


def _ports(pod: Body) -> dict[str, int]:
    """Ports of the pod's own container, by name."""
    container: Body = next(iter(pod.get("spec", {}).get("containers", ())), {})
    return {port.get("name"): int(port["containerPort"]) for port in container.get("ports", ())}


def _secret_of(volume_name: str, pod: Body) -> str | None:
    volumes = pod.get("spec", {}).get("volumes", ())
    names = (volume["secret"].get("secretName") for volume in volumes if volume.get("name") == volume_name)
    return next(names, None)


def unix_seconds(time: str | None) -> float | None:
    """Unix seconds of a Kubernetes timestamp; 0 if it cannot be parsed."""
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
    """Why a container ended, by its own log; else the end of its output, since an exception is in the last lines."""
    words = last_reason(message or "") or message or ""
    return " ".join(words.split())[-MAX_TEXT_CHARACTERS:]


def _workload(kind: str, body: Body) -> Workload:
    spec, status, metadata = body["spec"], body.get("status", {}), body["metadata"]
    template, group_size = WORKLOADS[kind].pod_template(body), WORKLOADS[kind].group_size(body)
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
        seen=WORKLOADS[kind].is_seen(body),
        template_revision=template["metadata"].get("labels", {}).get(REVISION_LABEL),
        replicas_released=_replicas_released(metadata.get("managedFields", ())),
        sized_by=_sized_by(metadata.get("managedFields", ())),
        failure=failure,
        inputs=template["metadata"].get("annotations", {}).get(INPUTS_ANNOTATION),
        gpus=_gpus(template) * group_size,
        group_size=group_size,
        on_delete=spec.get("updateStrategy", {}).get("type") == "OnDelete",
        surged=_owners_of_size(metadata.get("managedFields", ())) == {SURGE_FIELD_MANAGER},
    )


def rival_of_template(kind: str, managed_fields: Any) -> str | None:
    """A field manager, other than ours, that owns part of the pod template."""
    template_field = f"f:{WORKLOADS[kind].template_field}"
    owners = {
        str(entry.get("manager"))
        for entry in managed_fields
        if template_field in entry.get("fieldsV1", {}).get("f:spec", {})
    }
    return max(owners - OUR_FIELD_MANAGERS, default=None)


def _gpus(pod: Body) -> int:
    """GPUs of a pod or of a pod template."""
    annotated = pod.get("metadata", {}).get("annotations", {}).get(GPUS_ANNOTATION)
    if annotated is not None:
        return int(annotated)
    containers = pod.get("spec", {}).get("containers", ())
    return sum(int(c.get("resources", {}).get("limits", {}).get(NVIDIA_GPU, 0)) for c in containers)


def _replicas_released(managed_fields: Any) -> bool:
    """Whether a client other than the applier owns `spec.replicas`, or the applier does not."""
    owners = _owners_of_size(managed_fields)
    return FIELD_MANAGER not in owners or len(owners) > 1


def _sized_by(managed_fields: Any) -> str | None:
    owners = _owners_of_size(managed_fields)
    return max(owners) if owners and not owners & OUR_FIELD_MANAGERS else None


def _owners_of_size(managed_fields: Any) -> set[str]:
    return {
        str(entry.get("manager"))
        for entry in managed_fields
        if "f:replicas" in entry.get("fieldsV1", {}).get("f:spec", {})
    }
