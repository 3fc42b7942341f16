"""Requests to /v1/messages: Anthropic's messages as pydantic models, and their translation into chats.

Independent of the network and the model.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from collections.abc import Set as AbstractSet
from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag, model_validator
from pydantic_core import PydanticCustomError

from mmd_workers.gateway.basics.strict import DISCARD, Explained, Ignored, NotServed, Strict, validated
from mmd_workers.gateway.content.chat_request import (
    MaxTokens,
    ModelName,
    ReasoningEffort,
    Stops,
    Temperature,
    TopK,
    TopP,
)
from mmd_workers.gateway.content.conversation import (
    MAX_MESSAGES,
    MAX_PARTS,
    OF_CONTENT,
    AnswerMessage,
    CallName,
    JsonArguments,
    Message,
    ToolCall,
    content_kind,
    ends_in_text,
)
from mmd_workers.gateway.content.parts import CacheMark, FileId, MediaSource, TextPart, Url, type_of
from mmd_workers.gateway.content.response_format import JsonSchemaFormat, JsonSource, ResponseFormat
from mmd_workers.gateway.content.tools import MAX_TOOLS, FunctionName, Parameters, ServerTool
from mmd_workers.gateway.content.translation import (
    FieldNames,
    FieldPlace,
    TranslatedRequest,
    Translation,
    call_of,
    check_number_of_calls,
    consumed,
    entries_of,
    fault,
    message_of,
    named_tool,
    refuse_types,
    result_of,
    tool_of,
)

MAX_LISTED_TOOLS = 1024
"""Limit of the tools of a request, those included that are not in the prompt: `MAX_TOOLS` limits the others."""


class TextBlock(TextPart):
    """Text."""

    type: Literal["text"]
    citations: Annotated[list[Any] | None, DISCARD, Ignored("about the answer, and no part of it")] = None


class Base64Source(Strict):
    """An image in the request itself."""

    type: Literal["base64"]
    media_type: Annotated[str, Field(pattern=r"^image/[a-z0-9.+-]{1,32}$")]
    data: Annotated[str, Field(min_length=1)]

    @property
    def as_url(self) -> str:
        """The bytes as a data URL."""
        return f"data:{self.media_type};base64,{self.data}"


class UrlSource(Strict):
    """An image or a PDF elsewhere, or a data URL."""

    type: Literal["url"]
    url: Url

    @property
    def as_url(self) -> str:
        """The URL."""
        return self.url


class FileSource(Strict):
    """An uploaded file."""

    type: Literal["file"]
    file_id: FileId


class ImageBlock(Strict):
    """An image."""

    type: Literal["image"]
    image: Annotated[
        Annotated[Base64Source, Tag("base64")]
        | Annotated[UrlSource, Tag("url")]
        | Annotated[FileSource, Tag("file")],
        Discriminator(type_of),
    ] = Field(alias="source")
    cache_control: CacheMark = None

    def source(self, param: str) -> MediaSource:
        """The image as a media source. `param`: field of the block."""
        return _source("image", param, self.image)


class PdfSource(Base64Source):
    """A PDF in the request itself."""

    media_type: Literal["application/pdf"]


class Citations(Strict):
    """Whether the answer cites the document."""

    enabled: Literal[False] | None = None


class DocumentBlock(Strict):
    """A PDF, of which each page becomes an image."""

    type: Literal["document"]
    document: Annotated[
        Annotated[PdfSource, Tag("base64")]
        | Annotated[UrlSource, Tag("url")]
        | Annotated[FileSource, Tag("file")],
        Discriminator(type_of),
    ] = Field(alias="source")
    title: Annotated[str | None, Field(max_length=1024), Ignored("the model sees the pages alone")] = None
    context: Annotated[str | None, DISCARD, Ignored("the model sees the pages alone")] = None
    citations: Citations | None = None
    cache_control: CacheMark = None

    def source(self, param: str) -> MediaSource:
        """The document as a media source. `param`: field of the block."""
        return _source("document", param, self.document)


def _source(
    kind: Literal["image", "document"], param: str, given: Base64Source | UrlSource | FileSource
) -> MediaSource:
    if isinstance(given, FileSource):
        return MediaSource(kind, f"{param}.source.file_id", file_id=given.file_id)
    return MediaSource(kind, f"{param}.source", given.as_url)


class ToolUseBlock(Strict):
    """A call that the model made."""

    type: Literal["tool_use"]
    id: CallName
    name: CallName
    input: JsonArguments
    cache_control: CacheMark = None
    caller: Annotated[dict[str, Any] | None, DISCARD, Ignored("about the answer, and no part of it")] = None
    toolset_name: Annotated[str | None, Field(max_length=256), Ignored("it has no effect")] = None


class ToolReference(Strict):
    """A tool that a search in the client has found. From here on the model may call it."""

    type: Literal["tool_reference"]
    tool_name: CallName
    cache_control: CacheMark = None


ResultBlock = Annotated[
    Annotated[TextBlock, Tag("text")]
    | Annotated[ToolReference, Tag("tool_reference")]
    | Annotated[ImageBlock, Tag("image")]
    | Annotated[DocumentBlock, Tag("document")],
    Discriminator(type_of),
]


class ToolResultBlock(Strict):
    """The result of a call."""

    type: Literal["tool_result"]
    tool_use_id: CallName
    content: (
        Annotated[
            Annotated[str, Tag("text")]
            | Annotated[list[ResultBlock], Field(max_length=MAX_PARTS, fail_fast=True), Tag("parts")],
            OF_CONTENT,
        ]
        | None
    ) = None
    is_error: Annotated[bool | None, Ignored("the model reads it in the content")] = None
    cache_control: CacheMark = None
    toolset_name: Annotated[str | None, Field(max_length=256), Ignored("it has no effect")] = None


class ThinkingBlock(Strict):
    """Reasoning before an answer that is sent back as it came."""

    type: Literal["thinking"]
    thinking: str
    signature: Annotated[str | None, DISCARD, Ignored("reasoning is not signed here")] = None


class RedactedThinkingBlock(Strict):
    """Reasoning that another server has encrypted."""

    type: Literal["redacted_thinking"]
    data: Annotated[str, DISCARD, Ignored("it cannot be read here, and is left out")]


Block = Annotated[
    Annotated[TextBlock, Tag("text")]
    | Annotated[ThinkingBlock, Tag("thinking")]
    | Annotated[RedactedThinkingBlock, Tag("redacted_thinking")]
    | Annotated[ImageBlock, Tag("image")]
    | Annotated[DocumentBlock, Tag("document")]
    | Annotated[ToolUseBlock, Tag("tool_use")]
    | Annotated[ToolResultBlock, Tag("tool_result")],
    Discriminator(type_of),
]
_BLOCKS = Field(min_length=1, max_length=MAX_PARTS, fail_fast=True)


class AnthropicTurn(Strict):
    """What one side said."""

    role: Literal["user", "assistant", "system"]
    content: Annotated[
        Annotated[str, Tag("text")] | Annotated[list[Block], _BLOCKS, Tag("parts")],
        OF_CONTENT,
    ]


class ClientTool(Strict):
    """What the model may call, and the client runs. `strict`: its calls match the schema."""

    type: Literal["custom"] | None = None
    name: FunctionName
    description: str | None = None
    input_schema: Parameters
    strict: bool | None = None
    cache_control: CacheMark = None
    allowed_callers: list[Literal["direct"]] | None = None
    defer_loading: Annotated[
        bool | None,
        Explained(
            "`true`: the tool is a part of the prompt once a `tool_reference` names it, or at once if the server's own search would find it"
        ),
    ] = None
    eager_input_streaming: Annotated[bool | None, Ignored("inputs are streamed as they are generated")] = None


SERVER_TOOLS = re.compile(
    r"^(web_search|web_fetch|code_execution|advisor|tool_search_tool_(regex|bm25))(_[0-9]{8})?$"
)


class AnthropicTool(ServerTool):
    """What Anthropic's servers run."""

    type: Annotated[str, Field(pattern=SERVER_TOOLS.pattern)]


