"""Keeps one MultimodalPool for each pool of a deployment: its status reports the pool's size, and its spec follows that size unless others
give it (`autoscaling.mode: External`). What they ask for is carried out by `scaling`.
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
    """Whether others give a pool its size."""
    return pool.autoscaling is not None and pool.autoscaling.mode == "External"


def pool_status(deployment: str, pool: PoolName, workload: Workload) -> dict[str, Any]:
    """The status of a MultimodalPool. The selector selects one pod for each replica."""
    selector = f"{DEPLOYMENT_LABEL}={deployment},{COMPONENT_LABEL}={pool}"
    if workload.group_size > 1:
        selector += f",{WORKER_INDEX_LABEL}=0"
    return {"replicas": workload.current, "readyReplicas": workload.ready, "selector": selector}


def size_to_restore(pool: Pool, requested: RequestedSize, workload: Workload) -> int | None:
    """The size that the spec of a MultimodalPool should have; None where it stays as it is."""
    size = workload.replicas - workload.surged
    return None if is_external(pool) or requested.replicas == size else size


class PoolObjects:
    """The MultimodalPools of one deployment (one UID). `_written`: by name, the version that the watch showed when one was written,
    and when.
    """

    def __init__(self, context: PassContext, uid: str) -> None:
        self._context, self._uid = context, uid
        self._contests = Contests(context.pauses)
        self._written: dict[str, tuple[str | None, object, float]] = {}
        self._not_served_until = 0.0

    async def publish(
        self, body: Body, spec: MultimodalDeploymentSpec, observed: Observed, revision: str | None
    ) -> list[Problem]:
        """Bring all of them up to date. `revision`: the one that serves; a pool that does not exist yet gets none.

        Raises:
            BusyError: nothing can be written now.
        """
        problems: list[Problem] = []
        now = time.monotonic()
        for name in pools_in(spec):
            pool: Pool = getattr(spec, name)
            child = pool_workload(observed, name, revision) if revision else None
            if child is None or child.workload is None:
                continue
            if now < self._not_served_until:
                problems += [pool_definition_missing(name)] if is_external(pool) else []
                continue
            shown = observed.requested(pool_name(self._context.name, name))
            try:
                problems += await self._publish(body, name, pool, child.workload, shown, now)
            except NotServedError:
                self._not_served_until = now + self._context.pauses.not_served_seconds
                problems += [pool_definition_missing(name)] if is_external(pool) else []
            except RefusedError as error:
                problems.append(self._context.refused(shown or child, error))
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
        self, body: Body, name: PoolName, pool: Pool, workload: Workload, shown: Child | None, now: float
    ) -> list[Problem]:
        object_name = pool_name(self._context.name, name)
        if shown is None or shown.requested is None:
            return await self._create(name, workload, now)
        if shown.owner_uid != self._uid:
            return [not_ours(POOL_KIND, object_name)]
        problems: list[Problem] = []
        size = size_to_restore(pool, shown.requested, workload)
        if size is not None:
            problems = await self._restore(body, name, size, shown, now)
        status = pool_status(self._context.name, name, workload)
        if shown.requested.status != status and not self._unseen(shown, status, now):
            await self._context.cluster.apply_pool_status(self._context.namespace, object_name, status)
            self._written[object_name] = shown.resource_version, status, now
        return problems

    async def _create(self, name: PoolName, workload: Workload, now: float) -> list[Problem]:
        """Unless it exists and the watch does not show it yet."""
        object_name = pool_name(self._context.name, name)
        found = await self._context.cluster.get(POOL_KIND, self._context.namespace, object_name)
        if found is not None and child_of(POOL_KIND, found).owner_uid != self._uid:
            return [not_ours(POOL_KIND, object_name)]
        labels = self._labels(name)
        if found is not None and labels.items() <= found["metadata"].get("labels", {}).items():
            return []
        await self._context.cluster.apply(
            self._manifest(name, workload.replicas - workload.surged), self._context.namespace
        )
        status = pool_status(self._context.name, name, workload)
        await self._context.cluster.apply_pool_status(self._context.namespace, object_name, status)
        self._context.metrics.objects.labels("created").inc()
        return []

    async def _restore(
        self, body: Body, name: PoolName, size: int, shown: Child, now: float
    ) -> list[Problem]:
        requested, key = shown.requested, shown.name
        if requested is None or self._unseen(shown, size, now):
            return []
        rival = requested.set_by
        problems: list[Problem] = []
        if rival is not None:
            who = self._contests.against(key, now)
            problems = [contested(name, f"the size of {POOL_KIND} {key}", who)] if who else []
            if self._contests.pause(key, now) > 0:
                return problems
        await self._context.cluster.apply(self._manifest(name, size), self._context.namespace)
        self._written[key] = shown.resource_version, size, now
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

    def _unseen(self, shown: Child, content: object, now: float) -> bool:
        """Whether this was written and the watch does not show it yet."""
        version, written, at = self._written.get(shown.name, (None, None, 0.0))
        return (version, written) == (shown.resource_version, content) and now - at < UNSEEN_SECONDS

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
