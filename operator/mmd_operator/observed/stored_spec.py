"""Reads stored deployments with an operator that may be older or newer than the CRD. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, get_args

from pydantic import BaseModel

from mmd_api.faults import Fault, InvalidDeploymentError, cluster_faults
from mmd_api.resource import MultimodalDeployment
from mmd_api.spec.deployment import MultimodalDeploymentSpec

_METADATA_FIELDS = ("name", "namespace", "uid", "generation")


@dataclass(frozen=True, slots=True)
class Reading:
    """Result of reading a deployment. Exactly one of `deployment` and `faults` is set. `unknown`: ignored fields. `remedy`: remedy of all faults."""

    deployment: MultimodalDeployment | None
    faults: tuple[Fault, ...]
    unknown: tuple[str, ...]
    remedy: str = "fix the field"


def read(body: Mapping[str, Any]) -> Reading:
    """Read a body without the fields of a newer CRD: they are named, and the rest works."""
    unknown: list[str] = []
    spec = _known_part(MultimodalDeploymentSpec, body.get("spec", {}), "spec", unknown)
    metadata = {key: body["metadata"][key] for key in _METADATA_FIELDS if key in body["metadata"]}
    data = {"apiVersion": body["apiVersion"], "kind": body["kind"], "metadata": metadata, "spec": spec}
    try:
        deployment = MultimodalDeployment.parse(data)
    except InvalidDeploymentError as error:
        return Reading(None, error.faults, tuple(unknown))
    faults = tuple(cluster_faults(deployment))
    return Reading(None if faults else deployment, faults, tuple(unknown))


def _known_part(model: type[BaseModel], data: Any, path: str, unknown: list[str]) -> Any:
    """Return `data` without keys that `model` lacks, and add their paths to `unknown`."""
    if not isinstance(data, Mapping) or model.model_config.get("extra") == "allow":
        return data
    fields = {f.alias or name: f for name, f in model.model_fields.items()}
    known_fields = {}
    for key, value in data.items():
        field_path = f"{path}.{key}"
        if key not in fields:
            unknown.append(field_path)
            continue
        inner = _model_in(fields[key].annotation)
        if inner is not None and isinstance(value, list):
            value = [_known_part(inner, item, f"{field_path}[{n}]", unknown) for n, item in enumerate(value)]
        elif inner is not None:
            value = _known_part(inner, value, field_path, unknown)
        known_fields[key] = value
    return known_fields


def _model_in(annotation: object) -> type[BaseModel] | None:
    """The model in a field's annotation: plain, optional or in a list."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return next((m for a in get_args(annotation) if (m := _model_in(a)) is not None), None)
