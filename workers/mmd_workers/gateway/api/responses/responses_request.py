"""Requests to /v1/responses: OpenAI's Responses API as pydantic models, and their translation into chats.

Independent of the network and the model.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, get_args

from pydantic import BeforeValidator, Discriminator, Field, Tag, model_validator
from pydantic_core import PydanticCustomError

from mmd_api.contract.errors import InvalidValueError
from mmd_workers.gateway.api.responses.custom_tools import CustomTool
from mmd_workers.gateway.api.responses.responses_items import (
    ITEM_TAGS,
    ITEM_TYPES,
    InputItem,
    add_items,
    joined_name,
)
from mmd_workers.gateway.basics.api_errors import ApiError
from mmd_workers.gateway.basics.strict import (
    DISCARD,
    MAX_NAME_CHARACTERS,
    Explained,
    Ignored,
    NotServed,
    Strict,
    validated,
)
from mmd_workers.gateway.content.chat_request import (
    CacheSalt,
    MaxTokens,
    ModelName,
    ReasoningEffort,
    Temperature,
    TopP,
)
from mmd_workers.gateway.content.conversation import (
    MAX_MESSAGES,
    content_kind,
)
from mmd_workers.gateway.content.parts import ANSWER_PART_TYPES, ProcessorKwargs, type_of
from mmd_workers.gateway.content.response_format import (
    JsonSchemaFormat,
    JsonSource,
    ResponseFormat,
    SchemaName,
)
from mmd_workers.gateway.content.tools import (
    BY_CHOICE_KIND,
    CHOICE_TAGS,
    MAX_TOOLS,
    AllowedToolChoice,
    AllowedTools,
    FunctionName,
    Parameters,
    ServerTool,
)
from mmd_workers.gateway.content.translation import (
    FieldNames,
    FieldPlace,
    TranslatedRequest,
    Translation,
    entries_of,
    fault,
    message_of,
    named_tool,
    refuse_types,
    tool_of,
)

MAX_METADATA = 16
MAX_KEY_CHARACTERS = 64
MAX_VALUE_CHARACTERS = 512

_NO_EFFECT = Ignored("it has no effect")


class ClientFunction(Strict):
    """What the model may call, and the client runs. `strict`: its calls match the schema."""

    type: Literal["function"]
    name: FunctionName
    description: str | None = None
    parameters: Parameters | None = None
    strict: bool | None = None
    defer_loading: Annotated[bool | None, Ignored("every tool is a part of the prompt")] = None


def _member_kind(value: object) -> str:
    return "custom" if type_of(value) == "custom" else "function"


GroupMember = Annotated[
    Annotated[ClientFunction, Tag("function")] | Annotated[CustomTool, Tag("custom")],
    Discriminator(_member_kind),
]


class FunctionGroup(Strict):
    """Functions and custom tools under one name, which each call of them has beside its own."""

    type: Literal["namespace"]
    name: FunctionName
    description: Annotated[
        str | None, Explained("that of a group precedes the one of its first function")
    ] = None
    tools: Annotated[list[GroupMember], Field(max_length=MAX_TOOLS, fail_fast=True)]


class OpenAiTool(ServerTool):
    """What OpenAI's servers run."""

    type: Literal[
        "code_interpreter",
        "file_search",
        "image_generation",
        "mcp",
        "tool_search",
        "web_search",
        "web_search_2025_08_26",
        "web_search_preview",
        "web_search_preview_2025_03_11",
    ]
    execution: Annotated[
        Literal["server", "client"] | None, Explained("of `tool_search`; one of the client is rejected")
    ] = None


SERVER_TOOLS = frozenset(get_args(OpenAiTool.model_fields["type"].annotation))
CLIENT_TOOLS = ("function", "custom")
TOOL_TYPES = frozenset({*CLIENT_TOOLS, "namespace", *SERVER_TOOLS})
TOOL_TAGS = ("function", "custom", "namespace", "server")


def _tool_kind(value: object) -> str:
    kind = type_of(value)
    if kind in SERVER_TOOLS:
        return "server"
    return kind if kind in ("custom", "namespace") else "function"


ResponsesTool = Annotated[
    Annotated[ClientFunction, Tag("function")]
    | Annotated[CustomTool, Tag("custom")]
    | Annotated[FunctionGroup, Tag("namespace")]
    | Annotated[OpenAiTool, Tag("server")],
    Discriminator(_tool_kind),
]


class NamedFunctionChoice(Strict):
    """One of the tools."""

    type: Literal["function", "custom"]
    name: FunctionName
    namespace: FunctionName | None = None

    @property
    def joined_name(self) -> str:
        """The name of the function in the prompt."""
        return joined_name(self.namespace, self.name)


