"""Custom tools of the Responses API: functions whose only argument is free text. Independent of the network and the model.

The model reads and calls them as functions with one parameter. Clients get its value as it is, without JSON around it.
"""

from __future__ import annotations

import json
from typing import Annotated, Literal

import regex
from pydantic import AfterValidator, Discriminator, Field, Tag
from pydantic_core import PydanticCustomError

from mmd_workers.gateway.basics.strict import Explained, Ignored, Strict
from mmd_workers.gateway.content.parts import type_of
from mmd_workers.gateway.content.response_format import MAX_SCHEMA_CHARACTERS
from mmd_workers.gateway.content.tools import FunctionName

PARAMETER = "input"

MAX_DEFINITION_CHARACTERS = MAX_SCHEMA_CHARACTERS // 8
"""Limit of a regular expression: as JSON, a character may have six, and the schema has other text."""


def as_function_arguments(text: str) -> str:
    """The arguments of the function for this input, as JSON."""
    return json.dumps({PARAMETER: text})


def _served_syntax(syntax: str) -> str:
    """Refuse grammars that cannot be followed inside a JSON string."""
    if syntax != "regex":
        raise PydanticCustomError(
            "syntax",
            "grammars in Lark's syntax are not supported; use regex, or omit the format and explain it in the description",
        )
    return syntax


class AnyInput(Strict):
    """Any text."""

    type: Literal["text"]


class GrammarInput(Strict):
    """Text that matches a regular expression from its beginning to its end."""

    type: Literal["grammar"]
    syntax: Annotated[
        Literal["regex", "lark"], AfterValidator(_served_syntax), Explained("`lark` is rejected")
    ]
    definition: Annotated[str, Field(min_length=1, max_length=MAX_DEFINITION_CHARACTERS)]


class CustomTool(Strict):
    """A tool that takes free text, and that the client runs."""

    type: Literal["custom"]
    name: FunctionName
    description: str | None = None
    format: (
        Annotated[
            Annotated[AnyInput, Tag("text")] | Annotated[GrammarInput, Tag("grammar")], Discriminator(type_of)
        ]
        | None
    ) = None
    defer_loading: Annotated[bool | None, Ignored("every tool is a part of the prompt")] = None

    @property
    def strict(self) -> bool | None:
        """True if the input must match a grammar."""
        return True if isinstance(self.format, GrammarInput) else None

    @property
    def parameters(self) -> str:
        """The schema of the function's parameters, as JSON."""
        schema: dict[str, str] = {"type": "string"}
        if isinstance(self.format, GrammarInput):
            schema["pattern"] = _anchored(self.format.definition)
        form = {
            "type": "object",
            "properties": {PARAMETER: schema},
            "required": [PARAMETER],
            "additionalProperties": False,
        }
        return json.dumps(form, separators=(",", ":"))


def _anchored(definition: str) -> str:
    """The expression for a whole text. Its own anchors at both ends are left out: the library takes none inside a group."""
    definition = definition.removeprefix("^")
    body = definition.removesuffix("$")
    if body != definition and (len(body) - len(body.rstrip("\\"))) % 2:
        body = definition  # the last character is an escaped dollar sign
    return f"^(?:{body})$"


_BLANK = r"[ \t\r\n]{0,8}"
_BEGIN = regex.compile(rf'{_BLANK}\{{{_BLANK}"{PARAMETER}"{_BLANK}:{_BLANK}"')
_QUOTE_OR_ESCAPE = regex.compile(r'["\\]')
_UNIT = regex.compile(r"[0-9a-fA-F]{4}")
_ESCAPES = {'"': '"', "\\": "\\", "/": "/", "b": "\b", "f": "\f", "n": "\n", "r": "\r", "t": "\t"}
_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


class InputReader:
    """Reads the input of one call from the arguments of the function, however these are cut into pieces.

    Arguments of another form are the input as they are: the model is free to write any, unless a grammar forbids it. Escapes that JSON does not
    have stay as they are, too.
    """

    def __init__(self) -> None:
        self._held = ""  # text that is not decided yet
        self._state: Literal["before", "inside", "after", "other"] = "before"

    def push(self, piece: str) -> str:
        """Add a piece of the arguments, and return the input that became certain."""
        return self._read(piece, final=False)

    def flush(self) -> str:
        """The rest of the input, at the end of the arguments, which may have been cut."""
        return self._read("", final=True)

    def _read(self, piece: str, *, final: bool) -> str:
        self._held += piece
        if self._state == "before" and (match := _BEGIN.match(self._held, partial=True)) is None:
            self._state = "other"
        elif self._state == "before" and match is not None and not match.partial:
            self._state, self._held = "inside", self._held[match.end() :]
        if self._state == "before":
            return ""
        if self._state == "inside":
            return self._string(final)
        text, self._held = self._held, ""
        return text if self._state == "other" else ""

    def _string(self, final: bool) -> str:
        text, at = self._held, 0
        decoded: list[str] = []
        while at < len(text):
            match = _QUOTE_OR_ESCAPE.search(text, at)
            end = len(text) if match is None else match.start()
            decoded.append(text[at:end])
            at = end
            if match is None:
                break
            if match.group() == '"':
                self._state, at = "after", len(text)
                break
            character, length = _escape(text[at : at + 12], final)
            if not length:
                break
            decoded.append(character)
            at += length
        self._held = text[at:]
        return "".join(decoded)


def input_of(arguments: str) -> str:
    """The input in the arguments of a call."""
    reader = InputReader()
    return reader.push(arguments) + reader.flush()


def _escape(text: str, final: bool) -> tuple[str, int]:
    """The character that an escape at the beginning of a text stands for, and the length of the escape; 0: more of it has to come.

    `text`: up to 12 characters, as many as two units of UTF-16 have.
    """
    if text == "\\" or (text.startswith("\\u") and len(text) < 6):
        return ("", len(text)) if final else ("", 0)
    if text[1] != "u":
        return _ESCAPES.get(text[1], text[:2]), 2
    if not _UNIT.fullmatch(text[2:6]):
        return text[:2], 2
    code = int(text[2:6], 16)
    if not 0xD800 <= code < 0xE000:
        return chr(code), 6
    following = text[6:]
    if code < 0xDC00 and len(following) < 6 and "\\u".startswith(following[:2]) and not final:
        return "", 0
    low = int(following[2:], 16) if following[:2] == "\\u" and _UNIT.fullmatch(following[2:]) else 0
    if code < 0xDC00 <= low < 0xE000:
        return chr(0x10000 + ((code - 0xD800) << 10) + (low - 0xDC00)), 12
    return _REPLACEMENT, 6
