"""PodDisruptionBudgets: a node drain takes one pod of a component at a time, so that held requests can be handed over.

A budget limits how many pods may be unavailable, not how many must stay: with minAvailable, the only pod of a component (NATS has one)
could never be evicted, and `kubectl drain` would wait forever. While NATS moves, workers keep their work and reconnect.
Each revision of a pool has its own: in a budget of all revisions, the pods of a new one that are not Ready yet would count as unavailable,
and no pod of the serving one could be evicted for as long as a rollout takes.
"""

from __future__ import annotations

from mmd_api.contract.pools import PoolName
from mmd_api.readers import Component
from mmd_operator.resources.naming import Manifest, RevisionScope

BUDGET_KIND = "PodDisruptionBudget"


def pool_budget(scope: RevisionScope, pool: PoolName) -> Manifest:
    """The budget of a pool's pods of this revision."""
    metadata = scope.metadata(scope.pool(pool), pool, of_revision=True)
    return _budget(metadata, scope.pool_selector(pool))


def component_budget(scope: RevisionScope, component: Component) -> Manifest:
    """The budget of a component that outlives revisions."""
    metadata = scope.metadata(f"{scope.name}-{component}", component, of_revision=False)
    return _budget(metadata, scope.selector(component))


def _budget(metadata: Manifest, selector: Manifest) -> Manifest:
    return {
        "apiVersion": "policy/v1",
        "kind": BUDGET_KIND,
        "metadata": metadata,
        "spec": {
            "maxUnavailable": 1,
            "selector": {"matchLabels": selector},
            "unhealthyPodEvictionPolicy": "AlwaysAllow",
        },
    }
