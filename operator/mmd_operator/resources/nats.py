"""The managed NATS server with JetStream: one pod, its configuration, its users and its Service.

Every user has two names: its own, and one that accepts the password from before the last rotation. A rotation moves the password
from the first to the second and restarts the server, which takes its passwords from its environment; no client is locked out.

Its store lives as long as its pod. Encode jobs are published again by the workers that need them, so losing the store costs time but
no request, and the cluster needs no storage class.
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
from mmd_operator.resources.naming import (
    CONFIG_HASH_ANNOTATION,
    INPUTS_ANNOTATION,
    NATS_MONITOR_PORT,
    NATS_PORT,
    Manifest,
    RevisionScope,
)
from mmd_operator.resources.pods import (
    CONTAINER_SECURITY,
    LAST_WORDS,
    add_placement,
    own_variables,
    pod_basics,
    probe,
    resources,
)

CONFIG_FOLDER = "/etc/nats"
STORE_FOLDER = "/data"
MAX_PAYLOAD_BYTES = 8 * 2**20
"""Larger than any chunk: a request for a prompt of a million tokens is one message."""
PASSWORD_PREFIX = "NATS_PASSWORD_"  # noqa: S105 - names of variables, no password
PASSWORD_KEYS = (*USERS, *map(previous_of, USERS))
"""Keys of the Secret with the passwords."""
GENERATION_ANNOTATION = f"{GROUP}/password-generation"
KEYS_ANNOTATION = f"{GROUP}/password-keys"
"""On the Secret: which keys it has, since the operator does not read them."""


def nats_objects(scope: RevisionScope) -> list[Manifest]:
    """Secret, ConfigMap, Service and StatefulSet. The Secret has no passwords: `with_passwords` adds them at creation."""
    metadata = scope.metadata(scope.nats, "nats", of_revision=False)
    configuration = _configuration(scope)
    ports = {"client": NATS_PORT, "monitor": NATS_MONITOR_PORT}
    generation = str(scope.spec.nats.password_generation)
    marks = {GENERATION_ANNOTATION: generation, KEYS_ANNOTATION: ",".join(PASSWORD_KEYS)}
    secret = {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": {**metadata, "annotations": marks},
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
        "startupProbe": probe("/healthz", period=1, failures=120, port="monitor"),
        "livenessProbe": probe("/healthz?js-server-only=true", period=10, failures=3, port="monitor"),
        "readinessProbe": probe("/healthz", period=2, failures=2, port="monitor"),
        "securityContext": CONTAINER_SECURITY,
        "terminationMessagePolicy": LAST_WORDS,
        "volumeMounts": [
            {"name": "config", "mountPath": CONFIG_FOLDER, "readOnly": True},
            {"name": "store", "mountPath": STORE_FOLDER},
        ],
    }
    if own := own_variables(nats.template):
        container["env"] = own
    pod: Manifest = {
        **pod_basics(scope.spec, nats.template, nats.template.termination_grace_period_seconds),
        "containers": [container],
        "volumes": [
            {"name": "config", "configMap": {"name": scope.nats}},
            {"name": "store", "emptyDir": {"sizeLimit": f"{nats.storage_mebibytes * 9 // 8}Mi"}},
        ],
    }
    add_placement(nats, pod)
    config_hash = hashlib.sha256(configuration.encode()).hexdigest()[:16]
    stateful_set = {
        "apiVersion": "apps/v1",
        "kind": "StatefulSet",
        "metadata": metadata,
        "spec": {
            "replicas": 1,
            "serviceName": scope.nats,
            "podManagementPolicy": "Parallel",
            "updateStrategy": {"type": "RollingUpdate"},
            "selector": {"matchLabels": scope.selector("nats")},
            "template": {
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
            },
        },
    }
    return [secret, config_map, service, stateful_set]


def with_passwords(secret: Manifest) -> Manifest:
    """The Secret with a new random password for every user, under both its names."""
    return {**secret, "stringData": {key: _password() for key in PASSWORD_KEYS}}


def password_changes(secret: Manifest, present: Mapping[str, str]) -> list[Manifest]:
    """JSON patch that brings an existing Secret to `secret`, without knowing its passwords. `present`: its annotations.

    Keys that it lacks are added and no other is touched; for another generation, every password moves to the user's second name, and the
    first gets a new one.
    """
    wanted = secret["metadata"]["annotations"]
    marked = present.get(KEYS_ANNOTATION)
    known = marked.split(",") if marked else USERS  # created before second names existed
    operations: list[Manifest] = [_set(key) for key in PASSWORD_KEYS if key not in known]
    if present.get(GENERATION_ANNOTATION, "1") != wanted[GENERATION_ANNOTATION]:
        for user in USERS:
            if user in known:
                second = f"/data/{previous_of(user)}"
                operations += [{"op": "copy", "from": f"/data/{user}", "path": second}, _set(user)]
    if operations or marked is None:
        annotations = {**present, **wanted}
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
    for user, login in ((of, login) for of in USERS for login in (of, previous_of(of))):
        may = permissions_of(user, namespace, name)
        lines += [
            "    {",
            f"      user: {login}, password: ${PASSWORD_PREFIX}{login}",
            "      permissions: {",
            f"        publish: {json.dumps(may.publish)}",
            f"        subscribe: {json.dumps(may.subscribe)}",
            "      }",
            "    }",
        ]
    return "\n".join([*lines, "  ]", "}", ""])


def _configuration(scope: RevisionScope) -> str:
    """Configuration of nats-server."""
    return f"""\
server_name: {scope.nats}
port: {NATS_PORT}
http_port: {NATS_MONITOR_PORT}
max_payload: {MAX_PAYLOAD_BYTES}
jetstream {{
  store_dir: {STORE_FOLDER}
  max_memory_store: 64MB
  max_file_store: {scope.spec.nats.storage_mebibytes}MB
}}
{users_configuration(scope.namespace, scope.name)}"""
