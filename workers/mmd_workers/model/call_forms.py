"""The forms in which chat templates write calls of tools. Independent of models, requests and the network."""

from __future__ import annotations

from dataclasses import dataclass, field

import regex

_W = r"[ \t\r\n]{0,8}"
_NAME = r"(?P<name>[A-Za-z0-9_.-]{1,257})"
"""A function, or one of a group with the name of the group before it: `group.function`, of 128 characters each."""
_TYPE = rf'(?:"type"{_W}:{_W}"function"{_W},{_W})?'
_OBJECT = rf'(?P<open>\{{{_W}{_TYPE}"name"{_W}:{_W}"){_NAME}(?P<middle>"{_W},{_W}"(?:arguments|parameters)"{_W}:{_W})(?=\{{)'
"""A call as a JSON object, from its beginning to its arguments. Llama 3 often begins it with its type, whatever its template has."""
_PROBED = ("mmd_probed_tool", "mmd_probed_key", "mmd_probed_value", "mmd_probed_result")


@dataclass(frozen=True, slots=True)
class CallForm:
    """The form in which a family of models writes calls, as regular expressions. Their matches are bounded, and so is the held text.

    - `marker`: begins a call, or a list of calls; without a marker a call begins with the answer.
    - `first`: from the marker to the arguments of a call, with the groups `begin`, `open`, `name` and `middle`.
    - `after`: follows the arguments; may have the group `id`, which the model need not write.
    - `following`: from there to the arguments of the next call of a list.
    - `last`: the end of the list.
    - `separator`: text between calls, as the model writes it; None: it makes one call.
    """

    marker: str
    first: str
    after: str
    following: str = ""
    last: str = ""
    separator: str | None = None


FORMS: dict[str, CallForm] = {
    "Hermes": CallForm(
        marker="<tool_call>",
        first=rf"(?P<begin>)<tool_call>{_W}{_OBJECT}",
        after=rf"{_W}\}}{_W}</tool_call>",
        separator="\n",
    ),
    "Mistral": CallForm(
        marker="[TOOL_CALLS]",
        first=rf"(?P<begin>\[TOOL_CALLS\]{_W}\[{_W}){_OBJECT}",
        after=rf'(?P<id>{_W},{_W}"id"{_W}:{_W}"[A-Za-z0-9_-]{{0,64}}")?{_W}\}}',
        following=rf"{_W},{_W}{_OBJECT}",
        last=rf"{_W}\]",
        separator=", ",
    ),
    "Mistral with [ARGS]": CallForm(
        marker="[TOOL_CALLS]",
        first=rf"(?P<begin>)(?P<open>\[TOOL_CALLS\]{_W}){_NAME}(?:\[CALL_ID\][A-Za-z0-9_-]{{1,64}})?(?P<middle>\[ARGS\]{_W})(?=\{{)",
        after="",
        separator="",
    ),
    "Llama 3": CallForm(
        marker="",
        first=rf"(?P<begin>)(?:<\|python_tag\|>)?{_OBJECT}",
        after=rf"{_W}\}}",
    ),
}
"""The forms by their names, which errors list. A new form is an entry here; the first that matches a template counts.

In every form the arguments are one JSON object after `middle`. A form with other arguments also needs changes of `CallParser` and
`ToolUse.grammar`. Markers that a model may have as tokens belong in `MAY_BE_TOKENS`.
"""
MAY_BE_TOKENS = ("[TOOL_CALLS]", "[CALL_ID]", "[ARGS]", "<|python_tag|>", "<tool_call>", "</tool_call>")
"""Parts of calls that some models have as tokens of their own.

Decoded text omits those that are special tokens. A grammar takes only the token itself, not shorter tokens with the same text.
"""


@dataclass(frozen=True, slots=True)
class Spelling:
    """How one model writes calls.

    It writes `begin`, then for each call `open`, its name, `middle`, its arguments and `close`, with the form's separator between calls,
    and `end`. `tokens`: ids of the parts of calls that are tokens of their own.
    """

    form: CallForm
    begin: str
    open: str
    middle: str
    close: str
    end: str
    tokens: dict[str, int] = field(default_factory=dict)


def spelling_of(rendered: str, before: str, tokens: dict[str, int]) -> Spelling | None:
    """How a template writes calls; None: in another form.

    `rendered`: the template's text of `probed_call`. `before`: its text of the messages before the call.
    """
    for form in FORMS.values():
        arguments = rf'\{{{_W}"{_PROBED[1]}"{_W}:{_W}"{_PROBED[2]}"{_W}\}}'
        whole = regex.compile(f"{form.first}{arguments}(?P<after>{form.after})(?P<last>{form.last})")
        for match in whole.finditer(rendered):
            if match["name"] != _PROBED[0]:
                continue
            if not form.marker and rendered[: match.start()].rstrip() != before.rstrip():
                continue  # it has another form, whose marker stands before it
            return Spelling(
                form,
                begin=match["begin"],
                open=rendered[match.end("begin") : match.start("name")],
                middle=match["middle"],
                close=match["after"].removeprefix(match.groupdict().get("id") or ""),
                end=match["last"],
                tokens=tokens,
            )
    return None


def probed_call(call_id: str = "mmdprobed") -> list[dict[str, object]]:
    """A conversation with a call and its result, in the shape of Hugging Face's chat templates.

    `call_id`: nine letters and digits, as templates of Mistral require.
    """
    name, key, value, result = _PROBED
    call = {"id": call_id, "type": "function", "function": {"name": name, "arguments": {key: value}}}
    return [
        {"role": "user", "content": [{"type": "text", "text": "call the tool"}]},
        {"role": "assistant", "content": [], "tool_calls": [call]},
        {
            "role": "tool",
            "content": [{"type": "text", "text": result}],
            "tool_call_id": call_id,
            "name": name,
        },
    ]


def probed_tool() -> dict[str, object]:
    """A tool, in the shape of Hugging Face's chat templates."""
    name, key, *_ = _PROBED
    properties = {key: {"type": "string", "description": "a value"}}
    parameters = {"type": "object", "properties": properties, "required": [key]}
    function = {"name": name, "description": "a tool", "parameters": parameters}
    return {"type": "function", "function": function}


def renders_call(text: str) -> bool:
    """Whether a template's text has every part of `probed_call`."""
    return all(needle in text for needle in _PROBED)


def renders_tool(text: str) -> bool:
    """Whether a template's text has `probed_tool`."""
    return all(needle in text for needle in _PROBED[:2])
