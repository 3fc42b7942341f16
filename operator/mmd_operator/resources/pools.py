"""StatefulSet and headless Service of each pool: one pair for each pipeline revision."""

from __future__ import annotations

from mmd_api.pipeline import roles_of
from mmd_api.pools import PoolName
from mmd_api.spec import Pool
from mmd_api.subjects import user_of
from mmd_operator.resources.naming import WORKER_PORT, Manifest, Scope
from mmd_operator.resources.pods import worker_pod


def initial_replicas(pool: Pool) -> int:
    """Replicas that a pool is created with. One that may go to zero starts with one, so that its revision can become whole."""
    if pool.autoscaling is not None:
        return max(1, pool.autoscaling.min_replicas)
    return 1 if pool.replicas is None else pool.replicas


def pool_objects(scope: Scope, name: PoolName, pool: Pool) -> list[Manifest]:
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
            # A worker's peers speak to it while it drains; who takes new work is told by heartbeats, not by DNS.
            "publishNotReadyAddresses": True,
            "selector": scope.pool_selector(name),
            "ports": [{"name": "http", "port": WORKER_PORT, "targetPort": "http", "protocol": "TCP"}],
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
            "updateStrategy": {"type": "RollingUpdate"},
            "selector": {"matchLabels": scope.pool_selector(name)},
            "template": worker_pod(scope, name, pool, ["mmd", "worker"], args, WORKER_PORT, user_of(roles)),
        },
    }
    return [service, stateful_set]
