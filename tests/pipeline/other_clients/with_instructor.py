"""Instructor: shapes by a call of a tool, by a schema, and piece by piece, as JSON. The request is JSON in REQUEST."""

from __future__ import annotations

import json
import os
from typing import Any, Literal

import instructor
import openai
from pydantic import BaseModel, ConfigDict

REQUEST = json.loads(os.environ["REQUEST"])


class Shape(BaseModel):
    """A shape. Without anything else: this small model would never end to add to it."""

    model_config = ConfigDict(extra="forbid")

    color: Literal["red", "green", "blue"]
    sides: Literal[3, 4]


asked: dict[str, Any] = {
    "model": REQUEST["model"],
    "messages": [{"role": "user", "content": "Draw something."}],
    "temperature": 0,
    "max_tokens": 160,
    "max_retries": 0,
}
found = {}
for mode in (instructor.Mode.TOOLS, instructor.Mode.JSON_SCHEMA):
    client = instructor.from_openai(
        openai.OpenAI(base_url=REQUEST["url"], api_key="none", max_retries=0), mode=mode
    )
    found[mode.name] = client.chat.completions.create(response_model=Shape, **asked).model_dump()
    parts = client.chat.completions.create_partial(response_model=Shape, **asked)
    found[f"{mode.name} in parts"] = list(parts)[-1].model_dump()
print(json.dumps(found))  # noqa: T201
