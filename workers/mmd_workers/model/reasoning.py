"""Finds the form of a model's reasoning before an answer in its chat template and tokenizer.

Independent of models, requests and the network.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

MARKERS = (("<think>", "</think>"), ("◁think▷", "◁/think▷"), ("[THINK]", "[/THINK]"))
"""Markers that begin and end the reasoning: of Qwen, GLM and InternVL; of Kimi; of Magistral."""
SWITCHES = ("enable_thinking", "thinking")
"""Variables by which templates turn reasoning on and off."""
HISTORY_FIELDS = ("reasoning_content", "reasoning", "thinking")
"""Fields of an assistant's message in which templates look for its reasoning."""
HISTORY_PART = "part"
BLANK = " \t\r\n"
"""White space that may be beside a marker."""
_QUESTION, _REASONING = "mmd probed question", "mmd probed reasoning"

Begin = Literal["inside", "before", "after"]
"""Where the reasoning is when an answer begins: the prompt ends inside it, leaves it to the model, or has closed it."""
Render = Callable[[list[dict[str, Any]], dict[str, Any]], str]
"""Renders a conversation with these variables of the template; empty if the template refuses it."""


@dataclass(frozen=True, slots=True)
class Reasoning:
    """How one model reasons before it answers.

    - `begin`, `end`: the markers.
    - `tokens`: ids of the markers, if they are tokens.
    - `in_template`: the template has the markers, so the model has been made to reason; otherwise only its tokenizer has them.
    - `switch`: the template's variable that turns reasoning on and off; "": it has none.
    - `history`: the field of messages from which the template reads the reasoning, or `HISTORY_PART`; "": it has no place for it.
    """

    begin: str
    end: str
    tokens: Mapping[str, int]
    in_template: bool
    switch: str = ""
    history: str = ""

    def variables(self, reasons: bool | None) -> dict[str, Any]:
        """The template's variables that turn reasoning on or off. `reasons` None: the template's default."""
        return {} if reasons is None or not self.switch else {self.switch: reasons}

    def begin_after(self, prompt: str) -> Begin:
        """Where the reasoning is when an answer to this prompt begins.

        Templates decide it for each conversation, by a message's text, or by whether the result of a tool is the last message.
        """
        written = prompt.rstrip(BLANK)
        if written.endswith(self.begin):
            return "inside"
        return "after" if written.endswith(self.end) else "before"


def found_reasoning(
    templates: Sequence[str],
    added_tokens: Mapping[str, int],
    render: Render,
    calls: Sequence[dict[str, Any]],
) -> Reasoning | None:
    """Find how a model reasons; None: it has no known markers.

    `templates`: sources of its templates. `added_tokens`: added tokens of its tokenizer. `calls`: a conversation with a call of a tool
    and its result.
    """
    of_template = [pair for pair in MARKERS if any(pair[1] in source for source in templates)]
    of_tokenizer = [pair for pair in MARKERS if all(marker in added_tokens for marker in pair)]
    if not (pairs := [*of_template, *of_tokenizer]):
        return None
    begin, end = pairs[0]
    are_tokens = (begin, end) in of_tokenizer
    question: list[dict[str, Any]] = [_turn("user", _QUESTION)]
    plain = render(question, {})
    switch = next(
        (name for name in SWITCHES if any(render(question, {name: on}) != plain for on in (False, True))), ""
    )
    return Reasoning(
        begin,
        end,
        {marker: int(added_tokens[marker]) for marker in (begin, end)} if are_tokens else {},
        bool(of_template),
        switch,
        _history(render, calls, begin),
    )


def with_reasoning(message: dict[str, Any], history: str) -> dict[str, Any]:
    """Move a message's `reasoning_content` to where a template looks for it; drop it if there is no such place."""
    if "reasoning_content" not in message:
        return message
    rest = {name: value for name, value in message.items() if name != "reasoning_content"}
    if history == HISTORY_PART:
        part = {"type": "thinking", "thinking": message["reasoning_content"]}
        return {**rest, "content": [part, *message["content"]]}
    return {**rest, history: message["reasoning_content"]} if history else rest


def _turn(role: str, text: str) -> dict[str, Any]:
    return {"role": role, "content": [{"type": "text", "text": text}]}


def _history(render: Render, calls: Sequence[dict[str, Any]], begin: str) -> str:
    """Find where the template looks for the reasoning. Many templates leave it out unless the results of calls follow.

    A part counts only if the marker is before it: templates that take content for text write a list of parts as it is in Python.
    """
    answered = [_turn("user", _QUESTION), _turn("assistant", "answer"), _turn("user", "more")]
    for place in (*HISTORY_FIELDS, HISTORY_PART):
        for conversation in (calls, answered):
            turns = [
                with_reasoning({**turn, "reasoning_content": _REASONING}, place)
                if turn["role"] == "assistant"
                else turn
                for turn in conversation
            ]
            before, reasoning, _ = render(turns, {}).partition(_REASONING)
            if reasoning and (place != HISTORY_PART or before.rstrip(BLANK).endswith(begin)):
                return place
    return ""
