"""What a template of the spec changes of a planned pod: parts that it adds, where its pods run, and its patch."""

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
    """The variables of a pod template's overrides."""
    return [
        {"name": e.name, "value": e.value}
        if e.value_from is None
        else {"name": e.name, "valueFrom": e.value_from}
        for e in template.env
    ]


def with_overrides(
    scope: RevisionScope, component: Component, template: PodTemplate, planned: Manifest
) -> Manifest:
    """A planned pod template with everything that the spec's template has for it, its labels, annotations and variables aside."""
    spec: Manifest = planned["spec"]
    container: Manifest = {**spec["containers"][0]}
    added = _dumped(template, "volumes", "volume_mounts", "sidecars", "init_containers")
    if template.env_from:
        container["envFrom"] = [*container.get("envFrom", []), *template.env_from]
    container["volumeMounts"] = [*container["volumeMounts"], *added["volumeMounts"]]
    pod: Manifest = {
        **spec,
        "containers": [container, *added["sidecars"]],
        "volumes": [*spec["volumes"], *added["volumes"]],
        "securityContext": merged(spec["securityContext"], template.security_context),
    }
    if added["initContainers"]:
        pod["initContainers"] = added["initContainers"]
    if template.shared_memory is not None:
        _limit_shared_memory(pod, container, template.shared_memory)
    _place(scope, component, template, pod)
    whole: Manifest = merged({**planned, "spec": pod}, template.patch)
    for kind in ("containers", "initContainers"):
        if kind in whole["spec"]:
            whole["spec"][kind] = [_hardened(c, template) for c in whole["spec"][kind]]
    return whole


def _dumped(template: PodTemplate, *fields: str) -> dict[str, list[Manifest]]:
    return template.model_dump(mode="json", by_alias=True, exclude_none=True, include=set(fields))


def _limit_shared_memory(pod: Manifest, container: Manifest, limit: str) -> None:
    volume = {"name": SHARED_MEMORY_VOLUME, "emptyDir": {"medium": "Memory", "sizeLimit": limit}}
    others = [v for v in pod["volumes"] if v["name"] != SHARED_MEMORY_VOLUME]
    if len(others) == len(pod["volumes"]):
        mount = {"name": SHARED_MEMORY_VOLUME, "mountPath": SHARED_MEMORY_FOLDER}
        container["volumeMounts"] = [*container["volumeMounts"], mount]
        pod["volumes"] = [*others, volume]
    else:
        pod["volumes"] = [volume if v["name"] == SHARED_MEMORY_VOLUME else v for v in pod["volumes"]]


def _place(scope: RevisionScope, component: Component, template: PodTemplate, pod: Manifest) -> None:
    """Preferences, which keep no pod from running: replicas on different nodes, prefill near decode."""
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
    """None for NATS, whose cluster has a preference of its own (`nats_cluster.spread`), and for groups, whose pods exchange tensors at every step."""
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
    """KV goes from prefill to decode."""
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
    """A container within the standard, whatever its own securityContext leaves out; where pods are privileged, unless that says otherwise."""
    own = container.get("securityContext", {})
    if template.pod_security == "Privileged":
        return {**container, "securityContext": {**CONTAINER_SECURITY, **own}}
    context = merged(CONTAINER_SECURITY, own)
    context["capabilities"] = {**context["capabilities"], **CONTAINER_SECURITY["capabilities"]}
    return {**container, "securityContext": context}
