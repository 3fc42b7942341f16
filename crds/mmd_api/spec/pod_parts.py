"""Parts of core/v1 pods that a template holds unchanged, and what such a part may not do.

The API server checks their fields when the operator applies them. This module has what the API server would
accept and a deployment must not have: parts that replace the operator's own, or that leave the "restricted"
Pod Security Standard.
"""

from __future__ import annotations

import posixpath
from collections.abc import Iterable, Iterator, Mapping
from typing import Annotated, Any

from pydantic import ConfigDict, Field

from mmd_api.base import ApiModel

RESERVED_DOMAINS = ("app.kubernetes.io/", "serving.multimodal.dev/")
RESERVED_ENV = "MMD_"
RESERVED_CONTAINERS = ("gateway", "worker", "nats")
RESERVED_VOLUMES = (
    *("config", "tmp", "shm", "pod", "nats", "hub-cache", "models", "features", "keys", "tls", "store"),
)
RESERVED_MOUNTS = (
    *("/etc/mmd", "/tmp", "/dev/shm", "/etc/pod", "/etc/nats-login", "/var/cache/huggingface", "/models"),  # noqa: S108
    *("/var/cache/features", "/etc/mmd-keys", "/etc/mmd-tls", "/etc/nats", "/data"),
)
OWNED_POD_FIELDS = frozenset(
    {"restartPolicy", "terminationGracePeriodSeconds", "activeDeadlineSeconds", "hostname", "subdomain"}
    | {"nodeName", "setHostnameAsFQDN", "hostnameOverride"}
)
OWNED_CONTAINER_FIELDS = frozenset(
    {"command", "args", "image", "imagePullPolicy", "ports", "envFrom", "lifecycle", "workingDir"}
    | {
        "startupProbe",
        "livenessProbe",
        "readinessProbe",
        "terminationMessagePolicy",
        "terminationMessagePath",
    }
    | {"restartPolicy", "restartPolicyRules", "stdin", "tty"}
)
"""Fields of the container of a gateway, a worker or NATS."""
MERGE_KEYS: Mapping[str, str] = {
    "containers": "name",
    "initContainers": "name",
    "volumes": "name",
    "env": "name",
    "volumeMounts": "mountPath",
    "volumeDevices": "devicePath",
    "ports": "containerPort",
    "imagePullSecrets": "name",
    "hostAliases": "ip",
    "topologySpreadConstraints": "topologyKey",
    "resourceClaims": "name",
    "schedulingGates": "name",
}
"""Field by which entries of a pod's list are merged: `patchMergeKey` of the Kubernetes API.

Other lists are replaced.
"""
OBJECTS = frozenset(
    {
        "securityContext",
        "capabilities",
        "seccompProfile",
        "appArmorProfile",
        "seLinuxOptions",
        "windowsOptions",
    }
    | {"resources", "requests", "limits", "lifecycle", "preStop", "postStart", "httpGet", "tcpSocket"}
    | {"startupProbe", "livenessProbe", "readinessProbe"}
)
"""Fields of pods that are objects wherever they are."""
LISTS = frozenset({"add", "drop", "sysctls", "containers", "initContainers", "ephemeralContainers"})
SCALARS = frozenset({"type", "role", "user", "procMount", "mountPath"})
DIRECTIVE = "$patch"
MAX_DEPTH = 24
"""Maximum depth of a patch: no pod is nested as deep."""
RESTRICTED_VOLUMES = frozenset(
    {"configMap", "csi", "downwardAPI", "emptyDir", "ephemeral", "image", "persistentVolumeClaim"}
    | {"projected", "secret"}
)
RESTRICTED_SYSCTLS = frozenset(
    {"kernel.shm_rmid_forced", "net.ipv4.ip_local_port_range", "net.ipv4.ip_unprivileged_port_start"}
    | {"net.ipv4.tcp_syncookies", "net.ipv4.ping_group_range", "net.ipv4.ip_local_reserved_ports"}
    | {"net.ipv4.tcp_keepalive_time", "net.ipv4.tcp_fin_timeout", "net.ipv4.tcp_keepalive_intvl"}
    | {"net.ipv4.tcp_keepalive_probes", "net.ipv4.tcp_rmem", "net.ipv4.tcp_wmem"}
)
RESTRICTED_SELINUX_TYPES = frozenset(
    {None, "", "container_t", "container_init_t", "container_kvm_t", "container_engine_t"}
)
SAFE_PROFILES = frozenset({None, "RuntimeDefault", "Localhost"})

