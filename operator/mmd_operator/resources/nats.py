"""The managed NATS server with JetStream: one pod, its configuration, its users and its Service.

Its store lives as long as its pod. Encode jobs are published again by the workers that need them, so a lost store costs time and no
request, and no storage class is asked of the cluster.
"""

from __future__ import annotations

import hashlib
import json
import secrets

from mmd_api.spec import PodTemplate
from mmd_api.subjects import USERS, permissions_of
from mmd_operator.resources.naming import (
    CONFIG_HASH_ANNOTATION,
    NATS_MONITOR_PORT,
    NATS_PORT,
    Manifest,
    Scope,
)
from mmd_operator.resources.pods import CONTAINER_SECURITY, LAST_WORDS, pod_basics, probe, resources

CONFIG_FOLDER = "/etc/nats"
STORE_FOLDER = "/data"
MAX_PAYLOAD_BYTES = 8 * 2**20
"""Larger than any chunk: a request for a prompt of a million tokens is one message."""
PASSWORD_PREFIX = "NATS_PASSWORD_"  # noqa: S105 - names of variables, no password


def nats_objects(scope: Scope) -> list[Manifest]:
    """Secret, ConfigMap, Service and StatefulSet. The Secret has no passwords: `with_passwords` is for whoever creates it."""
    metadata = scope.metadata(scope.nats, "nats", of_revision=False)
    configuration = _configuration(scope)
    ports = {"client": NATS_PORT, "monitor": NATS_MONITOR_PORT}
    secret = {"apiVersion": "v1", "kind": "Secret", "metadata": metadata, "type": "Opaque"}
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
    container = {
        "name": "nats",
        "image": scope.spec.image.nats,
        "imagePullPolicy": scope.spec.image.pull_policy,
        "command": ["nats-server"],
        "args": ["--config", f"{CONFIG_FOLDER}/nats.conf"],
        "ports": [{"name": n, "containerPort": p, "protocol": "TCP"} for n, p in ports.items()],
        "envFrom": [{"prefix": PASSWORD_PREFIX, "secretRef": {"name": scope.nats}}],
        "resources": resources(scope.spec.nats.resources),
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
                    "labels": scope.labels("nats", of_revision=False),
                    "annotations": {CONFIG_HASH_ANNOTATION: config_hash},
                },
                "spec": {
                    **pod_basics(scope.spec, PodTemplate(termination_grace_period_seconds=30)),
                    "containers": [container],
                    "volumes": [
                        {"name": "config", "configMap": {"name": scope.nats}},
                        {"name": "store", "emptyDir": {"sizeLimit": f"{_store_mebibytes(scope) * 9 // 8}Mi"}},
                    ],
                },
            },
        },
    }
    return [secret, config_map, service, stateful_set]


def with_passwords(secret: Manifest) -> Manifest:
    """The Secret with a new random password for every user (a letter first: nats-server reads numbers as numbers)."""
    return {**secret, "stringData": {user: f"p{secrets.token_hex(24)}" for user in USERS}}


def users_configuration(namespace: str, name: str) -> str:
    """The part of nats-server's configuration that says who may do what; passwords come from its environment."""
    lines = ["authorization {", "  users = ["]
    for user in USERS:
        may = permissions_of(user, namespace, name)
        lines += [
            "    {",
            f"      user: {user}, password: ${PASSWORD_PREFIX}{user}",
            "      permissions: {",
            f"        publish: {json.dumps(may.publish)}",
            f"        subscribe: {json.dumps(may.subscribe)}",
            "      }",
            "    }",
        ]
    return "\n".join([*lines, "  ]", "}", ""])


def _store_mebibytes(scope: Scope) -> int:
    return scope.spec.nats.storage_mebibytes


def _configuration(scope: Scope) -> str:
    """Configuration of nats-server."""
    return f"""\
server_name: {scope.nats}
port: {NATS_PORT}
http_port: {NATS_MONITOR_PORT}
max_payload: {MAX_PAYLOAD_BYTES}
jetstream {{
  store_dir: {STORE_FOLDER}
  max_memory_store: 64MB
  max_file_store: {_store_mebibytes(scope)}MB
}}
{users_configuration(scope.namespace, scope.name)}"""
