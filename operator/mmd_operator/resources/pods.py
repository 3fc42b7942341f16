"""Parts shared by all pods of a deployment: security, volumes, environment, placement, probes."""

from __future__ import annotations

import math
from decimal import Decimal

from mmd_api.contract import environment as env
from mmd_api.contract import paths
from mmd_api.contract.subjects import inbox_of
from mmd_api.pipeline import inputs_of
from mmd_api.readers import Component
from mmd_api.spec.deployment import MultimodalDeploymentSpec
from mmd_api.spec.gateway import GatewaySpec
from mmd_api.spec.model import MODELS_FOLDER
from mmd_api.spec.nats import NatsSpec
from mmd_api.spec.pods import PodTemplate, Resources, Toleration
from mmd_api.spec.pools import NVIDIA_GPU, DiskCache, EncoderSpec, Pool
from mmd_operator.resources.config import config_file
from mmd_operator.resources.image import worker_image
from mmd_operator.resources.naming import (
    ADMIN_PORT_NAME,
    CONFIG_FOLDER,
    GPU_RESOURCE_ANNOTATION,
    GPUS_ANNOTATION,
    INPUTS_ANNOTATION,
    NATS_PORT,
    Manifest,
    RevisionScope,
    claim_of,
    container_name,
)
from mmd_operator.resources.overrides import CONTAINER_SECURITY, own_variables, with_overrides

USER_ID = 65532
PROBE_TIMEOUT_SECONDS = 5
SHARED_MEMORY_LIMIT = "1Gi"
HUB_CACHE = "/var/cache/huggingface"
POD_FACTS = "/etc/pod"
FEATURES_VOLUME = "features"
FEATURES_FOLDER = "/var/cache/features"
FEATURES_OF_DEPLOYMENTS = ".mmd-features"
LOGIN_FOLDER = "/etc/nats-login"
LAST_WORDS = "FallbackToLogsOnError"
"""The end of a failed container's log goes into the pod's status, and from there into a condition."""

POD_SECURITY: Manifest = {
    "runAsNonRoot": True,
    "runAsUser": USER_ID,
    "runAsGroup": USER_ID,
    "fsGroup": USER_ID,
    "seccompProfile": {"type": "RuntimeDefault"},
}


