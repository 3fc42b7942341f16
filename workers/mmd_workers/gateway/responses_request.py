"""What clients send to /v1/responses: OpenAI's responses as pydantic models, and the chats that they become. Independent of the network
and the model."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Discriminator, Field, Tag, model_validator
from pydantic_core import PydanticCustomError

from mmd_api.contract.errors import InvalidValueError, UnsupportedParameterError
from mmd_workers.gateway.api_errors import ApiError
from mmd_workers.gateway.chat_request import MaxTokens, ModelName, Temperature, TopP
from mmd_workers.gateway.conversation import (
    MAX_MESSAGES,
    MAX_PARTS,
    OF_CONTENT,
    Message,
    content_kind,
)
from mmd_workers.gateway.parts import ANSWER_PART_TYPES, AnyPart, TextPart, type_of
from mmd_workers.gateway.response_format import JsonSchemaFormat, JsonSource, ResponseFormat, SchemaName
from mmd_workers.gateway.strict import DISCARD, MAX_NAME_CHARACTERS, Ignored, NotServed, Strict, validated
from mmd_workers.gateway.translated import (
    TOOLS_NOT_SERVED,
    FieldNames,
    TranslatedRequest,
    as_messages,
    message_of,
    refuse_tools,
)

MAX_METADATA = 16
MAX_KEY_CHARACTERS = 64
MAX_VALUE_CHARACTERS = 512

_NO_EFFECT = Ignored("it has no effect")


class OutputTextPart(TextPart):
    """Text of an answer that is sent back."""

    type: Literal["output_text"]  # type: ignore[assignment]  # no other type of text
    annotations: Annotated[list[Any] | None, DISCARD, Ignored("about the answer, and no part of it")] = None
    logprobs: Annotated[list[Any] | None, DISCARD, Ignored("about the answer, and no part of it")] = None


ItemPart = Annotated[AnyPart | Annotated[OutputTextPart, Tag("output_text")], Discriminator(type_of)]
_PARTS = Field(min_length=1, max_length=MAX_PARTS, fail_fast=True)


class InputMessage(Strict):
    """What one side said, or an answer that is sent back as it came."""

    type: Literal["message"] | None = None
    role: Literal["user", "assistant", "system", "developer"]
    content: Annotated[
        Annotated[str, Tag("text")] | Annotated[list[ItemPart], _PARTS, Tag("parts")], OF_CONTENT
    ]
    id: Annotated[str | None, Field(max_length=256), Ignored("nothing is stored under it")] = None
    status: Annotated[Literal["in_progress", "completed", "incomplete"] | None, _NO_EFFECT] = None
    phase: Annotated[Literal["commentary", "final_answer"] | None, _NO_EFFECT] = None


class TextFormat(Strict):
    """Text, any JSON object, or JSON that matches a schema."""

    type: Literal["text", "json_object", "json_schema"]
    name: SchemaName | None = None
    description: Annotated[str, Field(max_length=4096)] | None = None
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
        """The same as a chat has it."""
        if self.source is None:
            return ResponseFormat.model_construct(type=self.type)
        schema = JsonSchemaFormat.model_construct(name=self.name or "", source=self.source)
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


def _metadata(value: object) -> object:
    """Keys and values; the first fault alone, since pydantic would make an error of each."""
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
            list[InputMessage],
            Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True),
            Tag("parts"),
        ],
        Discriminator(
            content_kind,
            custom_error_type="input_type",
            custom_error_message="input must be a string or a list of messages",
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
    parallel_tool_calls: Annotated[bool | None, Ignored("there are no tools to call")] = None
    prompt_cache_key: Annotated[str | None, Field(max_length=1024), _NO_EFFECT] = None
    prompt_cache_retention: Annotated[Literal["in_memory", "24h"] | None, _NO_EFFECT] = None
    reasoning: Annotated[
        dict[str, Any] | None, DISCARD, Ignored("a hint: the model reasons as it was trained to")
    ] = None
    safety_identifier: Annotated[str | None, Field(max_length=1024), _NO_EFFECT] = None
    service_tier: Annotated[Literal["auto", "default"] | None, Ignored("there is one tier")] = None
    user: Annotated[str | None, Field(max_length=1024), _NO_EFFECT] = None

    def as_chat(self) -> list[Message]:
        """The same conversation as messages of a chat, which it moves to them."""
        first = [] if self.instructions is None else [message_of("system", self.instructions)]
        if isinstance(self.input, str):
            return [*first, message_of("user", self.input)]
        return first + as_messages(self.input)

    @property
    def names(self) -> FieldNames:
        """How its fields are spelled."""
        fields = {
            "max_tokens": "max_output_tokens",
            "messages": "input",
            "response_format": "text.format",
            "response_format.json_schema.schema": "text.format.schema",
        }
        return FieldNames("" if self.instructions is None else "instructions", "input", fields)


_NOT_STORED = "responses are not stored"

NOT_SERVED: NotServed = {
    **TOOLS_NOT_SERVED,
    "background": ((False,), "an answer belongs to its connection; omit it, and stream long answers"),
    "context_management": ((), "send what the model is to read; omit it"),
    "conversation": ((), f"{_NOT_STORED}; send the whole conversation in input"),
    "include": (([], ["reasoning.encrypted_content"]), "omit it"),
    "max_tool_calls": ((), "omit it"),
    "previous_response_id": ((), f"{_NOT_STORED}; send the whole conversation in input"),
    "prompt": ((), "there are no stored prompts; send the text in instructions and input"),
    "store": ((False,), f"{_NOT_STORED}; set it to false or omit it, and send the whole conversation in input"),
    "top_logprobs": ((0,), "use /v1/chat/completions for log probabilities"),
    "truncation": (("disabled",), "a conversation that is too long is rejected; shorten it and omit this"),
}  # fmt: skip

TAGS = frozenset({"text", "parts", "output_text", *ANSWER_PART_TYPES})


@dataclass(frozen=True, slots=True)
class Repeated:
    """What of a request its response repeats. `form`: `text.format`."""

    instructions: str | None
    max_output_tokens: int | None
    temperature: float
    top_p: float
    form: TextFormat | None
    metadata: dict[str, str]

    @property
    def num_characters(self) -> int:
        """Of all its texts, but for some kilobytes at most."""
        schema = self.form.source if self.form is not None else None
        return len(self.instructions or "") + len(schema or "")


def parse_responses_request(value: object) -> TranslatedRequest:
    """Validate a decoded JSON body.

    Raises:
        InvalidTypeError: the body is no object.
        ApiError: 400, naming the first field at fault and what would be right.
    """
    refuse_tools(_items(value))
    for param, item in _items(value):
        kind = item.get("type") if isinstance(item, dict) else None
        if isinstance(kind, str) and kind != "message":
            other = UnsupportedParameterError(
                f"{param}: type {kind[:MAX_NAME_CHARACTERS]!r} is not supported; send messages alone"
            )
            raise ApiError(other, param=param)
    request = validated(ResponsesRequest, value, NOT_SERVED, TAGS)
    if request.stream_options is not None and not request.stream:
        raise ApiError(InvalidValueError("stream_options requires stream: true"), param="stream_options")
    form = request.text.format if request.text is not None else None
    return TranslatedRequest.model_construct(
        model=request.model,
        messages=request.as_chat(),
        max_tokens=request.max_output_tokens,
        stream=request.stream,
        temperature=request.temperature,
        top_p=request.top_p,
        response_format=None if form is None else form.as_response_format(),
        names=request.names,
        given=Repeated(
            request.instructions,
            request.max_output_tokens,
            1.0 if request.temperature is None else request.temperature,
            1.0 if request.top_p is None else request.top_p,
            form,
            request.metadata or {},
        ),
    )


def _items(value: object) -> Iterator[tuple[str, object]]:
    """Every item of a body that may be anything, with its field."""
    items = value.get("input") if isinstance(value, dict) else None
    for number, item in enumerate(items if isinstance(items, list) else ()):
        yield f"input[{number}]", item
