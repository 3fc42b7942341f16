"""The steps of a rollout: each takes the state so far and returns it with its own part of what to do now.

`rollout.STEPS` lists them in the order in which they apply, `rollout.STAGES` the stages. Pure; time is part of the state.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from mmd_api.contract.pools import POOL_NAMES
from mmd_api.spec.deployment import MultimodalDeploymentSpec
from mmd_operator.gpu_share import GpuShare, gpu_share
from mmd_operator.observed import Child, ObjectKey, Observed, manifest_key
from mmd_operator.pool_sizes import pool_in, wanted_replicas
from mmd_operator.replacement import Replacement, outdated_pods, replacement
from mmd_operator.resources.naming import DEPLOYMENT_LABEL, REVISION_LABEL, Manifest


@dataclass(frozen=True, slots=True)
class RolloutState:
    """One pass: what is wanted, what exists, and what the steps so far want done.

    `revision`, whose objects are `planned`, is to serve; `serving` serves now. `uid` is the deployment's own.
    """

    spec: MultimodalDeploymentSpec
    revision: str
    planned: Sequence[Manifest]
    observed: Observed
    uid: str
    now: float
    share: GpuShare = field(default_factory=GpuShare)
    apply: tuple[Manifest, ...] = ()
    sizes: Mapping[str, int] = field(default_factory=dict)
    replace: Mapping[str, Replacement] = field(default_factory=dict)
    restore: Mapping[ObjectKey, int] = field(default_factory=dict)
    remove: tuple[Child, ...] = ()

    @property
    def gateway(self) -> Child | None:
        """The gateway's Deployment."""
        name = next(m["metadata"]["name"] for m in self.planned if m["kind"] == "Deployment")
        return self.observed.children.get(("Deployment", name))

    @property
    def serving(self) -> str | None:
        """The revision that serves: that of the gateway's pod template."""
        gateway = self.gateway
        return gateway.workload.template_revision if gateway and gateway.workload else None

    @property
    def in_use(self) -> set[str | None]:
        """Revisions that serve, are to serve, or have gateway pods left."""
        return {self.revision, self.serving} | {pod.revision for pod in self.observed.pods_of("gateway")}

    @property
    def ready(self) -> bool:
        """Whether every StatefulSet of the plan (pools, and the managed NATS server) has all its pods Ready, and none is outdated."""
        for manifest in self.planned:
            if manifest["kind"] == "StatefulSet":
                child = self.observed.stateful_set(manifest["metadata"]["name"])
                if child is None or child.workload is None or not child.workload.rolled:
                    return False
                if child.workload.on_delete and outdated_pods(child, self.observed):
                    return False
        return True

    @property
    def switched(self) -> bool:
        """Whether all pods of the gateway are of the revision."""
        gateway = self.gateway
        return bool(
            gateway
            and gateway.workload
            and gateway.workload.rolled
            and self.serving == self.revision
            and self.in_use <= {self.revision}
        )

    def owns(self, child: Child) -> bool:
        """Whether a child belongs to the deployment and should stay."""
        return child.owner_uid == self.uid and not child.deleting


def share_gpu_budget(state: RolloutState) -> RolloutState:
    """A new revision gets what the budget leaves next to the one that serves."""
    return replace(state, share=gpu_share(state.spec, state.revision, state.serving, state.observed))


def apply_planned_objects(state: RolloutState) -> RolloutState:
    """All objects of the plan are applied."""
    return replace(state, apply=tuple(state.planned))


def hold_gateway_until_pools_are_ready(state: RolloutState) -> RolloutState:
    """The gateway is not switched to a revision whose pools are not Ready."""
    if state.serving is None or state.serving == state.revision or state.ready:
        return state
    return replace(state, apply=tuple(m for m in state.apply if m["kind"] != "Deployment"))


def hold_new_pools_without_gpus(state: RolloutState) -> RolloutState:
    """No pool is created where the budget leaves too little for one pod of each."""
    if not state.share.blocked:
        return state
    return replace(state, apply=tuple(m for m in state.apply if not _is_new_pool(m, state)))


def start_pools_at_present_size(state: RolloutState) -> RolloutState:
    """A pool that scales starts a new revision at the size it has now, so that the switch does not meet a small pool; within the
    GPU budget, of which the old revision holds its part."""
    return replace(state, apply=tuple(_at_starting_size(m, state) for m in state.apply))


