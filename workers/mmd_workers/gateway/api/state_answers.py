"""Responses about the gateway and its models as pydantic models. Independent of how they are found."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from mmd_api.contract.pools import Role


class ServedModel(BaseModel):
    """A name of the model, or an adapter. `parent`: the model of an adapter, as in vLLM."""

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: Literal["multimodal-operator"] = "multimodal-operator"
    max_model_len: int
    modalities: list[str]
    parent: str | None = Field(None, exclude_if=lambda name: name is None)


class ModelList(BaseModel):
    """The names that requests may have as `model`."""

    object: Literal["list"] = "list"
    data: list[ServedModel]


class Alive(BaseModel):
    """Response of /health and /livez."""

    status: Literal["alive"] = "alive"


class Readiness(BaseModel):
    """Response of /ready and /readyz. `reason`: why it is not ready; empty if it is. `ready_pods`: Ready pods by role."""

    ready: bool
    reason: str
    ready_pods: dict[Role, int]


class AnyObject(BaseModel):
    """An object of another specification."""

    model_config = ConfigDict(extra="allow")
