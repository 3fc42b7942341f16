"""How the answer of a sequence ends, as pods report it to each other, and what it must match."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import Field

FinishReason = Literal["stop", "length", "cancelled"]

MAX_GRAMMAR_CHARACTERS = 65_536


@dataclass(frozen=True, slots=True)
class Grammar:
    """What an answer must match: a JSON Schema as JSON, or a regular expression."""

    type: Literal["json_schema", "regex"]
    source: Annotated[str, Field(max_length=MAX_GRAMMAR_CHARACTERS)]
