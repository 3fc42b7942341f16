"""Templates, resources and images of pods."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Annotated, Any, Literal

from pydantic import Field

from mmd_api.base import ApiModel
from mmd_api.rule import Rule
from mmd_api.spec.fields import (
    Annotations,
    CpuQuantity,
    Labels,
    LabelValue,
    Name,
    QualifiedName,
    Quantity,
    keyed_by,
)
from mmd_api.spec.pod_parts import (
    RESERVED_CONTAINERS,
    RESERVED_DOMAINS,
    RESERVED_MOUNTS,
    RESERVED_VOLUMES,
    MountPart,
    NamedPart,
    PodPart,
    is_reserved_key,
    keeps_what_is_owned,
    merges,
    stays_restricted,
    under_reserved_mount,
    well_formed,
)

CORE_PARTS = (
    ("volumes", "volumes"),
    ("sidecars", "sidecars"),
    ("init_containers", "initContainers"),
    ("security_context", "securityContext"),
    ("topology_spread_constraints", "topologySpreadConstraints"),
    ("affinity", "affinity"),
    ("patch", "patch"),
)
"""Fields of a template that are as in core/v1, with their spelling in the resource."""


def _toleration_value(t: Toleration) -> bool:
    return t.operator != "Exists" or t.value is None


def _toleration_key(t: Toleration) -> bool:
    return t.operator == "Exists" or t.key is not None


def _toleration_seconds(t: Toleration) -> bool:
    return t.toleration_seconds is None or t.effect == "NoExecute"


def without_reserved_keys(field: str) -> Rule:
    """The rule that no key of a user's map has a prefix of the operator's.

    `field`: the field of the model, which both spellings share.
    """
    return Rule(
        field=field,
        cel=f"!self.{field}.exists(k, "
        + " || ".join(f"k.startsWith('{domain}')" for domain in RESERVED_DOMAINS)
        + ")",
        holds=lambda part: not any(map(is_reserved_key, getattr(part, field))),
        problem="keys with the prefix app.kubernetes.io/ or serving.multimodal.dev/ are reserved for the operator",
        remedy="use your own prefix",
    )


def _env_unique(t: PodTemplate) -> bool:
    return len({e.name for e in t.env}) == len(t.env)


def _env_free(t: PodTemplate) -> bool:
    return not any(e.name.startswith("MMD_") for e in t.env)


def _one_source(e: EnvVar) -> bool:
    return e.value_from is None or e.value == ""


def _names_unique(field: str, t: PodTemplate) -> bool:
    names = [item.name for item in getattr(t, field)]
    return len(set(names)) == len(names)


def _names_free(field: str, reserved: tuple[str, ...], t: PodTemplate) -> bool:
    return not any(item.name in reserved for item in getattr(t, field))


def _mounts_free(t: PodTemplate) -> bool:
    return not any(under_reserved_mount(mount.mount_path) for mount in t.volume_mounts)


def _mounts_unique(t: PodTemplate) -> bool:
    return len({mount.mount_path for mount in t.volume_mounts}) == len(t.volume_mounts)


def _fragment(field: str, t: PodTemplate) -> dict[str, Any]:
    """The part of a pod's spec that a field of a template becomes."""
    value = t.model_dump(mode="json", by_alias=True, include={field}, exclude_none=True)
    content: Any = next(iter(value.values()), {})
    if field == "patch":
        spec = content.get("spec", {})
        return spec if isinstance(spec, dict) else {}
    return {{"volumes": "volumes", "security_context": "securityContext"}.get(field, "containers"): content}


def _formed(field: str, t: PodTemplate) -> bool:
    return getattr(t, field) is None or well_formed(t.model_dump(mode="json", by_alias=True, include={field}))


def _restricted(field: str, t: PodTemplate) -> bool:
    if t.pod_security == "Privileged" or not _formed(field, t):  # its form has a rule of its own
        return True
    return stays_restricted(_fragment(field, t))


def _patch_check(check: Callable[[Any], bool], t: PodTemplate) -> bool:
    return not well_formed(t.patch) or check(t.patch)


def _well_formed(field: str, spelled: str) -> Rule:
    return Rule(
        field=spelled,
        cel=None,
        holds=partial(_formed, field),
        problem="has null, a value of another kind than pods have there, or an entry of a list without its name, containerPort or topologyKey",
        remedy="write it as in core/v1",
    )


