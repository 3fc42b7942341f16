"""The facts of a pass about a deployment, used for its conditions and its status. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from mmd_api.contract.pools import PoolName
from mmd_api.spec.exposure import ParentRef
from mmd_api.spec.gateway import AuthSpec
from mmd_api.status import (
    PinnedRevision,
    PoolThroughput,
    RolledBack,
    RolloutProgress,
    ScalingDecision,
    WeightsStatus,
)
from mmd_operator.observed.observed import Child, Observed, Workload
from mmd_operator.observed.problems import Problem
from mmd_operator.rollout.next_step import Step


@dataclass(frozen=True, slots=True)
class Scaling:
    """The autoscaler's part of the status.

    `decisions`: current decision per pool. `changes`: last size change per pool. `missing`: reports that block scale-down. `limited`: pools at a
    hard limit.
    """

    decisions: Mapping[PoolName, ScalingDecision] = field(default_factory=dict)
    changes: Mapping[PoolName, ScalingDecision] = field(default_factory=dict)
    throughput: Mapping[PoolName, PoolThroughput] = field(default_factory=dict)
    pools: tuple[PoolName, ...] = ()
    shadow: tuple[PoolName, ...] = ()
    missing: tuple[str, ...] = ()
    limited: tuple[str, ...] = ()
    limit: str | None = None
    bottleneck: PoolName | None = None


@dataclass(frozen=True, slots=True)
class Facts:
    """The facts of one pass. `problems` are gathered, the worst first; `step` is None if there is no plan."""

    name: str
    namespace: str
    pools: tuple[PoolName, ...]
    managed_nats: bool
    observed: Observed
    problems: tuple[Problem, ...]
    step: Step | None
    tls: bool = False
    """Whether the gateway speaks TLS."""
    route_parents: tuple[ParentRef, ...] = ()
    """Gateways to which the spec's HTTPRoute attaches."""
    auth: AuthSpec | None = None
    """The client authentication required by the spec, or None."""
    exposed_by: tuple[str, ...] = ()
    """Kinds of the spec's objects exposing the gateway outside the cluster."""
    paused: bool = False
    unknown_fields: tuple[str, ...] = ()
    scaling: Scaling = field(default_factory=Scaling)
    pinned: tuple[PinnedRevision, ...] = ()
    changes_paused: bool = False
    """Whether spec changes wait."""
    progress: RolloutProgress | None = None
    rolled_back: RolledBack | None = None
    last_serving: str | None = None
    """The revision to which the pass set the gateway, or else the one that served last."""
    overdue_seconds: float | None = None
    """The deadline missed by the rollout, or None."""
    not_rolled_back: str = ""
    """Why the rollout has not been rolled back although the spec asks for that."""
    waiting: str = ""
    """Waits of pods, in words, before they count as problems."""
    weights: WeightsStatus | None = None
    """The download of weights to the cache, if there is one."""

    @property
    def gateway(self) -> Workload | None:
        """The gateway's Deployment."""
        child = self.observed.children.get(("Deployment", f"{self.name}-gateway"))
        return child.workload if child else None

    @property
    def gateways_without_keys(self) -> tuple[str, ...]:
        """Names of gateway pods open to everyone. Pods being deleted are included: they still answer over open connections."""
        pods = self.observed.pods_of("gateway")
        return tuple(sorted(pod.name for pod in pods if pod.keys_secret is None and not pod.finished))

    @property
    def route(self) -> Child | None:
        """The HTTPRoute."""
        return self.observed.children.get(("HTTPRoute", f"{self.name}-gateway"))

    @property
    def pool(self) -> Child | None:
        """The InferencePool."""
        return self.observed.children.get(("InferencePool", f"{self.name}-gateway"))

    @property
    def serving(self) -> str | None:
        """The serving revision."""
        if self.step is not None:
            return self.step.serving
        if self.last_serving is not None:
            return self.last_serving
        return self.gateway.template_revision if self.gateway else None

    def workloads(self, pool: PoolName) -> dict[str | None, Workload]:
        """Workloads of a pool by revision."""
        return {
            child.revision: child.workload
            for child in self.observed.children.values()
            if child.is_sized
            and child.component == pool
            and child.name == f"{self.name}-{pool}-{child.revision}"  # anybody may copy labels
            and child.workload
            and not child.deleting
        }

    def serving_workload(self, pool: PoolName) -> Workload | None:
        """A pool's workload in the serving revision."""
        return self.workloads(pool).get(self.serving)