def correct_pool_sizes(state: RolloutState) -> RolloutState:
    """Pools of the revision, and of the one that serves, get the size of the spec, or one within its bounds."""
    sizes = {}
    for child in state.observed.children.values():
        pool = pool_in(state.spec, child.component)
        if (
            child.kind == "StatefulSet"
            and child.workload is not None
            and pool is not None
            and child.revision in {state.revision, state.serving}
            and state.owns(child)
        ):
            present = child.workload.replicas
            wanted = wanted_replicas(pool, present)
            if child.revision == state.revision and str(child.component) in state.share.sizes:
                wanted = max(present, min(wanted, state.share.sizes[str(child.component)]))
            if wanted != present:
                sizes[child.name] = wanted
    return replace(state, sizes=sizes)


def replace_outdated_pods(state: RolloutState) -> RolloutState:
    """Pods of the revision that were made from other settings are replaced, one at a time."""
    found = {}
    for child in state.observed.children.values():
        pool = pool_in(state.spec, child.component)
        if (
            child.kind == "StatefulSet"
            and pool is not None
            and child.revision == state.revision
            and state.owns(child)
            and child.workload
            and child.workload.on_delete
        ):
            wanted = wanted_replicas(pool, child.workload.replicas)
            deadline = pool.scheduling_deadline_seconds
            one = replacement(child, wanted, state.observed, state.spec.gpu_budget, state.now, deadline)
            if one.outdated:
                found[child.name] = one
    sizes = {name: one.replicas for name, one in found.items() if one.replicas is not None}
    return replace(state, replace=found, sizes={**state.sizes, **sizes})


def restore_fixed_sizes(state: RolloutState) -> RolloutState:
    """Restore the size of the gateway and NATS if a client changed it, even while the gateway is held: a rollout may take hours."""
    found = {}
    for manifest in state.planned:
        component = manifest["metadata"]["labels"].get("app.kubernetes.io/component")
        child = state.observed.children.get(manifest_key(manifest))
        if (
            manifest["kind"] in ("StatefulSet", "Deployment")
            and component not in POOL_NAMES
            and child is not None
            and child.workload is not None
            and state.owns(child)
            and child.workload.replicas != manifest["spec"]["replicas"]
        ):
            found[child.key] = manifest["spec"]["replicas"]
    return replace(state, restore=found)


def remove_unused_objects(state: RolloutState) -> RolloutState:
    """What is not planned is removed: of older revisions once no gateway pod uses them, the rest once the revision serves alone."""
    planned = {manifest_key(m) for m in state.planned}
    finished = state.switched and state.ready
    in_use = state.in_use
    remove = tuple(
        child
        for child in state.observed.children.values()
        if state.owns(child)
        and child.key not in planned
        and (finished if child.revision in (None, state.revision) else child.revision not in in_use)
    )
    return replace(state, remove=remove)


def nothing_serves(state: RolloutState) -> bool:
    """No gateway exists yet."""
    return state.serving is None


def pools_are_not_ready(state: RolloutState) -> bool:
    """Another revision serves, and pools of this one are not Ready."""
    return state.serving != state.revision and not state.ready


def another_revision_serves(state: RolloutState) -> bool:
    """Another revision serves, and all pools of this one are Ready."""
    return state.serving != state.revision


def older_gateways_finish(state: RolloutState) -> bool:
    """Gateway pods of older revisions are left."""
    return bool(state.in_use - {state.revision})


def nothing_is_left(state: RolloutState) -> bool:
    """All pods are Ready and of the revision, and no step wants anything done but to apply what is planned."""
    left = state.remove or state.sizes or state.replace or state.restore
    return state.ready and state.switched and not left


def something_is_left(state: RolloutState) -> bool:
    """Pods are not Ready yet, or a step wants something done."""
    return not nothing_is_left(state)


def _is_new_pool(manifest: Manifest, state: RolloutState) -> bool:
    component = manifest["metadata"]["labels"].get("app.kubernetes.io/component")
    absent = manifest_key(manifest) not in state.observed.children
    return manifest["kind"] == "StatefulSet" and absent and pool_in(state.spec, component) is not None


def _at_starting_size(manifest: Manifest, state: RolloutState) -> Manifest:
    labels = manifest["metadata"]["labels"]
    component = labels.get("app.kubernetes.io/component")
    pool = pool_in(state.spec, component)
    if manifest["kind"] != "StatefulSet" or pool is None or labels[REVISION_LABEL] == state.serving:
        return manifest
    if (replicas := state.share.sizes.get(str(component))) is None:
        old = state.observed.stateful_set(f"{labels[DEPLOYMENT_LABEL]}-{component}-{state.serving}")
        if old is None or old.workload is None or pool.autoscaling is None:
            return manifest
        replicas = max(1, wanted_replicas(pool, old.workload.replicas))
    return {**manifest, "spec": {**manifest["spec"], "replicas": replicas}}
