"""Templates, resources and images of pods."""

from __future__ import annotations

from typing import Annotated, Literal

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

RESERVED_LABEL_DOMAINS = ("app.kubernetes.io/", "serving.multimodal.dev/")


def _toleration_value(t: Toleration) -> bool:
    return t.operator != "Exists" or t.value is None


def _toleration_key(t: Toleration) -> bool:
    return t.operator == "Exists" or t.key is not None


def _toleration_seconds(t: Toleration) -> bool:
    return t.toleration_seconds is None or t.effect == "NoExecute"


def _labels_free(t: PodTemplate) -> bool:
    return not any(k.startswith(RESERVED_LABEL_DOMAINS) for k in t.labels)


def _annotations_free(t: PodTemplate) -> bool:
    return not any(k.startswith(RESERVED_LABEL_DOMAINS) for k in t.annotations)


def _env_unique(t: PodTemplate) -> bool:
    return len({e.name for e in t.env}) == len(t.env)


def _env_free(t: PodTemplate) -> bool:
    return not any(e.name.startswith("MMD_") for e in t.env)


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
    *(
        Rule(
            field=field,
            cel=f"!self.{field}.exists(k, "
            + " || ".join(f"k.startsWith('{domain}')" for domain in RESERVED_LABEL_DOMAINS)
            + ")",
            holds=free,
            problem="keys with the prefix app.kubernetes.io/ or serving.multimodal.dev/ are reserved for the operator",
            remedy="use your own prefix",
        )
        for field, free in (("labels", _labels_free), ("annotations", _annotations_free))
    ),
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
)


class EnvVar(ApiModel):
    """Environment variable with a literal value."""

    name: Annotated[str, Field(min_length=1, max_length=253, pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")]
    """Name of the variable. The prefix MMD_ is reserved."""
    value: Annotated[str, Field(max_length=4096)] = ""
    """Value of the variable."""


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
