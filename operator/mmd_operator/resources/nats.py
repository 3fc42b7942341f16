"""Managed NATS servers with JetStream: one pod or a cluster (see `nats_cluster`), their configuration, users and Services.

Every user has two names: its own, and one that accepts the password from before the last rotation. A rotation moves the password
from the first to the second and restarts the servers, which take their passwords from their environment; no client is locked out.

Unless the spec has a claim, a store lives as long as its pod. Workers republish the encode jobs that they need, so losing the store
costs time but no request, and the cluster needs no storage class.
"""

from __future__ import annotations

import hashlib
import json
import secrets
from base64 import b64encode
from collections.abc import Mapping

from mmd_api.contract.subjects import USERS, permissions_of, previous_of
from mmd_api.pipeline import inputs_of
from mmd_api.resource import GROUP
from mmd_operator.resources import nats_cluster
from mmd_operator.resources.naming import (
    CONFIG_HASH_ANNOTATION,
    INPUTS_ANNOTATION,
    NATS_MONITOR_PORT,
    NATS_PORT,
    NATS_ROUTE_PORT,
    Manifest,
    RevisionScope,
)
from mmd_operator.resources.overrides import CONTAINER_SECURITY, own_variables, with_overrides
from mmd_operator.resources.pods import (
    LAST_WORDS,
    add_placement,
    pod_basics,
    probe,
    resources,
)

CONFIG_FOLDER = "/etc/nats"
STORE_FOLDER = "/data"
MAX_PAYLOAD_BYTES = 8 * 2**20
"""Larger than any chunk: a request for a prompt of a million tokens is one message."""
PASSWORD_PREFIX = "NATS_PASSWORD_"  # noqa: S105 - names of variables, not a password
PASSWORD_KEYS = (*USERS, *map(previous_of, USERS))
"""Keys of the Secret with the passwords of clients."""
GENERATION_ANNOTATION = f"{GROUP}/password-generation"
KEYS_ANNOTATION = f"{GROUP}/password-keys"
"""On the Secret: which keys it has, since the operator does not read them."""


def nats_objects(scope: RevisionScope) -> list[Manifest]:
    """Secret, ConfigMap, Services and StatefulSet of NATS. The Secret has no passwords: `with_passwords` adds them at creation."""
    metadata = scope.metadata(scope.nats, "nats", of_revision=False)
    configuration = _configuration(scope)
    ports = {"client": NATS_PORT, "monitor": NATS_MONITOR_PORT}
    generation = str(scope.spec.nats.password_generation)
    is_cluster = scope.spec.nats.replicas > 1
    keys = (*PASSWORD_KEYS, nats_cluster.ROUTES_KEY) if is_cluster else PASSWORD_KEYS
    secret_annotations = {GENERATION_ANNOTATION: generation, KEYS_ANNOTATION: ",".join(keys)}
    secret = {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": {**metadata, "annotations": secret_annotations},
        "type": "Opaque",
    }
    config_map = {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": metadata,
        "data": {"nats.conf": configuration},
    }
    service = {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": metadata,
        "spec": {
            "type": "ClusterIP",
            "selector": scope.selector("nats"),
            "ports": [{"name": n, "port": p, "targetPort": n, "protocol": "TCP"} for n, p in ports.items()],
        },
    }
    nats = scope.spec.nats
    container: Manifest = {
        "name": "nats",
        "image": scope.spec.image.nats,
        "imagePullPolicy": scope.spec.image.pull_policy,
        "command": ["nats-server"],
        "args": ["--config", f"{CONFIG_FOLDER}/nats.conf"],
        "ports": [{"name": n, "containerPort": p, "protocol": "TCP"} for n, p in ports.items()],
        "envFrom": [{"prefix": PASSWORD_PREFIX, "secretRef": {"name": scope.nats}}],
        "resources": resources(nats.resources),
        "startupProbe": probe(
            nats_cluster.ALIVE if is_cluster else "/healthz", period=1, failures=120, port="monitor"
        ),
        "livenessProbe": probe(nats_cluster.ALIVE, period=10, failures=3, port="monitor"),
        "readinessProbe": probe("/healthz", period=2, failures=2, port="monitor"),
        "securityContext": CONTAINER_SECURITY,
        "terminationMessagePolicy": LAST_WORDS,
        "volumeMounts": [
            {"name": "config", "mountPath": CONFIG_FOLDER, "readOnly": True},
            {"name": "store", "mountPath": STORE_FOLDER},
        ],
    }
    if variables := [*(nats_cluster.environment(scope) if is_cluster else ()), *own_variables(nats.template)]:
        container["env"] = variables
    if is_cluster:
        container["ports"].append({"name": "routes", "containerPort": NATS_ROUTE_PORT, "protocol": "TCP"})
    # The server's limit counts messages only: holes of removed messages take as much again until it compacts them. A pod over the size
    # limit of its volume is evicted.
    volume_size = f"{nats.storage_mebibytes * 5 // 2}Mi"
    pod: Manifest = {
        **pod_basics(scope.spec, nats.template, nats.template.termination_grace_period_seconds),
        "containers": [container],
        "volumes": [{"name": "config", "configMap": {"name": scope.nats}}],
    }
    claims: Manifest = {}
    if nats.storage == "PersistentVolumeClaim":
        claims = _claims(scope, volume_size)
    else:
        pod["volumes"].append({"name": "store", "emptyDir": {"sizeLimit": volume_size}})
    add_placement(nats, pod)
    if is_cluster:
        nats_cluster.spread(scope, pod)
    config_hash = hashlib.sha256(configuration.encode()).hexdigest()[:16]
    planned: Manifest = {
        "metadata": {
            "labels": {**nats.template.labels, **scope.labels("nats", of_revision=False)},
            "annotations": {
                **nats.template.annotations,
                INPUTS_ANNOTATION: inputs_of(scope.spec, "nats"),
                CONFIG_HASH_ANNOTATION: config_hash,
                GENERATION_ANNOTATION: generation,
            },
        },
        "spec": pod,
    }
    stateful_set = {
        "apiVersion": "apps/v1",
        "kind": "StatefulSet",
        "metadata": metadata,
        "spec": {
            "replicas": nats.replicas,
            "serviceName": scope.nats,
            **claims,
            "podManagementPolicy": "Parallel",
            "updateStrategy": {"type": "RollingUpdate"},
            "selector": {"matchLabels": scope.selector("nats")},
            "template": with_overrides(scope, "nats", nats.template, planned),
        },
    }
    server_services = nats_cluster.services(scope, ports) if is_cluster else []
    return [secret, config_map, service, *server_services, stateful_set]


