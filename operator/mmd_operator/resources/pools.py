"""StatefulSet and headless Service of each pool: one pair for each pipeline revision."""

from __future__ import annotations

from mmd_api.contract.pools import PoolName
from mmd_api.contract.subjects import user_of
from mmd_api.pipeline import roles_of
from mmd_api.spec.pools import Pool
from mmd_operator.resources.naming import ADMIN_PORT, Manifest, RevisionScope
from mmd_operator.resources.pods import worker_pod


def initial_replicas(pool: Pool) -> int:
    """Replicas that a pool is created with. One that may go to zero starts with one, so that its revision can become Ready."""
    return pool.min_replicas if pool.autoscaling is None else max(1, pool.min_replicas)


def pool_objects(scope: RevisionScope, name: PoolName, pool: Pool) -> list[Manifest]:
    """The pool's objects in the order to apply them.

    `spec.replicas` counts at creation only: the applier leaves it out of later applies and writes `/scale` instead.
    """
    roles = roles_of(scope.spec, name)
    args = ["--pool", name, "--roles", ",".join(roles)]
    metadata = scope.metadata(scope.pool(name), name, of_revision=True)
    service = {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": metadata,
        "spec": {
            "clusterIP": "None",
            # A worker's peers speak to it while it drains; heartbeats, not DNS, show who takes new work.
            "publishNotReadyAddresses": True,
            "selector": scope.pool_selector(name),
            "ports": [{"name": "http", "port": ADMIN_PORT, "targetPort": "http", "protocol": "TCP"}],
        },
    }
    stateful_set = {
        "apiVersion": "apps/v1",
        "kind": "StatefulSet",
        "metadata": metadata,
        "spec": {
            "replicas": initial_replicas(pool),
            "serviceName": scope.pool(name),
            "podManagementPolicy": "Parallel",
            "updateStrategy": {"type": "OnDelete"},  # the operator replaces pods: see `replacement`
            "selector": {"matchLabels": scope.pool_selector(name)},
            "template": worker_pod(scope, name, pool, ["mmd", "worker"], args, ADMIN_PORT, user_of(roles)),
        },
    }
    return [service, stateful_set]
