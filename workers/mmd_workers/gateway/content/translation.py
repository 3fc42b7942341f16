"""Turns requests of other APIs into chats. Faults name the fields that the clients sent."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterable, Iterator, Mapping, MutableSequence, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

from pydantic import ConfigDict

from mmd_api.contract.errors import InvalidValueError, UnsupportedParameterError
from mmd_workers.gateway.basics.api_errors import ApiError
from mmd_workers.gateway.basics.strict import MAX_NAME_CHARACTERS
from mmd_workers.gateway.content.chat_request import ChatRequest
from mmd_workers.gateway.content.conversation import (
    MAX_MESSAGES,
    AnswerMessage,
    CalledFunction,
    Message,
    PromptMessage,
    ToolCall,
    ToolMessage,
)
from mmd_workers.gateway.content.tools import FunctionTool, NamedFunction, NamedTool, Tool
from mmd_workers.gateway.output.call_parser import MAX_TOOL_CALLS

_IN_MESSAGE = re.compile(
    r"messages\[(?P<message>\d+)\](?:(?P<content>\.content)(?:\[(?P<part>\d+)\])?"
    r"|\.tool_calls\[(?P<call>\d+)\]\.function\.arguments|(?P<result>\.tool_call_id))?"
)
_IN_TOOL = re.compile(r"tools\[(?P<tool>\d+)\]\.|tool_choice\.")
_PLACE = re.compile(r"\[(\d+)\]")


def refuse_types(entries: Iterable[tuple[str, object]], known: Iterable[str], remedy: str) -> None:
    """Refuse entries of unknown types, and name the field.

    Raises:
        ApiError: names the first such entry.
    """
    for param, entry in entries:
        kind = entry.get("type") if isinstance(entry, dict) else None
        if isinstance(kind, str) and kind not in known:
            fault = UnsupportedParameterError(
                f"{param}: type {kind[:MAX_NAME_CHARACTERS]!r} is not supported; {remedy}"
            )
            raise ApiError(fault, param=param)


def entries_of(value: object, name: str, spelling: str) -> Iterator[tuple[str, object]]:
    """Yield the entries of a list in a body, each with its field. The body and the entries are not validated yet."""
    entries = value.get(name) if isinstance(value, dict) else None
    for number, entry in enumerate(entries if isinstance(entries, list) else ()):
        yield spelling.format(number), entry


@dataclass(frozen=True, slots=True)
class FieldPlace:
    """The origin of a chat message in the client's fields.

    `parts`: the client's numbers of its parts, if they differ. `calls`: the fields of its calls' arguments. `result`: the field with the id
    of the call whose result it is.
    """

    content: str
    parts: Sequence[int] | None = None
    calls: Sequence[str] = ()
    result: str = ""

    def field(self, match: re.Match[str]) -> str:
        """The client's field for a matched field of the chat."""
        if match["call"] is not None:
            return self.calls[int(match["call"])]
        if match["result"] is not None:
            return self.result
        if match["part"] is not None:
            part = int(match["part"])
            return f"{self.content}[{part if self.parts is None else self.parts[part]}]"
        return self.content if match["content"] else self.content.removesuffix(".content")


@dataclass(frozen=True, slots=True)
class FieldNames:
    """The client's names for the fields of a chat that was made from its request.

    `places`: origins of the messages. `tools`: fields of the tools, with indexes as in a chat. `fields`: other fields, by their names in the
    chat. `dotted`: indexes are written `.0`, not `[0]`.
    """

    places: Sequence[FieldPlace]
    tools: Sequence[str] = ()
    fields: Mapping[str, str] = field(default_factory=dict)
    dotted: bool = False

    def spelled(self, param: str) -> str:
        """The client's name for a field of the chat."""
        if match := _IN_MESSAGE.match(param):
            param = self.places[int(match["message"])].field(match) + param[match.end() :]
        elif match := _IN_TOOL.match(param):
            path, _, last = param.rpartition(".")
            path = path.removesuffix(".function").replace(".allowed_tools", "")
            path = path if match["tool"] is None else self.tools[int(match["tool"])]
            param = f"{path}.{self.fields.get(last, last)}"
        else:
            param = self.fields.get(param, param)
        return _PLACE.sub(r".\1", param) if self.dotted else param

    @contextlib.contextmanager
    def in_faults(self) -> Iterator[None]:
        """Rename the field of a fault raised in this context."""
        try:
            yield
        except ApiError as error:
            if error.param:
                error.rename(self.spelled(error.param))
            raise


ChatRole = Literal["user", "assistant", "system", "developer"]


def message_of(role: ChatRole, content: Any) -> Message:
    """A chat message with this content, which is already validated."""
    if role == "assistant":
        return AnswerMessage.model_construct(role=role, content=content)
    return PromptMessage.model_construct(role=role, content=content)


def call_of(call_id: str, name: str, arguments: str) -> ToolCall:
    """A tool call of a chat. `arguments`: as JSON."""
    function = CalledFunction.model_construct(name=name, arguments=arguments)
    return ToolCall.model_construct(id=call_id, type="function", function=function)


def result_of(call_id: str, content: Any) -> ToolMessage:
    """A chat message with the result of a call. `content`: text, or parts, which are already validated."""
    return ToolMessage.model_construct(role="tool", tool_call_id=call_id, content=content or "")


def tool_of(name: str, description: str | None, parameters: Any, strict: bool | None) -> Tool:
    """A tool of a chat. `parameters`: as JSON."""
    function = FunctionTool.model_construct(
        name=name, description=description, parameters=parameters, strict=strict
    )
    return Tool.model_construct(type="function", function=function)


def named_tool(name: str) -> NamedTool:
    """A chat's choice of a tool."""
    return NamedTool.model_construct(type="function", function=NamedFunction.model_construct(name=name))


_Entry = TypeVar("_Entry")


def consumed(entries: MutableSequence[_Entry]) -> Iterator[_Entry]:
    """Yield all entries, and drop each one: a body's memory does not suffice for the entries beside the messages made from them."""
    entries.reverse()
    while entries:
        yield entries.pop()


class Translation:
    """The messages of a chat made from another API's request, each with its origin."""

    def __init__(self) -> None:
        self.messages: list[Message] = []
        self.places: list[FieldPlace] = []

    def add(self, message: Message, place: FieldPlace) -> None:
        """Add a message.

        Raises:
            ApiError: there are too many messages; names the field.
        """
        if len(self.messages) >= MAX_MESSAGES:
            raise fault(
                place.content.removesuffix(".content"),
                f"the results of tools count as messages, of which there are more than {MAX_MESSAGES}; send fewer",
            )
        self.messages.append(message)
        self.places.append(place)


def check_number_of_calls(calls: Sequence[ToolCall], param: str) -> None:
    """Check the number of calls in one message.

    Raises:
        ApiError: there are too many; names the field.
    """
    if len(calls) > MAX_TOOL_CALLS:
        raise fault(param, f"more than {MAX_TOOL_CALLS} calls of tools in one message; send fewer")


def fault(param: str, message: str) -> ApiError:
    """The error for an invalid value of this field."""
    return ApiError(InvalidValueError(f"{param}: {message}"), param=param)


class TranslatedRequest(ChatRequest):
    """A chat that was a request of another surface. The translation makes it of parts that have been validated."""

    model_config = ConfigDict(arbitrary_types_allowed=True)

    names: FieldNames
    given: Any = None
    """The parts of the request that its answer repeats."""
