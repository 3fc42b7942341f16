"""Arguments that a model writes as elements, each a name and a value: their types and their grammar. Independent of requests and the network.

A value that is a text stands in its element without quotes, so the schema of a tool tells whether `5` is a number or a text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from mmd_api.contract.errors import InvalidValueError
from mmd_workers.gateway.basics.api_errors import ApiError
from mmd_workers.gateway.output.element_values import ANY_TYPE, type_of
from mmd_workers.model.call_forms import ELEMENT_NAME, Spelling
from mmd_workers.model.grammar import LENIENT, SCHEMA_OPTIONS

# Schemas that are read to find the types of a tool's arguments, and how deep they are; beyond, any type is possible.
_MAX_STEPS = 1000
_MAX_DEPTH = 32
_ROOT = "mmd-root"  # a definition: the whole schema of a tool
_ANNOTATIONS = frozenset(
    {"title", "description", "default", "examples", "deprecated", "readOnly", "writeOnly", "$comment"}
)
_KNOWN = _ANNOTATIONS | {
    *("type", "properties", "required", "additionalProperties", "$defs", "definitions", "$schema", "$id")
}
_ALTERNATIVES = ("anyOf", "oneOf")


def argument_types(schema: Mapping[str, Any]) -> dict[str, frozenset[str]]:
    """The JSON types that each argument of a tool may have. An argument that is not named may have any."""
    types = _Types(schema)
    return {name: types.of(value) for name, value in _properties(schema).items()}


class _Types:
    """Finds the types that a schema permits."""

    def __init__(self, root: Mapping[str, Any]) -> None:
        self._root, self._left = root, _MAX_STEPS

    def of(self, schema: Any, depth: int = 0) -> frozenset[str]:
        """The types of the values that match a schema, or more."""
        self._left -= 1
        if self._left < 0 or depth > _MAX_DEPTH or not isinstance(schema, dict):
            return ANY_TYPE
        if "$ref" in schema:
            return self.of(_at(self._root, schema["$ref"]), depth + 1)
        if "const" in schema:
            return frozenset({type_of(schema["const"])})
        if isinstance(listed := schema.get("enum"), list):
            return frozenset(map(type_of, listed))
        if isinstance(named := schema.get("type"), str | list):
            return frozenset([named] if isinstance(named, str) else map(str, named))
        for keyword in _ALTERNATIVES:
            if isinstance(branches := schema.get(keyword), list) and branches:
                return frozenset().union(*(self.of(branch, depth + 1) for branch in branches))
        if isinstance(parts := schema.get("allOf"), list) and parts:
            return ANY_TYPE.intersection(*(self.of(part, depth + 1) for part in parts))
        return ANY_TYPE


class ElementGrammar:
    """The grammar of the arguments of one answer's calls, in the library's language. `rules` and `schemas` grow with each tool."""

    def __init__(self, spelling: Spelling) -> None:
        assert spelling.element is not None
        self.rules: list[str] = []
        self.schemas: dict[str, Any] = {}
        self._spelling, self._element = spelling, spelling.element
        close = spelling.form.element.close if spelling.form.element else ""
        end = self._element.end
        stop = end.index(close) + len(close)
        self._stop, self._after = end[:stop], quoted(end[stop:], spelling)
        if close in spelling.tokens:
            without = re.escape(close).replace("/", r"\/")
            self._text = f"VALUE {quoted(self._stop, spelling)}"
            self.rules.append(f"VALUE: /(?s:.*)/ & ~/(?s:.*){without}(?s:.*)/")
        else:
            self._text = "value"
            self.rules += [f"value[suffix={json.dumps(self._stop)}]: VALUE", "VALUE: /(?s:.*)/"]
        begin, middle = (quoted(text, spelling) for text in (self._element.begin, self._element.middle))
        self.rules += [
            f"other: {begin} KEY {middle} {self._text} {self._after}",
            "KEY: /[A-Za-z0-9_.$-]{1,64}/",
        ]

    def arguments(self, tool: str, schema: Mapping[str, Any], param: str, *, strict: bool) -> str:
        """The arguments of a tool. `tool`: begins the names of its rules. `param`: the field that has the schema.

        Without `strict`, keywords that cannot be enforced are annotations.

        Raises:
            ApiError: a keyword of a strict tool cannot be enforced; names it.
        """
        if strict:
            _refuse(schema.keys() - _KNOWN, param)
        if "properties" not in schema or not schema.keys().isdisjoint({"$ref", "allOf", *_ALTERNATIVES}):
            return "other*"
        required = schema.get("required")
        required = [name for name in required if isinstance(name, str)] if isinstance(required, list) else []
        properties = {
            **_properties(schema),
            **{name: {} for name in required if name not in _properties(schema)},
        }
        types = _Types(schema)
        parts = []
        for name in properties:
            if not ELEMENT_NAME.fullmatch(name):
                message = f"{param}.properties: this model's calls cannot have an argument with the name {name[:100]!r}; rename it"
                raise ApiError(InvalidValueError(message), param=f"{param}.properties")
        for number, (name, value) in enumerate(properties.items()):
            rule = f"{tool}a{number}"
            begin = quoted(self._element.begin + name + self._element.middle, self._spelling)
            written = self._value(
                rule, value, schema, types, f"{param}.properties.{name}" if strict else None
            )
            self.rules.append(f"{rule}: {begin} {written}")
            parts.append(rule if name in required else f"{rule}?")
        if schema.get("additionalProperties") is not False:
            parts.append("other*")
        return " ".join(parts)

    def _value(
        self, rule: str, schema: Any, root: Mapping[str, Any], types: _Types, strict: str | None
    ) -> str:
        """The value of an argument and the end of its element. `strict`: the field that has the schema, if it must be enforced."""
        possible = types.of(schema)
        target = _target(schema, root)
        if (listed := _listed(target)) is not None:
            texts = (value if isinstance(value, str) else json.dumps(value) for value in listed)
            choices = " | ".join(quoted(text + self._stop, self._spelling) for text in dict.fromkeys(texts))
            return f"({choices}) {self._after}"
        if "string" in possible:
            if strict is not None:
                _refuse(_constraints(target, root), strict)
            return f"{self._text} {self._after}"
        options = {} if strict is not None else {SCHEMA_OPTIONS: LENIENT}
        self.schemas[rule] = {**_alone(schema, root), **options}
        return f"@{rule} {quoted(self._stop, self._spelling)} {self._after}"


def quoted(text: str, spelling: Spelling) -> str:
    """A text in the library's language, with its tokens by id; empty for an empty text."""
    first = min(
        ((index, token) for token in spelling.tokens if (index := text.find(token)) >= 0), default=None
    )
    if first is None:
        return json.dumps(text) if text else ""
    index, token = first
    before, after = quoted(text[:index], spelling), quoted(text[index + len(token) :], spelling)
    return " ".join(part for part in (before, f"<[{spelling.tokens[token]}]>", after) if part)


