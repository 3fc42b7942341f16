"""Values of arguments that a model writes as elements: text as it is, others as JSON. Independent of requests and the network."""

from __future__ import annotations

import json
from collections.abc import Set as AbstractSet
from typing import Any

ANY_TYPE = frozenset({"string", "integer", "number", "boolean", "null", "object", "array"})
"""The types of JSON, as JSON Schema names them."""
_PYTHON = {"True": "true", "False": "false", "None": "null"}
_TYPES = {bool: "boolean", int: "integer", float: "number", str: "string", list: "array", dict: "object"}


def type_of(value: Any) -> str:
    """The type of a value of JSON, as JSON Schema names it."""
    return _TYPES.get(type(value), "null")


def is_text(types: AbstractSet[str]) -> bool:
    """Whether a value of these types can only be a text."""
    return types == {"string"}


def as_json(written: str, types: AbstractSet[str]) -> str:
    """The JSON of a value that was written in an element, where it may have these types.

    It is JSON of one of them, `True`, `False` or `None` as in Python, or else a text. What cannot be a text but is JSON is kept.
    """
    value = written.strip()
    if not types.isdisjoint({"boolean", "null"}):
        value = _PYTHON.get(value, value)
    try:
        found = type_of(json.loads(value, parse_constant=_refuse))
    except (ValueError, RecursionError):
        return quoted(written)
    fits = found in types or (found == "integer" and "number" in types)
    return value if ("string" not in types or (fits and found != "string")) else quoted(written)


def quoted(text: str) -> str:
    """A text as JSON."""
    return json.dumps(text, ensure_ascii=False)


def _refuse(constant: str) -> None:
    raise ValueError(constant)
