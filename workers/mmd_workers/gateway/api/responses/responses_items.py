"""Items of the input of /v1/responses as pydantic models, and their translation into messages of a chat.

Independent of the network and the model.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag

from mmd_workers.gateway.api.responses.custom_tools import as_function_arguments
from mmd_workers.gateway.api.responses.server_items import (
    OMITTED_TYPES,
    ClientCall,
    ClientCallOutput,
    CodeInterpreterCall,
    FileSearchCall,
    McpCall,
    OmittedItem,
    ServerToolCall,
)
from mmd_workers.gateway.basics.strict import DISCARD, Ignored, Strict
from mmd_workers.gateway.content.conversation import (
    MAX_PARTS,
    OF_CONTENT,
    AnswerMessage,
    CallName,
    ResultContent,
    ToolCall,
)
from mmd_workers.gateway.content.parts import AnyPart, TextPart, type_of
from mmd_workers.gateway.content.translation import (
    FieldPlace,
    Translation,
    call_of,
    check_number_of_calls,
    consumed,
    message_of,
    result_of,
)

_NO_EFFECT = Ignored("it has no effect")


class OutputTextPart(TextPart):
    """Text of an answer that is sent back."""

    type: Literal["output_text"]  # type: ignore[assignment]  # no other type of text
    annotations: Annotated[list[Any] | None, DISCARD, Ignored("about the answer, and no part of it")] = None
    logprobs: Annotated[list[Any] | None, DISCARD, Ignored("about the answer, and no part of it")] = None


ItemPart = Annotated[AnyPart | Annotated[OutputTextPart, Tag("output_text")], Discriminator(type_of)]
_PARTS = Field(min_length=1, max_length=MAX_PARTS, fail_fast=True)


Status = Annotated[Literal["in_progress", "completed", "incomplete"] | None, _NO_EFFECT]
ItemId = Annotated[str | None, Field(max_length=256), Ignored("nothing is stored under it")]


class InputMessage(Strict):
    """What one side said, or an answer that is sent back as it came."""

    type: Literal["message"] | None = None
    role: Literal["user", "assistant", "system", "developer"]
    content: Annotated[
        Annotated[str, Tag("text")] | Annotated[list[ItemPart], _PARTS, Tag("parts")], OF_CONTENT
    ]
    id: ItemId = None
    status: Status = None
    phase: Annotated[Literal["commentary", "final_answer"] | None, _NO_EFFECT] = None


_ABOUT = Ignored("about the call, and no part of it")


class FunctionCall(Strict):
    """A call that the model made."""

    type: Literal["function_call"]
    call_id: CallName
    name: CallName
    arguments: str
    id: ItemId = None
    status: Status = None
    caller: Annotated[dict[str, Any] | None, DISCARD, _ABOUT] = None
    namespace: Annotated[str | None, Field(max_length=256)] = None
    parsed_arguments: Annotated[
        Any | None, DISCARD, Ignored("what OpenAI's client makes of the arguments")
    ] = None


class CustomToolCall(Strict):
    """A call of a custom tool that the model made."""

    type: Literal["custom_tool_call"]
    call_id: CallName
    name: CallName
    input: str
    id: ItemId = None
    status: Status = None
    caller: Annotated[dict[str, Any] | None, DISCARD, _ABOUT] = None
    namespace: Annotated[str | None, Field(max_length=256)] = None


class FunctionCallOutput(Strict):
    """The result of a call."""

    type: Literal["function_call_output", "custom_tool_call_output"]
    call_id: CallName
    output: ResultContent
    id: ItemId = None
    status: Status = None
    caller: Annotated[dict[str, Any] | None, DISCARD, _ABOUT] = None
    name: Annotated[str | None, Field(max_length=256), _ABOUT] = None
    namespace: Annotated[str | None, Field(max_length=256), _ABOUT] = None


def _item_kind(value: object) -> str | None:
    """The branch of an item; a message may have no type."""
    kind = (type_of(value) or "message") if isinstance(value, dict) else "message"
    if kind.removesuffix("_output") in _CLIENT_CALLS:
        return "client_call_output" if kind.endswith("_output") else "client_call"
    return "omitted" if kind in OMITTED_TYPES else kind


class ReasoningTextPart(Strict):
    """Reasoning of the model."""

    type: Literal["reasoning_text", "text"]
    text: str


class ReasoningItem(Strict):
    """The reasoning before an answer that is sent back as it came."""

    type: Literal["reasoning"]
    content: Annotated[list[ReasoningTextPart], Field(max_length=MAX_PARTS, fail_fast=True)] | None = None
    summary: Annotated[list[Any] | None, DISCARD, Ignored("the reasoning itself is in content")] = None
    encrypted_content: Annotated[str | None, DISCARD, Ignored("nothing is encrypted here")] = None
    id: ItemId = None
    status: Status = None


InputItem = Annotated[
    Annotated[InputMessage, Tag("message")]
    | Annotated[ReasoningItem, Tag("reasoning")]
    | Annotated[FunctionCall, Tag("function_call")]
    | Annotated[FunctionCallOutput, Tag("function_call_output")]
    | Annotated[CustomToolCall, Tag("custom_tool_call")]
    | Annotated[FunctionCallOutput, Tag("custom_tool_call_output")]
    | Annotated[FileSearchCall, Tag("file_search_call")]
    | Annotated[CodeInterpreterCall, Tag("code_interpreter_call")]
    | Annotated[McpCall, Tag("mcp_call")]
    | Annotated[ClientCall, Tag("client_call")]
    | Annotated[ClientCallOutput, Tag("client_call_output")]
    | Annotated[OmittedItem, Tag("omitted")],
    Discriminator(_item_kind),
]
_CLIENT_CALLS = ("local_shell_call", "shell_call", "apply_patch_call")
ITEM_TYPES = (
    "message",
    "reasoning",
    "function_call",
    "function_call_output",
    "custom_tool_call",
    "custom_tool_call_output",
    "file_search_call",
    "code_interpreter_call",
    "mcp_call",
    *_CLIENT_CALLS,
    *(f"{kind}_output" for kind in _CLIENT_CALLS),
    *OMITTED_TYPES,
)
ITEM_TAGS = (*ITEM_TYPES, "client_call", "client_call_output", "omitted")


def joined_name(group: str | None, name: str) -> str:
    """The name of a function in the prompt. Functions without a group have no dot in their names."""
    return f"{group}.{name}" if group else name


def divided_name(name: str) -> tuple[str | None, str]:
    """The group, if there is one, and the name of a function, from its name in the prompt."""
    group, _, own_name = name.rpartition(".")
    return group or None, own_name


def add_items(chat: Translation, items: list[Any]) -> None:
    """Translate items into messages of a chat. The items are moved, not copied.

    Calls belong to the assistant's message before them, or else to a message without content. Reasoning, of one item or of several in a row,
    belongs to whatever follows it. What a tool of another server has done is a call and its result, as far as the item shows the result.
    """
    messages = _Messages(chat)
    for number, item in enumerate(consumed(items)):
        messages.add(item, f"input[{number}]")
    messages.end()


class _Messages:
    """Adds one item after another to a chat."""

    def __init__(self, chat: Translation) -> None:
        self._chat = chat
        self._answer: AnswerMessage | None = None  # the message for the next call
        self._calls: list[ToolCall] = []
        self._fields: list[str] = []
        self._thoughts: list[str] = []  # reasoning that is not yet in a message
        self._reasoning_param = ""
        self._call_ids: dict[str, str] = {}  # calls that clients make, by the ids of their items

    def add(self, item: Any, param: str) -> None:
        """Add an item. `param`: its field."""
        if isinstance(item, ReasoningItem):
            text = "".join(part.text for part in item.content or ())
            self._thoughts += [text] if text else []
            self._reasoning_param = param
        elif isinstance(item, ServerToolCall):
            if (result := item.result) is not None:
                self._call(item.id, item.call_name, item.call_arguments, param)
                self._result(item.id, result, param, "id")
        elif isinstance(item, ClientCall):
            if item.id is not None:
                self._call_ids[item.id] = item.call_id
            self._call(item.call_id, item.call_name, item.call_arguments, param)
        elif isinstance(item, ClientCallOutput):
            call_id = item.call_id or self._call_ids.get(item.id or "", item.id or "")
            self._result(call_id, item.text, param, "call_id" if item.call_id else "id")
        elif isinstance(item, FunctionCall):
            self._call(item.call_id, joined_name(item.namespace, item.name), item.arguments, param)
        elif isinstance(item, CustomToolCall):
            arguments = as_function_arguments(item.input)
            self._call(item.call_id, joined_name(item.namespace, item.name), arguments, param)
        elif isinstance(item, FunctionCallOutput):
            self._result(item.call_id, item.output, param, "call_id")
        elif isinstance(item, InputMessage):
            self._message(item, param)

    def end(self) -> None:
        """Add reasoning that nothing follows."""
        if self._thoughts:
            answer = self._begin_answer(self._reasoning_param)
            answer.reasoning_content = "\n\n".join(self._thoughts)
            self._thoughts = []

    def _begin_answer(self, param: str) -> AnswerMessage:
        """Begin a message of the assistant, still without content and calls."""
        answer = AnswerMessage.model_construct(role="assistant")
        self._answer, self._calls, self._fields = answer, [], []
        self._chat.add(answer, FieldPlace(param, calls=self._fields))
        return answer

    def _call(self, call_id: str, name: str, arguments: str, param: str) -> None:
        self.end()
        answer = self._answer or self._begin_answer(param)
        self._calls.append(call_of(call_id, name, arguments))
        self._fields.append(f"{param}.arguments")
        check_number_of_calls(self._calls, param)
        answer.tool_calls = self._calls

    def _result(self, call_id: str, content: Any, param: str, id_field: str) -> None:
        self.end()
        self._answer = None
        place = FieldPlace(f"{param}.output", result=f"{param}.{id_field}")
        self._chat.add(result_of(call_id, content), place)

    def _message(self, item: InputMessage, param: str) -> None:
        self.end()
        answer_before, self._answer, self._calls, self._fields = self._answer, None, [], []
        message = message_of(item.role, item.content)
        place = FieldPlace(f"{param}.content", calls=self._fields)
        if isinstance(message, AnswerMessage):
            self._answer = message
            if answer_before is not None and answer_before.content is None and not answer_before.tool_calls:
                message.reasoning_content = answer_before.reasoning_content
                self._chat.messages[-1], self._chat.places[-1] = message, place
                return
        self._chat.add(message, place)
