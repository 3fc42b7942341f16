"""The messages of a conversation, as clients send them and as the model's frontend takes them. Independent of the network and the model."""

from __future__ import annotations

import json
import re
from collections import deque
from collections.abc import Iterator, Sequence
from itertools import count, groupby
from typing import Annotated, Any, Literal, cast, get_args

from pydantic import AfterValidator, BeforeValidator, Discriminator, Field, Tag, model_validator
from pydantic_core import PydanticCustomError, from_json

from mmd_api.contract.errors import InvalidTypeError, InvalidValueError
from mmd_workers.gateway.basics.api_errors import ApiError
from mmd_workers.gateway.basics.body import LONG_NUMBER, MAX_DIGITS
from mmd_workers.gateway.basics.strict import DISCARD, MAX_NAME_CHARACTERS, Explained, Ignored, Strict
from mmd_workers.gateway.content.parts import (
    AnswerContentPart,
    ContentPart,
    MediaSource,
    RefusalPart,
    TextPart,
)
from mmd_workers.gateway.output.call_parser import MAX_TOOL_CALLS

MAX_MESSAGES = 4096
MAX_PARTS = 4096  # parts of a message; the spec has a separate limit for media
MAX_ARGUMENT_MARKS = 65_536
"""Opening brackets, commas and colons in the arguments of all tool calls: more than their values and keys."""
_LONG_NUMBER = re.compile(LONG_NUMBER.pattern.decode())
_STRING = re.compile(r'"[^"\\]*+(?:\\.[^"\\]*+)*+"?', re.DOTALL)

CallName = Annotated[str, Field(min_length=1, max_length=256)]


def _as_json(value: dict[str, Any]) -> str:
    """The arguments of a call, encoded as JSON."""
    try:
        return json.dumps(value, separators=(",", ":"), allow_nan=False)
    except ValueError as error:
        raise PydanticCustomError("not_finite", "has a number that no float is; use a smaller one") from error


JsonArguments = Annotated[dict[str, Any], AfterValidator(_as_json)]
"""The arguments of a call that come as an object; JSON once they are validated."""


def content_kind(value: object) -> str | None:
    """The branch of content that a value belongs to: text or a list of parts."""
    return "text" if isinstance(value, str) else "parts" if isinstance(value, list) else None


OF_CONTENT = Discriminator(
    content_kind,
    custom_error_type="content_type",
    custom_error_message="content must be a string or a list of parts",
)
_PARTS = Field(min_length=1, max_length=MAX_PARTS, fail_fast=True)

Content = Annotated[
    Annotated[str, Tag("text")] | Annotated[list[ContentPart], _PARTS, Tag("parts")], OF_CONTENT
]
AnswerContent = Annotated[
    Annotated[str, Tag("text")] | Annotated[list[AnswerContentPart], _PARTS, Tag("parts")], OF_CONTENT
]
ResultContent = Annotated[
    Annotated[str, Tag("text")]
    | Annotated[list[ContentPart], Field(max_length=MAX_PARTS, fail_fast=True), Tag("parts")],
    OF_CONTENT,
    Explained("the result of a tool may be empty"),
]
"""Content of a tool call's result, which may be empty."""

_EMPTY_IN_ANSWERS = frozenset(
    {
        "refusal",
        "annotations",
        "audio",
        "function_call",
        "tool_calls",
        "reasoning_content",
        "reasoning",
        "reasoning_details",
        "thinking_blocks",
        "parsed",
    }
)
"""Fields of an answer's message that clients may send back as null or an empty list."""


class _Turn(Strict):
    """What all messages have in common."""

    id: Annotated[str | None, Field(max_length=256), Ignored("nothing is stored under it")] = None

    @model_validator(mode="before")
    @classmethod
    def _without_empty_fields(cls, value: object) -> object:
        if not isinstance(value, dict):
            return value
        empty = {
            name for name in _EMPTY_IN_ANSWERS & value.keys() if value[name] is None or value[name] == []
        }
        return {name: field for name, field in value.items() if name not in empty} if empty else value


