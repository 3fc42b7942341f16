"""What all pods of a deployment share: security, volumes, environment, placement, probes."""

from __future__ import annotations

import math
from decimal import Decimal

from mmd_api.rules import MODELS_FOLDER
from mmd_api.spec import GatewaySpec, MultimodalDeploymentSpec, PodTemplate, Pool, Resources, Toleration
from mmd_api.subjects import inbox_of
from mmd_operator.resources.config import config_hash
from mmd_operator.resources.naming import (
    CONFIG_HASH_ANNOTATION,
    CONFIG_PATH,
    NATS_PORT,
    Component,
    Manifest,
    Scope,
)

USER_ID = 65532
PROBE_TIMEOUT_SECONDS = 5
SHARED_MEMORY_LIMIT = "1Gi"
HUB_CACHE = "/var/cache/huggingface"
POD_FACTS = "/etc/pod"
LAST_WORDS = "FallbackToLogsOnError"
"""The end of the log of a container that failed goes into the pod's status, and from there into a condition."""

POD_SECURITY: Manifest = {
    "runAsNonRoot": True,
    "runAsUser": USER_ID,
    "runAsGroup": USER_ID,
    "fsGroup": USER_ID,
    "seccompProfile": {"type": "RuntimeDefault"},
}
CONTAINER_SECURITY: Manifest = {
    "allowPrivilegeEscalation": False,
    "capabilities": {"drop": ["ALL"]},
    "readOnlyRootFilesystem": True,
}


