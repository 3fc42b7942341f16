"""NetworkPolicies.

Ingress: HTTP (requests, metrics, probes) and a gateway's endpoint picker are for everybody, NATS for the deployment's own pods, and the
data ports of prefill and decode pods, where KV and vLLM's ranks trust what they receive, for such pods alone.

Egress, with `spec.network.egress: Restricted`: DNS, the deployment's own pods, and what the spec makes pods connect to. A host name cannot
be part of a policy, so what may be anywhere is limited by its port. Of addresses, only media and the hub are limited to public ones.
"""

from __future__ import annotations

from urllib.parse import urlsplit

from mmd_api.spec.model import ModelStorage
from mmd_operator.resources.naming import (
    ADMIN_PORT,
    COMPONENT_LABEL,
    GATEWAY_PORT,
    PICKER_PORT,
    REVISION_LABEL,
    WEIGHTS,
    Manifest,
    RevisionScope,
)

HTTP_PORTS = [GATEWAY_PORT, ADMIN_PORT]
KV_POOLS = ["prefill", "decode"]
"""Whichever of them a deployment has, of one pod or of groups; a rollout may have pods of both layouts."""
DNS_PORTS = [53, 5353]
"""A policy sees the port of the pod behind a Service, and OpenShift's DNS pods listen at the second."""
MEDIA_PORTS = [80, 443]
HUB_PORTS = [443]
NOT_PUBLIC = {
    "0.0.0.0/0": ["10.0.0.0/8", "100.64.0.0/10", "127.0.0.0/8", "169.254.0.0/16", "172.16.0.0/12", "192.168.0.0/16"],
    "::/0": ["::1/128", "fc00::/7", "fe80::/10"],
}  # fmt: skip
DEFAULT_PORTS = {"http": 80, "https": 443, "nats": 4222, "tls": 4222, "ws": 80, "wss": 443}


_DNS: Manifest = {
    "ports": [{"port": port, "protocol": protocol} for port in DNS_PORTS for protocol in ("UDP", "TCP")]
}


def network_policies(scope: RevisionScope) -> list[Manifest]:
    """Of ingress, one policy for the pods that hold KV, with a name that no deployment can have, and one for all others. Of egress, where it
    is restricted, one for gateways, one for NATS, and one for the pools of this revision: pods of another one may use another model.
    """
    kv_pods, others = _component(scope, "In", KV_POOLS), _component(scope, "NotIn", KV_POOLS)
    own_pods = {"matchLabels": scope.selector()}
    picker = [PICKER_PORT] if scope.spec.gateway.inference_pool is not None else []
    policies = [
        _ingress(scope, f"{scope.name}.kv", kv_pods, kv_pods, HTTP_PORTS),
        _ingress(scope, scope.name, others, own_pods, [*HTTP_PORTS, *picker]),
    ]
    return policies + (_egress_policies(scope) if scope.spec.network.egress == "Restricted" else [])


def _component(scope: RevisionScope, operator: str, components: list[str]) -> Manifest:
    """Selects the deployment's pods that are of these components (`In`) or are not (`NotIn`)."""
    expression = {"key": COMPONENT_LABEL, "operator": operator, "values": components}
    return {"matchLabels": scope.selector(), "matchExpressions": [expression]}


def _ingress(
    scope: RevisionScope, name: str, pods: Manifest, peers: Manifest, open_ports: list[int]
) -> Manifest:
    """`open_ports`: for everybody; others are for `peers` alone."""
    rules = [{"from": [{"podSelector": peers}]}, _at(open_ports)]
    spec = {"podSelector": pods, "policyTypes": ["Ingress"], "ingress": rules}
    return _policy(scope, name, spec, of_revision=False)


def _egress_policies(scope: RevisionScope) -> list[Manifest]:
    spec = scope.spec
    own = {"to": [{"podSelector": {"matchLabels": scope.selector()}}]}
    nats = {"matchLabels": scope.selector("nats")}
    named = [spec.observability.otlp_endpoint] if spec.observability.otlp_endpoint is not None else []
    if not spec.nats.managed and spec.nats.url is not None:
        named += spec.nats.url.split(",")
    pools = [_DNS, own, *(_at([_port_of(url)]) for url in named)]
    storage = spec.model.storage
    if storage.type == "Hub" and storage.cache is None:
        pools.append(_public(HUB_PORTS))
    gateway = [*pools]
    if spec.gateway.auth is not None and spec.gateway.auth.oidc is not None:
        gateway.append(_at([_port_of(spec.gateway.auth.oidc.issuer)]))
    if spec.gateway.media.allow_http:
        gateway.append({} if spec.gateway.media.allow_private_addresses else _public(MEDIA_PORTS))
    others = ["gateway", "nats", *([WEIGHTS] if storage.cache is not None else [])]
    workers = _component(scope, "NotIn", others)
    workers["matchLabels"] = {**workers["matchLabels"], REVISION_LABEL: scope.revision}
    policies = [
        _egress(scope, "gateway", {"matchLabels": scope.selector("gateway")}, gateway),
        _egress(scope, scope.revision, workers, pools, of_revision=True),
    ]
    if storage.cache is not None:
        policies.append(
            _egress(scope, WEIGHTS, {"matchLabels": scope.selector(WEIGHTS)}, _of_weights(storage))
        )
    if spec.nats.managed:
        policies.append(_egress(scope, "nats", nats, [_DNS, {"to": [{"podSelector": nats}]}]))
    return policies


def _of_weights(storage: ModelStorage) -> list[Manifest]:
    """Where the Job that downloads weights may connect to."""
    if storage.url is not None and storage.url.startswith("http"):
        return [_DNS, _at([_port_of(storage.url)])]
    return [_DNS, _public(HUB_PORTS) if storage.type == "Hub" else _at(HUB_PORTS)]


def _egress(
    scope: RevisionScope, of: str, pods: Manifest, rules: list[Manifest], *, of_revision: bool = False
) -> Manifest:
    spec = {"podSelector": pods, "policyTypes": ["Egress"], "egress": rules}
    return _policy(scope, f"{scope.name}.egress-{of}", spec, of_revision=of_revision)


def _policy(scope: RevisionScope, name: str, spec: Manifest, *, of_revision: bool) -> Manifest:
    return {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": scope.metadata(name, of_revision=of_revision),
        "spec": spec,
    }


def _at(ports: list[int]) -> Manifest:
    """Whoever is at the other end, at these ports."""
    return {"ports": [_port(port) for port in ports]}


def _public(ports: list[int]) -> Manifest:
    blocks = [{"ipBlock": {"cidr": cidr, "except": private}} for cidr, private in NOT_PUBLIC.items()]
    return {"to": blocks, **_at(ports)}


def _port(port: int, protocol: str = "TCP") -> Manifest:
    return {"port": port, "protocol": protocol}


def _port_of(url: str) -> int:
    """The port of a URL of the spec; that of its scheme where it has none, or none that is one, which pods then report."""
    try:
        port = urlsplit(url).port
    except ValueError:
        port = None
    return port or DEFAULT_PORTS[url.partition(":")[0].lower()]
