"""The grammar of an answer that begins with reasoning. Independent of the network."""

from __future__ import annotations

import json
import re
from typing import Any

from mmd_api.contract.answers import MAX_GRAMMAR_CHARACTERS, Grammar
from mmd_api.contract.errors import InvalidValueError
from mmd_workers.gateway.basics.api_errors import ApiError
from mmd_workers.model.reasoning import Reasoning


def after_reasoning(
    grammar: Grammar, reasoning: Reasoning, param: str, *, inside: bool, gap: bool = True
) -> Grammar:
    """A grammar that begins after the reasoning: any text up to the end marker, and white space after it.

    `inside`: the prompt has begun the reasoning; otherwise the answer may begin it, or have none. `param`: the field that sets `grammar`.
    `gap`: white space may follow the marker, and is not part of the answer.

    Raises:
        ApiError: the grammar is too long with the reasoning.
    """
    if grammar.type == "composite":
        composite: dict[str, Any] = json.loads(grammar.source)
    else:
        composite = {"lark": "start: @answer\n", "json_schema": {}, "regex": {}}
        is_schema = grammar.type == "json_schema"
        composite[grammar.type]["answer"] = json.loads(grammar.source) if is_schema else grammar.source
    first, *rules = composite["lark"].splitlines()
    begin = "" if inside else f"{_marker(reasoning, reasoning.begin)} "
    whole = f"{begin}reasoning {'GAP? ' if gap else ''}answer"
    rules += [
        f"start: {whole}" if inside else f"start: answer | {whole}",
        f"answer: {first.removeprefix('start: ')}",
    ]
    if gap:
        rules.append(r"GAP: /[ \t\r\n]{1,16}/")
    if reasoning.tokens:
        rules.append(f"reasoning: REASONING {_marker(reasoning, reasoning.end)}")
        rules.append(f"REASONING: /(?s:.*)/ & ~/(?s:.*){_escaped(reasoning.end)}(?s:.*)/")
    else:
        if not inside:  # text that begins like reasoning is no answer
            no_text = f"TEXT: ~/{_escaped(reasoning.begin)}(?s:.*)/ & "
            rules = [re.sub("^TEXT: ", lambda _: no_text, rule) for rule in rules]
        rules.append(f"reasoning[suffix={json.dumps(reasoning.end, ensure_ascii=False)}]: REASONING")
        rules.append("REASONING: /(?s:.*)/")
    composite["lark"] = "\n".join([*rules, ""])
    source = json.dumps(composite, separators=(",", ":"))
    if len(source) > MAX_GRAMMAR_CHARACTERS:
        too_long = InvalidValueError(
            f"{param}: with the reasoning before it, the form of the answer has {len(source) - MAX_GRAMMAR_CHARACTERS} characters too many; shorten it"
        )
        raise ApiError(too_long, param=param)
    return Grammar("composite", source)


def _marker(reasoning: Reasoning, marker: str) -> str:
    """A marker in the library's language."""
    if reasoning.tokens:
        return f"<[{reasoning.tokens[marker]}]>"
    return json.dumps(marker, ensure_ascii=False)


def _escaped(marker: str) -> str:
    """A marker as part of a regular expression in the library's language."""
    return re.escape(marker).replace("/", r"\/")
