"""The forms in which chat templates write calls of tools. Independent of models, requests and the network."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import regex

_W = r"[ \t\r\n]{0,8}"
_NAME = r"(?P<name>[A-Za-z0-9_.-]{1,257})"
"""A function, or one of a group with the name of the group before it: `group.function`, of 128 characters each."""
_BEFORE_NAME = rf'(?:"(?:type"{_W}:{_W}"function|id"{_W}:{_W}"[A-Za-z0-9_-]{{0,64}})"{_W},{_W}){{0,2}}'
_OBJECT = rf'(?P<open>\{{{_W}{_BEFORE_NAME}"name"{_W}:{_W}"){_NAME}(?P<middle>"{_W},{_W}"(?:arguments|parameters)"{_W}:{_W})(?=\{{)'
"""A call as a JSON object, from its beginning to its arguments. Models often begin it with its type or an id, whatever their template has."""
_COMMAND = (
    rf'(?P<open>\{{{_W}"tool_call_id"{_W}:{_W}"[0-9]{{1,9}}"{_W},{_W}"tool_name"{_W}:{_W}"){_NAME}'
    rf'(?P<middle>"{_W},{_W}"parameters"{_W}:{_W})(?=\{{)'
)
ELEMENT_NAME = regex.compile(r'[^<>\n\\"]{1,256}')
"""The name of an argument in an element."""
_KEY = rf"(?P<key>{ELEMENT_NAME.pattern})"
INVALID_JSON = "INVALID_JSON"
"""The argument that has what a model wrote in place of arguments, where an object must stand. Anthropic's API has the same name."""
_PROBED = ("mmd_probed_tool", "mmd_probed_key", "mmd_probed_value", "mmd_probed_result")


@dataclass(frozen=True, slots=True)
class ElementForm:
    """The form of arguments that are elements, each with a name and a value. A value that is a text stands there as it is, others as JSON.

    `begin` and `middle`: regular expressions of what stands before a name, and between it and its value. `close`: the text that ends a
    value. `end`: the text that ends the arguments. `in_lines`: a value is in lines of its own.
    """

    begin: str
    middle: str
    close: str
    end: str
    in_lines: bool = False

    @property
    def key(self) -> str:
        """A regular expression from the beginning of an element to its value, with the group `key`."""
        return f"{self.begin}{_KEY}{self.middle}"

    @property
    def line(self) -> str:
        """What stands before and after a value, and need not."""
        return "\n" if self.in_lines else ""

    @property
    def whole(self) -> str:
        """A regular expression of the probed call's element with its parts, and the white space after it."""
        line = f"(?:{self.line})?"
        middle, end = f"(?P<key_middle>{self.middle}{line})", f"(?P<key_end>{line}{self.close}{_W})"
        return f"(?P<key_begin>{self.begin}){_KEY}{middle}{_PROBED[2]}{end}"


@dataclass(frozen=True, slots=True)
class CallForm:
    """The form in which a family of models writes calls, as regular expressions. Their matches are bounded, and so is the held text.

    - `marker`: begins a call, or a list of calls; without a marker a call begins with the answer.
    - `first`: from the marker to the arguments of a call, with the groups `begin`, `open`, `name` and `middle`.
    - `after`: follows the arguments; may have the group `id`, which the model need not write.
    - `following`: from there to the arguments of the next call of a list.
    - `last`: the end of the list.
    - `separator`: text between calls, as the model writes it; None: it makes one call.
    - `element`: the form of arguments that are elements; None: they are one JSON object.
    """

    marker: str
    first: str
    after: str
    following: str = ""
    last: str = ""
    separator: str | None = None
    element: ElementForm | None = None


def _list(marker: str, end: str = "", named: str = _OBJECT) -> CallForm:
    """A list of calls as JSON objects, between a marker and a text that ends it. `named`: from the beginning of a call to its arguments."""
    return CallForm(
        marker=marker,
        first=rf"(?P<begin>{regex.escape(marker)}{_W}\[{_W}){named}",
        after=rf"{_W}\}}",
        following=rf"{_W},{_W}{named}",
        last=rf"{_W}\]{_W}{regex.escape(end)}",
        separator=", ",
    )


