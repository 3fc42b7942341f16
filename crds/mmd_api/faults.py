"""Lists every fault of a resource at once: field, problem and remedy, in the words of the resource.

The only module that knows pydantic's error types.
"""

from __future__ import annotations

import copy
import difflib
import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar, get_args

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from mmd_api.base import STRUCTURE_ONLY, ApiModel
from mmd_api.rule import Rule

Location = tuple[str | int, ...]
M = TypeVar("M", bound=BaseModel)

MAX_FAULTS = 200
MAX_SHOWN_CHARACTERS = 80
_STAND_INS: dict[str, object] = {
    "metadata": {"name": "standin"},
    "name": "standin",
    "spec": {"model": {"id": "standin"}, "decode": {}},
    "model": {"id": "standin"},
    "id": "standin",
    "decode": {},
    "maxReplicas": 1000,
}


@dataclass(frozen=True, slots=True)
class Fault:
    """One thing that is wrong. `field` is a path such as `spec.gateway.tolerations[0].key`; `message` ends with the remedy."""

    field: str
    message: str

    def __str__(self) -> str:
        return f"{self.field}: {self.message}" if self.field else self.message


class InvalidDeploymentError(ValueError):
    """A file or an object is no valid MultimodalDeployment. `faults` holds everything that is wrong with it."""

    def __init__(self, faults: Iterable[Fault]) -> None:
        self.faults = tuple(faults)
        super().__init__("\n".join(str(f) for f in self.faults))


def parse(model: type[M], data: object, *, secret: bool = False) -> M:
    """Validate JSON-like data as `model`, strictly: the types must be those that the API server takes.

    For `secret` data, no fault quotes a value or the name of an unknown field.

    Raises:
        InvalidDeploymentError: with every fault, not the first.
    """
    try:
        text = json.dumps(data)
    except (TypeError, ValueError) as error:
        raise InvalidDeploymentError(
            [Fault("", f"contains a value that JSON does not support ({error}); remove it")]
        ) from error
    try:
        return model.model_validate_json(text, strict=True)
    except ValidationError:
        raise InvalidDeploymentError(_all_faults(model, json.loads(text), secret)[:MAX_FAULTS]) from None


def cluster_faults(part: BaseModel) -> list[Fault]:
    """What is wrong with a valid resource in a cluster, although `mmd up` serves it on one machine."""
    return [_rule_fault(location, rule) for location, rule in _broken(part, (), in_cluster=True)]


def field_path(location: Location) -> str:
    """`("spec", "tolerations", 0)` as `spec.tolerations[0]`."""
    text = ""
    for step in location:
        if isinstance(step, int):
            text += f"[{step}]"
        elif step != "[key]":
            text += f".{step}" if text else step
    return text


def _all_faults(model: type[BaseModel], data: Any, secret: bool) -> list[Fault]:
    """Return the faults of structure, and then the broken rules.

    Rules are evaluated on the data after broken values have been removed (in place). A rule that reads a
    removed value is skipped: fixing the value may satisfy it.
    """
    repaired = data
    faults: dict[Fault, None] = {}
    unknown: set[Location] = set()
    for _ in range(8):
        try:
            parsed = model.model_validate_json(json.dumps(repaired), strict=True, context=STRUCTURE_ONLY)
        except ValidationError as error:
            details = error.errors(include_url=False)
            for detail in details:
                if not _consequence(detail["loc"], detail["type"], unknown):
                    faults[_structural_fault(model, detail, secret)] = None
            for detail in reversed(details):
                unknown.add(tuple(step for step in detail["loc"] if step != "[key]"))
                _repair(repaired, detail["loc"], missing=detail["type"] == "missing")
        else:
            for location, rule in _broken(parsed, (), in_cluster=False):
                if not any(
                    _reads(rule, at[len(location) :]) for at in unknown if at[: len(location)] == location
                ):
                    faults[_rule_fault(location, rule)] = None
            break
    return list(faults)


def _consequence(location: Location, error_type: str, unknown: set[Location]) -> bool:
    """Whether a field is missing only because its broken value was removed."""
    return error_type == "missing" and location in unknown


def _reads(rule: Rule, field: Location) -> bool:
    """Whether a rule reads a field below its model, or anything in or around that field.

    The rule's CEL names the fields it reads.
    """
    text = re.sub(r"\.\w+\(", " (", rule.cel or f"self.{rule.field}")
    present = {tuple(path.split(".")[1:]) for path in re.findall(r"has\((self[\w.]+)\)", text)}
    values = {
        tuple(path.split(".")[1:])
        for path in re.findall(r"self(?:\.\w+)+", re.sub(r"has\([^)]*\)", "", text))
    }
    return any(path[: len(field)] == field for path in present | values) or any(
        field[: len(path)] == path for path in values
    )


def _repair(data: Any, location: Location, *, missing: bool) -> None:
    """Remove the value at `location`, or insert a harmless one if one is required and missing."""
    if location and location[-1] == "[key]":
        location = location[:-1]
    if not location:
        return
    parent: Any = data
    for step in location[:-1]:
        if isinstance(parent, list) and isinstance(step, int) and step >= len(parent):
            return  # the entry was removed for an earlier fault
        if isinstance(parent, dict) and step not in parent:
            return
        parent = parent[step]
    last: Any = location[-1]
    if not missing:
        if isinstance(parent, list) or last in parent:
            del parent[last]
    elif last in _STAND_INS:
        parent[last] = copy.deepcopy(_STAND_INS[str(last)])
    else:
        _repair(data, location[:-1], missing=False)


