"""A deployment with a route and an Ingress.

The test plays the part of a gateway controller that reports on routes.
"""

from __future__ import annotations

from typing import Any

from kubernetes import client

from mmd_operator.resources.exposure import GATEWAY_API_GROUP, GATEWAY_API_VERSION, HTTP_ROUTES
from support.cluster.deployments import SPEC
from support.cluster.standin import Namespace

ROUTE: dict[str, Any] = {
    "parentRefs": [{"name": "shared", "namespace": "infra", "sectionName": "https"}],
    "hostnames": ["models.example.com"],
}
INGRESS: dict[str, Any] = {"host": "models.example.com", "tlsSecretName": "models-tls"}
EXPOSED: dict[str, Any] = {
    **SPEC,
    "gateway": {**SPEC.get("gateway", {}), "httpRoute": ROUTE, "ingress": INGRESS},
}
WHERE = (GATEWAY_API_GROUP, GATEWAY_API_VERSION)


def route(namespace: Namespace, name: str = "demo-gateway") -> dict[str, Any]:
    """Read the HTTPRoute.

    Raises:
        LookupError: it does not exist.
    """
    try:
        return dict(namespace.custom.get_namespaced_custom_object(*WHERE, namespace.name, HTTP_ROUTES, name))
    except client.ApiException as error:
        if error.status == 404:
            raise LookupError(name) from error
        raise


def report(namespace: Namespace, generation: int | None = None, **verdicts: tuple[str, str, str]) -> None:
    """Report on the route for its parents, as the controller of their class does.

    `verdicts`: status, reason and message by type of condition. Both conditions that the Gateway API requires
    are True by default.
    """
    http_route = route(namespace)
    by_type = {"Accepted": ("True", "Accepted", ""), "ResolvedRefs": ("True", "ResolvedRefs", ""), **verdicts}
    conditions = [
        {
            "type": kind,
            "status": status,
            "reason": reason,
            "message": message,
            "observedGeneration": generation or http_route["metadata"]["generation"],
            "lastTransitionTime": "2026-01-01T00:00:00Z",
        }
        for kind, (status, reason, message) in by_type.items()
    ]
    parents = [
        {"parentRef": parent, "controllerName": "example.com/controller", "conditions": conditions}
        for parent in http_route["spec"]["parentRefs"]
    ]
    namespace.custom.patch_namespaced_custom_object_status(
        *WHERE, namespace.name, HTTP_ROUTES, http_route["metadata"]["name"], {"status": {"parents": parents}}
    )
