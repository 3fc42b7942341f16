"""NetworkPolicies of a deployment.

Ingress: HTTP (requests, metrics, probes) and a gateway's endpoint picker are open to everybody, and NATS to the deployment's own pods. The
data ports of prefill and decode pods, where KV and vLLM's ranks trust what they receive, are open only to such pods.

Egress, with `spec.network.egress: Restricted`: DNS, the deployment's own pods, and the destinations in the spec. A policy cannot contain a
host name, so a destination that may be anywhere is limited by its port. Only media and the hub are limited to public addresses.
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
"""Pools that hold KV, in single pods or groups. A deployment may lack one of them, and a rollout may have pods of both layouts."""
DNS_PORTS = [53, 5353]
"""A policy sees the port of the pod behind a Service, and OpenShift's DNS pods listen on the second port."""
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
    """Policies of ingress and, if it is restricted, of egress.

    Ingress: one policy for the pods that hold KV, with a name that no deployment can have, and one for all other pods. Egress: one policy
    for gateways, one for NATS, and one for the pools of this revision, since pods of another revision may use another model.
    """
    kv_pods, other_pods = _component(scope, "In", KV_POOLS), _component(scope, "NotIn", KV_POOLS)
    own_pods = {"matchLabels": scope.selector()}
    picker = [PICKER_PORT] if scope.spec.gateway.inference_pool is not None else []
    policies = [
        _ingress(scope, f"{scope.name}.kv", kv_pods, kv_pods, HTTP_PORTS),
        _ingress(scope, scope.name, other_pods, own_pods, [*HTTP_PORTS, *picker]),
    ]
    return policies + (_egress_policies(scope) if scope.spec.network.egress == "Restricted" else [])


def _component(scope: RevisionScope, operator: str, components: list[str]) -> Manifest:
    """Selects the deployment's pods that are of these components (`In`) or are not (`NotIn`)."""
    expression = {"key": COMPONENT_LABEL, "operator": operator, "values": components}
    return {"matchLabels": scope.selector(), "matchExpressions": [expression]}


def _ingress(
    scope: RevisionScope, name: str, pods: Manifest, peers: Manifest, open_ports: list[int]
) -> Manifest:
    """Ingress policy of `pods`: everybody may connect to `open_ports`, and only `peers` to other ports."""
    rules = [{"from": [{"podSelector": peers}]}, _at(open_ports)]
    spec = {"podSelector": pods, "policyTypes": ["Ingress"], "ingress": rules}
    return _policy(scope, name, spec, of_revision=False)


def _egress_policies(scope: RevisionScope) -> list[Manifest]:
    spec = scope.spec
    to_own_pods = {"to": [{"podSelector": {"matchLabels": scope.selector()}}]}
    nats = {"matchLabels": scope.selector("nats")}
    urls = [spec.observability.otlp_endpoint] if spec.observability.otlp_endpoint is not None else []
    if not spec.nats.managed and spec.nats.url is not None:
        urls += spec.nats.url.split(",")
    pools = [_DNS, to_own_pods, *(_at([_port_of(url)]) for url in urls)]
    storage = spec.model.storage
    if storage.type == "Hub" and storage.cache is None:
        pools.append(_public(HUB_PORTS))
    gateway = [*pools]
    if spec.gateway.auth is not None and spec.gateway.auth.oidc is not None:
        gateway.append(_at([_port_of(spec.gateway.auth.oidc.issuer)]))
    if spec.gateway.media.allow_http:
        gateway.append({} if spec.gateway.media.allow_private_addresses else _public(MEDIA_PORTS))
    non_workers = ["gateway", "nats", *([WEIGHTS] if storage.cache is not None else [])]
    workers = _component(scope, "NotIn", non_workers)
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
    """Egress rules of the Job that downloads weights."""
    if storage.url is not None and storage.url.startswith("http"):
        return [_DNS, _at([_port_of(storage.url)])]
    return [_DNS, _public(HUB_PORTS) if storage.type == "Hub" else _at(HUB_PORTS)]


def _egress(
    scope: RevisionScope, part: str, pods: Manifest, rules: list[Manifest], *, of_revision: bool = False
) -> Manifest:
    spec = {"podSelector": pods, "policyTypes": ["Egress"], "egress": rules}
    return _policy(scope, f"{scope.name}.egress-{part}", spec, of_revision=of_revision)


def _policy(scope: RevisionScope, name: str, spec: Manifest, *, of_revision: bool) -> Manifest:
    return {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": scope.metadata(name, of_revision=of_revision),
        "spec": spec,
    }


def _at(ports: list[int]) -> Manifest:
    """Rule for these ports and any peer."""
    return {"ports": [_port(port) for port in ports]}


def _public(ports: list[int]) -> Manifest:
    blocks = [{"ipBlock": {"cidr": cidr, "except": private}} for cidr, private in NOT_PUBLIC.items()]
    return {"to": blocks, **_at(ports)}


def _port(port: int, protocol: str = "TCP") -> Manifest:
    return {"port": port, "protocol": protocol}


def _port_of(url: str) -> int:
    """Port of a URL of the spec, or its scheme's port if the URL has none or an invalid one, which pods then report."""
    try:
        port = urlsplit(url).port
    except ValueError:
        port = None
    return port or DEFAULT_PORTS[url.partition(":")[0].lower()]
