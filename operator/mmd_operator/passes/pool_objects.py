"""Keeps one MultimodalPool for each pool of a deployment.

Its status reports the pool's size. Its spec follows that size unless other clients set it (`autoscaling.mode: External`); `scaling` then
carries out the size they ask for.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from mmd_api.contract.pools import PoolName
from mmd_api.pool_resource import POOL_KIND, pool_name
from mmd_api.resource import API_VERSION, KIND
from mmd_api.spec.deployment import MultimodalDeploymentSpec
from mmd_api.spec.pools import Pool
from mmd_operator.kube.cluster import NotServedError, RefusedError
from mmd_operator.kube.contests import Contests
from mmd_operator.kube.context import PassContext
from mmd_operator.observed.observed import (
    MANAGED_BY_LABEL,
    Body,
    Child,
    Observed,
    RequestedSize,
    Workload,
    child_of,
)
from mmd_operator.observed.problems import Problem, contested, not_ours, pool_definition_missing
from mmd_operator.resources.naming import COMPONENT_LABEL, DEPLOYMENT_LABEL, Manifest
from mmd_operator.resources.workload_kinds import WORKER_INDEX_LABEL
from mmd_operator.rollout.applier import UNSEEN_SECONDS
from mmd_operator.scaling.scaling_facts import pool_workload
from mmd_operator.sizes.pool_sizes import pools_in


def is_external(pool: Pool) -> bool:
    """Whether other clients set the pool's size."""
    return pool.autoscaling is not None and pool.autoscaling.mode == "External"


def pool_status(deployment: str, pool: PoolName, workload: Workload) -> dict[str, Any]:
    """The status of a MultimodalPool. Its selector matches one pod per replica."""
    selector = f"{DEPLOYMENT_LABEL}={deployment},{COMPONENT_LABEL}={pool}"
    if workload.group_size > 1:
        selector += f",{WORKER_INDEX_LABEL}=0"
    return {"replicas": workload.current, "readyReplicas": workload.ready, "selector": selector}


def size_to_restore(pool: Pool, requested: RequestedSize, workload: Workload) -> int | None:
    """The size to write to a MultimodalPool's spec, or None to leave it unchanged."""
    size = workload.replicas - workload.surged
    return None if is_external(pool) or requested.replicas == size else size


