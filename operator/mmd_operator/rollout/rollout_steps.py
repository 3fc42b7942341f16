"""The steps of a rollout. Each takes the state so far and returns it with its own actions added, and with its effect for people to read.

`next_step.STEPS` lists them in the order in which they apply, `next_step.STAGES` the stages. The first paragraph of a docstring is the step's
sentence in `mmd explain` and in docs/rollouts.md. Pure; time is part of the state.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from mmd_api.contract.pools import POOL_NAMES
from mmd_api.pool_resource import POOL_KIND
from mmd_api.spec.deployment import MultimodalDeploymentSpec
from mmd_api.spec.pools import Pool
from mmd_api.status import StepEffect
from mmd_operator.observed.observed import Child, ObjectKey, Observed, PoolGrowth, manifest_key
from mmd_operator.resources.disruption import BUDGET_KIND
from mmd_operator.resources.exposure import EXPOSING_KINDS, to_service
from mmd_operator.resources.naming import COMPONENT_LABEL, DEPLOYMENT_LABEL, REVISION_LABEL, Manifest
from mmd_operator.resources.sentences import sentence_of
from mmd_operator.resources.workload_kinds import POOL_KINDS, WORKLOADS
from mmd_operator.sizes.gpu_budget import gpus_growing, gpus_held, grown
from mmd_operator.sizes.gpu_share import GpuShare, gpu_share
from mmd_operator.sizes.groups import as_one, next_size
from mmd_operator.sizes.pool_sizes import pool_in, wanted_replicas
from mmd_operator.sizes.replacement import Replacement, outdated_pods, pods_of, replacement

DOWNLOAD_RETRY_SECONDS = 600.0


@dataclass(frozen=True, slots=True)
class RolloutState:
    """The state of one pass: the desired objects, the present ones, and the actions of the steps so far.

    `revision` is to serve, and `planned` are its objects; `serving` serves now. `uid`: the deployment's UID. `last_serving`: the revision that
    served in the last pass; `serving_gateway`: the gateway's Deployment of that revision, if it is needed and can be made. `free_gpus`: GPUs
    that the budget leaves after the steps so far; each pool that grows takes its part (None: no budget). `waits_for`: the pools without enough
    GPUs or nodes, in words.
    """

    spec: MultimodalDeploymentSpec
    revision: str
    planned: Sequence[Manifest]
    observed: Observed
    uid: str
    now: float
    last_serving: str | None = None
    serving_gateway: Manifest | None = None
    share: GpuShare = field(default_factory=GpuShare)
    free_gpus: int | None = None
    waits_for: str = ""
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
    def named(self) -> str | None:
        """The revision in the gateway's pod template."""
        gateway = self.gateway
        return gateway.workload.template_revision if gateway and gateway.workload else None

    @property
    def serving(self) -> str | None:
        """The serving revision: the one that the gateway names.

        Other clients can delete the gateway or change its template. Where it names none, one without pools, or the one to serve before its
        pools are Ready, the revision that served last still does, if it has pools.
        """
        named, last = self.named, self.last_serving
        if last is None or named == last or not self._has_pools(last):
            return named
        if named == self.revision:
            share = gpu_share(self.spec, named, last, self.observed, self.uid)
            return named if _is_ready(replace(self, share=share), last) else last
        return named if self._has_pools(named) else last

    def _has_pools(self, revision: str | None) -> bool:
        return revision is not None and any(
            child.is_sized
            and child.revision == revision
            and child.component in POOL_NAMES
            and self.owns(child)
            for child in self.observed.children.values()
        )

    @property
    def gateway_is_lost(self) -> bool:
        """Whether another revision serves, and the gateway does not name it."""
        return self.serving not in (None, self.revision, self.named)

    @property
    def in_use(self) -> set[str | None]:
        """The serving revision, the one to serve, and all with gateway pods left that may have requests."""
        gateways = (pod for pod in self.observed.pods_of("gateway") if not pod.gone(self.now))
        return {self.revision, self.serving} | {pod.revision for pod in gateways}

    @property
    def ready(self) -> bool:
        """Whether the revision can serve: pods of the planned workloads except the gateway are Ready, and none is outdated.

        All pods have to be. While another revision serves, a pool that scales may do with as many as serve there.
        """
        return _is_ready(self, self.serving)

    @property
    def switched(self) -> bool:
        """Whether all gateway pods belong to the revision."""
        gateway = self.gateway
        return bool(
            gateway
            and gateway.workload
            and gateway.workload.rolled
            and self.named == self.revision
            and self.in_use <= {self.revision}
        )

    def owns(self, child: Child) -> bool:
        """Whether a child belongs to the deployment and should stay."""
        return child.owner_uid == self.uid and not child.deleting


