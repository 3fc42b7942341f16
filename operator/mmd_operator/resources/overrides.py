"""Changes of a spec's pod template to a planned pod: added parts, placement, and its patch."""

from __future__ import annotations

from typing import Any

from mmd_api.readers import Component
from mmd_api.spec.pods import PodTemplate
from mmd_operator.resources.naming import Manifest, RevisionScope
from mmd_operator.resources.strategic_merge import merged

HOSTNAME = "kubernetes.io/hostname"
ZONE = "topology.kubernetes.io/zone"
SHARED_MEMORY_VOLUME = "shm"
SHARED_MEMORY_FOLDER = "/dev/shm"  # noqa: S108
NEAR_WEIGHT = 50

CONTAINER_SECURITY: Manifest = {
    "allowPrivilegeEscalation": False,
    "capabilities": {"drop": ["ALL"]},
    "readOnlyRootFilesystem": True,
}


def own_variables(template: PodTemplate) -> list[Manifest]:
    """Variables from a pod template's overrides."""
    return [
        {"name": e.name, "value": e.value}
        if e.value_from is None
        else {"name": e.name, "valueFrom": e.value_from}
        for e in template.env
    ]


def with_overrides(
    scope: RevisionScope, component: Component, template: PodTemplate, planned: Manifest
) -> Manifest:
    """A planned pod template with all overrides of the spec's template, except for labels, annotations and variables."""
    spec: Manifest = planned["spec"]
    container: Manifest = {**spec["containers"][0]}
    additions = _dumped(template, "volumes", "volume_mounts", "sidecars", "init_containers")
    if template.env_from:
        container["envFrom"] = [*container.get("envFrom", []), *template.env_from]
    container["volumeMounts"] = [*container["volumeMounts"], *additions["volumeMounts"]]
    pod: Manifest = {
        **spec,
        "containers": [container, *additions["sidecars"]],
        "volumes": [*spec["volumes"], *additions["volumes"]],
        "securityContext": merged(spec["securityContext"], template.security_context),
    }
    if additions["initContainers"]:
        pod["initContainers"] = additions["initContainers"]
    if template.shared_memory is not None:
        _limit_shared_memory(pod, container, template.shared_memory)
    _place(scope, component, template, pod)
    overridden: Manifest = merged({**planned, "spec": pod}, template.patch)
    for kind in ("containers", "initContainers"):
        if kind in overridden["spec"]:
            overridden["spec"][kind] = [_hardened(c, template) for c in overridden["spec"][kind]]
    return overridden


def _dumped(template: PodTemplate, *fields: str) -> dict[str, list[Manifest]]:
    return template.model_dump(mode="json", by_alias=True, exclude_none=True, include=set(fields))


def _limit_shared_memory(pod: Manifest, container: Manifest, limit: str) -> None:
    volume = {"name": SHARED_MEMORY_VOLUME, "emptyDir": {"medium": "Memory", "sizeLimit": limit}}
    other_volumes = [v for v in pod["volumes"] if v["name"] != SHARED_MEMORY_VOLUME]
    if len(other_volumes) == len(pod["volumes"]):
        mount = {"name": SHARED_MEMORY_VOLUME, "mountPath": SHARED_MEMORY_FOLDER}
        container["volumeMounts"] = [*container["volumeMounts"], mount]
        pod["volumes"] = [*other_volumes, volume]
    else:
        pod["volumes"] = [volume if v["name"] == SHARED_MEMORY_VOLUME else v for v in pod["volumes"]]


def _place(scope: RevisionScope, component: Component, template: PodTemplate, pod: Manifest) -> None:
    """Set preferences of placement: replicas on different nodes, prefill near decode. They keep no pod from running."""
    selector = {"matchLabels": _selector(scope, component)}
    if template.topology_spread_constraints is not None:
        spread = [{"labelSelector": selector, **c} for c in template.topology_spread_constraints]
    else:
        spread = _default_spread(scope, component, selector)
    if spread:
        pod["topologySpreadConstraints"] = spread
    affinity = template.affinity if template.affinity is not None else _default_affinity(scope, component)
    if affinity:
        pod["affinity"] = affinity


def _selector(scope: RevisionScope, component: Component) -> dict[str, str]:
    if component == "gateway" or component == "nats":
        return scope.selector(component)
    return scope.pool_selector(component)


def _default_spread(scope: RevisionScope, component: Component, selector: dict[str, Any]) -> list[Manifest]:
    """Default spread across nodes; none for NATS and for groups.

    A NATS cluster has its own preference (`nats_cluster.spread`), and the pods of a group exchange tensors at every step.
    """
    if component == "nats" or (component != "gateway" and scope.spec.group_size(component) > 1):
        return []
    return [
        {
            "labelSelector": selector,
            "maxSkew": 1,
            "topologyKey": HOSTNAME,
            "whenUnsatisfiable": "ScheduleAnyway",
        }
    ]


def _default_affinity(scope: RevisionScope, component: Component) -> Manifest:
    """Default affinity: prefill near decode, since KV goes from prefill to decode."""
    if component != "prefill":
        return {}
    near = [
        {
            "weight": NEAR_WEIGHT,
            "podAffinityTerm": {
                "labelSelector": {"matchLabels": scope.pool_selector("decode")},
                "topologyKey": key,
            },
        }
        for key in (HOSTNAME, ZONE)
    ]
    return {"podAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": near}}


def _hardened(container: Manifest, template: PodTemplate) -> Manifest:
    """A container within the standard, whatever its own securityContext leaves out. For privileged pods, its own securityContext wins."""
    own_context = container.get("securityContext", {})
    if template.pod_security == "Privileged":
        return {**container, "securityContext": {**CONTAINER_SECURITY, **own_context}}
    context = merged(CONTAINER_SECURITY, own_context)
    context["capabilities"] = {**context["capabilities"], **CONTAINER_SECURITY["capabilities"]}
    return {**container, "securityContext": context}