class PoolObjects:
    """The MultimodalPools of one deployment (one UID).

    `_last_writes`: by name, the version shown by the watch at the last write, what was written, and when (monotonic seconds).
    """

    def __init__(self, context: PassContext, uid: str) -> None:
        self._context, self._uid = context, uid
        self._contests = Contests(context.pauses)
        self._last_writes: dict[str, tuple[str | None, object, float]] = {}
        self._not_served_until = 0.0

    async def publish(
        self, body: Body, spec: MultimodalDeploymentSpec, observed: Observed, revision: str | None
    ) -> list[Problem]:
        """Bring all MultimodalPools up to date. `revision`: the serving one; a pool that does not exist yet gets no MultimodalPool.

        Raises:
            BusyError: nothing can be written now.
        """
        problems: list[Problem] = []
        now = time.monotonic()
        for name in pools_in(spec):
            pool: Pool = getattr(spec, name)
            child = pool_workload(observed, name, revision, self._uid) if revision else None
            if child is None or child.workload is None:
                continue
            if now < self._not_served_until:
                problems += [pool_definition_missing(name)] if is_external(pool) else []
                continue
            pool_object = observed.requested(pool_name(self._context.name, name))
            try:
                problems += await self._publish(body, name, pool, child.workload, pool_object, now)
            except NotServedError:
                self._not_served_until = now + self._context.pauses.not_served_seconds
                problems += [pool_definition_missing(name)] if is_external(pool) else []
            except RefusedError as error:
                problems.append(self._context.refused(pool_object or child, error))
        for unused in self._unused(spec, observed):
            await self._context.cluster.delete(POOL_KIND, self._context.namespace, unused.name, unused.uid)
        return problems

    def _unused(self, spec: MultimodalDeploymentSpec, observed: Observed) -> list[Child]:
        return [
            child
            for child in observed.children.values()
            if child.kind == POOL_KIND
            and child.owner_uid == self._uid
            and child.component not in pools_in(spec)
            and not child.deleting
        ]

    async def _publish(
        self,
        body: Body,
        name: PoolName,
        pool: Pool,
        workload: Workload,
        pool_object: Child | None,
        now: float,
    ) -> list[Problem]:
        object_name = pool_name(self._context.name, name)
        if pool_object is None or pool_object.requested is None:
            return await self._create(name, workload)
        if pool_object.owner_uid != self._uid:
            return [not_ours(POOL_KIND, object_name)]
        problems: list[Problem] = []
        size = size_to_restore(pool, pool_object.requested, workload)
        if size is not None:
            problems = await self._restore(body, name, size, pool_object, now)
        status = pool_status(self._context.name, name, workload)
        if pool_object.requested.status != status and not self._unseen(pool_object, status, now):
            await self._context.cluster.apply_pool_status(self._context.namespace, object_name, status)
            self._last_writes[object_name] = pool_object.resource_version, status, now
        return problems

    async def _create(self, name: PoolName, workload: Workload) -> list[Problem]:
        """Create a MultimodalPool, unless it exists and the watch does not show it yet."""
        object_name = pool_name(self._context.name, name)
        stored = await self._context.cluster.get(POOL_KIND, self._context.namespace, object_name)
        if stored is not None and child_of(POOL_KIND, stored).owner_uid != self._uid:
            return [not_ours(POOL_KIND, object_name)]
        labels = self._labels(name)
        if stored is not None and labels.items() <= stored["metadata"].get("labels", {}).items():
            return []
        await self._context.cluster.apply(
            self._manifest(name, workload.replicas - workload.surged), self._context.namespace
        )
        status = pool_status(self._context.name, name, workload)
        await self._context.cluster.apply_pool_status(self._context.namespace, object_name, status)
        self._context.metrics.objects.labels("created").inc()
        return []

    async def _restore(
        self, body: Body, name: PoolName, size: int, pool_object: Child, now: float
    ) -> list[Problem]:
        requested, key = pool_object.requested, pool_object.name
        if requested is None or self._unseen(pool_object, size, now):
            return []
        rival = requested.set_by
        problems: list[Problem] = []
        if rival is not None:
            client = self._contests.against(key, now)
            problems = [contested(name, f"the size of {POOL_KIND} {key}", client)] if client else []
            if self._contests.pause(key, now) > 0:
                return problems
        await self._context.cluster.apply(self._manifest(name, size), self._context.namespace)
        self._last_writes[key] = pool_object.resource_version, size, now
        if rival is not None:
            self._contests.repaired(key, now, rival)
            self._context.events.report(
                body,
                "SizeReverted",
                f'{POOL_KIND} {key} has {size} replicas again instead of {requested.replicas}, which field manager "{rival}" set; '
                f"set spec.{name}.autoscaling.mode to External to let others size the pool, or change spec.{name}",
                warning=True,
            )
        return problems

    def _unseen(self, pool_object: Child, content: object, now: float) -> bool:
        """Whether this content was written and the watch does not show it yet."""
        version, written, at = self._last_writes.get(pool_object.name, (None, None, 0.0))
        return (version, written) == (pool_object.resource_version, content) and now - at < UNSEEN_SECONDS

    def _labels(self, name: PoolName) -> Mapping[str, str]:
        return {
            "app.kubernetes.io/name": "multimodal-deployment",
            "app.kubernetes.io/instance": self._context.name,
            MANAGED_BY_LABEL: "multimodal-operator",
            DEPLOYMENT_LABEL: self._context.name,
            COMPONENT_LABEL: name,
        }

    def _manifest(self, name: PoolName, replicas: int) -> Manifest:
        owner = {"apiVersion": API_VERSION, "kind": KIND, "name": self._context.name, "uid": self._uid}
        return {
            "apiVersion": API_VERSION,
            "kind": POOL_KIND,
            "metadata": {
                "name": pool_name(self._context.name, name),
                "namespace": self._context.namespace,
                "labels": dict(self._labels(name)),
                "ownerReferences": [{**owner, "controller": True}],
            },
            "spec": {"replicas": replicas},
        }
