"""NetworkPolicies: HTTP (requests, metrics, probes) is for everybody, NATS for the deployment's own pods, and the data ports of prefill and
decode pods, where KV and vLLM's ranks trust what they receive, for such pods alone.
"""

from __future__ import annotations

from mmd_operator.resources.naming import ADMIN_PORT, COMPONENT_LABEL, GATEWAY_PORT, Manifest, RevisionScope

KV_POOLS = ["prefill", "decode"]
"""Whichever of them a deployment has, of one pod or of groups; a rollout may have pods of both layouts."""


def network_policies(scope: RevisionScope) -> list[Manifest]:
    """One policy for the pods that hold KV, with a name that no deployment can have, one for all others. Egress stays open: media are
    fetched from where the spec allows.
    """
    kv_pods, others = _component(scope, "In"), _component(scope, "NotIn")
    own_pods = {"matchLabels": scope.selector()}
    return [
        _policy(scope, f"{scope.name}.kv", kv_pods, kv_pods),
        _policy(scope, scope.name, others, own_pods),
    ]


def _component(scope: RevisionScope, operator: str) -> Manifest:
    """Selects the deployment's pods that are of the KV pools (`In`) or are not (`NotIn`)."""
    expression = {"key": COMPONENT_LABEL, "operator": operator, "values": KV_POOLS}
    return {"matchLabels": scope.selector(), "matchExpressions": [expression]}


def _policy(scope: RevisionScope, name: str, pods: Manifest, peers: Manifest) -> Manifest:
    http = [{"port": port, "protocol": "TCP"} for port in (GATEWAY_PORT, ADMIN_PORT)]
    return {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": scope.metadata(name, of_revision=False),
        "spec": {
            "podSelector": pods,
            "policyTypes": ["Ingress"],
            "ingress": [{"from": [{"podSelector": peers}]}, {"ports": http}],
        },
    }