StepResult = tuple[RolloutState, StepEffect | None]


def share_gpu_budget(state: RolloutState) -> StepResult:
    """A new revision gets what `gpuBudget` leaves beside the serving one: a pod for each pool, then more for the pool furthest from its size."""
    share = gpu_share(state.spec, state.revision, state.serving, state.observed, state.uid)
    return replace(state, share=share), _effect(share_gpu_budget, [share.words] if share.words else [])


def apply_planned_objects(state: RolloutState) -> StepResult:
    """All objects of the plan are applied."""
    new = sum(manifest_key(m) not in state.observed.children for m in state.planned)
    effect = _effect(
        apply_planned_objects, [f"{new} of {len(state.planned)} do not exist yet"] if new else []
    )
    return replace(state, apply=tuple(state.planned)), effect


def keep_budgets_of_all_revisions(state: RolloutState) -> StepResult:
    """A pool's disruption budget over all revisions, as earlier releases made it, stays alone until the rollout is over.

    A pod that two budgets select cannot be evicted.
    """
    shared = {
        child.component
        for child in state.observed.children.values()
        if child.kind == BUDGET_KIND and child.revision is None and state.owns(child)
    }
    withheld = [
        m
        for m in state.apply
        if m["kind"] == BUDGET_KIND
        and REVISION_LABEL in m["metadata"]["labels"]
        and m["metadata"]["labels"].get(COMPONENT_LABEL) in shared
    ]
    effect = _effect(keep_budgets_of_all_revisions, [m["metadata"]["name"] for m in withheld])
    return _without(state, withheld), effect


def route_to_service_without_picker(state: RolloutState) -> StepResult:
    """The HTTPRoute leads to the Service while the deployment has no InferencePool of its own, or no Ready gateway pod has a picker.

    A missing or rejected InferencePool would fail every request, and another owner's would take them. Without a picker, Envoy fails
    requests with a body, whatever the pool's failure mode.
    """
    pools = [manifest_key(m) for m in state.planned if m["kind"] == "InferencePool"]
    pools_exist = all((child := state.observed.children.get(key)) and state.owns(child) for key in pools)
    picker_is_ready = any(
        p.has_picker and p.ready and not p.deleting for p in state.observed.pods_of("gateway")
    )
    if not pools or (pools_exist and picker_is_ready):
        return state, None
    apply = tuple(to_service(m) if m["kind"] == "HTTPRoute" else m for m in state.apply)
    routes = [m["metadata"]["name"] for m in apply if m["kind"] == "HTTPRoute"]
    return replace(state, apply=apply), _effect(route_to_service_without_picker, routes)


def hold_gateway_until_pools_are_ready(state: RolloutState) -> StepResult:
    """The gateway is not switched while another revision serves and pools of the new one are not Ready."""
    if state.serving is None or state.serving == state.revision or state.ready:
        return state, None
    effect = _effect(hold_gateway_until_pools_are_ready, [f"revision {state.serving} serves"])
    return replace(state, apply=tuple(m for m in state.apply if m["kind"] != "Deployment")), effect


def hold_new_pools_without_gpus(state: RolloutState) -> StepResult:
    """New pools are not created where the budget leaves too little for one pod of each."""
    if not state.share.blocked:
        return state, None
    withheld = [m for m in state.apply if _is_new_pool(m, state)]
    effect = _effect(hold_new_pools_without_gpus, [m["metadata"]["name"] for m in withheld])
    return _without(state, withheld), effect


