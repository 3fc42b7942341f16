"""Objects that expose the gateway outside the cluster: an HTTPRoute to its Service or to an InferencePool, and an Ingress."""

from __future__ import annotations

from mmd_api.spec.exposure import HttpRouteSpec, IngressSpec, ParentRef
from mmd_operator.resources.naming import GATEWAY_PORT, PICKER_PORT, Manifest, RevisionScope

GATEWAY_API_GROUP = "gateway.networking.k8s.io"
GATEWAY_API_VERSION = "v1"
HTTP_ROUTES = "httproutes"
INSTALL_GATEWAY_API = "kubectl apply --server-side -f https://github.com/kubernetes-sigs/gateway-api/releases/download/v1.4.0/standard-install.yaml"
INFERENCE_GROUP = "inference.networking.k8s.io"
INFERENCE_VERSION = "v1"
INFERENCE_POOLS = "inferencepools"
INSTALL_INFERENCE_EXTENSION = "kubectl apply --server-side -f https://github.com/kubernetes-sigs/gateway-api-inference-extension/releases/download/v1.3.0/manifests.yaml"
EXPOSING_KINDS = frozenset({"HTTPRoute", "InferencePool", "Ingress"})
"""Kinds that no pod needs: a rollout waits for none of them, and an object that is no longer in the spec is removed at once."""


def exposure_objects(scope: RevisionScope) -> list[Manifest]:
    """The exposing objects that the spec asks for."""
    gateway, objects = scope.spec.gateway, []
    if gateway.inference_pool is not None:
        objects.append(_inference_pool(scope))
    if gateway.http_route is not None:
        objects.append(_http_route(scope, gateway.http_route))
    if gateway.ingress is not None:
        objects.append(_ingress(scope, gateway.ingress))
    return objects


def _http_route(scope: RevisionScope, route: HttpRouteSpec) -> Manifest:
    """HTTPRoute without a timeout: the gateway has its own deadline for every request, and an answer may stream until then."""
    backend = _service(scope.gateway)
    if scope.spec.gateway.inference_pool is not None:
        backend = {"group": INFERENCE_GROUP, "kind": "InferencePool", "name": scope.gateway}
    rule = {
        "backendRefs": [backend],
        "timeouts": {"request": "0s"},
    }
    spec: Manifest = {"parentRefs": [_parent(parent) for parent in route.parent_refs], "rules": [rule]}
    if route.hostnames:
        spec["hostnames"] = list(route.hostnames)
    return {
        "apiVersion": f"{GATEWAY_API_GROUP}/{GATEWAY_API_VERSION}",
        "kind": "HTTPRoute",
        "metadata": _metadata(scope, route.annotations),
        "spec": spec,
    }


def to_service(route: Manifest) -> Manifest:
    """The HTTPRoute with the gateway's Service, which has the route's name, as its backend."""
    (rule,) = route["spec"]["rules"]
    rule = {**rule, "backendRefs": [_service(route["metadata"]["name"])]}
    return {**route, "spec": {**route["spec"], "rules": [rule]}}


def _service(name: str) -> Manifest:
    return {"name": name, "port": GATEWAY_PORT}


def _inference_pool(scope: RevisionScope) -> Manifest:
    """InferencePool with the gateway's pods as endpoints; each of them answers for all.

    FailOpen: if no picker answers, the proxy chooses a pod if it can. Each pod takes any request, and checks keys and limits itself.
    Envoy cannot choose once it has sent a piece of the request's body.
    """
    picker = {"name": scope.gateway, "port": {"number": PICKER_PORT}, "failureMode": "FailOpen"}
    return {
        "apiVersion": f"{INFERENCE_GROUP}/{INFERENCE_VERSION}",
        "kind": "InferencePool",
        "metadata": _metadata(scope, {}),
        "spec": {
            "selector": {"matchLabels": scope.selector("gateway")},
            "targetPorts": [{"number": GATEWAY_PORT}],
            "endpointPickerRef": picker,
        },
    }


def _parent(parent: ParentRef) -> Manifest:
    fields = {"name": parent.name, "namespace": parent.namespace, "sectionName": parent.section_name}
    return {key: value for key, value in fields.items() if value is not None}


def _ingress(scope: RevisionScope, ingress: IngressSpec) -> Manifest:
    backend = {"service": {"name": scope.gateway, "port": {"name": "http"}}}
    rule: Manifest = {"http": {"paths": [{"path": "/", "pathType": "Prefix", "backend": backend}]}}
    if ingress.host is not None:
        rule = {"host": ingress.host, **rule}
    spec: Manifest = {"rules": [rule]}
    if ingress.ingress_class_name is not None:
        spec["ingressClassName"] = ingress.ingress_class_name
    if ingress.tls_secret_name is not None:
        hosts = {"hosts": [ingress.host]} if ingress.host is not None else {}
        spec["tls"] = [{**hosts, "secretName": ingress.tls_secret_name}]
    return {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "Ingress",
        "metadata": _metadata(scope, ingress.annotations),
        "spec": spec,
    }


def _metadata(scope: RevisionScope, annotations: dict[str, str]) -> Manifest:
    metadata = scope.metadata(scope.gateway, "gateway", of_revision=False)
    return {**metadata, "annotations": dict(annotations)} if annotations else metadata
