"""What the surfaces beside chat completions share: their requests become chats, and faults name the fields that their clients sent.

Tools are refused here, for all of them.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterable, Iterator, Mapping, MutableSequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from pydantic import ConfigDict

from mmd_api.contract.errors import UnsupportedParameterError
from mmd_workers.gateway.api_errors import ApiError
from mmd_workers.gateway.chat_request import ChatRequest
from mmd_workers.gateway.conversation import AnswerMessage, Message, PromptMessage
from mmd_workers.gateway.strict import NotServed

_IN_MESSAGE = re.compile(r"messages\[(\d+)\](\.content)?")
_PLACE = re.compile(r"\[(\d+)\]")

_NO_TOOLS = "describe the tools in the instructions and parse the response"
TOOLS_NOT_SERVED: NotServed = {
    "tools": (([],), _NO_TOOLS),
    "tool_choice": (("none", "auto", {"type": "none"}, {"type": "auto"}), "omit it"),
}
TOOL_TYPES = frozenset({"tool_use", "tool_result", "function_call", "function_call_output"})
"""Types of blocks and items that belong to tools."""


def refuse_tools(entries: Iterable[tuple[str, object]]) -> None:
    """Refuse blocks and items that belong to tools, each with its field.

    Raises:
        ApiError: names the first one.
    """
    for param, entry in entries:
        kind = entry.get("type") if isinstance(entry, dict) else None
        if isinstance(kind, str) and kind in TOOL_TYPES:
            fault = UnsupportedParameterError(
                f"{param}: type {kind!r} is not supported, since tools are not: {_NO_TOOLS}"
            )
            raise ApiError(fault, param=param)


@dataclass(frozen=True, slots=True)
class FieldNames:
    """How a client spells the fields of a chat that its request became.

    `instructions`: the field of the first message, empty where that is one of `messages`, the field of the others. `fields`: other
    fields by their names in the chat. `dotted`: places in lists are spelled `.0`, not `[0]`.
    """

    instructions: str
    messages: str
    fields: Mapping[str, str] = field(default_factory=dict)
    dotted: bool = False

    def spelled(self, param: str) -> str:
        """The client's name of a field of the chat."""
        if found := _IN_MESSAGE.match(param):
            number, rest = int(found[1]), param[found.end() :]
            if self.instructions and number == 0:
                param = self.instructions + rest
            else:
                place = f"[{number - bool(self.instructions)}]"
                param = f"{self.messages}{place}{found[2] or ''}{rest}"
        else:
            param = self.fields.get(param, param)
        return _PLACE.sub(r".\1", param) if self.dotted else param

    @contextlib.contextmanager
    def in_faults(self) -> Iterator[None]:
        """Rename the field of a fault that is raised meanwhile."""
        try:
            yield
        except ApiError as error:
            if error.param:
                error.rename(self.spelled(error.param))
            raise


ChatRole = Literal["user", "assistant", "system", "developer"]


class Turn(Protocol):
    """A message of another surface, whose content has been validated."""

    @property
    def role(self) -> ChatRole:
        """Who says it."""
        ...

    @property
    def content(self) -> Any:
        """Text, or parts as those of a chat."""
        ...


def message_of(role: ChatRole, content: Any) -> Message:
    """The message of a chat with this content, which has been validated."""
    if role == "assistant":
        return AnswerMessage.model_construct(role=role, content=content)
    return PromptMessage.model_construct(role=role, content=content)


def as_messages(turns: MutableSequence[Any]) -> list[Message]:
    """The messages of a chat, made of all `turns`. Each is dropped as soon as it is a message: the memory for a body has no room for both."""
    turns.reverse()
    found: list[Message] = []
    while turns:
        turn: Turn = turns.pop()
        found.append(message_of(turn.role, turn.content))
    return found


class TranslatedRequest(ChatRequest):
    """A chat that was a request of another surface. The translation makes it of parts that have been validated."""

    model_config = ConfigDict(arbitrary_types_allowed=True)

    names: FieldNames
    given: Any = None
    """What of the request its answer repeats."""
