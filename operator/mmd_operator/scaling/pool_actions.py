"""Carries out the actions of the autoscaler: drains, resizes and renews pods.

`autoscaling` decides the actions, and `scaling_limits` which of them may be done now.
"""

from __future__ import annotations

from datetime import UTC, datetime

from mmd_api.contract.annotations import DRAIN_ANNOTATION
from mmd_api.contract.pools import POOL_NAMES, PoolName
from mmd_operator.autoscaling import Decision, PoolFacts, ScaleActions
from mmd_operator.kube.cluster import Cluster
from mmd_operator.kube.contests import Contests
from mmd_operator.kube.events import Events
from mmd_operator.kube.metrics import Counts, OperatorMetrics
from mmd_operator.kube.pauses import Pauses
from mmd_operator.observed.observed import Child, Observed, PodView
from mmd_operator.observed.problems import contested
from mmd_operator.rollout.applier import UNSEEN_SECONDS
from mmd_operator.sizes.pending_growth import PendingGrowth


class PoolActions:
    """Acts on the pools of one deployment.

    By pool, `_draining`: when each pod was asked to drain, by UID; `_overdue`: pods with an Event about their missed deadline; `_changes`: the
    decision that began the present change of size; `_kept_surges`: UID and size of a workload whose surge became part of its size, and when
    that was written.
    """

    def __init__(
        self,
        cluster: Cluster,
        metrics: OperatorMetrics,
        namespace: str,
        growth: PendingGrowth,
        counts: Counts,
        pauses: Pauses,
    ) -> None:
        self._cluster, self._metrics, self._namespace = cluster, metrics, namespace
        self._growth, self._counts = growth, counts
        self._drain_requests = Contests(pauses)
        self._asked_at: dict[str, float] = {}  # Unix seconds of the last request to drain, by UID of the pod
        self._draining: dict[PoolName, dict[str, float]] = {name: {} for name in POOL_NAMES}
        self._overdue: dict[PoolName, set[str]] = {name: set() for name in POOL_NAMES}
        self._changes: dict[PoolName, Decision] = {}
        self._kept_surges: dict[PoolName, tuple[str, int, float]] = {}

    def watch_drains(self, observed: Observed, now: float) -> None:
        """Count the drains of removed pods as ended, and note new drain requests. `now`: Unix seconds."""
        present = {pod.uid for pod in observed.pods}
        self._asked_at = {uid: at for uid, at in self._asked_at.items() if uid in present}
        for name, draining in self._draining.items():
            pods = observed.pods_of(name)
            for uid in draining.keys() - {pod.uid for pod in pods}:
                requested = draining.pop(uid)
                self._counts.drains[name, "ended"] += 1
                self._metrics.drain_seconds.labels(name).observe(max(0.0, now - requested))
            draining |= {
                pod.uid: pod.drain_requested_at for pod in pods if pod.drain_requested_at is not None
            }

    async def carry_out(
        self,
        actions: ScaleActions,
        child: Child,
        facts: PoolFacts,
        pods: list[PodView],
        decision: Decision,
        events: Events,
    ) -> None:
        """Bring one pool towards a decision. `pods`: the pods of `child`; `events` receives the Events to report.

        Raises:
            BusyError, RefusedError: an action could not be carried out; the others wait for the next tick.
        """
        pool = decision.pool
        uids = {pod.name: pod.uid for pod in pods}
        leaders = {pod.name for pod in pods if pod.group is not None}
        if decision.replicas != decision.current:
            self._changes[pool] = decision
        change = self._changes.get(pool)
        why = change if change is not None and change.replicas == decision.replicas else decision
        if actions.replicas is not None and not self._growth.forbids(child.name, actions.replicas):
            with self._growth.writing(child.name, actions.replicas):
                await self._cluster.scale(child.kind, self._namespace, child.name, actions.replicas)
            unit = child.workload.unit if child.workload else "pods"
            sizes = f"from {facts.replicas} to {actions.replicas} {unit}"
            events.append(("Scaled", f"{child.kind} {child.name} {sizes}; {why}"))
        elif actions.keep_surge:
            await self._keep_surge(child, facts.replicas, why, decision.at, events)
        if not facts.surge:
            self._kept_surges.pop(pool, None)
        for name in actions.drain:
            if decision.at - self._asked_at.get(uids[name], 0.0) < UNSEEN_SECONDS:
                continue  # the watch may not show the annotation yet
            if self._drain_requests.pause(uids[name], decision.at) > 0:
                continue  # another client keeps removing the annotation
            await self._cluster.ask_to_drain(self._namespace, name, uids[name], datetime.now(UTC))
            self._drain_requests.repaired(uids[name], decision.at, None)
            self._asked_at[uids[name]] = decision.at
            self._counts.drains[pool, "begun"] += 1
            events.append(
                (
                    "Draining",
                    f"pod {name} is draining: it finishes its requests and accepts no new ones; {why}",
                )
            )
            if rival := self._drain_requests.against(uids[name], decision.at):
                problem = contested(pool, f"the annotation {DRAIN_ANNOTATION} of pod {name}", rival)
                events.append((problem.reason, f"{problem.seen}; {problem.remedy}"))
        for name in actions.renew:
            await self._cluster.delete_pod(self._namespace, name, uids[name], leads=name in leaders)
            self._counts.drains[pool, "renewed"] += 1
            events.append(("Renewed", f"drained pod {name} is needed again and is being replaced"))
        for name in actions.overdue:
            if name not in self._overdue[pool]:
                self._overdue[pool].add(name)
                self._counts.drains[pool, "overdue"] += 1
                message = (
                    f"pod {name} did not finish draining within {facts.drain_seconds:.0f} s and is removed"
                )
                events.append(("DrainDeadlineExceeded", message))
        self._overdue[pool] &= uids.keys() | set(actions.overdue)

    async def _keep_surge(
        self, child: Child, replicas: int, why: Decision, now: float, events: Events
    ) -> None:
        """Make a surge part of the size: once, and again while the watch still shows a surge. It is reported once."""
        uid, size, written_at = self._kept_surges.get(why.pool, ("", 0, 0.0))
        was_reported = (uid, size) == (child.uid, replicas)
        if was_reported and now - written_at < UNSEEN_SECONDS:
            return
        await self._cluster.release_replicas(child.kind, self._namespace, child.name, replicas)
        self._kept_surges[why.pool] = child.uid, replicas, now
        if not was_reported:
            words = f"keeps all {replicas} pods after the replacement"
            events.append(("Scaled", f"{child.kind} {child.name} {words}; {why}"))