PodPart = Annotated[
    dict[str, Any], Field(max_length=64, json_schema_extra={"x-kubernetes-preserve-unknown-fields": True})
]


class NamedPart(ApiModel):
    """Object of core/v1 with a name."""

    model_config = ConfigDict(extra="allow")

    name: Annotated[str, Field(max_length=63)]
    """Name."""


class MountPart(ApiModel):
    """Volume mount as in core/v1."""

    model_config = ConfigDict(extra="allow")

    name: Annotated[str, Field(max_length=63)]
    """Name of the volume."""
    mount_path: Annotated[str, Field(max_length=512)]
    """Folder."""


def under_reserved_mount(path: str) -> bool:
    """Whether a mount would cover a folder of the operator's, or be in one."""
    whole = posixpath.normpath("/" + path.lstrip("/")).rstrip("/") + "/"
    return any(
        whole.startswith(f"{reserved}/") or f"{reserved}/".startswith(whole) for reserved in RESERVED_MOUNTS
    )


def is_reserved_key(key: str) -> bool:
    """Whether a label or an annotation is the operator's."""
    return key.startswith(RESERVED_DOMAINS)


def entries(value: Any) -> list[Any]:
    """A list as it is. Empty for anything else, which the API server refuses."""
    return value if isinstance(value, list) else []


def objects(value: Any) -> list[Mapping[str, Any]]:
    """The entries of a list that are objects."""
    return [item for item in entries(value) if isinstance(item, Mapping)]


def part(value: Any, *path: str) -> Mapping[str, Any]:
    """An object below another. Empty if there is none."""
    for step in path:
        value = value.get(step) if isinstance(value, Mapping) else None
    return value if isinstance(value, Mapping) else {}


def well_formed(value: Any) -> bool:
    """Whether what the operator reads of a part of a pod has the types that core/v1 has there.

    Entries of lists that are merged must have their keys. The API server checks the rest.
    """
    if isinstance(value, list):
        return all(map(well_formed, value))
    if not isinstance(value, Mapping):
        return True
    return all(_field_formed(key, below) and well_formed(below) for key, below in value.items())


def _field_formed(key: str, value: Any) -> bool:
    if value is None:
        return False
    if key in OBJECTS and not isinstance(value, Mapping):
        return False
    if key in LISTS and not isinstance(value, list):
        return False
    if key in ("add", "drop"):
        return all(isinstance(item, str) for item in value)
    if key in SCALARS:
        return not isinstance(value, (list, Mapping))
    if key in MERGE_KEYS and isinstance(value, list):
        return all(isinstance(i, Mapping) and isinstance(i.get(MERGE_KEYS[key]), (str, int)) for i in value)
    return True


def stays_restricted(pod: Mapping[str, Any]) -> bool:
    """Whether a well-formed part of a pod's spec sets nothing that the "restricted" standard forbids.

    What it leaves out is the operator's.
    """
    if any(pod.get(field) for field in ("hostNetwork", "hostPID", "hostIPC")):
        return False
    if any(set(volume) - {"name", DIRECTIVE} - RESTRICTED_VOLUMES for volume in objects(pod.get("volumes"))):
        return False
    context = part(pod, "securityContext")
    if any(sysctl.get("name") not in RESTRICTED_SYSCTLS for sysctl in objects(context.get("sysctls"))):
        return False
    return _context_restricted(context) and all(map(_container_restricted, containers_in(pod)))


