"""How a deployment gets from what stands to what is wanted, one step at a time. Pure.

A pipeline revision is brought up beside the one that serves. When all its pools are whole, the gateway's Deployment is applied with it:
Kubernetes then starts gateway pods of the new revision, which place requests on the new pools only, before it stops old ones, which finish
what they hold on the old pools. The old pools go when no gateway pod of their revision is left. Until the new revision is whole
the gateway is not touched, so a bad one never serves; taking it back is a rollout whose target is already whole.
Which revision serves is read from the gateway's pod template: nothing else needs to be remembered.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, cast

from mmd_api.pools import POOL_NAMES, PoolName
from mmd_api.spec import MultimodalDeploymentSpec, Pool
from mmd_operator.observed import Child, ObjectKey, Observed
from mmd_operator.resources.naming import DEPLOYMENT_LABEL, REVISION_LABEL, Manifest

Stage = Literal["Creating", "BringingUp", "SwitchingGateway", "Draining", "Updating", "Complete"]


@dataclass(frozen=True, slots=True)
class Step:
    """What to do now: objects to apply in order, sizes to set, objects to remove."""

    stage: Stage
    revision: str
    serving: str | None
    apply: tuple[Manifest, ...]
    sizes: Mapping[str, int]
    remove: tuple[Child, ...]


def manifest_key(manifest: Manifest) -> ObjectKey:
    """Kind and name."""
    return manifest["kind"], manifest["metadata"]["name"]


def next_step(
    spec: MultimodalDeploymentSpec, revision: str, planned: Sequence[Manifest], observed: Observed, uid: str
) -> Step:
    """The step from `observed` towards `planned`, the objects of `revision`. `uid` is the deployment's own."""
    gateway = _gateway(planned, observed)
    serving = gateway.workload.template_revision if gateway and gateway.workload else None
    whole = _whole(planned, observed)
    switching = serving is not None and serving != revision
    hold = switching and not whole
    in_use = {revision, serving} | {pod.revision for pod in observed.pods_of("gateway")}
    switched = bool(
        gateway
        and gateway.workload
        and gateway.workload.rolled
        and serving == revision
        and in_use <= {revision}
    )
    wanted = {manifest_key(m) for m in planned}
    apply = [m for m in planned if not (hold and m["kind"] == "Deployment")]
    remove = [
        child
        for child in observed.children.values()
        if child.owner_uid == uid
        and child.key not in wanted
        and not child.deleting
        and (switched and whole if child.revision in (None, revision) else child.revision not in in_use)
    ]
    sizes = _sizes(spec, {revision, serving}, observed, uid)
    left = bool(remove or sizes)
    return Step(
        stage=_stage(serving, revision, whole=whole, switched=switched, left=left, in_use=in_use),
        revision=revision,
        serving=serving,
        apply=tuple(_starting_size(m, spec, serving, observed) for m in apply),
        sizes=sizes,
        remove=tuple(remove),
    )


def _gateway(planned: Sequence[Manifest], observed: Observed) -> Child | None:
    name = next(m["metadata"]["name"] for m in planned if m["kind"] == "Deployment")
    return observed.children.get(("Deployment", name))


def _whole(planned: Sequence[Manifest], observed: Observed) -> bool:
    """Whether every StatefulSet of the plan (pools, and the managed NATS server) has all its pods, new and ready."""
    for manifest in planned:
        if manifest["kind"] == "StatefulSet":
            child = observed.stateful_set(manifest["metadata"]["name"])
            if child is None or child.workload is None or not child.workload.rolled:
                return False
    return True


def _stage(
    serving: str | None, revision: str, *, whole: bool, switched: bool, left: bool, in_use: set[str | None]
) -> Stage:
    if serving is None:
        return "Creating"
    if serving != revision:
        return "SwitchingGateway" if whole else "BringingUp"
    if in_use - {revision}:
        return "Draining"
    return "Complete" if whole and switched and not left else "Updating"


def wanted_replicas(pool: Pool, present: int) -> int:
    """Size of a pool: the spec's, or the present one within the bounds of a pool that scales."""
    if pool.autoscaling is not None:
        low, high = pool.autoscaling.min_replicas, pool.autoscaling.max_replicas
        return min(max(present, low), high)
    return 1 if pool.replicas is None else pool.replicas


def _pool(spec: MultimodalDeploymentSpec, component: str | None) -> Pool | None:
    return cast("Pool | None", getattr(spec, component)) if component in POOL_NAMES else None


def _starting_size(
    manifest: Manifest, spec: MultimodalDeploymentSpec, serving: str | None, observed: Observed
) -> Manifest:
    """A pool that scales starts a new revision at the size it has now, so that the switch does not meet a small pool."""
    labels = manifest["metadata"]["labels"]
    component = labels.get("app.kubernetes.io/component")
    pool = _pool(spec, component)
    if manifest["kind"] != "StatefulSet" or pool is None or labels[REVISION_LABEL] == serving:
        return manifest
    old = observed.stateful_set(f"{labels[DEPLOYMENT_LABEL]}-{component}-{serving}")
    if old is None or old.workload is None or pool.autoscaling is None:
        return manifest
    replicas = max(1, wanted_replicas(pool, old.workload.replicas))
    return {**manifest, "spec": {**manifest["spec"], "replicas": replicas}}


def _sizes(
    spec: MultimodalDeploymentSpec, revisions: set[str | None], observed: Observed, uid: str
) -> dict[str, int]:
    """StatefulSets of pools whose size is not what it should be, with the size they should have."""
    sizes = {}
    for child in observed.children.values():
        pool = _pool(spec, child.component)
        if (
            child.kind == "StatefulSet"
            and child.workload is not None
            and pool is not None
            and child.owner_uid == uid
            and child.revision in revisions
            and not child.deleting
        ):
            wanted = wanted_replicas(pool, child.workload.replicas)
            if wanted != child.workload.replicas:
                sizes[child.name] = wanted
    return sizes


def pools_in(spec: MultimodalDeploymentSpec) -> tuple[PoolName, ...]:
    """Pools that the spec holds, upstream first."""
    return tuple(name for name in POOL_NAMES if getattr(spec, name) is not None)
