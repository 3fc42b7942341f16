"""What clients send: OpenAI's chat completions as pydantic models, faults named by field. Independent of the network.

Fields that this server does not serve are refused by name with a remedy, never ignored, unless they carry the value that
means "off".
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    Discriminator,
    Field,
    Tag,
    ValidationError,
    model_validator,
)

from mmd_api.contract.answers import Grammar
from mmd_api.contract.errors import (
    InvalidTypeError,
    InvalidValueError,
    MissingParameterError,
    MmdError,
    UnknownParameterError,
    UnsupportedParameterError,
)
from mmd_workers.gateway.api_errors import ApiError
from mmd_workers.gateway.parts import PART_TYPES, ContentPart, MediaSource, TextPart
from mmd_workers.gateway.response_format import ResponseFormat, StructuredOutputs
from mmd_workers.gateway.strict import Strict

MAX_MESSAGES = 4096
MAX_PARTS = 4096  # of a message; the number of media has a separate limit in the spec


def _content_kind(value: object) -> str | None:
    return "text" if isinstance(value, str) else "parts" if isinstance(value, list) else None


Content = Annotated[
    Annotated[str, Tag("text")]
    | Annotated[list[ContentPart], Field(min_length=1, max_length=MAX_PARTS, fail_fast=True), Tag("parts")],
    Discriminator(
        _content_kind,
        custom_error_type="content_type",
        custom_error_message="content must be a string or a list of parts",
    ),
]


_EMPTY_IN_ANSWERS = frozenset({"refusal", "annotations", "audio", "function_call", "tool_calls"})
"""Fields of an answer's message that clients send back with null or an empty list in them."""


class Message(Strict):
    """One turn. `name` is taken and not used: chat templates have no place for it."""

    role: Literal["system", "developer", "user", "assistant"]
    content: Content
    name: Annotated[str, Field(max_length=256)] | None = None

    @model_validator(mode="before")
    @classmethod
    def _without_empty_fields(cls, value: object) -> object:
        if not isinstance(value, dict):
            return value
        empty = {
            name for name in _EMPTY_IN_ANSWERS & value.keys() if value[name] is None or value[name] == []
        }
        return {name: field for name, field in value.items() if name not in empty} if empty else value


class StreamOptions(Strict):
    """`include_usage`: one more chunk at the end, with the token counts."""

    include_usage: bool | None = None
    include_obfuscation: bool | None = None


Stop = Annotated[str, Field(min_length=1, max_length=256)]


def _stop_kind(value: object) -> str | None:
    return "one" if isinstance(value, str) else "list" if isinstance(value, list) else None


def _discard(_value: object) -> None:
    """Drop a value that has no effect: the request is held to its end, and megabytes of this value would be counted nowhere."""