def _tool_kind(value: object) -> str:
    return "server" if SERVER_TOOLS.fullmatch(type_of(value) or "") else "client"


AnyTool = Annotated[
    Annotated[ClientTool, Tag("client")] | Annotated[AnthropicTool, Tag("server")], Discriminator(_tool_kind)
]


class ClientToolChoice(Strict):
    """Which tools the answer may or must call."""

    type: Literal["auto", "any", "tool", "none"]
    name: FunctionName | None = None
    disable_parallel_tool_use: bool | None = None

    @model_validator(mode="after")
    def _names_a_tool(self) -> ClientToolChoice:
        if (self.type == "tool") != (self.name is not None):
            raise PydanticCustomError("tool_name", "type tool requires name, and no other type has it")
        return self


class OutputFormat(Strict):
    """The schema that the answer matches."""

    type: Literal["json_schema"]
    source: JsonSource = Field(alias="schema")


class OutputConfig(Strict):
    """The form of the answer."""

    format: OutputFormat | None = None
    effort: Annotated[
        Literal["low", "medium", "high", "xhigh", "max"] | None,
        Ignored("a hint: the model reasons as it was trained to"),
    ] = None


class Thinking(Strict):
    """A hint whether the model reasons before it answers: it counts where the model's template has a switch for it."""

    type: Literal["enabled", "disabled", "adaptive", "between_tools"]
    budget_tokens: Annotated[
        Annotated[int, Field(ge=1)] | None, Ignored("the model reasons as long as it was trained to")
    ] = None
    display: Annotated[
        Literal["summarized", "omitted", "updates"] | None, Ignored("the reasoning is shown as it is")
    ] = None