def hold_paused_rollout(state: RolloutState) -> StepResult:
    """While `spec.rollout.paused` is true and another revision serves, the gateway is not switched and no new pool is created."""
    if not state.spec.rollout.paused or state.serving in (None, state.revision):
        return state, None
    withheld = [m for m in state.apply if m["kind"] == "Deployment" or _is_new_pool(m, state)]
    effect = _effect(hold_paused_rollout, [m["metadata"]["name"] for m in withheld])
    return _without(state, withheld), effect


def hold_pods_until_weights_are_cached(state: RolloutState) -> StepResult:
    """New pools, and a gateway that does not serve the revision yet, are not created until the Job has filled the cache of weights."""
    waits_for = [
        m["metadata"]["name"]
        for m in state.planned
        if m["kind"] == "Job" and not _is_complete(state.observed.children.get(manifest_key(m)), state)
    ]
    if not waits_for:
        return state, None
    withheld = [
        m
        for m in state.apply
        if _is_new_pool(m, state) or (m["kind"] == "Deployment" and state.serving != state.revision)
    ]
    names = [m["metadata"]["name"] for m in withheld]
    effect = _effect(hold_pods_until_weights_are_cached, [*waits_for, *names] if names else [])
    return _without(state, withheld), effect


def restore_serving_gateway(state: RolloutState) -> StepResult:
    """A gateway that was deleted or set back during a rollout is made again for the revision that serves, from its recorded spec."""
    gateway = state.serving_gateway
    held = all(m["kind"] != "Deployment" for m in state.apply)
    if gateway is None or not held or not state.gateway_is_lost:
        return state, None
    effect = _effect(restore_serving_gateway, [f"{gateway['metadata']['name']}: revision {state.serving}"])
    return replace(state, apply=(*state.apply, gateway)), effect


def start_pools_at_present_size(state: RolloutState) -> StepResult:
    """A pool that scales starts a new revision at the size it has now, within that share; a pool of groups starts with one group, and
    grows to it as groups get their nodes.

    This way the switch does not meet a small pool.
    """
    apply = tuple(_at_starting_size(m, state) for m in state.apply)
    sized = [after for before, after in zip(state.apply, apply, strict=True) if after != before]
    effect = _effect(
        start_pools_at_present_size, [_sized(m["metadata"]["name"], m["spec"]["replicas"]) for m in sized]
    )
    return replace(state, apply=apply), effect


def correct_pool_sizes(state: RolloutState) -> StepResult:
    """Pools of both revisions get the size of the spec, or one within its bounds; until the switch, scaled ones grow to the serving pool's.

    They grow by what `gpuBudget` leaves, pools of groups by one group at a time, until that has nodes. The remaining budget accounts for the pools that this pass creates.
    """
    sizes, short, unplaced, free = {}, [], [], _free_gpus(state)
    starting = {
        m["metadata"]["name"]: _starting_size(m, state, state.serving)
        for m in state.planned
        if _grows_before_switch(m, state)
    }
    for child in state.observed.children.values():
        pool = pool_in(state.spec, child.component)
        if (
            child.is_sized
            and child.workload is not None
            and pool is not None
            and child.revision in {state.revision, state.serving}
            and state.owns(child)
        ):
            shown, present = child.workload.replicas, _with_growth(child, state)
            wanted = max(wanted_replicas(pool, present), starting.get(child.name, 0))
            if child.revision == state.revision and str(child.component) in state.share.sizes:
                wanted = max(present, min(wanted, state.share.sizes[str(child.component)]))
            now = max(present, next_size(child, wanted, state.observed)) if wanted > present else wanted
            if now < wanted:
                unplaced.append(f"{child.kind} {child.name} stays at {now} of {wanted} {child.workload.unit}")
            size, free = grown(child, now, state.observed, free)
            if size < now:
                short.append(f"{child.kind} {child.name} stays at {size} of {wanted} {child.workload.unit}")
            set_by_autoscaler = size == present and pool.autoscaling is not None
            if size != shown and not set_by_autoscaler and not shown < size < present:
                sizes[child.name] = size
    waits_for = (
        f"{', '.join(short)} until GPUs of spec.gpuBudget {state.spec.gpu_budget} are free" if short else ""
    )
    if unplaced:
        words = f"{', '.join(unplaced)} until all pods of its groups have nodes"
        waits_for = "; ".join(filter(None, (waits_for, words)))
    effect = _effect(correct_pool_sizes, [*(_sized(*size) for size in sizes.items()), *short, *unplaced])
    return replace(state, sizes=sizes, free_gpus=free, waits_for=waits_for), effect