class AllowedFunctions(Strict):
    """Some of the tools, of which one may or must be called."""

    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: Annotated[list[NamedFunctionChoice], Field(min_length=1, max_length=MAX_TOOLS, fail_fast=True)]


class TextFormat(Strict):
    """Text, any JSON object, or JSON that matches a schema."""

    type: Literal["text", "json_object", "json_schema"]
    name: SchemaName | None = None
    description: str | None = None
    source: JsonSource | None = Field(None, alias="schema")
    strict: bool | None = None

    @model_validator(mode="after")
    def _has_a_schema(self) -> TextFormat:
        if (self.type == "json_schema") != (self.source is not None and self.name is not None):
            raise PydanticCustomError(
                "no_schema", "type json_schema requires name and schema, and no other type has them"
            )
        return self

    def as_response_format(self) -> ResponseFormat:
        """The same format as a field of a chat."""
        if self.source is None:
            return ResponseFormat.model_construct(type=self.type)
        schema = JsonSchemaFormat.model_construct(
            name=self.name or "", source=self.source, strict=self.strict
        )
        return ResponseFormat.model_construct(type=self.type, json_schema=schema)


class TextConfig(Strict):
    """The form of the answer."""

    format: TextFormat | None = None
    verbosity: Annotated[
        Literal["low", "medium", "high"] | None, Ignored("a hint: request the length in the prompt")
    ] = None


class ResponseStreamOptions(Strict):
    """Options of a stream."""

    include_obfuscation: Annotated[bool | None, Ignored("events are never padded")] = None


_SHOWN_AS_IS = Ignored("the reasoning itself is in the output")


class ReasoningConfig(Strict):
    """Whether the model reasons before it answers."""

    effort: ReasoningEffort | None = None
    summary: Annotated[Literal["auto", "concise", "detailed"] | None, _SHOWN_AS_IS] = None
    generate_summary: Annotated[Literal["auto", "concise", "detailed"] | None, _SHOWN_AS_IS] = None
    context: Annotated[
        Literal["auto", "current_turn", "all_turns"] | None,
        Ignored("the model's chat template decides which reasoning it reads"),
    ] = None
    mode: Annotated[Literal["standard", "pro"] | None, Ignored("it has no effect")] = None


def _metadata(value: object) -> object:
    """Validate keys and values; only the first fault is raised, because pydantic would report each."""
    if not isinstance(value, dict):
        return value
    if len(value) > MAX_METADATA:
        raise PydanticCustomError("metadata", f"has {len(value)} keys; use at most {MAX_METADATA}")
    for key, text in value.items():
        if not isinstance(text, str):
            raise PydanticCustomError(
                "metadata_type", f"the value of {key[:MAX_NAME_CHARACTERS]!r} must be a string"
            )
        if len(key) > MAX_KEY_CHARACTERS or len(text) > MAX_VALUE_CHARACTERS:
            raise PydanticCustomError(
                "metadata",
                f"{key[:MAX_NAME_CHARACTERS]!r} or its value is too long; use at most {MAX_KEY_CHARACTERS} and {MAX_VALUE_CHARACTERS} characters",
            )
    return value


