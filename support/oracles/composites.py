"""A grammar of calls with forced tokens, a schema and a pattern, which both engines have to follow."""

from __future__ import annotations

from typing import Any

CALLS: dict[str, Any] = {
    "lark": 'start: <[1]> call (", " call){0,2}\ncall: "f(" @tool ")" | "g(" @word ")"\n',
    "json_schema": {
        "tool": {
            "type": "object",
            "properties": {"a": {"enum": ["x", 1]}},
            "required": ["a"],
            "additionalProperties": False,
        }
    },
    "regex": {"word": "[a-f]{3,8}"},
}