def _section(marker: str, end: str, named: str, after: str, separator: str = "") -> CallForm:
    """Calls between a marker and a text that ends them all. `named`: from the beginning of a call to its arguments."""
    return CallForm(
        marker=marker,
        first=rf"(?P<begin>{regex.escape(marker)}{_W}){named}",
        after=after,
        following=rf"{_W}{named}",
        last=rf"{_W}{regex.escape(end)}",
        separator=separator,
    )


def _deepseek(named: str, after: str, separator: str) -> CallForm:
    return _section(
        "<｜tool▁calls▁begin｜>",
        "<｜tool▁calls▁end｜>",
        rf"(?P<open><｜tool▁call▁begin｜>){named}(?=\{{)",
        rf"{after}{_W}<｜tool▁call▁end｜>",
        separator,
    )


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
    "Qwen3-Coder": CallForm(
        marker="<tool_call>",
        first=rf"(?P<begin>)(?P<open><tool_call>{_W}<function=){_NAME}(?P<middle>>{_W})",
        after=rf"</function>{_W}</tool_call>",
        separator="\n",
        element=ElementForm("<parameter=", ">", "</parameter>", "</function>", in_lines=True),
    ),
    "GLM": CallForm(
        marker="<tool_call>",
        first=rf"(?P<begin>)(?P<open><tool_call>{_W}){_NAME}(?P<middle>{_W})(?=<arg_key>|</tool_call>)",
        after="</tool_call>",
        separator="\n",
        element=ElementForm("<arg_key>", rf"</arg_key>{_W}<arg_value>", "</arg_value>", "</tool_call>"),
    ),
    "MiniMax-M2": CallForm(
        marker="<minimax:tool_call>",
        first=rf'(?P<begin><minimax:tool_call>{_W})(?P<open><invoke name="){_NAME}(?P<middle>">{_W})',
        after="</invoke>",
        following=rf'{_W}(?P<open><invoke name="){_NAME}(?P<middle>">{_W})',
        last=rf"{_W}</minimax:tool_call>",
        separator="\n",
        element=ElementForm('<parameter name="', '">', "</parameter>", "</invoke>"),
    ),
    "MiniMax-M1": _section("<tool_calls>", "</tool_calls>", _OBJECT, rf"{_W}\}}", "\n"),
    "Hunyuan": _list("<tool_calls>", "</tool_calls>"),
    "Nemotron": _list("<TOOLCALL>", "</TOOLCALL>"),
    "InternLM": CallForm(
        marker="<|action_start|>",
        first=rf"(?P<begin>)<\|action_start\|>{_W}<\|plugin\|>{_W}{_OBJECT}",
        after=rf"{_W}\}}{_W}<\|action_end\|>",
        separator="",
    ),
    "Command R7B": _list("<|START_ACTION|>", "<|END_ACTION|>", _COMMAND),
    "Kimi K2": _section(
        "<|tool_calls_section_begin|>",
        "<|tool_calls_section_end|>",
        rf"(?P<open><\|tool_call_begin\|>{_W}(?:functions\.)?){_NAME}(?P<middle>:[0-9]{{1,9}}{_W}<\|tool_call_argument_begin\|>{_W})(?=\{{)",
        rf"{_W}<\|tool_call_end\|>",
    ),
    "DeepSeek-V3": _deepseek(rf"function<｜tool▁sep｜>{_NAME}(?P<middle>{_W}```json{_W})", rf"{_W}```", "\n"),
    "DeepSeek-V3.1": _deepseek(rf"{_NAME}(?P<middle><｜tool▁sep｜>{_W})", "", ""),
    "Llama 3": CallForm(
        marker="",
        first=rf"(?P<begin>)(?:<\|python_tag\|>|<\|python_start\|>(?:<\|python_end\|>)?)?{_OBJECT}",
        after=rf"{_W}\}}",
    ),
}
"""The forms by their names, which errors list. A new form is an entry here; the first that matches a template counts.

After `middle` the arguments are one JSON object, or elements. A form with other arguments also needs changes of `CallParser` and
`ToolUse.grammar`. Markers that a model may have as tokens belong in `MAY_BE_TOKENS`.
"""
MAY_BE_TOKENS = (
    *("[TOOL_CALLS]", "[CALL_ID]", "[ARGS]", "<tool_call>", "</tool_call>"),
    *("<|python_tag|>", "<|python_start|>", "<|python_end|>"),
    *(
        "<arg_key>",
        "</arg_key>",
        "<arg_value>",
        "</arg_value>",
        "<minimax:tool_call>",
        "</minimax:tool_call>",
    ),
    *("<tool_calls>", "</tool_calls>", "<TOOLCALL>", "</TOOLCALL>", "<|action_start|>", "<|plugin|>"),
    *("<|action_end|>", "<|START_ACTION|>", "<|END_ACTION|>", "<|tool_calls_section_begin|>"),
    *(
        "<|tool_call_begin|>",
        "<|tool_call_argument_begin|>",
        "<|tool_call_end|>",
        "<|tool_calls_section_end|>",
    ),
    *(
        "<｜tool▁calls▁begin｜>",
        "<｜tool▁call▁begin｜>",
        "<｜tool▁sep｜>",
        "<｜tool▁call▁end｜>",
        "<｜tool▁calls▁end｜>",
    ),
)
"""Parts of calls that some models have as tokens of their own.

Decoded text omits those that are special tokens. A grammar takes only the token itself, not shorter tokens with the same text.
"""


