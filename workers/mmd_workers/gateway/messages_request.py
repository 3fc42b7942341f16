"""What clients send to /v1/messages: Anthropic's messages as pydantic models, and the chats that they become. Independent of the network
and the model."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag

from mmd_api.contract.errors import InvalidValueError
from mmd_workers.gateway.api_errors import ApiError
from mmd_workers.gateway.chat_request import MaxTokens, ModelName, Stop, Temperature, TopK, TopP
from mmd_workers.gateway.conversation import (
    MAX_MESSAGES,
    MAX_PARTS,
    OF_CONTENT,
    Message,
    content_kind,
)
from mmd_workers.gateway.parts import MediaSource, TextPart, Url, type_of
from mmd_workers.gateway.response_format import JsonSchemaFormat, JsonSource, ResponseFormat
from mmd_workers.gateway.strict import DISCARD, Ignored, NotServed, Strict, validated
from mmd_workers.gateway.translated import (
    TOOLS_NOT_SERVED,
    FieldNames,
    TranslatedRequest,
    as_messages,
    message_of,
    refuse_tools,
)

MAX_STOP_SEQUENCES = 4


class CacheControl(Strict):
    """A mark that a prefix is to be cached."""

    type: Literal["ephemeral"]
    ttl: Literal["5m", "1h"] | None = None


CacheMark = Annotated[CacheControl | None, Ignored("prefixes of prompts are cached without it")]


class TextBlock(TextPart):
    """Text."""

    type: Literal["text"]
    cache_control: CacheMark = None
    citations: Annotated[list[Any] | None, DISCARD, Ignored("about the answer, and no part of it")] = None


class Base64Source(Strict):
    """An image in the request itself."""

    type: Literal["base64"]
    media_type: Annotated[str, Field(pattern=r"^image/[a-z0-9.+-]{1,32}$")]
    data: Annotated[str, Field(min_length=1)]

    @property
    def as_url(self) -> str:
        """The image as a data URL."""
        return f"data:{self.media_type};base64,{self.data}"


class UrlSource(Strict):
    """An image elsewhere, or a data URL."""

    type: Literal["url"]
    url: Url

    @property
    def as_url(self) -> str:
        """The image's URL."""
        return self.url


class ImageBlock(Strict):
    """An image."""

    type: Literal["image"]
    image: Annotated[
        Annotated[Base64Source, Tag("base64")] | Annotated[UrlSource, Tag("url")], Discriminator(type_of)
    ] = Field(alias="source")
    cache_control: CacheMark = None

    def source(self, param: str) -> MediaSource:
        """The image."""
        return MediaSource("image", f"{param}.source", self.image.as_url)


Block = Annotated[
    Annotated[TextBlock, Tag("text")] | Annotated[ImageBlock, Tag("image")], Discriminator(type_of)
]
_BLOCKS = Field(min_length=1, max_length=MAX_PARTS, fail_fast=True)


class AnthropicTurn(Strict):
    """What one side said."""

    role: Literal["user", "assistant", "system"]
    content: Annotated[
        Annotated[str, Tag("text")] | Annotated[list[Block], _BLOCKS, Tag("parts")],
        OF_CONTENT,
    ]


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
    cache_control: CacheMark = None

    def as_chat(self) -> list[Message]:
        """The same conversation as messages of a chat, which it moves to them."""
        system = [] if self.system is None else [message_of("system", self.system)]
        return system + as_messages(self.messages)

    @property
    def names(self) -> FieldNames:
        """How its fields are spelled."""
        fields = {
            "response_format.json_schema.schema": "output_config.format.schema",
            "response_format": "output_config.format",
        }
        return FieldNames("" if self.system is None else "system", "messages", fields, dotted=True)


class MessagesRequest(CountTokensRequest):
    """Body of POST /v1/messages."""

    max_tokens: MaxTokens
    stop_sequences: Annotated[list[Stop], Field(max_length=MAX_STOP_SEQUENCES, fail_fast=True)] | None = None
    stream: bool | None = None
    temperature: Temperature | None = None
    top_p: TopP | None = None
    top_k: TopK | None = None
    metadata: Annotated[Metadata | None, Ignored("it has no effect")] = None
    service_tier: Annotated[Literal["auto", "standard_only"] | None, Ignored("there is one tier")] = None


NOT_SERVED: NotServed = {
    **TOOLS_NOT_SERVED,
    "thinking": (({"type": "disabled"},), "the model reasons as it was trained to; omit it"),
    "container": ((), "omit it"),
    "context_management": ((), "send the messages that the model is to read; omit it"),
    "mcp_servers": (([],), "omit it"),
}

TAGS = frozenset({"parts", "text", "image", "base64", "url"})
_INDEX = ".{}"  # as Anthropic's API spells a place in a list


def parse_messages_request(value: object) -> TranslatedRequest:
    """Validate a decoded JSON body.

    Raises:
        InvalidTypeError: the body is no object.
        ApiError: 400, naming the first field at fault and what would be right.
    """
    refuse_tools(_blocks(value))
    request = validated(MessagesRequest, value, NOT_SERVED, TAGS, _INDEX)
    last = len(request.messages) - 1
    if request.messages[last].role == "assistant":
        begun = InvalidValueError(
            f"messages.{last}: the answer cannot go on in a message of the assistant; end with one of the user"
        )
        raise ApiError(begun, param=f"messages.{last}")
    form = request.output_config.format if request.output_config is not None else None
    return TranslatedRequest.model_construct(
        model=request.model,
        messages=request.as_chat(),
        max_tokens=request.max_tokens,
        stop=request.stop_sequences,
        stream=request.stream,
        temperature=request.temperature,
        top_p=request.top_p,
        top_k=request.top_k,
        response_format=None if form is None else _response_format(form),
        names=request.names,
    )


def parse_count_tokens_request(value: object) -> CountTokensRequest:
    """Validate a decoded JSON body; for what it raises see `parse_messages_request`."""
    refuse_tools(_blocks(value))
    return validated(CountTokensRequest, value, NOT_SERVED, TAGS, _INDEX)


def _response_format(form: OutputFormat) -> ResponseFormat:
    schema = JsonSchemaFormat.model_construct(name="answer", source=form.source)
    return ResponseFormat.model_construct(type="json_schema", json_schema=schema)


def _blocks(value: object) -> Iterator[tuple[str, object]]:
    """Every block of a body that may be anything, with its field."""
    turns = value.get("messages") if isinstance(value, dict) else None
    for m, turn in enumerate(turns if isinstance(turns, list) else ()):
        content = turn.get("content") if isinstance(turn, dict) else None
        for b, block in enumerate(content if isinstance(content, list) else ()):
            yield f"messages.{m}.content.{b}", block