def _stays_restricted(field: str, spelled: str) -> Rule:
    return Rule(
        field=spelled,
        cel=None,
        holds=partial(_restricted, field),
        problem="sets what the Pod Security Standard restricted forbids (a host's namespaces, paths or ports, root, privileges, "
        "added capabilities, profiles turned off)",
        remedy="remove it, or set podSecurity: Privileged in this template",
    )


def _reserved_names(field: str, spelled: str, names: tuple[str, ...]) -> tuple[Rule, ...]:
    """Rules for a list whose entries have names.

    The schema already states that none is there twice.
    """
    return (
        Rule(
            field=spelled,
            cel=None,
            holds=partial(_names_unique, field),
            problem="duplicate name",
            remedy="keep one of them",
        ),
        Rule(
            field=spelled,
            cel=f"!self.{spelled}.exists(v, v.name in [{','.join(repr(n) for n in names)}])",
            holds=partial(_names_free, field, names),
            problem="the operator uses this name",
            remedy="use another",
        ),
    )


TOLERATION = (
    Rule(
        field="value",
        cel="self.operator != 'Exists' || !has(self.value)",
        holds=_toleration_value,
        problem="operator Exists does not take a value",
        remedy="remove value, or set operator: Equal",
    ),
    Rule(
        field="key",
        cel="self.operator == 'Exists' || has(self.key)",
        holds=_toleration_key,
        problem="operator Equal requires a key",
        remedy="set key, or operator: Exists",
    ),
    Rule(
        field="tolerationSeconds",
        cel="!has(self.tolerationSeconds) || (has(self.effect) && self.effect == 'NoExecute')",
        holds=_toleration_seconds,
        problem="tolerationSeconds applies only to effect NoExecute",
        remedy="set effect: NoExecute, or remove tolerationSeconds",
    ),
)


POD_TEMPLATE = (
    without_reserved_keys("labels"),
    without_reserved_keys("annotations"),
    Rule(
        field="env",
        cel=None,
        holds=_env_unique,
        problem="duplicate variable name",
        remedy="keep one of them",
    ),
    Rule(
        field="env",
        cel="!self.env.exists(e, e.name.startsWith('MMD_'))",
        holds=_env_free,
        problem="variables with the prefix MMD_ are reserved for the operator",
        remedy="use the spec field that sets it",
    ),
    *_reserved_names("volumes", "volumes", RESERVED_VOLUMES),
    *_reserved_names("sidecars", "sidecars", RESERVED_CONTAINERS),
    *_reserved_names("init_containers", "initContainers", RESERVED_CONTAINERS),
    Rule(
        field="volumeMounts",
        cel=None,
        holds=_mounts_unique,
        problem="duplicate mountPath",
        remedy="keep one of them",
    ),
    Rule(
        field="volumeMounts",
        cel=None,
        holds=_mounts_free,
        problem="a mountPath is in, or covers, a folder of the operator's: " + ", ".join(RESERVED_MOUNTS),
        remedy="mount it elsewhere",
    ),
    *(_well_formed(field, spelled) for field, spelled in CORE_PARTS),
    _stays_restricted("volumes", "volumes"),
    _stays_restricted("sidecars", "sidecars"),
    _stays_restricted("init_containers", "initContainers"),
    _stays_restricted("security_context", "securityContext"),
    _stays_restricted("patch", "patch"),
    Rule(
        field="patch",
        cel=None,
        holds=partial(_patch_check, merges),
        problem="cannot be merged: it has null, a directive other than $patch: delete or replace in an entry of a list with a merge key, "
        "an entry without its merge key, or a value of another kind than pods have there",
        remedy="write it as part of a pod template with metadata and spec, and name the entries of lists",
    ),
    Rule(
        field="patch",
        cel=None,
        holds=partial(_patch_check, keeps_what_is_owned),
        problem="changes what the operator owns (of the pod: name, restart policy, grace period, its own labels, annotations, containers and "
        "volumes; of its own container: command, args, image, ports, probes, lifecycle, envFrom, MMD_ variables, mounts, CPU, memory, GPUs)",
        remedy="remove it, or use the spec field that sets it",
    ),
)

ENV_VAR = (
    Rule(
        field="valueFrom",
        cel="!has(self.valueFrom) || self.value == ''",
        holds=_one_source,
        problem="value and valueFrom are mutually exclusive",
        remedy="keep one of them",
    ),
)


