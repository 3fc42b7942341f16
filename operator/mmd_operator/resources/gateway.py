"""Deployment and Service of the gateway, the only part of a deployment that clients speak to."""

from __future__ import annotations

from mmd_api.subjects import GATEWAY_USER
from mmd_operator.resources.naming import GATEWAY_PORT, Manifest, Scope
from mmd_operator.resources.pods import probe, worker_pod

LEAVE_SERVICE_SECONDS = 4
READINESS_PERIOD_SECONDS = 2
READINESS_FAILURES = 15
"""A gateway that is slow, or looks for its message server, holds what it is sent. Taken out of the Service it would refuse it:
where it is the only one, and where all are slow for the same reason, that loses requests. A crash takes it out at once.
"""


def gateway_objects(scope: Scope) -> list[Manifest]:
    """Service and Deployment. The gateway's replicas are the spec's: no scaler owns them."""
    metadata = scope.metadata(scope.gateway, "gateway", of_revision=False)
    service = {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": metadata,
        "spec": {
            "type": "ClusterIP",
            "selector": scope.selector("gateway"),
            "ports": [{"name": "http", "port": GATEWAY_PORT, "targetPort": "http", "protocol": "TCP"}],
        },
    }
    template = worker_pod(
        scope, "gateway", scope.spec.gateway, ["mmd", "gateway"], [], GATEWAY_PORT, GATEWAY_USER
    )
    container = template["spec"]["containers"][0]
    container["readinessProbe"] = probe(
        "/readyz", period=READINESS_PERIOD_SECONDS, failures=READINESS_FAILURES
    )
    # Nodes hear a moment later that the pod leaves the Service: until then it goes on as if nothing were.
    container["lifecycle"] = {"preStop": {"exec": {"command": ["sleep", str(LEAVE_SERVICE_SECONDS)]}}}
    deployment = {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": metadata,
        "spec": {
            "replicas": scope.spec.gateway.replicas,
            "strategy": {"type": "RollingUpdate", "rollingUpdate": {"maxSurge": 1, "maxUnavailable": 0}},
            "selector": {"matchLabels": scope.selector("gateway")},
            "template": template,
        },
    }
    return [service, deployment]