class ResponsesRequest(Strict):
    """Body of POST /v1/responses."""

    model: ModelName
    input: Annotated[
        Annotated[str, Tag("text")]
        | Annotated[
            list[InputItem],
            Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True),
            Tag("parts"),
        ],
        Discriminator(
            content_kind,
            custom_error_type="input_type",
            custom_error_message="input must be a string or a list of items",
        ),
    ]
    instructions: str | None = None
    max_output_tokens: MaxTokens | None = None
    temperature: Temperature | None = None
    top_p: TopP | None = None
    text: TextConfig | None = None
    stream: bool | None = None
    stream_options: ResponseStreamOptions | None = None
    metadata: Annotated[dict[str, str], BeforeValidator(_metadata)] | None = None
    tools: Annotated[list[ResponsesTool], Field(max_length=MAX_TOOLS, fail_fast=True)] | None = None
    tool_choice: (
        Annotated[
            Annotated[Literal["none", "auto", "required"], Tag("word")]
            | Annotated[NamedFunctionChoice, Tag("named")]
            | Annotated[AllowedFunctions, Tag("allowed")],
            BY_CHOICE_KIND,
        ]
        | None
    ) = None
    parallel_tool_calls: bool | None = None
    cache_salt: CacheSalt | None = None
    ignore_eos: bool | None = None
    client_metadata: Annotated[dict[str, Any] | None, DISCARD, Ignored("ids of the client's own")] = None
    prompt_cache_key: Annotated[str | None, Field(max_length=1024), _NO_EFFECT] = None
    prompt_cache_retention: Annotated[Literal["in_memory", "24h"] | None, _NO_EFFECT] = None
    reasoning: ReasoningConfig | None = None
    mm_processor_kwargs: ProcessorKwargs | None = None
    safety_identifier: Annotated[str | None, Field(max_length=1024), _NO_EFFECT] = None
    service_tier: Annotated[Literal["auto", "default"] | None, Ignored("there is one tier")] = None
    user: Annotated[str | None, Field(max_length=1024), _NO_EFFECT] = None

    def as_chat(self) -> TranslatedRequest:
        """Translate the request into a chat; its items are moved, not copied.

        Raises:
            ApiError: fields contradict each other.
        """
        chat = Translation()
        if self.instructions is not None:
            chat.add(message_of("system", self.instructions), FieldPlace("instructions"))
        if isinstance(self.input, str):
            chat.add(message_of("user", self.input), FieldPlace("input"))
        else:
            add_items(chat, self.input)
        if not chat.messages:
            raise fault(
                "input", "has only reasoning and calls that cannot be read here; send a message as well"
            )
        fields = {
            "max_tokens": "max_output_tokens",
            "messages": "input",
            "response_format": "text.format",
            "response_format.json_schema.schema": "text.format.schema",
        }
        text_format = self.text.format if self.text is not None else None
        functions = list(self._functions())
        if len(functions) > MAX_TOOLS:
            raise fault("tools", f"more than {MAX_TOOLS} functions, those of groups included; send fewer")
        request = TranslatedRequest.model_construct(
            model=self.model,
            cache_salt=self.cache_salt,
            messages=chat.messages,
            max_tokens=self.max_output_tokens,
            stream=self.stream,
            temperature=self.temperature,
            top_p=self.top_p,
            ignore_eos=self.ignore_eos,
            tools=[
                tool_of(name, description, function.parameters, function.strict)
                for _, name, description, function in functions
            ],
            tool_choice=_choice(self.tool_choice),
            parallel_tool_calls=self.parallel_tool_calls,
            reasoning_effort=None if self.reasoning is None else self.reasoning.effort,
            mm_processor_kwargs=self.mm_processor_kwargs,
            response_format=None if text_format is None else text_format.as_response_format(),
            names=FieldNames(chat.places, [param for param, *_ in functions], fields),
        )
        with request.names.in_faults():
            _ = request.tool_use
        return request

    def _functions(self) -> Iterator[tuple[str, str, str | None, ClientFunction | CustomTool]]:
        """Yield the functions, each with its field, and with its name and description in the prompt.

        The description of a group precedes that of its first function alone: it may be as long as a body.

        Raises:
            ApiError: the answer may rely on a tool that is not served.
        """
        for number, tool in enumerate(self.tools or ()):
            param = f"tools[{number}]"
            if isinstance(tool, ClientFunction | CustomTool):
                yield param, tool.name, tool.description, tool
            elif isinstance(tool, FunctionGroup):
                for member, function in enumerate(tool.tools):
                    texts = [tool.description if member == 0 else None, function.description]
                    description = "\n\n".join(text for text in texts if text) or function.description
                    yield (
                        f"{param}.tools[{member}]",
                        joined_name(tool.name, function.name),
                        description,
                        function,
                    )
            else:
                self._check_may_be_left_out(tool, param)

    def _check_may_be_left_out(self, tool: OpenAiTool, param: str) -> None:
        """Refuse a tool of OpenAI's servers on which the answer, or the client, relies."""
        if tool.type == "tool_search" and tool.execution == "client":
            raise fault(
                param, "tool_search of the client is not supported; omit it, and send the tools that it finds"
            )
        if self.tool_choice == "required":
            remedy = "omit it, or set tool_choice to 'auto'"
        elif tool.type == "mcp" and all(isinstance(other, OpenAiTool) for other in self.tools or ()):
            remedy = "send the tools of the MCP server as functions, and run them in the client"
        else:
            return
        raise fault(param, f"{tool.type} runs on OpenAI's servers, and this server runs no tools; {remedy}")


def _choice(choice: str | NamedFunctionChoice | AllowedFunctions | None) -> Any:
    """The same choice as a field of a chat."""
    if isinstance(choice, NamedFunctionChoice):
        return named_tool(choice.joined_name)
    if isinstance(choice, AllowedFunctions):
        tools = [named_tool(tool.joined_name) for tool in choice.tools]
        allowed = AllowedTools.model_construct(mode=choice.mode, tools=tools)
        return AllowedToolChoice.model_construct(type="allowed_tools", allowed_tools=allowed)
    return choice