def _properties(schema: Mapping[str, Any]) -> dict[str, Any]:
    properties = schema.get("properties")
    return properties if isinstance(properties, dict) else {}


def _at(root: Mapping[str, Any], pointer: Any) -> Any:
    """The schema at a local JSON pointer; None if there is none."""
    place: Any = root
    if not isinstance(pointer, str) or not pointer.startswith("#"):
        return None
    for step in filter(None, pointer[1:].split("/")):
        place = place.get(step.replace("~1", "/").replace("~0", "~")) if isinstance(place, dict) else None
    return place


def _target(schema: Any, root: Mapping[str, Any]) -> dict[str, Any]:
    """The schema that a reference leads to."""
    for _ in range(8):
        if not isinstance(schema, dict) or "$ref" not in schema:
            break
        schema = _at(root, schema["$ref"])
    return schema if isinstance(schema, dict) else {}


def _alone(schema: Any, root: Mapping[str, Any]) -> dict[str, Any]:
    """The schema of one argument with what it refers to."""
    if not isinstance(schema, dict):
        return {}
    definitions = {key: root[key] for key in ("$defs", "definitions") if key in root}
    pointers = set(_pointers([schema, definitions]))
    if all(pointer.startswith(("#/$defs/", "#/definitions/")) for pointer in pointers):
        return {**definitions, **schema} if pointers else schema
    return {**_moved(schema), "$defs": {_ROOT: _moved(root)}}


def _pointers(value: Any) -> Iterator[str]:
    """The local references in a schema."""
    if isinstance(value, dict):
        if isinstance(pointer := value.get("$ref"), str) and pointer.startswith("#"):
            yield pointer
        value = list(value.values())
    if isinstance(value, list):
        for item in value:
            yield from _pointers(item)


def _moved(value: Any) -> Any:
    """A schema whose local references lead into the definition `_ROOT`."""
    if isinstance(value, list):
        return [_moved(item) for item in value]
    if not isinstance(value, dict):
        return value
    moved = {key: _moved(item) for key, item in value.items()}
    if isinstance(pointer := value.get("$ref"), str) and pointer.startswith("#"):
        moved["$ref"] = f"#/$defs/{_ROOT}{pointer[1:]}"
    return moved


def _listed(schema: Mapping[str, Any]) -> list[Any] | None:
    """The values of a schema that lists them."""
    if "const" in schema:
        return [schema["const"]]
    listed = schema.get("enum")
    return listed if isinstance(listed, list) and listed else None


def _constraints(schema: Any, root: Mapping[str, Any]) -> set[str]:
    """Keywords of a value that may be a text, beyond its types."""
    target = _target(schema, root)
    found = target.keys() - _ANNOTATIONS - {"type", *_ALTERNATIVES}
    for keyword in _ALTERNATIVES:
        for branch in target.get(keyword) or ():
            found |= branch.keys() - _ANNOTATIONS - {"type"} if isinstance(branch, dict) else set()
    return found


def _refuse(keywords: Iterable[str], param: str) -> None:
    if names := sorted(keywords):
        raise ApiError(
            InvalidValueError(
                f"{param}: {', '.join(names)} cannot be enforced, because this model writes texts in arguments without quotes; remove it, or "
                "send the tool without strict, where such keywords are annotations"
            ),
            param=param,
        )
