"""NetworkPolicies: NATS and the pods' data ports are for the deployment's own pods; HTTP (requests, metrics, probes) for everybody."""

from __future__ import annotations

from mmd_operator.resources.naming import ADMIN_PORT, GATEWAY_PORT, Manifest, RevisionScope


def network_policy(scope: RevisionScope) -> Manifest:
    """One policy for all pods of the deployment. Egress stays open: media are fetched from where the spec allows."""
    own_pods = {"podSelector": {"matchLabels": scope.selector()}}
    http = [{"port": port, "protocol": "TCP"} for port in (GATEWAY_PORT, ADMIN_PORT)]
    return {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": scope.metadata(scope.name, of_revision=False),
        "spec": {
            "podSelector": {"matchLabels": scope.selector()},
            "policyTypes": ["Ingress"],
            "ingress": [{"from": [own_pods]}, {"ports": http}],
        },
    }