class ContextEdit(Strict):
    """What Anthropic's servers leave out of a conversation that has grown long."""

    type: Literal["clear_thinking_20251015", "clear_tool_uses_20250919"]
    keep: Annotated[Any, DISCARD] = None
    trigger: Annotated[Any, DISCARD] = None
    clear_at_least: Annotated[Any, DISCARD] = None
    exclude_tools: Annotated[Any, DISCARD] = None
    clear_tool_inputs: Annotated[Any, DISCARD] = None


class ContextManagement(Strict):
    """Edits of the conversation before the model reads it."""

    edits: Annotated[list[ContextEdit], Field(max_length=16, fail_fast=True)] | None = None


class Metadata(Strict):
    """About the request."""

    user_id: Annotated[str, Field(max_length=1024)] | None = None


class CountTokensRequest(Strict):
    """Body of POST /v1/messages/count_tokens: a prompt."""

    model: ModelName
    messages: Annotated[list[AnthropicTurn], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)]
    system: (
        Annotated[
            Annotated[str, Tag("text")] | Annotated[list[TextBlock], _BLOCKS, Tag("parts")],
            Discriminator(
                content_kind,
                custom_error_type="content_type",
                custom_error_message="system must be a string or a list of blocks of text",
            ),
        ]
        | None
    ) = None
    output_config: OutputConfig | None = None
    output_format: Annotated[
        OutputFormat | None, Explained("`output_config.format` as earlier clients spell it")
    ] = None
    cache_control: CacheMark = None
    tools: Annotated[list[AnyTool], Field(max_length=MAX_LISTED_TOOLS, fail_fast=True)] | None = None
    tool_choice: ClientToolChoice | None = None
    thinking: Thinking | None = None
    context_management: Annotated[
        ContextManagement | None,
        Ignored(
            "the model reads the messages as they are sent, apart from reasoning that its template omits"
        ),
    ] = None

    def as_chat(self) -> TranslatedRequest:
        """Translate the prompt into a chat; its messages are moved, not copied.

        Raises:
            ApiError: a block is in the wrong place, or fields contradict each other.
        """
        chat = Translation()
        self._check_names()
        self._check_server_tools()
        found = {part.tool_name for part in self._results() if isinstance(part, ToolReference)}
        tools = self._offered(found)
        if len(tools) > MAX_TOOLS:
            raise fault("tools", f"more than {MAX_TOOLS} tools in the prompt; send fewer, or defer some")
        names = {tool.name for _, tool in tools}
        references = {name: _text_of(name, name in names) for name in found}
        if self.system is not None:
            chat.add(message_of("system", self.system), FieldPlace("system"))
        for number, turn in enumerate(consumed(self.messages)):
            where = f"messages.{number}.content"
            if isinstance(turn.content, str):
                chat.add(message_of(turn.role, turn.content), FieldPlace(where))
            else:
                _add_blocks(chat, turn.role, turn.content, where, references)
        choice: Any = None
        if (requested := self.tool_choice) is not None:
            words = {"auto": "auto", "any": "required", "none": "none"}
            choice = words[requested.type] if requested.name is None else named_tool(requested.name)
            if requested.type == "any" and not tools:
                raise fault("tool_choice", "any needs tools; send some that are not deferred")
        format_field, output_format = self._output_format()
        fields = {
            "parallel_tool_calls": "tool_choice.disable_parallel_tool_use",
            "parameters": "input_schema",
            "response_format.json_schema.schema": f"{format_field}.schema",
            "response_format": format_field,
        }
        request = TranslatedRequest.model_construct(
            model=self.model,
            messages=chat.messages,
            tools=[tool_of(tool.name, tool.description, tool.input_schema, tool.strict) for _, tool in tools],
            tool_choice=choice,
            parallel_tool_calls=requested is None or not requested.disable_parallel_tool_use,
            reasoning_effort=None if self.thinking is None else _EFFORTS[self.thinking.type],
            response_format=None if output_format is None else _response_format(output_format),
            continue_final_message=bool(chat.messages) and _has_text_alone(chat.messages[-1]),
            names=FieldNames(chat.places, [f"tools[{number}]" for number, _ in tools], fields, dotted=True),
        )
        with request.names.in_faults():
            _ = request.tool_use
        return request

    def _output_format(self) -> tuple[str, OutputFormat | None]:
        """The field with the form of the answer, and its value.

        Raises:
            ApiError: both fields are set.
        """
        field = "output_config.format"
        configured = self.output_config.format if self.output_config is not None else None
        if self.output_format is None:
            return field, configured
        if configured is not None:
            raise fault("output_format", f"set {field} or output_format, not both")
        return "output_format", self.output_format

    def _check_names(self) -> None:
        """Refuse two tools of one name, also where one of them is deferred."""
        names: set[str] = set()
        for number, tool in enumerate(self.tools or ()):
            if isinstance(tool, ClientTool):
                if tool.name in names:
                    raise fault(f"tools.{number}.name", f"another tool has the name {tool.name!r}")
                names.add(tool.name)

    def _check_server_tools(self) -> None:
        """Refuse a tool that Anthropic's servers run where the answer may have to call it."""
        choice = self.tool_choice
        for number, tool in enumerate(self.tools or ()):
            if choice is None or not isinstance(tool, ServerTool):
                continue
            if choice.type == "any" or (choice.type == "tool" and choice.name == tool.name):
                raise fault(
                    f"tools.{number}",
                    f"{tool.type} runs on Anthropic's servers, and this server runs no tools; omit it, or let tool_choice name another tool",
                )

    def _offered(self, found: AbstractSet[str]) -> list[tuple[int, ClientTool]]:
        """The tools that the model reads, with their numbers: all but those of servers, and those that a search has yet to find.

        `found`: names of those that it has found.
        """
        tools = list(enumerate(self.tools or ()))
        chosen = None if self.tool_choice is None else self.tool_choice.name
        is_searched_by_server = any(
            isinstance(tool, ServerTool) and tool.type.startswith("tool_search") for _, tool in tools
        )
        return [
            (number, tool)
            for number, tool in tools
            if isinstance(tool, ClientTool)
            and (not tool.defer_loading or tool.name in found or tool.name == chosen or is_searched_by_server)
        ]

    def _results(self) -> Iterator[Any]:
        """Yield the parts of all results of tools."""
        for turn in self.messages:
            for block in turn.content if isinstance(turn.content, list) else ():
                if isinstance(block, ToolResultBlock) and isinstance(block.content, list):
                    yield from block.content