def replace_outdated_pods(state: RolloutState) -> StepResult:
    """Pods that were made from other settings are replaced, one at a time in each pool; the only pod of a pool is joined by its
    successor first, if `gpuBudget` and quotas leave room and a node takes it.

    No pod is replaced while the rollout is paused.
    """
    if state.spec.rollout.paused:
        return state, None
    replacements, free = {}, state.free_gpus
    for child in state.observed.children.values():
        pool = pool_in(state.spec, child.component)
        if (
            child.is_sized
            and pool is not None
            and child.revision == state.revision
            and state.owns(child)
            and child.workload
            and child.workload.on_delete
        ):
            wanted = wanted_replicas(pool, child.workload.replicas - child.workload.surged)
            deadline = pool.scheduling_deadline_seconds
            available_gpus = None if free is None else free + gpus_growing(state.observed, child.name)
            pool_replacement = replacement(child, wanted, state.observed, available_gpus, state.now, deadline)
            if (size := _with_growth(child, state)) > child.workload.replicas and pool_replacement.outdated:
                pool_replacement = Replacement(
                    pool_replacement.outdated, waiting=f"its growth to {size} pods has not been observed"
                )
            if pool_replacement.outdated:
                replacements[child.name] = pool_replacement
            if pool_replacement.replicas is not None:
                _, free = grown(child, pool_replacement.replicas, state.observed, free)
    sizes = {
        name: pool_replacement.replicas
        for name, pool_replacement in replacements.items()
        if pool_replacement.replicas is not None
    }
    effect = _effect(replace_outdated_pods, list(replacements))
    return replace(state, replace=replacements, sizes={**state.sizes, **sizes}, free_gpus=free), effect


def restore_fixed_sizes(state: RolloutState) -> StepResult:
    """The gateway and NATS get their size back if another client changed it.

    This applies even while the gateway is held: a rollout may take hours.
    """
    fixed_sizes = {}
    for manifest in state.planned:
        component = manifest["metadata"]["labels"].get(COMPONENT_LABEL)
        child = state.observed.children.get(manifest_key(manifest))
        if (
            manifest["kind"] in WORKLOADS
            and component not in POOL_NAMES
            and child is not None
            and child.workload is not None
            and state.owns(child)
            and child.workload.replicas != manifest["spec"]["replicas"]
        ):
            fixed_sizes[child.key] = manifest["spec"]["replicas"]
    effect = _effect(restore_fixed_sizes, [_sized(name, size) for (_, name), size in fixed_sizes.items()])
    return replace(state, restore=fixed_sizes), effect


def remove_unused_objects(state: RolloutState) -> StepResult:
    """Objects of older revisions are removed once no gateway pod uses them, others that are not planned once the revision serves
    alone, routes at once."""
    planned = {manifest_key(m) for m in state.planned}
    finished = state.switched and state.ready
    in_use = state.in_use
    remove = tuple(
        child
        for child in state.observed.children.values()
        if state.owns(child)
        and child.key not in planned
        and child.kind != POOL_KIND
        and (
            child.kind in EXPOSING_KINDS
            or (finished if child.revision in (None, state.revision) else child.revision not in in_use)
        )
    )
    effect = _effect(remove_unused_objects, [f"{child.kind} {child.name}" for child in remove])
    return replace(state, remove=remove), effect