class ChatRequest(Strict):
    """Body of POST /v1/chat/completions."""

    model: Annotated[str, Field(max_length=512)]
    messages: Annotated[list[Message], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)]
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1, le=2**31 - 1)] | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    stop: (
        Annotated[
            Annotated[Stop, Tag("one")]
            | Annotated[list[Stop], Field(max_length=4, fail_fast=True), Tag("list")],
            Discriminator(
                _stop_kind,
                custom_error_type="stop_type",
                custom_error_message="stop must be a string or a list of up to 4 strings",
            ),
        ]
        | None
    ) = None
    n: Annotated[int, Field(ge=1, le=16)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    ignore_eos: bool | None = None
    return_token_ids: bool | None = None
    timings: bool | None = None
    user: Annotated[str, Field(max_length=1024)] | None = None
    metadata: Annotated[dict[str, Any] | None, AfterValidator(_discard)] = None
    store: Literal[False] | None = None
    safety_identifier: Annotated[str, Field(max_length=1024)] | None = None
    prompt_cache_key: Annotated[str, Field(max_length=1024)] | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None

    @property
    def stops(self) -> list[str]:
        """Stop strings as a list."""
        return [self.stop] if isinstance(self.stop, str) else (self.stop or [])

    def grammar(self) -> tuple[Grammar, str] | None:
        """What the answer must match, and the field it comes from; None where it is free.

        Raises:
            ApiError: two fields contradict each other.
        """
        found = self.response_format.grammar() if self.response_format is not None else None
        if self.structured_outputs is not None:
            if found is not None:
                both = InvalidValueError("set response_format or structured_outputs, not both")
                raise ApiError(both, param="structured_outputs")
            found = self.structured_outputs.as_grammar()
        if found is not None and self.ignore_eos:
            contradiction = InvalidValueError(
                f"ignore_eos: an answer of {found[1]} ends where it is complete; omit one of them"
            )
            raise ApiError(contradiction, param="ignore_eos")
        return found


_NOT_SERVED: dict[str, tuple[tuple[object, ...], str]] = {
    "tools": (([],), "describe the tools in a system message and parse the response"),
    "tool_choice": (("none", "auto"), "omit it"),
    "parallel_tool_calls": ((True, False), "omit it"),
    "functions": (([],), "describe the functions in a system message and parse the response"),
    "function_call": (("none", "auto"), "omit it"),
    "frequency_penalty": ((0,), "set it to 0 or omit it"),
    "presence_penalty": ((0,), "set it to 0 or omit it"),
    "logit_bias": (({},), "omit it"),
    "modalities": ((["text"],), "output is text only; use ['text'] or omit it"),
    "audio": ((), "output is text only; omit it"),
    "prediction": ((), "omit it"),
    "reasoning_effort": (("none",), "omit it"),
    "verbosity": (("medium",), "omit it"),
    "service_tier": (("auto", "default"), "omit it"),
    "web_search_options": ((), "omit it"),
    "best_of": ((1,), "use n and select the best choice in the client"),
    "echo": ((False,), "omit it"),
}


def parse_chat_request(value: object) -> ChatRequest:
    """Validate a decoded JSON body.

    Raises:
        InvalidTypeError: the body is no object.
        ApiError: 400, naming the first field at fault and what would be right.
    """
    if not isinstance(value, dict):
        raise InvalidTypeError("the body must be a JSON object")
    known = {name: field for name, field in value.items() if name not in _NOT_SERVED}
    for name in value.keys() & _NOT_SERVED.keys():
        off, remedy = _NOT_SERVED[name]
        if value[name] is not None and not any(_same(value[name], allowed) for allowed in off):
            unsupported = UnsupportedParameterError(f"{name} is not supported: {remedy}")
            raise ApiError(unsupported, param=str(name))
    try:
        request = ChatRequest.model_validate(known)
    except ValidationError as error:
        raise _named(error) from error
    if request.max_tokens is not None and request.max_completion_tokens is not None:
        both = InvalidValueError("set max_tokens or max_completion_tokens, not both")
        raise ApiError(both, param="max_completion_tokens")
    if request.top_logprobs and not request.logprobs:
        raise ApiError(InvalidValueError("top_logprobs requires logprobs: true"), param="top_logprobs")
    if request.stream_options is not None and not request.stream:
        raise ApiError(InvalidValueError("stream_options requires stream: true"), param="stream_options")
    return request


def _same(value: object, allowed: object) -> bool:
    if isinstance(allowed, bool) or isinstance(value, bool):
        return value is allowed
    return value == allowed


_TAGS = {"text", "parts", "one", "list", *PART_TYPES}


def _named(error: ValidationError) -> ApiError:
    first = error.errors(include_url=False, include_input=False)[0]
    param, previous = "", None
    for part in first["loc"]:
        if isinstance(part, int):
            param += f"[{part}]"
        elif part in _TAGS and previous in ("content", "stop"):
            pass  # which branch of a union, not a field
        elif part in _TAGS and isinstance(previous, int):
            pass
        else:
            param += f".{part}" if param else str(part)
        previous = part
    kind, message = first["type"], first["msg"]
    fault: type[MmdError] = InvalidValueError
    if kind == "unknown_fields":
        names = [name if name == "..." or not param else f"{param}.{name}" for name in first["ctx"]["names"]]
        fault, param = UnknownParameterError, names[0]
        fields = "field" if len(names) == 1 else "fields"
        message = f"unknown {fields} {', '.join(names)}; remove {'it' if len(names) == 1 else 'them'}"
    elif kind == "missing":
        fault, message = MissingParameterError, f"{param} is missing"
    elif kind == "union_tag_invalid":
        given = first["ctx"].get("tag")
        message = (
            f"{param}: unknown part type {given!r}; use {', '.join(PART_TYPES[:-1])} or {PART_TYPES[-1]}"
        )
    elif kind == "union_tag_not_found":
        fault, message = MissingParameterError, f"{param}.type is missing"
        param += ".type"
    elif kind.endswith("_type"):
        fault, message = InvalidTypeError, f"{param}: {message}"
    else:
        message = f"{param}: {message}"
    return ApiError(fault(message[:1000]), param=param[:200] or None)


# --- media and text of a conversation -------------------------------------------------------------------------


def conversation(request: ChatRequest) -> tuple[list[dict[str, Any]], list[MediaSource]]:
    """The frontend's messages (parts of type text, image, video, audio) and the media in order of use."""
    messages: list[dict[str, Any]] = []
    media: list[MediaSource] = []
    for m, message in enumerate(request.messages):
        role = "system" if message.role == "developer" else message.role
        if isinstance(message.content, str):
            messages.append({"role": role, "content": [{"type": "text", "text": message.content}]})
            continue
        parts: list[dict[str, Any]] = []
        for p, part in enumerate(message.content):
            if isinstance(part, TextPart):
                parts.append({"type": "text", "text": part.text})
                continue
            source = part.source(f"messages[{m}].content[{p}]")
            media.append(source)
            parts.append({"type": source.modality})
        messages.append({"role": role, "content": parts})
    return messages, media