class PromptMessage(_Turn):
    """Instructions, or what the user says."""

    role: Literal["system", "developer", "user"]
    content: Content
    name: Annotated[str | None, Field(max_length=256), Ignored("chat templates have no place for it")] = None


class CalledFunction(Strict):
    """The function of a tool call, with its arguments as JSON."""

    name: CallName
    arguments: str
    parsed_arguments: Annotated[
        Any | None, DISCARD, Ignored("what OpenAI's client makes of the arguments")
    ] = None


class ToolCall(Strict):
    """A call that the model made."""

    id: CallName
    type: Literal["function"] = "function"
    function: CalledFunction
    index: Annotated[int | None, Ignored("a place in a stream")] = None


def _null_if_empty(content: object) -> object:
    """Some clients send an empty list beside tool calls."""
    return None if content == [] else content


class AnswerMessage(_Turn):
    """What the model said before: content, a refusal or tool calls, after reasoning."""

    role: Literal["assistant"]
    content: Annotated[AnswerContent | None, BeforeValidator(_null_if_empty)] = None
    refusal: str | None = None
    reasoning_content: str | None = None
    reasoning: Annotated[
        str | None,
        Explained("`reasoning_content` as other servers spell it; that field counts if both are set"),
    ] = None
    tool_calls: Annotated[list[ToolCall], Field(max_length=MAX_TOOL_CALLS, fail_fast=True)] | None = None
    name: Annotated[str | None, Field(max_length=256), Ignored("chat templates have no place for it")] = None

    annotations: Annotated[list[Any] | None, DISCARD, Ignored("about the answer, and no part of it")] = None
    reasoning_details: Annotated[
        list[Any] | None, DISCARD, Ignored("OpenRouter's form of the reasoning, beside the text of it")
    ] = None
    thinking_blocks: Annotated[
        list[Any] | None, DISCARD, Ignored("LiteLLM's form of the reasoning, beside the text of it")
    ] = None
    provider_specific_fields: Annotated[
        dict[str, Any] | None, DISCARD, Ignored("what LiteLLM keeps about an answer")
    ] = None

    @property
    def thoughts(self) -> str:
        """The reasoning; empty if there is none."""
        return self.reasoning_content or self.reasoning or ""

    @model_validator(mode="after")
    def _says_something(self) -> AnswerMessage:
        has_other_reasoning = bool({"reasoning_details", "thinking_blocks"} & self.model_fields_set)
        has_text = self.content is not None or self.refusal is not None or self.thoughts
        if not has_text and not self.tool_calls and not has_other_reasoning:
            raise PydanticCustomError(
                "no_content",
                "content must be a string or a list of parts where the message has neither tool_calls nor refusal",
            )
        if self.content is not None and self.refusal is not None:
            raise PydanticCustomError("content_and_refusal", "set content or refusal, not both")
        return self


class ToolMessage(_Turn):
    """The result of a tool call."""

    role: Literal["tool"]
    content: ResultContent
    tool_call_id: CallName
    name: CallName | None = None


def _role_of(value: object) -> str | None:
    """The role, cut to the length in error messages, because pydantic copies it several times."""
    if not isinstance(value, dict):
        return "user"  # its branch reports that the message is not an object
    role = value.get("role")
    return None if role is None else str(role)[:MAX_NAME_CHARACTERS]


Message = Annotated[
    Annotated[PromptMessage, Tag("system")]
    | Annotated[PromptMessage, Tag("developer")]
    | Annotated[PromptMessage, Tag("user")]
    | Annotated[AnswerMessage, Tag("assistant")]
    | Annotated[ToolMessage, Tag("tool")],
    Discriminator(_role_of),
]
ROLES: tuple[str, ...] = tuple(get_args(member)[1].tag for member in get_args(get_args(Message)[0]))
Messages = Annotated[list[Message], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)]


