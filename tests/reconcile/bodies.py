"""Bodies of pods and workloads as an API server sends them, with only what a test says."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mmd_api.contract.annotations import DRAIN_ANNOTATION
from mmd_operator.observed.observed import SURGE_FIELD_MANAGER, PodView, pod_of
from mmd_operator.resources.naming import DEPLOYMENT_LABEL, INPUTS_ANNOTATION, REVISION_LABEL

UID = "11111111-1111-1111-1111-111111111111"
OLD, NEW = "aaaaaaaaaa", "bbbbbbbbbb"


def labels(component: str, revision: str | None) -> dict[str, str]:
    found = {
        DEPLOYMENT_LABEL: "demo",
        "app.kubernetes.io/component": component,
        "app.kubernetes.io/managed-by": "multimodal-operator",
    }
    return found | ({REVISION_LABEL: revision} if revision else {})


def pod(
    component: str = "decode",
    revision: str | None = NEW,
    *,
    name: str = "demo-decode-0",
    ready: bool = False,
    scheduling: str | None = None,
    container: dict[str, Any] | None = None,
    deleting: bool = False,
    inputs: str | None = None,
    created: str | None = None,
    ready_since: str | None = None,
    drain: str | None = None,
    gpus: int = 0,
    containers: Sequence[dict[str, Any]] = (),
) -> PodView:
    conditions = [
        {"type": "Ready", "status": "True" if ready else "False", "lastTransitionTime": ready_since}
    ]
    if scheduling is not None:
        conditions.append(
            {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": scheduling}
        )
    metadata = {
        "name": name,
        "uid": f"uid-of-{name}",
        "namespace": "default",
        "labels": labels(component, revision),
        "annotations": {INPUTS_ANNOTATION: inputs} if inputs else {},
    }
    if drain is not None:
        metadata["annotations"][DRAIN_ANNOTATION] = drain
    if created is not None:
        metadata["creationTimestamp"] = created
    if deleting:
        metadata["deletionTimestamp"] = "2026-01-01T00:00:00Z"
    status = {
        "conditions": conditions,
        "containerStatuses": [*containers, *([container] if container else [])],
    }
    limits = {"nvidia.com/gpu": str(gpus)} if gpus else {}
    spec = {"containers": [{"name": "worker", "resources": {"limits": limits}}]}
    return pod_of({"metadata": metadata, "spec": spec, "status": status})


def waiting(reason: str, message: str = "") -> dict[str, Any]:
    return {"restartCount": 0, "state": {"waiting": {"reason": reason, "message": message}}}


def crashed(
    message: str | None, *, code: int = 1, reason: str = "Error", restarts: int = 3
) -> dict[str, Any]:
    ended = {"exitCode": code, "reason": reason, "message": message}
    return {
        "restartCount": restarts,
        "state": {"waiting": {"reason": "CrashLoopBackOff", "message": "back-off 40s restarting"}},
        "lastState": {"terminated": ended},
    }


def workload(
    kind: str,
    component: str,
    revision: str | None,
    *,
    replicas: int = 1,
    ready: int | None = None,
    template: str | None = None,
    owner: str = UID,
    behind: bool = False,
    uid: str = "u",
    inputs: str | None = None,
    gpus: int = 0,
    surged: bool = False,
) -> dict[str, Any]:
    """A StatefulSet or Deployment, whole unless said otherwise. `template`: revision of its pods."""
    stays = kind == "Deployment" or component == "nats"
    name = f"demo-{component}" if stays else f"demo-{component}-{revision}"
    made = replicas if ready is None else ready
    return {
        "metadata": {
            "name": name,
            "namespace": "default",
            "uid": f"{uid}-{name}",
            "resourceVersion": "7",
            "generation": 2,
            "labels": labels(component, None if stays else revision),
            "ownerReferences": [{"uid": owner, "controller": True}],
            "managedFields": [{"manager": SURGE_FIELD_MANAGER, "fieldsV1": {"f:spec": {"f:replicas": {}}}}]
            if surged
            else [],
        },
        "spec": {
            "replicas": replicas,
            "updateStrategy": {"type": "RollingUpdate" if stays else "OnDelete"},
            "template": {
                "metadata": {
                    "labels": labels(component, template or revision),
                    "annotations": {INPUTS_ANNOTATION: inputs} if inputs else {},
                },
                "spec": {"containers": [{"resources": {"limits": {"nvidia.com/gpu": str(gpus)}}}]},
            },
        },
        "status": {
            "observedGeneration": 1 if behind else 2,
            "replicas": replicas,
            "readyReplicas": made,
            "updatedReplicas": replicas,
        },
    }
