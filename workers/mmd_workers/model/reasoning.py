"""The forms in which models write their reasoning before an answer, found in a chat template and a tokenizer. Independent of models, requests
and the network."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

MARKERS = (("<think>", "</think>"), ("◁think▷", "◁/think▷"), ("[THINK]", "[/THINK]"))
"""What begins and ends the reasoning: of Qwen, GLM and InternVL, of Kimi, of Magistral."""
SWITCHES = ("enable_thinking", "thinking")
"""Variables by which templates turn reasoning on and off."""
HISTORY_FIELDS = ("reasoning_content", "reasoning", "thinking")
"""Fields of a message of the assistant in which templates look for its reasoning."""
HISTORY_PART = "part"
BLANK = " \t\r\n"
"""White space that may be beside a marker."""
_QUESTION, _REASONING = "mmd probed question", "mmd probed reasoning"

Begin = Literal["inside", "before", "after"]
"""Where the reasoning is when an answer begins: the prompt ends inside it, leaves it to the model, or has closed it."""
Render = Callable[[list[dict[str, Any]], dict[str, Any]], str]
"""Renders a conversation with these variables of the template; empty where the template refuses it."""


@dataclass(frozen=True, slots=True)
class Reasoning:
    """How one model reasons before it answers.

    `begin`, `end`: the markers. `tokens`: their ids, where they are tokens. `in_template`: the template has them, so the model has been
    made to reason; else its tokenizer alone has. `switch`: the template's variable that turns reasoning on and off; "": it has none.
    `history`: the field of messages that the template reads it from, or `HISTORY_PART`; "": it has no place for it.
    """

    begin: str
    end: str
    tokens: Mapping[str, int]
    in_template: bool
    switch: str = ""
    history: str = ""

    def variables(self, reasons: bool | None) -> dict[str, Any]:
        """The template's variables that turn reasoning on or off; None: as the template has it."""
        return {} if reasons is None or not self.switch else {self.switch: reasons}

    def begin_after(self, prompt: str) -> Begin:
        """Where the reasoning is when an answer begins to this prompt: templates decide it for each conversation, by a message's text, or by whether
        the result of a tool is the last one."""
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
    """How a model reasons, given the sources of its templates, its tokenizer's added tokens, and a conversation with a call of a tool and its
    result; None: it has no markers that are known."""
    of_template = [pair for pair in MARKERS if any(pair[1] in source for source in templates)]
    of_tokenizer = [pair for pair in MARKERS if all(marker in added_tokens for marker in pair)]
    if not (found := [*of_template, *of_tokenizer]):
        return None
    begin, end = found[0]
    are_tokens = (begin, end) in of_tokenizer
    asked: list[dict[str, Any]] = [_turn("user", _QUESTION)]
    plain = render(asked, {})
    switch = next(
        (name for name in SWITCHES if any(render(asked, {name: on}) != plain for on in (False, True))), ""
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
    """A message whose `reasoning_content` is where a template looks for it; left out where it has no place."""
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
    """Where the template looks for the reasoning. Many leave it out unless the results of calls follow. A part counts where the marker is before it:
    templates that take content for text write a list of parts as it is in Python."""
    answered = [_turn("user", _QUESTION), _turn("assistant", "answer"), _turn("user", "more")]
    for place in (*HISTORY_FIELDS, HISTORY_PART):
        for conversation in (calls, answered):
            turns = [
                with_reasoning({**turn, "reasoning_content": _REASONING}, place)
                if turn["role"] == "assistant"
                else turn
                for turn in conversation
            ]
            before, found, _ = render(turns, {}).partition(_REASONING)
            if found and (place != HISTORY_PART or before.rstrip(BLANK).endswith(begin)):
                return place
    return ""
