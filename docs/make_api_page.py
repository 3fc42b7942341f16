"""The tables of fields in `docs/api.md`, made from the models of requests: `python docs/make_api_page.py` writes them."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, get_args

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from mmd_workers.gateway.api.messages import messages_request
from mmd_workers.gateway.api.operations import OPERATIONS
from mmd_workers.gateway.api.responses import responses_request
from mmd_workers.gateway.basics.strict import Explained, Ignored, NotServed, Strict
from mmd_workers.gateway.content import chat_request

PAGE = Path(__file__).with_name("api.md")
BEGIN = "<!-- Generated from workers/mmd_workers/gateway by `make crds`, up to the next comment. Do not edit. -->\n"
END = "<!-- End of what is generated. -->\n"
HEAD = "| field | | values, effect or remedy |\n|---|---|---|\n"

CONVERSATIONS: dict[str, tuple[type[Strict], str]] = {
    "Messages": (chat_request.ChatRequest, "messages"),
    "Input of `/v1/responses`": (responses_request.ResponsesRequest, "input"),
    "Messages of `/v1/messages`": (messages_request.MessagesRequest, "messages"),
}
"""Titles of tables of their own, each with a field and a request that has it."""


def tables() -> str:
    """A table for each endpoint, and one for each kind of conversation, which two endpoints may take."""
    parts = []
    skip = {name for _, name in CONVERSATIONS.values()}
    for operation in OPERATIONS:
        parts.append(f"\n### `POST {operation.path}`\n\n{HEAD}")
        rows = [*_merged(_fields(operation.request, "", skip)), *_refused(operation.not_served)]
        parts += [_row(*row) for row in sorted(rows)]
    for title, (model, name) in CONVERSATIONS.items():
        parts.append(f"\n### {title}\n\n{HEAD}")
        parts += [_row(*row) for row in _merged(_nested(model.model_fields[name], f"{name}[]"))]
    return "".join([*parts, "\n"])


def _merged(fields: Iterable[tuple[str, str, str]]) -> Iterator[tuple[str, str, str]]:
    """One row for a field that differs between roles, types of parts and other branches."""
    found: dict[tuple[str, str], list[str]] = {}
    for name, handling, text in fields:
        texts = found.setdefault((name, handling), [])
        if text not in texts:
            texts.append(text)
    return ((*field, _alternatives(texts)) for field, texts in found.items())


def _alternatives(texts: list[str]) -> str:
    """What several branches allow, each kind of value once."""
    longest = [text for text in texts if not any(other.startswith(f"{text}; ") for other in texts)]
    return " or ".join(dict.fromkeys(" or ".join(longest).split(" or ")))


def page(text: str) -> str:
    """The page, given what it is now."""
    before, rest = text.split(BEGIN)
    _, after = rest.split(END)
    return f"{before}{BEGIN}{tables()}{END}{after}"


def _fields(
    model: type[BaseModel], prefix: str, skip: Collection[str] = (), is_ignored: bool = False
) -> Iterator[tuple[str, str, str]]:
    """Name, handling and text of every field of a model, and of the objects in it but for those of the fields `skip`.

    `is_ignored`: the model is in a field without effect.
    """
    schema = model.model_json_schema()
    for own_name, field in model.model_fields.items():
        name = field.alias or own_name
        where = f"{prefix}{name}"
        ignored = next((mark for mark in field.metadata if isinstance(mark, Ignored)), None)
        text = _values(schema["properties"][name], schema.get("$defs", {}))
        if ignored is not None:
            text = f"{text}; {ignored.why}"
        effect = next((mark for mark in field.metadata if isinstance(mark, Explained)), None)
        if effect is not None:
            text = f"{text}; {effect.what}"
        if field.is_required() and not prefix:
            text = f"{text}; required"
        has_no_effect = is_ignored or ignored is not None
        yield where, "ignored" if has_no_effect else "served", text
        if name not in skip:
            yield from _nested(field, where, has_no_effect)


def _nested(field: FieldInfo, where: str, is_ignored: bool = False) -> Iterator[tuple[str, str, str]]:
    """The fields of the objects that a field may have; of a list, those of its items."""
    for model, in_list in _models(field.annotation):
        prefix = f"{where}{'[]' if in_list and not where.endswith('[]') else ''}."
        yield from _fields(model, prefix, is_ignored=is_ignored)


def _models(annotation: Any, in_list: bool = False) -> Iterator[tuple[type[BaseModel], bool]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation, in_list
    for part in dict.fromkeys(part for part in get_args(annotation) if not isinstance(part, str)):
        yield from _models(part, in_list or getattr(annotation, "__origin__", None) is list)


def _refused(not_served: NotServed) -> Iterator[tuple[str, str, str]]:
    for name, (off, remedy) in not_served.items():
        values = " or ".join(_code(value) for value in off)
        yield name, "refused", f"{remedy}; accepted: {values}" if values else remedy


def _values(schema: Mapping[str, Any], definitions: Mapping[str, Any]) -> str:
    """The values that a JSON schema allows, besides null."""
    if "$ref" in schema:
        return "object"
    for key in ("anyOf", "oneOf"):
        if key in schema:
            kinds = [_values(kind, definitions) for kind in schema[key] if kind.get("type") != "null"]
            return " or ".join(dict.fromkeys(kinds))
    if "enum" in schema:
        return ", ".join(_code(value) for value in schema["enum"])
    if "const" in schema:
        return _code(schema["const"])
    kind = str(schema.get("type", "any value"))
    if kind == "array":
        items = _values(schema["items"], definitions)
        return f"{_sized('list', schema.get('minItems'), schema.get('maxItems'), '')} of {items}"
    if kind == "string":
        return _sized("string", schema.get("minLength"), schema.get("maxLength"), " characters")
    if kind in ("integer", "number"):
        low = schema.get("minimum", schema.get("exclusiveMinimum"))
        high = schema.get("maximum", schema.get("exclusiveMaximum"))
        above = "above " if "exclusiveMinimum" in schema else "from "
        below = "below " if "exclusiveMaximum" in schema else "to "
        limits = [f"{above}{low}"] if low is not None else []
        limits += [f"{below}{high}"] if high is not None else []
        return " ".join([kind, *limits])
    return kind


def _sized(kind: str, least: int | None, most: int | None, unit: str) -> str:
    if most is None:
        return f"non-empty {kind}" if least else kind
    return f"{kind} ({least} to {most}{unit})" if least else f"{kind} (up to {most}{unit})"


def _code(value: object) -> str:
    return f"`{value if isinstance(value, str) and value else json.dumps(value)}`"


def _row(name: str, handling: str, text: str) -> str:
    return f"| `{name}` | {handling} | {text} |\n"


def main() -> None:
    """Write the tables, or with `--check` exit 1 when they are not what the code says."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true")
    written = PAGE.read_text()
    if not parser.parse_args().check:
        PAGE.write_text(page(written))
    elif written != page(written):
        sys.exit(f"{PAGE.name} is out of date: run make crds")


if __name__ == "__main__":
    main()