def containers_in(pod: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """Containers of a part of a pod's spec, of every kind."""
    for kind in ("containers", "initContainers", "ephemeralContainers"):
        yield from objects(pod.get(kind))


def _container_restricted(container: Mapping[str, Any]) -> bool:
    context = part(container, "securityContext")
    capabilities = part(context, "capabilities")
    if context.get("privileged") or context.get("allowPrivilegeEscalation"):
        return False
    if set(entries(capabilities.get("add"))) - {"NET_BIND_SERVICE"}:
        return False
    if "drop" in capabilities and "ALL" not in entries(capabilities["drop"]):
        return False
    if context.get("procMount", "Default") != "Default":
        return False
    if any(port.get("hostPort") for port in objects(container.get("ports"))):
        return False
    return _context_restricted(context) and not any(_names_host(hook) for hook in _hooks(container))


def _context_restricted(context: Mapping[str, Any]) -> bool:
    selinux = part(context, "seLinuxOptions")
    return (
        context.get("runAsNonRoot", True) is True
        and context.get("runAsUser") != 0
        and part(context, "seccompProfile").get("type") in SAFE_PROFILES
        and part(context, "appArmorProfile").get("type") in SAFE_PROFILES
        and selinux.get("type") in RESTRICTED_SELINUX_TYPES
        and not selinux.get("user")
        and not selinux.get("role")
        and not part(context, "windowsOptions").get("hostProcess")
    )


def _hooks(container: Mapping[str, Any]) -> Iterable[Mapping[str, Any]]:
    probes = (part(container, probe) for probe in ("startupProbe", "livenessProbe", "readinessProbe"))
    return (*probes, *(part(container, "lifecycle", hook) for hook in ("preStop", "postStart")))


def _names_host(hook: Mapping[str, Any]) -> bool:
    return any(part(hook, kind).get("host") for kind in ("httpGet", "tcpSocket"))


def keeps_what_is_owned(patch: Mapping[str, Any]) -> bool:
    """Whether a patch of a pod template leaves alone what the operator owns.

    These are labels, variables, ports, commands, volumes and GPUs.
    """
    if set(patch) - {"metadata", "spec"} or set(part(patch, "metadata")) - {"labels", "annotations"}:
        return False
    for kind in ("labels", "annotations"):
        if any(map(is_reserved_key, part(patch, "metadata", kind))):
            return False
    spec = part(patch, "spec")
    if OWNED_POD_FIELDS & set(spec):
        return False
    if any(volume.get("name") in RESERVED_VOLUMES for volume in objects(spec.get("volumes"))):
        return False
    if any(c.get("name") in RESERVED_CONTAINERS for c in objects(spec.get("initContainers"))):
        return False
    owned = (c for c in objects(spec.get("containers")) if c.get("name") in RESERVED_CONTAINERS)
    return all(map(_container_kept, owned))


def _container_kept(container: Mapping[str, Any]) -> bool:
    if OWNED_CONTAINER_FIELDS & set(container) or DIRECTIVE in container:
        return False
    if any(str(e.get("name", "")).startswith(RESERVED_ENV) for e in objects(container.get("env"))):
        return False
    if any(under_reserved_mount(str(m.get("mountPath", ""))) for m in objects(container.get("volumeMounts"))):
        return False
    resources = part(container, "resources")
    return "claims" not in resources and not any(
        name in ("cpu", "memory") or "gpu" in name or "/mig-" in name
        for kind in ("requests", "limits")
        for name in part(resources, kind)
    )


def merges(patch: Mapping[str, Any]) -> bool:
    """Whether a patch has the form that can be merged.

    It has objects and lists where pods have them, a merge key in every entry of a list that is merged by it,
    no null, and no directive but `$patch: replace` or `$patch: delete` in such an entry.
    """
    spec = part(patch, "spec")
    shaped = all(isinstance(patch.get(k, {}), dict) for k in ("metadata", "spec")) and all(
        isinstance(part(patch, "metadata").get(k, {}), dict) for k in ("labels", "annotations")
    )
    lists = all(
        isinstance(value, list)
        for object_ in (spec, *containers_in(spec))
        for key, value in object_.items()
        if key in MERGE_KEYS
    )
    return shaped and lists and _mergeable(patch)


def _mergeable(value: Any, *, keyed: bool = False, depth: int = 0) -> bool:
    if isinstance(value, list):
        return all(_mergeable(item, depth=depth + 1) for item in value)
    if not isinstance(value, dict):
        return value is not None
    if depth > MAX_DEPTH:
        return False
    for key, below in value.items():
        if key.startswith("$"):
            if not (keyed and key == DIRECTIVE and below in ("replace", "delete")):
                return False
        elif key in MERGE_KEYS and isinstance(below, list):
            merge_key = MERGE_KEYS[key]
            if not all(isinstance(item, dict) and item.get(merge_key) not in (None, "") for item in below):
                return False
            if not all(_mergeable(item, keyed=True, depth=depth + 1) for item in below):
                return False
        elif not _mergeable(below, depth=depth + 1):
            return False
    return True
