"""The end of a sequence's answer, as pods report it to each other, and the grammar that the answer must
match.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import Field

FinishReason = Literal["stop", "length", "cancelled"]

MAX_GRAMMAR_CHARACTERS = 65_536


@dataclass(frozen=True, slots=True)
class Grammar:
    """Grammar of an answer: a JSON Schema as JSON, a regular expression, or a composite.

    A composite is a JSON object, made by the gateway. `lark` is a grammar of the library, whose rules refer
    to others as `@name`; those are in `json_schema` and `regex`, by name. It refers to special tokens by id,
    as `<[5]>`.
    """

    type: Literal["json_schema", "regex", "composite"]
    source: Annotated[str, Field(max_length=MAX_GRAMMAR_CHARACTERS)]