_EFFORTS: dict[str, ReasoningEffort | None] = {
    "enabled": "medium",
    "disabled": "none",
    "adaptive": None,
    "between_tools": None,
}
"""The reasoning effort of the chat, by the type of `thinking`."""


def _add_blocks(
    chat: Translation,
    role: Literal["user", "assistant", "system"],
    blocks: list[Any],
    where: str,
    references: Mapping[str, TextBlock],
) -> None:
    """Translate the blocks of one message: each result becomes a message, then all other blocks become one.

    `references`: the texts in place of references to tools, by their names.
    """
    content: list[Any] = []
    block_numbers: list[int] = []
    thoughts: list[str] = []
    calls: list[ToolCall] = []
    fields: list[str] = []
    for number, block in enumerate(blocks):
        param = f"{where}.{number}"
        if isinstance(block, ToolResultBlock):
            if role != "user":
                raise fault(param, "the result of a tool belongs to a message of the user; send it there")
            if content:
                raise fault(param, "results of tools come first in a message; put other blocks after them")
            result = result_of(block.tool_use_id, _with_texts(block.content, references))
            chat.add(result, FieldPlace(f"{param}.content", result=f"{param}.tool_use_id"))
        elif isinstance(block, ThinkingBlock | RedactedThinkingBlock):
            if role != "assistant":
                raise fault(param, "thinking belongs to a message of the assistant; send it there")
            thoughts += [block.thinking] if isinstance(block, ThinkingBlock) else []
        elif isinstance(block, ToolUseBlock):
            if role != "assistant":
                raise fault(param, "the use of a tool belongs to a message of the assistant; send it there")
            arguments: Any = block.input  # JSON since it was validated
            calls.append(call_of(block.id, block.name, arguments))
            fields.append(f"{param}.input")
            check_number_of_calls(calls, param)
        else:
            content.append(block)
            block_numbers.append(number)
    if not content and not calls and not thoughts and role != "assistant":
        return
    message = message_of(role, content or None)
    if thoughts:
        assert message.role == "assistant"
        message.reasoning_content = "".join(thoughts)
    if calls:
        assert message.role == "assistant"
        message.tool_calls = calls
    has_all_blocks = len(block_numbers) == len(blocks)
    chat.add(message, FieldPlace(where, None if has_all_blocks else block_numbers, fields))