def worker_pod(
    scope: Scope,
    component: Component,
    part: Pool | GatewaySpec,
    command: list[str],
    args: list[str],
    port: int,
    nats_user: str,
) -> Manifest:
    """Pod template of the gateway or of a pool's worker."""
    gpus = part.gpus if isinstance(part, Pool) else 0
    container: Manifest = {
        "name": "gateway" if component == "gateway" else "worker",
        "image": scope.spec.image.worker,
        "imagePullPolicy": scope.spec.image.pull_policy,
        "command": command,
        "args": args,
        "env": _environment(scope, part, port, nats_user),
        "ports": [{"name": "http", "containerPort": port, "protocol": "TCP"}],
        "resources": resources(part.resources, gpus),
        "startupProbe": probe("/livez", period=1, failures=600),
        "livenessProbe": probe("/livez", period=10, failures=3),
        "readinessProbe": probe("/readyz", period=2, failures=2),
        "securityContext": CONTAINER_SECURITY,
        "terminationMessagePolicy": LAST_WORDS,
        "volumeMounts": [
            {"name": "config", "mountPath": CONFIG_PATH.rpartition("/")[0], "readOnly": True},
            {"name": "tmp", "mountPath": "/tmp"},  # noqa: S108
            {"name": "shm", "mountPath": "/dev/shm"},  # noqa: S108
        ],
    }
    pod: Manifest = {
        **pod_basics(scope.spec, part.template),
        "containers": [container],
        "volumes": [
            {"name": "config", "configMap": {"name": scope.config}},
            {"name": "tmp", "emptyDir": {}},
            {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": SHARED_MEMORY_LIMIT}},
        ],
    }
    if isinstance(part, Pool):
        _show_annotations(pod, container)
    _add_model_storage(scope.spec, pod, container)
    _add_placement(part, pod)
    return {
        "metadata": {
            "labels": {**part.template.labels, **scope.labels(component, of_revision=True)},
            "annotations": {
                **_scrape_annotations(port),
                **part.template.annotations,
                CONFIG_HASH_ANNOTATION: config_hash(scope),
            },
        },
        "spec": pod,
    }


def _scrape_annotations(port: int) -> dict[str, str]:
    """How many Prometheus servers find `/metrics`. A template's own annotation of the same name wins."""
    return {"prometheus.io/scrape": "true", "prometheus.io/port": str(port)}


def pod_basics(spec: MultimodalDeploymentSpec, template: PodTemplate) -> Manifest:
    """Pod fields that every component has: restricted, and without a token of the API server."""
    pod: Manifest = {
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "securityContext": POD_SECURITY,
        "terminationGracePeriodSeconds": template.termination_grace_period_seconds,
    }
    if spec.image.pull_secrets:
        pod["imagePullSecrets"] = [{"name": name} for name in spec.image.pull_secrets]
    named = {
        "serviceAccountName": template.service_account_name,
        "priorityClassName": template.priority_class_name,
        "runtimeClassName": template.runtime_class_name,
    }
    return pod | {key: value for key, value in named.items() if value is not None}


def probe(path: str, *, period: int, failures: int, port: str = "http") -> Manifest:
    """An HTTP probe on a named port."""
    return {
        "httpGet": {"path": path, "port": port, "scheme": "HTTP"},
        "periodSeconds": period,
        "timeoutSeconds": PROBE_TIMEOUT_SECONDS,
        "failureThreshold": failures,
    }


def resources(wanted: Resources, gpus: int = 0) -> Manifest:
    """Requests and limits. CPU has no limit: throttling shows up as latency. Memory's limit is what was asked for."""
    requests = {k: v for k, v in (("cpu", wanted.cpu), ("memory", wanted.memory)) if v is not None}
    limits: Manifest = {"memory": wanted.memory} if wanted.memory is not None else {}
    if gpus:
        limits["nvidia.com/gpu"] = str(gpus)  # a quantity: the API server gives it back as text
    return {key: value for key, value in (("requests", requests), ("limits", limits)) if value}


def threads(wanted: Resources) -> int:
    """Compute threads for what was asked for, rounded down but at least 1; 0 (no request): as many as the machine has."""
    if wanted.cpu is None:
        return 0
    cores = Decimal(wanted.cpu[:-1]) / 1000 if wanted.cpu.endswith("m") else Decimal(wanted.cpu)
    return max(1, math.floor(cores))


def nats_environment(scope: Scope, user: str) -> list[Manifest]:
    """How a pod reaches NATS, as `user` of a managed server. A password never stands in a manifest: Kubernetes puts it in from
    the Secret when the container starts."""
    nats = scope.spec.nats
    if nats.managed:
        address = f"{scope.nats}.{scope.namespace}.svc:{NATS_PORT}"
        return [
            {"name": "MMD_NATS_USERNAME", "value": user},
            _secret_variable("MMD_NATS_PASSWORD", scope.nats, user),
            _nats_url("nats", address),
            {"name": "MMD_NATS_INBOX", "value": inbox_of(user)},
        ]
    if nats.credentials_secret is None:
        return [{"name": "MMD_NATS_URL", "value": nats.url}]
    scheme, _, address = (nats.url or "").partition("://")
    return [
        _secret_variable("MMD_NATS_USERNAME", nats.credentials_secret, "username"),
        _secret_variable("MMD_NATS_PASSWORD", nats.credentials_secret, "password"),
        _nats_url(scheme, address),
    ]


def _secret_variable(variable: str, secret: str, key: str) -> Manifest:
    return {"name": variable, "valueFrom": {"secretKeyRef": {"name": secret, "key": key}}}


def _nats_url(scheme: str, address: str) -> Manifest:
    return {
        "name": "MMD_NATS_URL",
        "value": f"{scheme}://$(MMD_NATS_USERNAME):$(MMD_NATS_PASSWORD)@{address}",
    }


def _environment(scope: Scope, part: Pool | GatewaySpec, port: int, nats_user: str) -> list[Manifest]:
    fixed: list[Manifest] = [
        {"name": "MMD_PIPELINE_CONFIG", "value": CONFIG_PATH},
        {"name": "MMD_POD_NAME", "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}},
        {"name": "MMD_POD_IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}},
        {"name": "MMD_HTTP_PORT", "value": str(port)},
        *nats_environment(scope, nats_user),
        {"name": "MMD_THREADS", "value": str(threads(part.resources))},
        {"name": "MMD_GRACE_SECONDS", "value": str(part.template.termination_grace_period_seconds)},
        *_hub_environment(scope.spec),
    ]
    own = [{"name": e.name, "value": e.value} for e in part.template.env]
    return list({variable["name"]: variable for variable in [*fixed, *own]}.values())


def _hub_environment(spec: MultimodalDeploymentSpec) -> list[Manifest]:
    storage = spec.model.storage
    if storage.type != "Hub":
        return [{"name": "HF_HUB_OFFLINE", "value": "1"}]
    environment: list[Manifest] = [{"name": "HF_HOME", "value": HUB_CACHE}]
    if storage.token_secret is not None:
        source = {"secretKeyRef": {"name": storage.token_secret, "key": "token"}}
        environment.append({"name": "HF_TOKEN", "valueFrom": source})
    return environment


def _show_annotations(pod: Manifest, container: Manifest) -> None:
    """The pod's annotations as a file that follows them: how a worker is asked to drain, without a port for it."""
    annotations = {"path": "annotations", "fieldRef": {"fieldPath": "metadata.annotations"}}
    pod["volumes"].append({"name": "pod", "downwardAPI": {"items": [annotations]}})
    container["volumeMounts"].append({"name": "pod", "mountPath": POD_FACTS, "readOnly": True})
    container["env"].append({"name": "MMD_POD_ANNOTATIONS", "value": f"{POD_FACTS}/annotations"})


def _add_model_storage(spec: MultimodalDeploymentSpec, pod: Manifest, container: Manifest) -> None:
    storage = spec.model.storage
    if storage.type == "Hub":
        pod["volumes"].append({"name": "hub-cache", "emptyDir": {}})
        container["volumeMounts"].append({"name": "hub-cache", "mountPath": HUB_CACHE})
    elif storage.type == "PersistentVolumeClaim":
        claim = {"claimName": storage.claim_name, "readOnly": True}
        mount: Manifest = {"name": "models", "mountPath": MODELS_FOLDER, "readOnly": True}
        pod["volumes"].append({"name": "models", "persistentVolumeClaim": claim})
        container["volumeMounts"].append(mount | ({"subPath": storage.sub_path} if storage.sub_path else {}))


def _add_placement(part: Pool | GatewaySpec, pod: Manifest) -> None:
    if part.node_selector:
        pod["nodeSelector"] = dict(part.node_selector)
    if part.tolerations:
        pod["tolerations"] = [_toleration(t) for t in part.tolerations]


def _toleration(toleration: Toleration) -> Manifest:
    return toleration.model_dump(by_alias=True, exclude_none=True)