def _claims(scope: RevisionScope, size: str) -> Manifest:
    """StatefulSet fields that give each server a volume. The volume outlives pods, and is deleted with the deployment."""
    claim: Manifest = {"accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": size}}}
    if name := scope.spec.nats.storage_class_name:
        claim["storageClassName"] = name
    metadata = {"name": "store", "labels": scope.labels("nats", of_revision=False)}
    template = {"apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": metadata, "spec": claim}
    return {
        "volumeClaimTemplates": [template],
        "persistentVolumeClaimRetentionPolicy": {"whenDeleted": "Delete", "whenScaled": "Retain"},
    }


def password_keys(secret: Manifest) -> list[str]:
    """Keys that the Secret of `nats_objects` needs; without annotations, the clients' keys."""
    annotations = secret.get("metadata", {}).get("annotations", {})
    return annotations[KEYS_ANNOTATION].split(",") if KEYS_ANNOTATION in annotations else list(PASSWORD_KEYS)


def with_passwords(secret: Manifest) -> Manifest:
    """The Secret with a new random password for every user, under both its names, and for the routes of a cluster."""
    return {**secret, "stringData": {key: _password() for key in password_keys(secret)}}


def password_changes(secret: Manifest, present: Mapping[str, str]) -> list[Manifest]:
    """JSON patch that brings an existing Secret to `secret`, without knowing its passwords. `present`: its annotations.

    Missing keys are added, and no other key is touched. For another generation, every password moves to the user's second name, and
    the first name gets a new password.
    """
    desired = secret["metadata"]["annotations"]
    recorded_keys = present.get(KEYS_ANNOTATION)
    # a Secret without the annotation was created before second names existed
    existing_keys = recorded_keys.split(",") if recorded_keys else USERS
    operations: list[Manifest] = [_set(key) for key in password_keys(secret) if key not in existing_keys]
    if present.get(GENERATION_ANNOTATION, "1") != desired[GENERATION_ANNOTATION]:
        for user in USERS:
            if user in existing_keys:
                second = f"/data/{previous_of(user)}"
                operations += [{"op": "copy", "from": f"/data/{user}", "path": second}, _set(user)]
    if operations or recorded_keys is None:
        # keys of a former cluster that is one server now
        other_keys = [key for key in existing_keys if key not in password_keys(secret)]
        annotations = {**present, **desired, KEYS_ANNOTATION: ",".join([*password_keys(secret), *other_keys])}
        operations.append({"op": "add", "path": "/metadata/annotations", "value": annotations})
    return operations


def _set(key: str) -> Manifest:
    value = b64encode(_password().encode()).decode()
    return {"op": "add", "path": f"/data/{key}", "value": value}


def _password() -> str:
    return f"p{secrets.token_hex(24)}"  # a letter first: nats-server reads numbers as numbers


def users_configuration(namespace: str, name: str) -> str:
    """The part of nats-server's configuration that defines permissions; passwords come from its environment."""
    lines = ["authorization {", "  users = ["]
    for user, login in ((owner, login) for owner in USERS for login in (owner, previous_of(owner))):
        permissions = permissions_of(user, namespace, name)
        lines += [
            "    {",
            f"      user: {login}, password: ${PASSWORD_PREFIX}{login}",
            "      permissions: {",
            f"        publish: {json.dumps(permissions.publish)}",
            f"        subscribe: {json.dumps(permissions.subscribe)}",
            "      }",
            "    }",
        ]
    return "\n".join([*lines, "  ]", "}", ""])


def _configuration(scope: RevisionScope) -> str:
    """Configuration of nats-server."""
    is_cluster = scope.spec.nats.replicas > 1
    name = f"${nats_cluster.SERVER_NAME}" if is_cluster else scope.nats
    # a server that ran alone cannot bring its streams into a cluster
    store = f"{STORE_FOLDER}/cluster" if is_cluster else STORE_FOLDER
    return f"""\
server_name: {name}
port: {NATS_PORT}
http_port: {NATS_MONITOR_PORT}
max_payload: {MAX_PAYLOAD_BYTES}
jetstream {{
  store_dir: {store}
  max_memory_store: 64MB
  max_file_store: {scope.spec.nats.storage_mebibytes}MB
}}
{nats_cluster.configuration(scope) if is_cluster else ""}{users_configuration(scope.namespace, scope.name)}"""