def _with_texts(content: Any, references: Mapping[str, TextBlock]) -> Any:
    """The content of a result, with a text in place of each reference to a tool.

    References to one tool share their text: a part of its own needs more memory than a body is charged for a reference.
    """
    if not isinstance(content, list):
        return content
    return [references[part.tool_name] if isinstance(part, ToolReference) else part for part in content]


def _text_of(name: str, is_offered: bool) -> TextBlock:
    """The text in place of a reference to this tool."""
    state = "can be called now" if is_offered else "is no longer there"
    return TextBlock.model_construct(type="text", text=f"The tool {name} {state}.\n")


class MessagesRequest(CountTokensRequest):
    """Body of POST /v1/messages."""

    max_tokens: MaxTokens
    stop_sequences: Stops | None = None
    stream: bool | None = None
    temperature: Temperature | None = None
    top_p: TopP | None = None
    top_k: TopK | None = None
    ignore_eos: bool | None = None
    metadata: Annotated[Metadata | None, Ignored("it has no effect")] = None
    service_tier: Annotated[Literal["auto", "standard_only"] | None, Ignored("there is one tier")] = None


NOT_SERVED: NotServed = {
    "container": ((), "omit it"),
    "mcp_servers": (([],), "omit it"),
}

TAGS = frozenset(
    {
        "parts",
        "text",
        "thinking",
        "redacted_thinking",
        "image",
        "document",
        "tool_use",
        "tool_result",
        "tool_reference",
        "client",
        "server",
        "base64",
        "url",
        "file",
    }
)
_INDEX = ".{}"  # Anthropic's notation for an index in a list


def parse_messages_request(value: object) -> TranslatedRequest:
    """Validate a decoded JSON body.

    Raises:
        InvalidTypeError: the body is not an object.
        ApiError: 400, naming the first invalid field and the remedy.
    """
    _refuse_other_types(value)
    request = validated(MessagesRequest, value, NOT_SERVED, TAGS, _INDEX)
    last, role = len(request.messages) - 1, request.messages[-1].role
    chat = request.as_chat()
    if role == "assistant" and not chat.continue_final_message:
        raise fault(
            f"messages.{last}",
            "the answer cannot go on after calls of tools, media or thinking alone; end with text, or with a message of the user",
        )
    chat.max_tokens = request.max_tokens
    chat.stop = request.stop_sequences
    chat.stream = request.stream
    chat.temperature = request.temperature
    chat.top_p = request.top_p
    chat.top_k = request.top_k
    chat.ignore_eos = request.ignore_eos
    return chat


def parse_count_tokens_request(value: object) -> TranslatedRequest:
    """Validate a decoded JSON body; raises as `parse_messages_request` does."""
    _refuse_other_types(value)
    return validated(CountTokensRequest, value, NOT_SERVED, TAGS, _INDEX).as_chat()


def _has_text_alone(message: Message) -> bool:
    """True if the answer continues this last message of a conversation."""
    return (
        isinstance(message, AnswerMessage)
        and message.content is not None
        and not message.tool_calls
        and ends_in_text(message.content)
    )


def _response_format(form: OutputFormat) -> ResponseFormat:
    schema = JsonSchemaFormat.model_construct(name="answer", source=form.source, strict=True)
    return ResponseFormat.model_construct(type="json_schema", json_schema=schema)


def _refuse_other_types(value: object) -> None:
    """Refuse tools whose form is known to Anthropic's models alone."""
    tools = [
        (param, tool)
        for param, tool in entries_of(value, "tools", "tools.{}")
        if _tool_kind(tool) == "client"
    ]
    refuse_types(
        tools,
        ("custom",),
        "this server runs no tools; send tools with name and input_schema, and run them in the client",
    )
