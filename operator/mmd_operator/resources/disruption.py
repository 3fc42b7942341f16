"""PodDisruptionBudgets: a node drain takes one pod of a component at a time, so that held requests can be handed over."""

from __future__ import annotations

from mmd_operator.resources.naming import Component, Manifest, Scope


def disruption_budget(scope: Scope, component: Component) -> Manifest:
    """The budget of one component over all its revisions."""
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