def _rule_fault(location: Location, rule: Rule) -> Fault:
    return Fault(field_path((*location, *rule.field.split("."))), rule.message)


def _broken(part: BaseModel, location: Location, *, in_cluster: bool) -> Iterator[tuple[Location, Rule]]:
    """Broken rules of a part of the resource and of everything below it."""
    if isinstance(part, ApiModel):
        for rule in part.broken_rules(in_cluster=in_cluster):
            yield location, rule
    for name, field in type(part).model_fields.items():
        value, alias = getattr(part, name), field.alias or name
        if isinstance(value, BaseModel):
            yield from _broken(value, (*location, alias), in_cluster=in_cluster)
        elif isinstance(value, list):
            for number, item in enumerate(value):
                if isinstance(item, BaseModel):
                    yield from _broken(item, (*location, alias, number), in_cluster=in_cluster)


def _structural_fault(model: type[BaseModel], detail: ErrorDetails, secret: bool) -> Fault:
    location = detail["loc"]
    if secret and detail["type"] == "extra_forbidden":
        field_names = ", ".join(_fields_at(model, location[:-1]))
        return Fault(field_path(location[:-1]), f"has an unknown field; valid fields: {field_names}")
    return Fault(
        field_path(location), _message(model, detail, "the value" if secret else _shown(detail["input"]))
    )


def _message(model: type[BaseModel], detail: ErrorDetails, shown: str) -> str:
    """Problem and remedy of one pydantic error. `shown` stands for the value."""
    context = detail.get("ctx", {})
    match detail["type"]:
        case "missing":
            return "required but not set; add it"
        case "extra_forbidden":
            return _unknown_field(model, detail["loc"])
        case "literal_error":
            choices = str(context["expected"]).replace(" or ", ", ").replace("'", "")
            return f"{shown} is not one of {choices}; {_nearest(shown, choices.split(', '), 'choose one of them')}"
        case "int_type" | "int_from_float" | "int_parsing":
            return f"{shown} is not an integer; write it without quotes, decimals or units"
        case "bool_type" | "bool_parsing":
            return f"{shown} is neither true nor false; write true or false without quotes"
        case "string_type":
            return f"{shown} is not a string; put it in quotes"
        case "greater_than_equal":
            return f"{shown} is too small; set at least {context['ge']}"
        case "less_than_equal":
            return f"{shown} is too large; set at most {context['le']}"
        case "string_pattern_mismatch":
            return f"{shown} has an invalid format; it must match {context['pattern']}"
        case "string_too_short":
            return f"{shown} is too short; use at least {context['min_length']} characters"
        case "string_too_long":
            return f"{shown} is too long; use at most {context['max_length']} characters"
        case "too_short":
            return f"{context['actual_length']} entries are too few; list at least {context['min_length']}"
        case "too_long":
            return f"{context['actual_length']} entries are too many; list at most {context['max_length']}"
        case "datetime_type" | "datetime_parsing" | "datetime_from_date_parsing" | "timezone_aware":
            return f"{shown} is not a time with a time zone; write it as 2027-06-30T00:00:00Z"
        case "model_type" | "dict_type" | "model_attributes_type":
            return f"{shown} is not a mapping; write its fields below it, indented"
        case "null":
            return "has no value; set one, or remove the field"
        case "json_invalid":
            return (
                "has text that is not valid Unicode, or is nested too deeply; correct the text, or flatten it"
            )
        case "list_type":
            return f"{shown} is not a list; begin each entry with '- '"
        case _:
            return f"{detail['msg']} (got {shown}); see docs/reference.md"


def _shown(value: object) -> str:
    text = json.dumps(value, default=str)
    return text if len(text) <= MAX_SHOWN_CHARACTERS else text[:MAX_SHOWN_CHARACTERS] + "..."


def _unknown_field(model: type[BaseModel], location: Location) -> str:
    names = _fields_at(model, location[:-1])
    return f"unknown field; {_nearest(str(location[-1]), names, 'valid fields: ' + ', '.join(names))}"


def _nearest(word: str, names: list[str], otherwise: str) -> str:
    close = difflib.get_close_matches(word.strip('"').lower(), [k.lower() for k in names], n=1, cutoff=0.7)
    return f"did you mean {next(k for k in names if k.lower() == close[0])}?" if close else otherwise


def _fields_at(model: type[BaseModel], location: Location) -> list[str]:
    return sorted(f.alias or n for n, f in _model_at(model, location).model_fields.items())


def _model_at(model: type[BaseModel], location: Location) -> type[BaseModel]:
    """The model class that describes the part of the resource at `location`."""
    for step in location:
        if isinstance(step, int):
            continue
        field = next(f for n, f in model.model_fields.items() if (f.alias or n) == step)
        model = _models_in(field.annotation)[0]
    return model


def _models_in(annotation: object) -> list[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [m for argument in get_args(annotation) for m in _models_in(argument)]