def ends_in_text(content: str | Sequence[Any] | None) -> bool:
    """True if the last part of content, if there is one, is text."""
    return content is None or isinstance(content, str) or isinstance(content[-1], TextPart | RefusalPart)


def check_continued(messages: Sequence[Message], begins_answer: bool | None, continues: bool | None) -> None:
    """Check the fields `add_generation_prompt` and `continue_final_message` of a request.

    Raises:
        ApiError: they contradict each other or the last message; names the field.
    """
    fault, param = None, "continue_final_message"
    if continues and begins_answer:
        fault = (
            "add_generation_prompt and continue_final_message exclude each other; set one of them to false"
        )
    elif continues:
        last = messages[-1]
        is_answer = isinstance(last, AnswerMessage) and not last.tool_calls and ends_in_text(last.content)
        if not is_answer or (last.content is None and last.refusal is None):
            param = f"messages[{len(messages) - 1}]"
            fault = (
                f"{param}: continue_final_message requires a last message of the assistant that ends in text and has no tool_calls; "
                "send one, or omit continue_final_message"
            )
    elif begins_answer is False:
        param = "add_generation_prompt"
        fault = (
            "add_generation_prompt: false requires continue_final_message: true, since every other answer begins with a new message; "
            "set both, or omit it"
        )
    if fault is not None:
        raise ApiError(InvalidValueError(fault), param=param)


def argument_marks(messages: Sequence[Message]) -> int:
    """Count the opening brackets, commas and colons in the arguments of tool calls: at least one for each value and key.

    Raises:
        ApiError: there are too many.
    """
    marks = 0
    for param, call in _calls(messages):
        marks += _marks(call.function.arguments)
        if marks > MAX_ARGUMENT_MARKS:
            fault = InvalidValueError(
                f"{param}: the arguments of all tool calls have more than {MAX_ARGUMENT_MARKS} brackets, commas and colons; send fewer messages"
            )
            raise ApiError(fault, param=param)
    return marks


def _marks(arguments: str) -> int:
    return 1 + sum(map(arguments.count, "[{,:"))


def _has_long_number(arguments: str) -> bool:
    """True if JSON has a number outside its strings that is too long to be read in linear time.

    JSON has at most as many strings as marks, so the search takes one step for each. Text after more strings than that is never read as JSON.
    """
    if not _LONG_NUMBER.search(arguments):
        return False
    position = 0
    for _ in range(_marks(arguments) + 1):
        string = _STRING.search(arguments, position)
        if _LONG_NUMBER.search(arguments, position, string.start() if string else len(arguments)):
            return True
        if string is None:
            return False
        position = string.end()
    return False


def conversation(messages: Sequence[Message]) -> tuple[list[dict[str, Any]], list[MediaSource]]:
    """The frontend's messages, and the media in order of use.

    A message has a role, content as parts of type text, image, video and audio, `reasoning_content`, and the fields of tool calls, in the form
    of Hugging Face's chat templates. A call's arguments are an object, or a string if a model has written invalid JSON. Results that follow
    one another are in the order of their calls: most templates write no ids, and clients send results as their tools end.

    Raises:
        ApiError: the arguments of a tool call are not an object, or a result belongs to no call.
    """
    argument_marks(messages)
    turns: list[dict[str, Any]] = []
    media: list[MediaSource] = []
    call_ids: set[str] = set()
    for m, message in _with_results_in_order(messages):
        role = "system" if message.role == "developer" else message.role
        turn: dict[str, Any] = {"role": role, "content": _content(message, f"messages[{m}]", media)}
        if isinstance(message, AnswerMessage) and message.tool_calls:
            turn["tool_calls"] = [
                _call(call, f"messages[{m}].tool_calls[{c}]") for c, call in enumerate(message.tool_calls)
            ]
            call_ids.update(call.id for call in message.tool_calls)
        if isinstance(message, AnswerMessage) and message.thoughts:
            turn["reasoning_content"] = message.thoughts
        if isinstance(message, ToolMessage):
            if message.tool_call_id not in call_ids:
                param = f"messages[{m}].tool_call_id"
                unknown = InvalidValueError(
                    f"{param}: no tool call before this message has the id {message.tool_call_id[:MAX_NAME_CHARACTERS]!r}; "
                    "send the assistant's message with its tool_calls before their results"
                )
                raise ApiError(unknown, param=param)
            turn["tool_call_id"] = message.tool_call_id
            if message.name is not None:
                turn["name"] = message.name
        turns.append(turn)
    return turns, media


