"""How the answer of a sequence ends, as pods report it to each other, and what it must match."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import Field

FinishReason = Literal["stop", "length", "cancelled"]

MAX_GRAMMAR_CHARACTERS = 65_536


@dataclass(frozen=True, slots=True)
class Grammar:
    """What an answer must match: a JSON Schema as JSON, a regular expression, or a composite.

    A composite is a JSON object, made by the gateway: `lark`, a grammar of the library's whose rules refer to others as `@name`, and the
    others by name in `json_schema` and `regex`. It refers to special tokens by id, as `<[5]>`.
    """

    type: Literal["json_schema", "regex", "composite"]
    source: Annotated[str, Field(max_length=MAX_GRAMMAR_CHARACTERS)]
