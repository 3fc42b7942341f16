"""Claim for a deployment's weights, and the Job that fills it once for each model, before the pods that mount it start.

The Job needs no GPU and connects to the outside like gateways, so it has their placement and ServiceAccount.
"""

from __future__ import annotations

from mmd_api.contract import environment as env
from mmd_api.contract.weights import EXIT_STATUS, NOT_RETRIED
from mmd_api.spec.model import MODELS_FOLDER, ModelStorage, WeightsCache
from mmd_api.weights import downloads_of
from mmd_operator.resources.naming import (
    ADMIN_PORT,
    WEIGHTS,
    Manifest,
    RevisionScope,
    claim_of,
    template_digest,
)
from mmd_operator.resources.overrides import CONTAINER_SECURITY
from mmd_operator.resources.pods import LAST_WORDS, add_placement, pod_basics

TRIES = 6
"""Retries of the Job's pod, after pauses of 10 s to 6 min."""
DEADLINE_SECONDS = 24 * 3600
GRACE_SECONDS = 5
CPU, MEMORY = "1", "2Gi"
"""Enough for four pieces at a time, their digests, and the libraries."""


def weights_objects(scope: RevisionScope) -> list[Manifest]:
    """The claim, if the operator owns it, and the Job; nothing without a cache. A Job never changes: its name has a digest of its template."""
    storage = scope.spec.model.storage
    if storage.cache is None:
        return []
    template = _template(scope, storage, storage.cache)
    job = {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": scope.metadata(
            f"{scope.name}-{WEIGHTS}-{template_digest(template)[:10]}", WEIGHTS, of_revision=True
        ),
        "spec": {
            "backoffLimit": TRIES,
            "activeDeadlineSeconds": DEADLINE_SECONDS,
            "podFailurePolicy": {
                "rules": [
                    {
                        "action": "FailJob",
                        "onExitCodes": {
                            "containerName": WEIGHTS,
                            "operator": "In",
                            "values": sorted(EXIT_STATUS[reason] for reason in NOT_RETRIED),
                        },
                    },
                    {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
                ]
            },
            "template": template,
        },
    }
    return [*_own_claim(scope, storage.cache), job]


def _own_claim(scope: RevisionScope, cache: WeightsCache) -> list[Manifest]:
    if cache.size_gibibytes is None:
        return []
    spec: Manifest = {
        "accessModes": [cache.access_mode or "ReadWriteMany"],
        "resources": {"requests": {"storage": f"{cache.size_gibibytes}Gi"}},
    }
    if cache.storage_class_name is not None:
        spec["storageClassName"] = cache.storage_class_name
    metadata = scope.metadata(claim_of(scope.name, cache), WEIGHTS, of_revision=False)
    return [{"apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": metadata, "spec": spec}]


def _template(scope: RevisionScope, storage: ModelStorage, cache: WeightsCache) -> Manifest:
    claim = claim_of(scope.name, cache)
    size = f" of {cache.size_gibibytes} GiB" if cache.size_gibibytes is not None else ""
    items = [f"--item={download.field}={download.url}" for download in downloads_of(scope.spec)]
    container: Manifest = {
        "name": WEIGHTS,
        "image": scope.spec.image.worker,  # not the digest that a revision is pinned to later
        "imagePullPolicy": scope.spec.image.pull_policy,
        "command": ["mmd", "fetch-weights"],
        "args": [*items, f"--claim=claim {claim}{size}"],
        "env": _environment(scope),
        "ports": [{"name": "http", "containerPort": ADMIN_PORT, "protocol": "TCP"}],
        "resources": {"requests": {"cpu": CPU, "memory": MEMORY}, "limits": {"memory": MEMORY}},
        "securityContext": CONTAINER_SECURITY,
        "terminationMessagePolicy": LAST_WORDS,
        "volumeMounts": [
            {"name": "tmp", "mountPath": "/tmp"},  # noqa: S108
            {"name": "models", "mountPath": MODELS_FOLDER},
        ],
    }
    if storage.credentials_secret is not None:
        container["envFrom"] = [{"secretRef": {"name": storage.credentials_secret}}]
    pod: Manifest = {
        **pod_basics(scope.spec, scope.spec.gateway.template, GRACE_SECONDS),
        "restartPolicy": "Never",
        "containers": [container],
        "volumes": [
            {"name": "tmp", "emptyDir": {}},
            {"name": "models", "persistentVolumeClaim": {"claimName": claim}},
        ],
    }
    add_placement(scope.spec.gateway, pod)
    return {"metadata": {"labels": scope.labels(WEIGHTS, of_revision=True)}, "spec": pod}


def _environment(scope: RevisionScope) -> list[Manifest]:
    variables: list[Manifest] = [
        {"name": env.WEIGHTS, "value": MODELS_FOLDER},
        {"name": env.HTTP_PORT, "value": str(ADMIN_PORT)},
        {"name": env.POD_NAME, "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}},
        {"name": "HF_HOME", "value": "/tmp/huggingface"},  # noqa: S108
    ]
    storage = scope.spec.model.storage
    if storage.token_secret is not None:
        source = {"secretKeyRef": {"name": storage.token_secret, "key": "token"}}
        name = "HF_TOKEN" if storage.type == "Hub" else env.WEIGHTS_TOKEN
        variables.append({"name": name, "valueFrom": source})
    return variables