def _with_results_in_order(messages: Sequence[Message]) -> Iterator[tuple[int, Message]]:
    """Yield each message with its index; results that follow one another in the order of their calls.

    Calls may share an id: each of its results belongs to the next of them since the results before, and further ones to its latest call.
    """
    latest: dict[str, int] = {}
    open_calls: dict[str, deque[int]] = {}
    number, is_answered = count(), False
    for is_result, run in groupby(enumerate(messages), lambda each: isinstance(each[1], ToolMessage)):
        if is_result:
            results = cast("Iterator[tuple[int, ToolMessage]]", run)
            placed = []
            for m, result in results:
                places = open_calls.get(result.tool_call_id)
                place = places.popleft() if places else latest.get(result.tool_call_id, -1)
                placed.append((place, m, result))
            yield from ((m, result) for _, m, result in sorted(placed, key=lambda each: each[0]))
            is_answered = True
            continue
        for m, message in run:
            yield m, message
            for call in message.tool_calls or () if isinstance(message, AnswerMessage) else ():
                if is_answered:
                    open_calls, is_answered = {}, False
                latest[call.id] = next(number)
                open_calls.setdefault(call.id, deque()).append(latest[call.id])


def _content(message: Message, where: str, media: list[MediaSource]) -> list[dict[str, Any]]:
    """The parts of a message. Its media are appended to `media`."""
    content = message.content
    if content is None and isinstance(message, AnswerMessage):
        content = message.refusal
    if isinstance(content, str):
        return [{"type": "text", "text": content}]
    parts: list[dict[str, Any]] = []
    for p, part in enumerate(content or ()):
        if isinstance(part, TextPart):
            parts.append({"type": "text", "text": part.text})
        elif isinstance(part, RefusalPart):
            parts.append({"type": "text", "text": part.refusal})
        else:
            source = part.source(f"{where}.content[{p}]")
            media.append(source)
            parts.append({"type": source.modality})
    return parts


def _calls(messages: Sequence[Message]) -> Iterator[tuple[str, ToolCall]]:
    """Yield each tool call, with the field of its arguments."""
    for m, message in enumerate(messages):
        if isinstance(message, AnswerMessage):
            for c, call in enumerate(message.tool_calls or ()):
                yield f"messages[{m}].tool_calls[{c}].function.arguments", call


def _call(call: ToolCall, where: str) -> dict[str, Any]:
    """A call for the template. Arguments that begin like an object but are invalid stay a string: a model may have written or cut them so."""
    param = f"{where}.function.arguments"
    source = call.function.arguments
    arguments: Any = source
    try:
        if _has_long_number(source):
            raise ValueError(f"a number has more than {MAX_DIGITS} digits")
        arguments = from_json(source or "{}", allow_inf_nan=False)
    except ValueError as error:
        if not source.startswith("{"):
            raise ApiError(
                InvalidValueError(f"{param}: no valid JSON: {str(error)[:200]}; send an object as JSON"),
                param=param,
            ) from error
    else:
        if not isinstance(arguments, dict):
            raise ApiError(InvalidTypeError(f"{param}: the JSON must be an object"), param=param)
    return {
        "id": call.id,
        "type": call.type,
        "function": {"name": call.function.name, "arguments": arguments},
    }