_NOT_STORED = "responses are not stored"

NOT_SERVED: NotServed = {
    "background": ((False,), "an answer belongs to its connection; omit it, and stream long answers"),
    "context_management": ((), "send what the model is to read; omit it"),
    "conversation": ((), f"{_NOT_STORED}; send the whole conversation in input"),
    "include": (([], ["reasoning.encrypted_content"]), "omit it"),
    "max_tool_calls": ((), "omit it"),
    "media_io_kwargs": (({},), "use mm_processor_kwargs"),
    "previous_response_id": ((), f"{_NOT_STORED}; send the whole conversation in input"),
    "prompt": ((), "there are no stored prompts; send the text in instructions and input"),
    "store": ((False,), f"{_NOT_STORED}; set it to false or omit it, and send the whole conversation in input"),
    "top_logprobs": ((0,), "use /v1/chat/completions for log probabilities"),
    "truncation": (("disabled",), "a conversation that is too long is rejected; shorten it and omit this"),
}  # fmt: skip

TAGS = frozenset(
    {"text", "parts", "output_text", "grammar", *CHOICE_TAGS, *ITEM_TAGS, *TOOL_TAGS, *ANSWER_PART_TYPES}
)


@dataclass(frozen=True, slots=True)
class Repeated:
    """The fields of a request that its response repeats. `form`: the field `text.format`."""

    instructions: str | None
    max_output_tokens: int | None
    temperature: float
    top_p: float
    form: TextFormat | None
    metadata: dict[str, str]
    tools: Sequence[ClientFunction | CustomTool | FunctionGroup] = ()
    tool_choice: str | NamedFunctionChoice | AllowedFunctions = "auto"
    parallel_tool_calls: bool = True

    @property
    def custom_tools(self) -> frozenset[str]:
        """The names of custom tools in the prompt."""
        groups = [tool for tool in self.tools if isinstance(tool, FunctionGroup)]
        members = [(group.name, tool) for group in groups for tool in group.tools]
        return frozenset(
            joined_name(group, tool.name)
            for group, tool in [*((None, tool) for tool in self.tools), *members]
            if isinstance(tool, CustomTool)
        )

    @property
    def num_characters(self) -> int:
        """The length of all its texts, apart from a few kilobytes."""
        form = "" if self.form is None else f"{self.form.source or ''}{self.form.description or ''}"
        members = [member for tool in self.tools if isinstance(tool, FunctionGroup) for member in tool.tools]
        descriptions = sum(len(tool.description or "") for tool in [*self.tools, *members])
        parameters = sum(
            len(tool.parameters or "")
            for tool in [*self.tools, *members]
            if not isinstance(tool, FunctionGroup)
        )
        return len(self.instructions or "") + len(form) + descriptions + parameters


def parse_responses_request(value: object) -> TranslatedRequest:
    """Validate a decoded JSON body.

    Raises:
        InvalidTypeError: the body is not an object.
        ApiError: 400, naming the first invalid field and the remedy.
    """
    remedy = "send tools of type function or custom, and run them in the client"
    refuse_types(entries_of(value, "tools", "tools[{}]"), TOOL_TYPES, remedy)
    for param, tool in entries_of(value, "tools", "tools[{}]"):
        if _tool_kind(tool) == "namespace":
            refuse_types(entries_of(tool, "tools", param + ".tools[{}]"), CLIENT_TOOLS, remedy)
    choice = value.get("tool_choice") if isinstance(value, dict) else None
    kinds = "choose a function, a custom tool, allowed_tools, none, auto or required"
    refuse_types([("tool_choice", choice)], (*CLIENT_TOOLS, "allowed_tools"), kinds)
    refuse_types(entries_of(choice, "tools", "tool_choice.tools[{}]"), CLIENT_TOOLS, "choose functions")
    refuse_types(
        entries_of(value, "input", "input[{}]"),
        ITEM_TYPES,
        "send messages, reasoning, and calls of tools with their outputs",
    )
    request = validated(ResponsesRequest, value, NOT_SERVED, TAGS)
    if request.stream_options is not None and not request.stream:
        raise ApiError(InvalidValueError("stream_options requires stream: true"), param="stream_options")
    chat = request.as_chat()
    chat.given = Repeated(
        request.instructions,
        request.max_output_tokens,
        1.0 if request.temperature is None else request.temperature,
        1.0 if request.top_p is None else request.top_p,
        request.text.format if request.text is not None else None,
        request.metadata or {},
        [tool for tool in request.tools or () if not isinstance(tool, ServerTool)],
        "auto" if request.tool_choice is None else request.tool_choice,
        request.parallel_tool_calls is not False,
    )
    return chat
