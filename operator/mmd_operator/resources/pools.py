"""Workload and headless Service of each pool: one pair for each pipeline revision.

A pool whose replicas are single pods is a StatefulSet; a pool whose replicas are groups of pods is a LeaderWorkerSet. Only this module
decides which.
"""

from __future__ import annotations

from mmd_api.contract.pools import PoolName
from mmd_api.contract.subjects import user_of
from mmd_api.pipeline import active_roles, roles_of
from mmd_api.spec.pools import Pool
from mmd_operator.resources.naming import (
    ADMIN_PORT,
    BUILT_ANNOTATION,
    Manifest,
    RevisionScope,
    template_digest,
)
from mmd_operator.resources.pods import worker_pod
from mmd_operator.resources.workload_kinds import LWS_GROUP, LWS_VERSION


def initial_replicas(pool: Pool) -> int:
    """Replicas of a new pool. A pool that may scale to zero starts with one replica, so that its revision can become Ready."""
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
            # A worker's peers talk to it while it drains; heartbeats, not DNS, show which workers take new work.
            "publishNotReadyAddresses": True,
            "selector": scope.pool_selector(name),
            "ports": [{"name": "http", "port": ADMIN_PORT, "targetPort": "http", "protocol": "TCP"}],
        },
    }
    template = worker_pod(
        scope, name, pool, ["mmd", "worker"], args, ADMIN_PORT, user_of(active_roles(scope.spec, name))
    )
    size, replicas = scope.spec.group_size(name), initial_replicas(pool)
    if size == 1:
        return [service, _stateful_set(scope, name, metadata, template, replicas)]
    return [service, _leader_worker_set(metadata, template, replicas, size)]


def _stateful_set(
    scope: RevisionScope, name: PoolName, metadata: Manifest, template: Manifest, replicas: int
) -> Manifest:
    return {
        "apiVersion": "apps/v1",
        "kind": "StatefulSet",
        "metadata": metadata,
        "spec": {
            "replicas": replicas,
            "serviceName": scope.pool(name),
            "podManagementPolicy": "Parallel",
            "updateStrategy": {"type": "OnDelete"},  # the operator replaces pods: see `replacement`
            "selector": {"matchLabels": scope.pool_selector(name)},
            "template": template,
        },
    }


def _leader_worker_set(metadata: Manifest, leader: Manifest, replicas: int, size: int) -> Manifest:
    """LeaderWorkerSet of groups of pods that start, fail and are replaced as one.

    Followers are never Ready for work: they have no readiness probe, so that a group is Ready when its leader is. The Service above
    has the name that the controller would give its own Service.
    """
    container, *other_containers = leader["spec"]["containers"]
    follower_container = {key: value for key, value in container.items() if key != "readinessProbe"}
    follower = {**leader, "spec": {**leader["spec"], "containers": [follower_container, *other_containers]}}
    templates: Manifest = {
        "size": size,
        "restartPolicy": "RecreateGroupOnPodRestart",
        "leaderTemplate": leader,
        "workerTemplate": follower,
    }
    return {
        "apiVersion": f"{LWS_GROUP}/{LWS_VERSION}",
        "kind": "LeaderWorkerSet",
        "metadata": {**metadata, "annotations": {BUILT_ANNOTATION: template_digest(templates)}},
        "spec": {
            "replicas": replicas,
            "startupPolicy": "LeaderCreated",  # the leader waits for its followers
            "networkConfig": {"subdomainPolicy": "Shared"},
            "rolloutStrategy": {
                "type": "RollingUpdate",
                "rollingUpdateConfiguration": {"maxUnavailable": 1, "maxSurge": 0},
            },
            "leaderWorkerTemplate": templates,
        },
    }
