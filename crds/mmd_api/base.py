"""The base of every model of the resource: camelCase on the wire, closed, immutable, and true to the rules of `rules.py`."""

from __future__ import annotations

from typing import Any, Self

from pydantic import BaseModel, ConfigDict, ValidationInfo, model_validator
from pydantic.alias_generators import to_camel
from pydantic_core import PydanticCustomError

from mmd_api.rules import broken_rules

STRUCTURE_ONLY: dict[str, Any] = {"structure_only": True}
"""Validation context that leaves the rules out, so that a reader of a broken file can weigh them one by one."""


class ApiModel(BaseModel):
    """A part of the resource. Unknown fields are refused, so a typing error never passes silently."""

    model_config = ConfigDict(
        alias_generator=to_camel,
        populate_by_name=True,
        extra="forbid",
        frozen=True,
        use_attribute_docstrings=True,
    )

    @model_validator(mode="after")
    def _keep_the_rules(self, info: ValidationInfo) -> Self:
        broken = [] if info.context == STRUCTURE_ONLY else broken_rules(self)
        if broken:
            context: dict[str, Any] = {"rules": broken, "text": " / ".join(r.message for r in broken)}
            raise PydanticCustomError("rule", "{text}", context)
        return self
