"""PodDisruptionBudgets: a node drain takes one pod of a component at a time, so that held requests can be handed over.

A budget limits how many pods may be unavailable, not how many must stay: with minAvailable, the only pod of a component (NATS has one)
could never be evicted, and `kubectl drain` would wait forever. While NATS moves, workers keep their work and reconnect.
"""

from __future__ import annotations

from mmd_api.readers import Component
from mmd_operator.resources.naming import Manifest, RevisionScope


def disruption_budget(scope: RevisionScope, component: Component) -> Manifest:
    """The budget of one component across all its revisions."""
    return {
        "apiVersion": "policy/v1",
        "kind": "PodDisruptionBudget",
        "metadata": scope.metadata(f"{scope.name}-{component}", component, of_revision=False),
        "spec": {
            "maxUnavailable": 1,
            "selector": {"matchLabels": scope.selector(component)},
            "unhealthyPodEvictionPolicy": "AlwaysAllow",
        },
    }
