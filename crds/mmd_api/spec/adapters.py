"""A LoRA adapter and where its weights are."""

from __future__ import annotations

from typing import TypeVar

from mmd_api.base import ApiModel
from mmd_api.rule import Rule
from mmd_api.spec.model import (
    KNOWN_TO_PODS,
    REVISION_OF_HUB_ID_CEL,
    ModelId,
    ModelSource,
    ModelSpec,
    RevisionName,
    ServedName,
    revision_of_hub_id,
    source_of,
)

MAX_ADAPTERS = 32


def _has_files(a: AdapterSpec) -> bool:
    return a.source != "Builtin"


ADAPTER = (
    Rule(
        field="id",
        cel="!self.id.startsWith('builtin/')",
        holds=_has_files,
        problem="no adapter is part of the worker image",
        remedy="set id to a hub id or a path",
    ),
    Rule(
        field="revision",
        cel=REVISION_OF_HUB_ID_CEL,
        holds=revision_of_hub_id,
        problem="only adapters from the hub have revisions",
        remedy="remove revision",
    ),
    KNOWN_TO_PODS,
)


class AdapterSpec(ApiModel, rules=ADAPTER):
    """LoRA adapter in PEFT's format (adapter_config.json, adapter_model.safetensors), from where model.storage has the model."""

    name: ServedName
    """Name under which clients request the model with this adapter."""
    id: ModelId
    """Hub id or path, as of the model."""
    revision: RevisionName | None = None
    """Commit, tag or branch of a hub repository. Only a commit is immutable."""

    @property
    def source(self) -> ModelSource:
        """Kind of name that `id` is, by its prefix."""
        return source_of(self.id)


ModelOrAdapter = TypeVar("ModelOrAdapter", ModelSpec, AdapterSpec)
