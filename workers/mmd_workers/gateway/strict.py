"""The base of what clients send: models that refuse unknown fields by name. Independent of fields."""

from __future__ import annotations

from collections.abc import Set as AbstractSet
from itertools import islice
from typing import Any

from pydantic import BaseModel, ConfigDict, model_validator
from pydantic_core import PydanticCustomError

MAX_NAMED_FIELDS = 3  # of those that are unknown
MAX_NAME_CHARACTERS = 64


class Strict(BaseModel):
    """Refuses unknown fields, and values of another type than the field's."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _has_no_unknown_field(cls, value: Any) -> Any:
        """One error for all of them: pydantic makes one each, in about 10 µs, and a body has room for many thousands."""
        if isinstance(value, dict) and (unknown := value.keys() - _names(cls)):
            raise PydanticCustomError("unknown_fields", "{names}", {"names": _first_of(value, unknown)})
        return value


def _names(model: type[BaseModel]) -> set[str]:
    return {field.alias or name for name, field in model.model_fields.items()}


def _first_of(value: dict[str, Any], unknown: AbstractSet[str]) -> list[str]:
    """The first of the unknown names in the order in which they were sent, "..." for the rest."""
    named = islice((name for name in value if name in unknown), MAX_NAMED_FIELDS)
    return [*(name[:MAX_NAME_CHARACTERS] for name in named), *["..."][: len(unknown) - MAX_NAMED_FIELDS]]
