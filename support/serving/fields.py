"""The fields of a request by the OpenAPI document, nested ones included, and bodies with a given field.

A name looks like `messages[].content[].type`: alternatives of a schema and items of a list have no steps of
their own.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

SAMPLES: dict[str, Any] = {
    "string": "x", "integer": 1, "number": 0.5, "boolean": True, "null": None, "array": [], "object": {}
}  # fmt: skip
CHOICES = ("anyOf", "oneOf", "allOf")


@dataclass(frozen=True)
class Fields:
    """The fields of one schema. `schemas`: those that it may refer to."""

    schema: dict[str, Any]
    schemas: dict[str, Any]

    def names(self) -> Iterator[str]:
        """Yield every field. A field that holds its own kind again ends there."""
        return self._names(self.schema, "", ())

    def with_field(self, name: str) -> Any:
        """A body with the required fields and this one."""
        return self._made(self.schema, name)

    def _names(self, schema: dict[str, Any], at: str, within: tuple[str, ...]) -> Iterator[str]:
        if (reference := schema.get("$ref")) is not None:
            if reference not in within:
                yield from self._names(self._referred(reference), at, (*within, reference))
            return
        for name, inner in schema.get("properties", {}).items():
            yield (path := f"{at}.{name}" if at else name)
            yield from self._names(inner, path, within)
        for alternative in _alternatives(schema):
            yield from self._names(alternative, at, within)
        for item in _items(schema):
            yield from self._names(item, f"{at}[]", within)

    def _made(self, schema: dict[str, Any], field_name: str = "") -> Any:
        """A value for a schema, which has the field `field_name` in it."""
        if "$ref" in schema:
            return self._made(self._referred(schema["$ref"]), field_name)
        if alternatives := _alternatives(schema):
            matching = (
                schema
                for schema in alternatives
                if not field_name or field_name in self._names(schema, "", ())
            )
            return self._made(next(matching), field_name)
        if field_name.startswith("["):
            (item, *_) = (
                item for item in _items(schema) if field_name[3:] in {"", *self._names(item, "", ())}
            )
            return [self._made(item, field_name[2:].removeprefix("."))]
        if "properties" in schema:
            name, dot, rest = field_name.partition(".")
            name, bracket, item = name.partition("[")
            inner = bracket + item + dot + rest if bracket else rest
            body = {field: self._made(schema["properties"][field]) for field in schema.get("required", ())}
            return body | ({name: self._made(schema["properties"][name], inner)} if name else {})
        for fixed in ("const", "default"):
            if fixed in schema:
                return schema[fixed]
        return schema["enum"][0] if "enum" in schema else SAMPLES[schema.get("type", "string")]

    def _referred(self, reference: str) -> dict[str, Any]:
        schema: dict[str, Any] = self.schemas[reference.rpartition("/")[2]]
        return schema


def takes_json(document: dict[str, Any], path: str) -> bool:
    """Whether a path takes a JSON body, and no form."""
    return "application/json" in document["paths"][path]["post"]["requestBody"]["content"]


def fields_of(document: dict[str, Any], path: str) -> Fields:
    """The fields of the requests that are posted to a path."""
    content = document["paths"][path]["post"]["requestBody"]["content"]
    return Fields(content["application/json"]["schema"], document["components"]["schemas"])


def names_in(content: bytes) -> Iterator[str]:
    """Every field of a body as it is sent; none where it is no JSON."""
    try:
        value = json.loads(content)
    except ValueError:
        return
    yield from _names_in(value, "")


def _names_in(value: Any, at: str) -> Iterator[str]:
    if isinstance(value, dict):
        for name, inner in value.items():
            yield (path := f"{at}.{name}" if at else name)
            yield from _names_in(inner, path)
    elif isinstance(value, list):
        for inner in value:
            yield from _names_in(inner, f"{at}[]")


def _alternatives(schema: dict[str, Any]) -> list[dict[str, Any]]:
    return [alternative for kind in CHOICES for alternative in schema.get(kind, ())]


def _items(schema: dict[str, Any]) -> list[dict[str, Any]]:
    items = schema.get("items")
    return [*schema.get("prefixItems", ()), *([items] if isinstance(items, dict) else [])]