def retry_failed_downloads(state: RolloutState) -> StepResult:
    """A Job that failed to download weights is deleted after ten minutes, and so starts again."""
    planned = {manifest_key(m) for m in state.planned if m["kind"] == "Job"}
    failed = tuple(
        child
        for child in state.observed.children.values()
        if child.key in planned
        and state.owns(child)
        and child.job is not None
        and child.job.failed_at is not None
        and state.now - child.job.failed_at >= DOWNLOAD_RETRY_SECONDS
    )
    effect = _effect(retry_failed_downloads, [child.name for child in failed])
    return replace(state, remove=(*state.remove, *failed)), effect


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
    pending = state.remove or state.sizes or state.replace or state.restore or state.waits_for
    return state.ready and state.switched and not pending


def something_is_left(state: RolloutState) -> bool:
    """Pods are not Ready yet, or a step wants something done."""
    return not nothing_is_left(state)


def growth_of(state: RolloutState) -> dict[str, PoolGrowth]:
    """Growth of the pools created or enlarged by the steps, by workload name."""
    growth = _created(state)
    for name, replicas in state.sizes.items():
        child = state.observed.sized(name)
        if child is not None and child.workload is not None and replicas > child.workload.replicas:
            growth[name] = PoolGrowth(replicas, child.workload.gpus, child.revision, child.uid)
    return growth


def _with_growth(child: Child, state: RolloutState) -> int:
    """Replicas of a pool, including growth not shown by the watch yet."""
    growth = state.observed.growth.get(child.name)
    shown = child.workload.replicas if child.workload else 0
    return max(shown, growth.replicas if growth else 0)


def _free_gpus(state: RolloutState) -> int | None:
    """GPUs of the budget not taken by present pods, decided growth, or pools created now; None without a budget."""
    if (unheld := _unheld_gpus(state)) is None:
        return None
    created = sum(
        max(0, growth.replicas * growth.gpus - gpus_growing(state.observed, name))
        for name, growth in _created(state).items()
    )
    return unheld - created


def _unheld_gpus(state: RolloutState) -> int | None:
    """GPUs of the budget not taken by present pods or decided growth; None without a budget."""
    return None if state.spec.gpu_budget is None else state.spec.gpu_budget - gpus_held(state.observed)


def _created(state: RolloutState) -> dict[str, PoolGrowth]:
    """Growth of the pools created now, by workload name."""
    created = {}
    for manifest in state.apply:
        labels = manifest["metadata"]["labels"]
        pool = pool_in(state.spec, labels.get(COMPONENT_LABEL))
        if pool is not None and _is_new_pool(manifest, state):
            size = manifest["spec"]["replicas"]
            gpus = state.spec.replica_gpus(labels[COMPONENT_LABEL])
            created[manifest["metadata"]["name"]] = PoolGrowth(size, gpus, labels[REVISION_LABEL], None)
    return created


def _without(state: RolloutState, withheld: Sequence[Manifest]) -> RolloutState:
    """The state without these manifests among those to apply."""
    return replace(state, apply=tuple(m for m in state.apply if m not in withheld))


def _effect(step: Callable[[RolloutState], StepResult], details: Sequence[str]) -> StepEffect | None:
    """The effect of a step, in the words of its docstring; None without details."""
    if not details:
        return None
    return StepEffect(step=step.__name__, message=f"{sentence_of(step)} ({', '.join(details)})"[:1024])


def _sized(name: str, replicas: int) -> str:
    return f"{name}: {replicas} {'pod' if replicas == 1 else 'pods'}"


def _is_complete(job: Child | None, state: RolloutState) -> bool:
    return bool(job and state.owns(job) and job.job and job.job.complete)


def _is_new_pool(manifest: Manifest, state: RolloutState) -> bool:
    component = manifest["metadata"]["labels"].get(COMPONENT_LABEL)
    absent = manifest_key(manifest) not in state.observed.children
    return manifest["kind"] in POOL_KINDS and absent and pool_in(state.spec, component) is not None


def _at_starting_size(manifest: Manifest, state: RolloutState) -> Manifest:
    if manifest["kind"] not in POOL_KINDS:
        return manifest
    replicas = _starting_size(manifest, state, state.serving)
    if _has_groups(manifest):
        replicas = min(1, replicas)
    return {**manifest, "spec": {**manifest["spec"], "replicas": replicas}}


