"""The autoscaler's facts about a deployment's pools and pods, from the observed cluster. Pure."""

from __future__ import annotations

from mmd_api.contract.pools import PoolName
from mmd_api.spec.pools import Pool
from mmd_operator.autoscaling import PodFacts, PoolFacts
from mmd_operator.observed.observed import Child, Observed, PodView
from mmd_operator.sizes.groups import as_one


def pool_workload(observed: Observed, pool: PoolName, revision: str, uid: str) -> Child | None:
    """The workload of a pool in one revision. `uid`: the deployment's UID, since anybody may copy labels."""
    return next(
        (
            child
            for child in observed.children.values()
            if child.is_sized
            and child.component == pool
            and child.revision == revision
            and child.owner_uid == uid
            and not child.deleting
        ),
        None,
    )


def pods_in(child: Child, pool: PoolName, observed: Observed) -> list[PodView]:
    """The pods of a pool's workload, one per replica. For groups: the leaders, with what their followers lack."""
    return [
        as_one(pod, observed)
        for pod in observed.pods_of(pool)
        if pod.revision == child.revision and pod.name.startswith(f"{child.name}-")
    ]


def ready_gateways(observed: Observed, revision: str) -> list[PodView]:
    """The Ready gateway pods of one revision, except those being deleted."""
    return [
        pod
        for pod in observed.pods_of("gateway")
        if pod.revision == revision and pod.ready and not pod.deleting
    ]


def pool_facts(
    child: Child, pods: list[PodView], pool: Pool, now: float, asking: Child | None = None
) -> PoolFacts:
    """A pool as the autoscaler sees it. `asking`: its MultimodalPool. `now`: Unix seconds."""
    return PoolFacts(
        replicas=child.workload.replicas if child.workload else 0,
        pods=tuple(pod_facts(pod, now) for pod in pods),
        drain_seconds=float(pool.drain_seconds),
        surge=int(child.workload.surged) if child.workload else 0,
        requested=asking.requested.replicas if asking and asking.requested else None,
    )


def pod_facts(pod: PodView, now: float) -> PodFacts:
    """A pod as the autoscaler sees it. `now`: Unix seconds."""
    ordinal = pod.name.rpartition("-")[2]
    return PodFacts(
        name=pod.name,
        ordinal=int(ordinal) if ordinal.isdigit() else -1,
        created_at=pod.created_at,
        ready=pod.ready,
        unschedulable=pod.unschedulable is not None,
        deleting=pod.deleting,
        lost=pod.deleting and pod.gone(now),
        drain_requested=pod.drain_requested_at is not None,
        drain_requested_at=pod.drain_requested_at,
        waiting_since=pod.unschedulable_since or pod.starting_since,
        failing=pod.failing,
    )
