"""The base of request models: unknown fields and fields that are not served are refused, and faults name the field. Independent of fields."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from itertools import islice
from typing import Any, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict, ValidationError, model_validator
from pydantic_core import PydanticCustomError

from mmd_api.contract.errors import (
    InvalidTypeError,
    InvalidValueError,
    MissingParameterError,
    MmdError,
    UnknownParameterError,
    UnsupportedParameterError,
)
from mmd_workers.gateway.basics.api_errors import ApiError

MAX_NAMED_FIELDS = 3  # unknown fields named in an error
MAX_NAME_CHARACTERS = 64


@dataclass(frozen=True, slots=True)
class Ignored:
    """Marks a field that is accepted and has no effect."""

    why: str


@dataclass(frozen=True, slots=True)
class Explained:
    """Marks a field whose effect is not evident from its values."""

    what: str


def _discard(_value: object) -> None:
    """Drop a value without effect: the request keeps its values to the end, and megabytes of this one would not be counted anywhere."""


DISCARD = AfterValidator(_discard)


class Strict(BaseModel):
    """Refuses unknown fields, and values of another type than the field's."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _has_no_unknown_field(cls, value: Any) -> Any:
        """Raise one error for all unknown fields: pydantic takes about 10 µs for each error, and a body may have many thousands."""
        if isinstance(value, dict) and (unknown := value.keys() - _names(cls)):
            raise PydanticCustomError("unknown_fields", "{names}", {"names": _first_of(value, unknown)})
        return value


NotServed = Mapping[str, tuple[tuple[object, ...], str]]
"""Fields that are refused, each with its accepted values, which mean "off", and the remedy."""

Model = TypeVar("Model", bound=Strict)


def validated(
    model: type[Model], value: object, not_served: NotServed, tags: AbstractSet[str], index: str = "[{}]"
) -> Model:
    """Validate a decoded JSON body.

    `tags`: names of branches of unions, which are no fields. `index`: how errors write an index of a list.

    Raises:
        InvalidTypeError: the body is not an object.
        ApiError: 400, names the first field at fault and the remedy.
    """
    if not isinstance(value, dict):
        raise InvalidTypeError("the body must be a JSON object")
    served = {name: field for name, field in value.items() if name not in not_served}
    for name in value:
        if name not in not_served:
            continue
        off_values, remedy = not_served[name]
        if value[name] is not None and not any(_same(value[name], allowed) for allowed in off_values):
            unsupported = UnsupportedParameterError(f"{name} is not supported: {remedy}")
            raise ApiError(unsupported, param=str(name))
    try:
        return model.model_validate(served)
    except ValidationError as error:
        raise _named(error, tags, index) from error


def _same(value: object, allowed: object) -> bool:
    if isinstance(allowed, bool) or isinstance(value, bool):
        return value is allowed
    return value == allowed


_OF_BRANCHES = ("content", "format", "input", "output", "prompt", "source", "stop", "system", "tool_choice")
"""Fields that are unions of named branches."""


def _named(error: ValidationError, tags: AbstractSet[str], index: str) -> ApiError:
    first = error.errors(include_url=False, include_input=False)[0]
    param, previous = "", None
    for part in first["loc"]:
        if isinstance(part, int):
            param += index.format(part)
        elif part in tags and (isinstance(previous, int) or previous in _OF_BRANCHES):
            pass  # a branch of a union, not a field
        else:
            param += f".{part}" if param else str(part)
        previous = part
    kind, message = first["type"], first["msg"]
    fault: type[MmdError] = InvalidValueError
    if kind == "unknown_fields":
        names = [name if name == "..." or not param else f"{param}.{name}" for name in first["ctx"]["names"]]
        fault, param = UnknownParameterError, names[0]
        fields = "field" if len(names) == 1 else "fields"
        message = f"unknown {fields} {', '.join(names)}; remove {'it' if len(names) == 1 else 'them'}"
    elif kind == "missing":
        fault, message = MissingParameterError, f"{param} is missing"
    elif kind == "union_tag_invalid":
        *others, last = first["ctx"]["expected_tags"].replace("'", "").split(", ")
        is_role = _is_role(first["ctx"])
        param += ".role" if is_role else ""
        noun = "role" if is_role else "part type"
        message = f"{param}: unknown {noun} {first['ctx']['tag']!r}; use {', '.join(others)} or {last}"
    elif kind == "union_tag_not_found":
        param += ".role" if _is_role(first["ctx"]) else ".type"
        fault, message = MissingParameterError, f"{param} is missing"
    elif kind in ("too_long", "too_short") and "ctx" in first:  # our own errors of this kind have none
        most = kind == "too_long"
        number = first["ctx"]["max_length" if most else "min_length"]
        message = f"{param}: send {'at most' if most else 'at least'} {number} {'entry' if number == 1 else 'entries'}"
    elif kind.endswith("_type"):
        fault, message = InvalidTypeError, f"{param}: {message}"
    else:
        message = f"{param}: {message}"
    return ApiError(fault(message[:1000]), param=param[:200] or None)


def _is_role(context: Mapping[str, Any]) -> bool:
    """True if a message is at fault, by its role, and not a part, by its type."""
    return "role" in context["discriminator"]


def _names(model: type[BaseModel]) -> set[str]:
    return {field.alias or name for name, field in model.model_fields.items()}


def _first_of(value: dict[str, Any], unknown: AbstractSet[str]) -> list[str]:
    """The first unknown names in the order in which they were sent, and "..." for the rest."""
    names = islice((name for name in value if name in unknown), MAX_NAMED_FIELDS)
    return [*(name[:MAX_NAME_CHARACTERS] for name in names), *["..."][: len(unknown) - MAX_NAMED_FIELDS]]