def worker_pod(
    scope: RevisionScope,
    component: Component,
    part: Pool | GatewaySpec,
    command: list[str],
    args: list[str],
    port: int,
    nats_user: str,
    admin_port: int | None = None,
) -> Manifest:
    """Pod template of the gateway or of a pool's worker. `admin_port`: port of everything that is not for clients, if not `port`."""
    container: Manifest = {
        "name": container_name(component),
        "image": worker_image(scope.spec.image, scope.pinned),
        "imagePullPolicy": scope.spec.image.pull_policy,
        "command": command,
        "args": args,
        "env": _environment(scope, component, part, port, nats_user, admin_port),
        "ports": [
            {"name": name, "containerPort": number, "protocol": "TCP"}
            for name, number in (("http", port), (ADMIN_PORT_NAME, admin_port))
            if number is not None
        ],
        "resources": resources(part.resources),
        "startupProbe": probe(paths.LIVEZ, period=1, failures=600),
        "livenessProbe": probe(paths.LIVEZ, period=10, failures=3),
        "readinessProbe": probe(paths.READYZ, period=2, failures=2),
        "securityContext": CONTAINER_SECURITY,
        "terminationMessagePolicy": LAST_WORDS,
        "volumeMounts": [
            {"name": "config", "mountPath": CONFIG_FOLDER, "readOnly": True},
            {"name": "tmp", "mountPath": "/tmp"},  # noqa: S108
            {"name": "shm", "mountPath": "/dev/shm"},  # noqa: S108
        ],
    }
    file = config_file(component)
    # the whole folder is mounted: a file mounted by sub-path is never updated
    config_item = {"key": file, "path": file}
    pod: Manifest = {
        **pod_basics(scope.spec, part.template, part.grace_seconds),
        "containers": [container],
        "volumes": [
            {"name": "config", "configMap": {"name": scope.config, "items": [config_item]}},
            {"name": "tmp", "emptyDir": {}},
            {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": SHARED_MEMORY_LIMIT}},
        ],
    }
    if isinstance(part, Pool):
        _show_annotations(pod, container)
    _show_login(scope, nats_user, pod, container)
    _add_model_storage(scope, pod, container)
    if isinstance(part, EncoderSpec) and part.cache.disk is not None:
        _add_feature_disk(scope, part.cache.disk, pod, container)
    add_placement(part, pod)
    planned: Manifest = {
        "metadata": {
            "labels": {**part.template.labels, **scope.labels(component, of_revision=True)},
            "annotations": {
                **_scrape_annotations(admin_port or port),
                **part.template.annotations,
                INPUTS_ANNOTATION: inputs_of(scope.spec, component),
            },
        },
        "spec": pod,
    }
    if isinstance(part, Pool) and part.gpus:
        _add_gpus(part, planned, container)
    return with_overrides(scope, component, part.template, planned)


def _add_gpus(pool: Pool, planned: Manifest, container: Manifest) -> None:
    """Request the GPUs of a pod, by name or by claims.

    GPUs other than `nvidia.com/gpu` are also counted in an annotation, since a claim does not state its number of GPUs.
    """
    if pool.resource_claims:
        container["resources"]["claims"] = [{"name": claim.name} for claim in pool.resource_claims]
        planned["spec"]["resourceClaims"] = [
            {"name": c.name, "resourceClaimTemplateName": c.resource_claim_template_name}
            for c in pool.resource_claims
        ]
    else:  # a quantity, which the API server returns as text
        limits = container["resources"].get("limits", {})
        container["resources"]["limits"] = {**limits, pool.gpu_resource: str(pool.gpus)}
    count_annotation = {GPUS_ANNOTATION: str(pool.gpus)}
    if pool.resource_claims:
        planned["metadata"]["annotations"].update(count_annotation)
    elif pool.gpu_resource != NVIDIA_GPU:
        planned["metadata"]["annotations"].update(
            {**count_annotation, GPU_RESOURCE_ANNOTATION: pool.gpu_resource}
        )


def _scrape_annotations(port: int) -> dict[str, str]:
    """Common annotations by which Prometheus finds `/metrics`. A template's own annotations win."""
    return {"prometheus.io/scrape": "true", "prometheus.io/port": str(port)}


def pod_basics(spec: MultimodalDeploymentSpec, template: PodTemplate, grace_seconds: int) -> Manifest:
    """Pod fields of every component: restricted security, and no token of the API server."""
    pod: Manifest = {
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "securityContext": POD_SECURITY,
        "terminationGracePeriodSeconds": grace_seconds,
    }
    if spec.image.pull_secrets:
        # The API server answers every apply of a list with two equal keys with 500.
        pod["imagePullSecrets"] = [{"name": name} for name in dict.fromkeys(spec.image.pull_secrets)]
    optional_names = {
        "serviceAccountName": template.service_account_name,
        "priorityClassName": template.priority_class_name,
        "runtimeClassName": template.runtime_class_name,
    }
    return pod | {key: value for key, value in optional_names.items() if value is not None}


def probe(path: str, *, period: int, failures: int, port: str = "http") -> Manifest:
    """An HTTP probe on a named port."""
    return {
        "httpGet": {"path": path, "port": port, "scheme": "HTTP"},
        "periodSeconds": period,
        "timeoutSeconds": PROBE_TIMEOUT_SECONDS,
        "failureThreshold": failures,
    }


def resources(wanted: Resources) -> Manifest:
    """Requests and limits. CPU has no limit: throttling shows up as latency. The memory limit equals the request."""
    requests = {k: v for k, v in (("cpu", wanted.cpu), ("memory", wanted.memory)) if v is not None}
    limits: Manifest = {"memory": wanted.memory} if wanted.memory is not None else {}
    return {key: value for key, value in (("requests", requests), ("limits", limits)) if value}


def threads(wanted: Resources) -> int:
    """Compute threads for the CPU request, rounded down but at least 1; 0 (no request): as many as the container may use."""
    if wanted.cpu is None:
        return 0
    cores = Decimal(wanted.cpu[:-1]) / 1000 if wanted.cpu.endswith("m") else Decimal(wanted.cpu)
    return max(1, math.floor(cores))


def nats_environment(scope: RevisionScope, user: str) -> list[Manifest]:
    """Variables for a pod's connection to NATS, as `user` of a managed server.

    The password comes from the Secret in a separate variable: neither a manifest nor the URL, which logs and errors may quote,
    contains it.
    """
    nats = scope.spec.nats
    if nats.managed:
        names = scope.nats_servers if nats.replicas > 1 else (scope.nats,)
        urls = ",".join(f"nats://{scope.nats_host(name)}:{NATS_PORT}" for name in names)
        return [
            {"name": env.NATS_USERNAME, "value": user},
            _secret_variable(env.NATS_PASSWORD, scope.nats, user),
            {"name": env.NATS_URL, "value": urls},
            {"name": env.NATS_INBOX, "value": inbox_of(user)},
        ]
    url = {"name": env.NATS_URL, "value": nats.url}
    if nats.credentials_secret is None:
        return [url]
    return [
        _secret_variable(env.NATS_USERNAME, nats.credentials_secret, "username"),
        _secret_variable(env.NATS_PASSWORD, nats.credentials_secret, "password"),
        url,
    ]


def _secret_variable(variable: str, secret: str, key: str) -> Manifest:
    return {"name": variable, "valueFrom": {"secretKeyRef": {"name": secret, "key": key}}}


def _environment(
    scope: RevisionScope,
    component: Component,
    part: Pool | GatewaySpec,
    port: int,
    nats_user: str,
    admin_port: int | None,
) -> list[Manifest]:
    fixed: list[Manifest] = [
        {"name": env.PIPELINE_CONFIG, "value": f"{CONFIG_FOLDER}/{config_file(component)}"},
        {"name": env.POD_NAME, "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}},
        {"name": env.POD_IP, "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}},
        {"name": env.HTTP_PORT, "value": str(port)},
        *([{"name": env.ADMIN_PORT, "value": str(admin_port)}] if admin_port is not None else []),
        *nats_environment(scope, nats_user),
        {"name": env.THREADS, "value": str(threads(part.resources))},
        *([{"name": env.GPUS, "value": str(part.gpus)}] if isinstance(part, Pool) and part.gpus else []),
        {"name": env.GRACE_SECONDS, "value": str(part.drain_seconds)},
        *_hub_environment(scope.spec),
    ]
    return list({variable["name"]: variable for variable in [*fixed, *own_variables(part.template)]}.values())


def _hub_environment(spec: MultimodalDeploymentSpec) -> list[Manifest]:
    storage = spec.model.storage
    if storage.cache is not None:
        offline = {"name": "HF_HUB_OFFLINE", "value": "1"}
        return [{"name": env.WEIGHTS, "value": MODELS_FOLDER}, offline]
    if storage.type != "Hub":
        return [{"name": "HF_HUB_OFFLINE", "value": "1"}]
    environment: list[Manifest] = [{"name": "HF_HOME", "value": HUB_CACHE}]
    if storage.token_secret is not None:
        source = {"secretKeyRef": {"name": storage.token_secret, "key": "token"}}
        environment.append({"name": "HF_TOKEN", "valueFrom": source})
    return environment


def _show_annotations(pod: Manifest, container: Manifest) -> None:
    """Mount the pod's annotations as a file that follows their changes: it carries drain requests to a worker."""
    annotations = {"path": "annotations", "fieldRef": {"fieldPath": "metadata.annotations"}}
    pod["volumes"].append({"name": "pod", "downwardAPI": {"items": [annotations]}})
    container["volumeMounts"].append({"name": "pod", "mountPath": POD_FACTS, "readOnly": True})
    container["env"].append({"name": env.POD_ANNOTATIONS, "value": f"{POD_FACTS}/annotations"})


def _show_login(scope: RevisionScope, user: str, pod: Manifest, container: Manifest) -> None:
    """Mount the NATS login as files that follow its Secret: a pod that reconnects uses the current password.

    The variables remain: if a key is missing, they make the pod's start fail and name the key.
    """
    nats = scope.spec.nats
    if nats.managed:
        secret, keys = scope.nats, {user: "password"}
    elif nats.credentials_secret is not None:
        secret, keys = nats.credentials_secret, {"username": "username", "password": "password"}
    else:
        return
    items = [{"key": key, "path": path} for key, path in keys.items()]
    source = {"secretName": secret, "items": items, "optional": True}
    pod["volumes"].append({"name": "nats", "secret": source})
    container["volumeMounts"].append({"name": "nats", "mountPath": LOGIN_FOLDER, "readOnly": True})
    container["env"].append({"name": env.NATS_LOGIN, "value": LOGIN_FOLDER})


def _add_model_storage(scope: RevisionScope, pod: Manifest, container: Manifest) -> None:
    storage = scope.spec.model.storage
    if storage.cache is not None:
        cached = {"claimName": claim_of(scope.name, storage.cache), "readOnly": True}
        pod["volumes"].append({"name": "models", "persistentVolumeClaim": cached})
        container["volumeMounts"].append({"name": "models", "mountPath": MODELS_FOLDER, "readOnly": True})
    elif storage.type == "Hub":
        pod["volumes"].append({"name": "hub-cache", "emptyDir": {}})
        container["volumeMounts"].append({"name": "hub-cache", "mountPath": HUB_CACHE})
    elif storage.type == "PersistentVolumeClaim":
        claim = {"claimName": storage.claim_name, "readOnly": True}
        mount: Manifest = {"name": "models", "mountPath": MODELS_FOLDER, "readOnly": True}
        pod["volumes"].append({"name": "models", "persistentVolumeClaim": claim})
        container["volumeMounts"].append(mount | ({"subPath": storage.sub_path} if storage.sub_path else {}))


def _add_feature_disk(scope: RevisionScope, disk: DiskCache, pod: Manifest, container: Manifest) -> None:
    """Mount the volume for the encoder's evicted features.

    The pod writes below its deployment's folder and its own name, since a claim may hold other data.
    """
    if disk.claim_name is not None:
        source: Manifest = {"persistentVolumeClaim": {"claimName": disk.claim_name}}
    else:
        # the kubelet evicts a pod above this limit
        source = {"emptyDir": {"sizeLimit": f"{disk.size_mebibytes * 9 // 8}Mi"}}
    pod["volumes"].append({"name": FEATURES_VOLUME, **source})
    container["volumeMounts"].append({"name": FEATURES_VOLUME, "mountPath": FEATURES_FOLDER})
    folder = f"{FEATURES_FOLDER}/{FEATURES_OF_DEPLOYMENTS}/{scope.namespace}-{scope.name}/$({env.POD_NAME})"
    container["env"] += [
        {"name": env.FEATURE_DISK, "value": folder},
        {"name": env.FEATURE_DISK_MEBIBYTES, "value": str(disk.size_mebibytes)},
    ]


def add_placement(part: Pool | GatewaySpec | NatsSpec, pod: Manifest) -> None:
    """Set where the pods of a component may run."""
    if part.node_selector:
        pod["nodeSelector"] = dict(part.node_selector)
    if part.tolerations:
        pod["tolerations"] = [_toleration(t) for t in part.tolerations]


def _toleration(toleration: Toleration) -> Manifest:
    return toleration.model_dump(by_alias=True, exclude_none=True)