class EnvVar(ApiModel, rules=ENV_VAR):
    """Environment variable."""

    name: Annotated[str, Field(min_length=1, max_length=253, pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")]
    """Name of the variable. The prefix MMD_ is reserved."""
    value: Annotated[str, Field(max_length=4096)] = ""
    """Value of the variable."""
    value_from: PodPart | None = None
    """Source of the value, as in core/v1."""


class Toleration(ApiModel, rules=TOLERATION):
    """Toleration as in core/v1."""

    key: QualifiedName | None = None
    """Key of the taint. If empty, operator must be Exists, which matches all keys."""
    operator: Literal["Exists", "Equal"] = "Equal"
    """Relationship between key and value."""
    value: LabelValue | None = None
    """Value of the taint."""
    effect: Literal["NoSchedule", "PreferNoSchedule", "NoExecute"] | None = None
    """Effect of the taint. Matches all effects if not set."""
    toleration_seconds: Annotated[int, Field(ge=0, le=2**31 - 1)] | None = None
    """How long the pod tolerates a NoExecute taint."""


class Resources(ApiModel):
    """CPU and memory of a pod. GPUs are requested by `gpus` of the pool."""

    cpu: CpuQuantity | None = None
    """CPU request, such as 4 or 500m. Also sets the number of compute threads."""
    memory: Quantity | None = None
    """Memory request and limit."""


class PodTemplate(ApiModel, rules=POD_TEMPLATE):
    """Overrides for the pods of a component."""

    labels: Labels = {}
    """Labels added to the pods."""
    annotations: Annotations = {}
    """Annotations added to the pods."""
    env: Annotated[
        list[EnvVar],
        Field(
            max_length=64,
            json_schema_extra=keyed_by("name"),
        ),
    ] = []
    """Environment variables added to the container. They override those of the operator, except MMD_ variables."""
    env_from: Annotated[list[PodPart], Field(max_length=16)] = []
    """Sources of more variables, as in core/v1."""
    volumes: Annotated[list[NamedPart], Field(max_length=32, json_schema_extra=keyed_by("name"))] = []
    """Volumes as in core/v1."""
    volume_mounts: Annotated[
        list[MountPart], Field(max_length=32, json_schema_extra=keyed_by("mountPath"))
    ] = []
    """Volume mounts of the container, as in core/v1."""
    sidecars: Annotated[list[NamedPart], Field(max_length=8, json_schema_extra=keyed_by("name"))] = []
    """Containers that run next to the operator's, as in core/v1."""
    init_containers: Annotated[list[NamedPart], Field(max_length=8, json_schema_extra=keyed_by("name"))] = []
    """Init containers as in core/v1."""
    shared_memory: Quantity | None = None
    """Size limit of /dev/shm. Default 1Gi."""
    affinity: PodPart | None = None
    """Affinity as in core/v1. Default: prefill pods prefer to be near decode pods."""
    topology_spread_constraints: Annotated[list[PodPart], Field(max_length=8)] | None = None
    """Constraints as in core/v1. Default: preferably one pod of the component per node. labelSelector defaults to the component's pods."""
    security_context: PodPart = {}
    """Fields of the pods' securityContext, as in core/v1."""
    pod_security: Literal["Restricted", "Privileged"] = "Restricted"
    """Pod Security Standard that the template must not leave. Privileged allows everything."""
    patch: PodPart = {}
    """Strategic merge patch of the pod template, with metadata and spec, for what has no field."""
    service_account_name: Name | None = None
    """Name of the ServiceAccount of the pods. Its token is not mounted."""
    priority_class_name: Name | None = None
    """Name of the PriorityClass of the pods."""
    runtime_class_name: Name | None = None
    """Name of the RuntimeClass of the pods, such as nvidia."""
    termination_grace_period_seconds: Annotated[int, Field(ge=5, le=3600)] = 120
    """How long a terminating pod may take to finish or hand over its requests. A gateway gets at least its `requestTimeoutSeconds`."""


class ImageSpec(ApiModel):
    """Container images of the pods."""

    worker: Annotated[str, Field(min_length=1, max_length=512)] = "multimodal-worker:latest"
    """Image of the gateway and of all pools."""
    nats: Annotated[str, Field(min_length=1, max_length=512)] = "multimodal-nats:latest"
    """Image of the managed NATS server."""
    pull_policy: Literal["Always", "IfNotPresent", "Never"] = "IfNotPresent"
    """Image pull policy."""
    pull_secrets: Annotated[list[Name], Field(max_length=8)] = []
    """Names of the Secrets used to pull the images."""
