"""Deployment and Service of the gateway, the only part of a deployment that clients connect to."""

from __future__ import annotations

from mmd_api.contract import environment as env
from mmd_api.contract import paths
from mmd_api.contract.subjects import GATEWAY_USER
from mmd_api.spec.exposure import ServiceSpec
from mmd_api.spec.gateway import LEAVE_SERVICE_SECONDS, TLS_CERTIFICATE, TLS_KEY, AuthSpec, TlsSpec
from mmd_api.tenants import KEYS_FILE
from mmd_operator.resources.naming import (
    ADMIN_PORT,
    ADMIN_PORT_NAME,
    BUILT_ANNOTATION,
    GATEWAY_PORT,
    KEYS_VOLUME,
    PICKER_PORT,
    PICKER_PORT_NAME,
    TLS_VOLUME,
    Manifest,
    RevisionScope,
    template_digest,
)
from mmd_operator.resources.pods import probe, worker_pod

KEYS_FOLDER = "/etc/mmd-keys"
TLS_FOLDER = "/etc/mmd-tls"
READINESS_PERIOD_SECONDS = 2
READINESS_FAILURES = 15
"""A slow gateway, or one that is looking for its message server, still holds the requests it receives. Removing it from the Service
would refuse them, and lose requests if it is the only gateway or all gateways are equally slow. A crash removes it at once.
"""


def gateway_objects(scope: RevisionScope) -> list[Manifest]:
    """Service and Deployment of the gateway. Its replicas come from the spec: no scaler owns them."""
    metadata = scope.metadata(scope.gateway, "gateway", of_revision=False)
    service: Manifest = {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": metadata,
        "spec": {
            "type": scope.spec.gateway.service.type,
            "selector": scope.selector("gateway"),
            "ports": [{"name": "http", "port": GATEWAY_PORT, "targetPort": "http", "protocol": "TCP"}],
        },
    }
    _balance(scope.spec.gateway.service, service)
    template = worker_pod(
        scope, "gateway", scope.spec.gateway, ["mmd", "gateway"], [], GATEWAY_PORT, GATEWAY_USER, ADMIN_PORT
    )
    container = template["spec"]["containers"][0]
    if scope.spec.gateway.auth is not None:
        _show_keys(scope.spec.gateway.auth, template["spec"], container)
    container["readinessProbe"] = probe(
        paths.READYZ, period=READINESS_PERIOD_SECONDS, failures=READINESS_FAILURES
    )
    if scope.spec.gateway.tls is not None:
        service["spec"]["ports"][0]["appProtocol"] = "https"
        _show_certificate(scope.spec.gateway.tls, template["spec"], container)
    if scope.spec.gateway.inference_pool is not None:
        port = {"name": PICKER_PORT_NAME, "protocol": "TCP"}
        plain = {} if scope.spec.gateway.inference_pool.picker_tls else {"appProtocol": "kubernetes.io/h2c"}
        service["spec"]["ports"].append(
            {**port, "port": PICKER_PORT, "targetPort": PICKER_PORT_NAME, **plain}
        )
        container["ports"].append({**port, "containerPort": PICKER_PORT})
        container["env"].append({"name": env.PICKER_PORT, "value": str(PICKER_PORT)})
    # Nodes learn only a moment later that the pod leaves the Service; until then it serves as before.
    container["lifecycle"] = {"preStop": {"exec": {"command": ["sleep", str(LEAVE_SERVICE_SECONDS)]}}}
    deployment = {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": {**metadata, "annotations": {BUILT_ANNOTATION: template_digest(template)}},
        "spec": {
            "replicas": scope.spec.gateway.replicas,
            "strategy": {"type": "RollingUpdate", "rollingUpdate": {"maxSurge": 1, "maxUnavailable": 0}},
            "selector": {"matchLabels": scope.selector("gateway")},
            "template": template,
        },
    }
    return [service, deployment]


def _balance(spec: ServiceSpec, service: Manifest) -> None:
    """Set the fields that configure the Service's load balancer."""
    if spec.annotations:
        service["metadata"] = {**service["metadata"], "annotations": dict(spec.annotations)}
    if spec.load_balancer_class is not None:
        service["spec"]["loadBalancerClass"] = spec.load_balancer_class
    if spec.load_balancer_source_ranges:
        service["spec"]["loadBalancerSourceRanges"] = list(spec.load_balancer_source_ranges)


def _show_keys(auth: AuthSpec, pod: Manifest, container: Manifest) -> None:
    """Mount the file of API keys, which follows its Secret.

    It is not optional: a gateway starts only if the Secret exists, and keeps its file if the Secret is deleted.
    """
    items = [{"key": KEYS_FILE, "path": KEYS_FILE}]
    pod["volumes"].append({"name": KEYS_VOLUME, "secret": {"secretName": auth.keys_secret, "items": items}})
    container["volumeMounts"].append({"name": KEYS_VOLUME, "mountPath": KEYS_FOLDER, "readOnly": True})
    container["env"].append({"name": env.KEYS_FILE, "value": f"{KEYS_FOLDER}/{KEYS_FILE}"})


def _show_certificate(tls: TlsSpec, pod: Manifest, container: Manifest) -> None:
    """Mount the TLS certificate and its key like the API keys. Probes use the admin port: without a certificate, the clients' port is closed."""
    items = [{"key": name, "path": name} for name in (TLS_CERTIFICATE, TLS_KEY)]
    pod["volumes"].append({"name": TLS_VOLUME, "secret": {"secretName": tls.secret_name, "items": items}})
    container["volumeMounts"].append({"name": TLS_VOLUME, "mountPath": TLS_FOLDER, "readOnly": True})
    container["env"].append({"name": env.TLS_FOLDER, "value": TLS_FOLDER})
    for kind in ("startupProbe", "livenessProbe", "readinessProbe"):
        container[kind]["httpGet"]["port"] = ADMIN_PORT_NAME