def _starting_size(manifest: Manifest, state: RolloutState, serving: str | None) -> int:
    """Replicas of a pool before its revision serves. `serving`: the revision that serves."""
    pool, planned = _pool_of(manifest, state), int(manifest["spec"]["replicas"])
    labels = manifest["metadata"]["labels"]
    if pool is None or labels[REVISION_LABEL] == serving:
        return planned
    if (shared := state.share.sizes.get(labels[COMPONENT_LABEL])) is not None:
        return shared
    beside = _serving_pool(manifest, state, serving)
    if beside is None or pool.autoscaling is None:
        return planned
    return max(1, wanted_replicas(pool, beside.workload.replicas if beside.workload else 0))


def _is_ready(state: RolloutState, serving: str | None) -> bool:
    """`RolloutState.ready` while the revision `serving` serves."""
    return all(
        _can_serve(manifest, state, serving) for manifest in state.planned if manifest["kind"] in POOL_KINDS
    )


def _can_serve(manifest: Manifest, state: RolloutState, serving: str | None) -> bool:
    """Whether a pool, or NATS, has the Ready pods that it needs before its revision may serve."""
    child = state.observed.sized(manifest["metadata"]["name"])
    if child is None or child.workload is None:
        return False
    workload, pool = child.workload, _pool_of(manifest, state)
    if workload.on_delete and outdated_pods(child, state.observed):
        return False
    if pool is None or serving in (None, state.revision) or _serves_alone(state):
        return workload.rolled
    size = _starting_size(manifest, state, serving)
    if (
        workload.replicas < size
    ):  # it grows by what the budget has left, and serves with less if that is nothing
        size, _ = grown(child, size, state.observed, _unheld_gpus(state))
    beside = _serving_pool(manifest, state, serving)
    if beside is None or pool.autoscaling is None:
        return workload.rolled and workload.replicas >= size
    # A pool that grows may never have all pods Ready, and the nodes may not do for both: what counts is what serves.
    needed = min(size, max(1, wanted_replicas(pool, _running(beside, state.observed))))
    return workload.up_to_date and workload.ready >= needed


def _serves_alone(state: RolloutState) -> bool:
    """Whether the only Ready gateway pods are still those of the revision to serve: a switch away from it has failed."""
    revisions = {p.revision for p in state.observed.pods_of("gateway") if p.ready and not p.deleting}
    return revisions == {state.revision}


def _running(child: Child, observed: Observed) -> int:
    """Replicas of a pool that exist and have their nodes."""
    if child.workload is None:
        return 0
    without_node = sum(as_one(pod, observed).unschedulable is not None for pod in pods_of(child, observed))
    return max(0, min(child.workload.replicas, child.workload.current) - without_node)


def _serving_pool(manifest: Manifest, state: RolloutState, serving: str | None) -> Child | None:
    """The workload of the same pool in the revision that serves."""
    labels = manifest["metadata"]["labels"]
    return state.observed.sized(f"{labels[DEPLOYMENT_LABEL]}-{labels.get(COMPONENT_LABEL)}-{serving}")


def _pool_of(manifest: Manifest, state: RolloutState) -> Pool | None:
    return pool_in(state.spec, manifest["metadata"]["labels"].get(COMPONENT_LABEL))


def _has_groups(manifest: Manifest) -> bool:
    kind = manifest["kind"]
    return kind in POOL_KINDS and WORKLOADS[kind].group_size(manifest) > 1


def _grows_before_switch(manifest: Manifest, state: RolloutState) -> bool:
    """Whether a pool grows to the size at which its revision may serve: one of groups, or one that scales unless the rollout is paused."""
    if manifest["kind"] not in POOL_KINDS or state.serving == state.revision:
        return False
    pool = _pool_of(manifest, state)
    scales = pool is not None and pool.autoscaling is not None and not state.spec.rollout.paused
    return scales or _has_groups(manifest)