@dataclass(frozen=True, slots=True)
class ElementSpelling:
    """How one model writes an argument: `begin`, its name, `middle`, its value and `end`."""

    begin: str
    middle: str
    end: str


@dataclass(frozen=True, slots=True)
class Spelling:
    """How one model writes calls.

    It writes `begin`, then for each call `open`, its name, `middle`, its arguments and `close`, with the form's separator between calls,
    and `end`. `tokens`: ids of the parts of calls that are tokens of their own. `element`: how it writes arguments that are elements.
    """

    form: CallForm
    begin: str
    open: str
    middle: str
    close: str
    end: str
    tokens: dict[str, int] = field(default_factory=dict)
    element: ElementSpelling | None = None


def spelling_of(rendered: str, before: str, tokens: dict[str, int]) -> Spelling | None:
    """How a template writes calls; None: in another form.

    `rendered`: the template's text of `probed_call`. `before`: its text of the messages before the call.
    """
    for form in FORMS.values():
        if element := form.element:
            arguments = element.whole
        else:
            arguments = rf'\{{{_W}"{_PROBED[1]}"{_W}:{_W}"{_PROBED[2]}"{_W}\}}'
        whole = regex.compile(f"{form.first}{arguments}(?P<after>{form.after})(?P<last>{form.last})")
        for match in whole.finditer(rendered):
            if match["name"] != _PROBED[0] or (element and match["key"] != _PROBED[1]):
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
                element=ElementSpelling(match["key_begin"], match["key_middle"], match["key_end"])
                if element
                else None,
            )
    return None


def probed_call(call_id: str = "mmdprobed") -> list[dict[str, Any]]:
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


def named_id(name: str, number: int) -> str:
    """The id of a call where templates write an id in place of a name. `number`: of the call in the conversation."""
    return f"functions.{name}:{number}"


def shows_name(text: str, before: str = "") -> bool:
    """Whether a template's text has the name of the probed call. `before`: its text of the messages before the call."""
    return text.count(_PROBED[0]) > before.count(_PROBED[0])


def is_json(text: str) -> bool:
    """Whether a template's text has the arguments of the probed call other than as Python writes an object."""
    return f"{{'{_PROBED[1]}': '{_PROBED[2]}'}}" not in text


def probed_tool() -> dict[str, Any]:
    """A tool, in the shape of Hugging Face's chat templates."""
    name, key, *_ = _PROBED
    properties = {key: {"type": "string", "description": "a value"}}
    parameters = {"type": "object", "properties": properties, "required": [key]}
    function = {"name": name, "description": "a tool", "parameters": parameters}
    return {"type": "function", "function": function}


def renders_call(text: str, before: str = "") -> bool:
    """Whether a template's text has every part of `probed_call`. `before`: its text of the messages before the call."""
    return all(text.count(needle) > before.count(needle) for needle in _PROBED)


def renders_tool(text: str) -> bool:
    """Whether a template's text has `probed_tool`."""
    return all(needle in text for needle in _PROBED[:2])
