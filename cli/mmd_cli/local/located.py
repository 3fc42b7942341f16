"""Resolves the relative paths of a deployment's file."""

from __future__ import annotations

from pathlib import Path

from pydantic import ValidationError

from mmd_api.base import STRUCTURE_ONLY
from mmd_api.faults import Fault, InvalidDeploymentError
from mmd_api.resource import MultimodalDeployment
from mmd_api.spec.adapters import ModelOrAdapter


def located(deployment: MultimodalDeployment, folder: Path) -> MultimodalDeployment:
    """The resource with relative paths of the model and of adapters resolved in `folder`.

    Raises:
        InvalidDeploymentError: a path has characters that ids cannot have.
    """
    spec = deployment.spec

    def absolute(part: ModelOrAdapter, field: str) -> ModelOrAdapter:
        if part.source != "RelativePath":
            return part
        path = str((folder / part.id).resolve())
        try:
            return part.model_validate({**part.model_dump(), "id": path}, context=STRUCTURE_ONLY)
        except ValidationError as error:
            problem = f"{path!r} has characters that an id cannot have; move it to a path of letters, digits, '.', '_' and '-'"
            raise InvalidDeploymentError([Fault(f"{field}.id", problem)]) from error

    adapters = [
        absolute(adapter, f"spec.engine.adapters[{adapter.name}]") for adapter in spec.engine.adapters
    ]
    engine = spec.engine.model_copy(update={"adapters": adapters})
    spec = spec.model_copy(update={"model": absolute(spec.model, "spec.model"), "engine": engine})
    return deployment.model_copy(update={"spec": spec})
