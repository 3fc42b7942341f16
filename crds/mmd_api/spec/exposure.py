"""What lets clients outside the cluster reach the gateway: a route and a pool of the Gateway API, an Ingress, a load balancer."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from mmd_api.base import ApiModel
from mmd_api.rule import Rule
from mmd_api.spec.fields import Annotations, Name, NamespaceName, QualifiedName
from mmd_api.spec.pods import without_reserved_keys

Hostname = Annotated[
    str,
    Field(
        max_length=253,
        pattern=r"^(\*\.)?([a-z0-9]([-a-z0-9]*[a-z0-9])?\.)*[a-z]([-a-z0-9]*[a-z0-9])?$",
    ),
]
"""A DNS name in lower case, or a wildcard for its subdomains. Its last label begins with a letter, so that it is no IP address."""


class ParentRef(ApiModel):
    """Gateway that a route attaches to."""

    name: Name
    """Name of the Gateway."""
    namespace: NamespaceName | None = None
    """Namespace of the Gateway, whose listeners must allow routes from this one. Defaults to the namespace of the deployment."""
    section_name: Name | None = None
    """Name of a listener of the Gateway. Defaults to all that admit the route."""


def _parents_differ(route: HttpRouteSpec) -> bool:
    parents = [(p.namespace, p.name) for p in route.parent_refs]
    return all(
        route.parent_refs.count(p) == 1
        and (p.section_name is not None or parents.count((p.namespace, p.name)) == 1)
        for p in route.parent_refs
    )


def _cel_same(field: str) -> str:
    """CEL for p and q having the same optional field.

    The API server finds a bound only for the cost of comparing the fields themselves.
    """
    return f"(has(q.{field}) ? has(p.{field}) && q.{field} == p.{field} : !has(p.{field}))"


_CEL_SAME_GATEWAY = f"q.name == p.name && {_cel_same('__namespace__')}"
HTTP_ROUTE = (
    Rule(
        field="parentRefs",
        cel=f"self.parentRefs.all(p, self.parentRefs.exists_one(q, {_CEL_SAME_GATEWAY} && {_cel_same('sectionName')})"
        f" && (has(p.sectionName) || self.parentRefs.exists_one(q, {_CEL_SAME_GATEWAY})))",
        holds=_parents_differ,
        problem="a Gateway appears twice, and a route attaches to each of its listeners once",
        remedy="remove the second entry, or give each its own sectionName",
    ),
    without_reserved_keys("annotations"),
)


class HttpRouteSpec(ApiModel, rules=HTTP_ROUTE):
    """HTTPRoute of the Gateway API that sends requests to the gateway."""

    parent_refs: Annotated[list[ParentRef], Field(min_length=1, max_length=8)]
    """Gateways that the route attaches to."""
    hostnames: Annotated[list[Hostname], Field(max_length=16)] = []
    """Host names that clients use. Without any, the route takes requests for every name of the listeners."""
    annotations: Annotations = {}
    """Annotations of the HTTPRoute."""


INGRESS = (without_reserved_keys("annotations"),)


class IngressSpec(ApiModel, rules=INGRESS):
    """Ingress that sends requests to the gateway."""

    ingress_class_name: Name | None = None
    """Name of the IngressClass. Defaults to the default class of the cluster."""
    host: Hostname | None = None
    """Host name that clients use. Without it, the Ingress takes requests for every name."""
    tls_secret_name: Name | None = None
    """Name of a Secret of type kubernetes.io/tls with which the Ingress terminates TLS."""
    annotations: Annotations = {}
    """Annotations of the Ingress, which configure its controller's timeouts and sizes (docs/exposure.md)."""


_OCTET = r"(25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])"
Cidr = Annotated[
    str,
    Field(
        max_length=64,
        pattern=rf"^({_OCTET}(\.{_OCTET}){{3}}/(3[0-2]|[12]?[0-9])|[0-9a-f]*:[0-9a-f:]*/(12[0-8]|1[01][0-9]|[1-9]?[0-9]))$",
    ),
]
"""A range of IPv4 or IPv6 addresses."""


def _balancer_used(service: ServiceSpec) -> bool:
    unused = service.load_balancer_class is None and not service.load_balancer_source_ranges
    return service.type == "LoadBalancer" or unused


SERVICE = (
    Rule(
        field="type",
        cel="self.type == 'LoadBalancer' || (!has(self.loadBalancerClass) && self.loadBalancerSourceRanges.size() == 0)",
        holds=_balancer_used,
        problem="loadBalancerClass and loadBalancerSourceRanges have no effect on a Service without a load balancer",
        remedy="set type: LoadBalancer, or remove them",
    ),
    without_reserved_keys("annotations"),
)


class ServiceSpec(ApiModel, rules=SERVICE):
    """Service of the gateway."""

    type: Literal["ClusterIP", "LoadBalancer"] = "ClusterIP"
    """Type of the Service. LoadBalancer gives it an address outside the cluster."""
    load_balancer_class: QualifiedName | None = None
    """Class of the load balancer, which Kubernetes lets nobody change later. Defaults to the cluster's."""
    load_balancer_source_ranges: Annotated[list[Cidr], Field(max_length=64)] = []
    """Addresses that the load balancer admits. If empty, all."""
    annotations: Annotations = {}
    """Annotations of the Service, which configure its load balancer."""


class InferencePoolSpec(ApiModel):
    """InferencePool of the Gateway API Inference Extension with the gateway's pods, which tell Gateways which of them takes a request. An `httpRoute` then leads to it."""

    picker_tls: bool = True
    """Whether Gateways ask over TLS, with a certificate that each pod makes for itself, as most do. False: in plain text."""
