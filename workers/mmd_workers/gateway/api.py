"""What clients send and get: OpenAI's chat completions as pydantic models, faults named by field. Knows no network.

Fields that this server does not serve are refused by name with a remedy, never ignored, unless they carry the value that
means "off".
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Discriminator, Field, Tag, ValidationError

MAX_MESSAGES = 4096
MAX_PARTS = 16_384  # of a message; the number of media has a limit of its own in the spec


class ApiError(Exception):
    """A fault to be shown in OpenAI's shape: HTTP status, type, the field at fault and a stable code."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        code: str,
        param: str | None = None,
        retry_after_seconds: float | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.code = code
        self.param = param
        self.retry_after_seconds = retry_after_seconds

    def body(self) -> dict[str, Any]:
        """The JSON body."""
        kind = {404: "not_found_error", 429: "rate_limit_error"}.get(
            self.status, "invalid_request_error" if self.status < 500 else "server_error"
        )
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


# --- requests -------------------------------------------------------------------------------------------------

Url = Annotated[str, Field(min_length=1)]


class ImageUrl(_Strict):
    """`detail` low is refused: the model's own processor decides the resolution."""

    url: Url
    detail: Literal["auto", "high"] | None = None


class MediaUrl(_Strict):
    """An http(s) or data URL."""

    url: Url


class InputAudio(_Strict):
    """Base64 of a sound file and the name of its format, as OpenAI's clients send it."""

    data: Annotated[str, Field(min_length=1)]
    format: Annotated[str, Field(pattern=r"^[a-z0-9]{1,16}$")]


class TextPart(_Strict):
    """Text of a message."""

    type: Literal["text"]
    text: str


class ImagePart(_Strict):
    """An image by URL."""

    type: Literal["image_url"]
    image_url: ImageUrl


class VideoPart(_Strict):
    """A video by URL."""

    type: Literal["video_url"]
    video_url: MediaUrl


class AudioUrlPart(_Strict):
    """A sound by URL."""

    type: Literal["audio_url"]
    audio_url: MediaUrl


class InputAudioPart(_Strict):
    """A sound in the request itself."""

    type: Literal["input_audio"]
    input_audio: InputAudio


Part = Annotated[
    TextPart | ImagePart | VideoPart | AudioUrlPart | InputAudioPart, Field(discriminator="type")
]


def _content_kind(value: object) -> str | None:
    return "text" if isinstance(value, str) else "parts" if isinstance(value, list) else None


Content = Annotated[
    Annotated[str, Tag("text")]
    | Annotated[list[Part], Field(min_length=1, max_length=MAX_PARTS), Tag("parts")],
    Discriminator(
        _content_kind,
        custom_error_type="content_type",
        custom_error_message="content must be a string or a list of parts",
    ),
]


class Message(_Strict):
    """One turn. `name` is taken and not used: chat templates have no place for it."""

    role: Literal["system", "developer", "user", "assistant"]
    content: Content
    name: Annotated[str, Field(max_length=256)] | None = None


class StreamOptions(_Strict):
    """`include_usage`: one more chunk at the end, with the token counts."""

    include_usage: bool = False
    include_obfuscation: bool = False


Stop = Annotated[str, Field(min_length=1, max_length=256)]


def _stop_kind(value: object) -> str | None:
    return "one" if isinstance(value, str) else "list" if isinstance(value, list) else None


class ChatRequest(_Strict):
    """Body of POST /v1/chat/completions."""

    model: Annotated[str, Field(max_length=512)]
    messages: Annotated[list[Message], Field(min_length=1, max_length=MAX_MESSAGES)]
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
            Annotated[Stop, Tag("one")] | Annotated[list[Stop], Field(max_length=4), Tag("list")],
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
    timings: bool | None = None
    user: Annotated[str, Field(max_length=1024)] | None = None
    metadata: dict[str, Any] | None = None
    store: Literal[False] | None = None
    safety_identifier: Annotated[str, Field(max_length=1024)] | None = None
    prompt_cache_key: Annotated[str, Field(max_length=1024)] | None = None

    @property
    def stops(self) -> list[str]:
        """Stop strings as a list."""
        return [self.stop] if isinstance(self.stop, str) else (self.stop or [])


_NOT_SERVED: dict[str, tuple[tuple[object, ...], str]] = {
    "tools": (([],), "describe the tools in a system message and parse the answer"),
    "tool_choice": (("none", "auto"), "leave it out"),
    "parallel_tool_calls": ((True, False), "leave it out"),
    "functions": (([],), "describe the functions in a system message and parse the answer"),
    "function_call": (("none", "auto"), "leave it out"),
    "response_format": (({"type": "text"},), "ask for the format in the prompt and check the answer"),
    "frequency_penalty": ((0,), "set it to 0 or leave it out"),
    "presence_penalty": ((0,), "set it to 0 or leave it out"),
    "logit_bias": (({},), "leave it out"),
    "modalities": ((["text"],), "answers are text: use ['text'] or leave it out"),
    "audio": ((), "answers are text: leave it out"),
    "prediction": ((), "leave it out"),
    "reasoning_effort": (("none",), "leave it out"),
    "verbosity": (("medium",), "leave it out"),
    "service_tier": (("auto", "default"), "leave it out"),
    "web_search_options": ((), "leave it out"),
    "best_of": ((1,), "use n and choose on the client"),
    "echo": ((False,), "leave it out"),
}


def parse_chat_request(value: object) -> ChatRequest:
    """Validate a decoded JSON body.

    Raises:
        ApiError: 400, naming the first field at fault and what would be right.
    """
    if not isinstance(value, dict):
        raise ApiError(400, "the body must be a JSON object", code="invalid_type")
    known = {name: field for name, field in value.items() if name not in _NOT_SERVED}
    for name in value.keys() & _NOT_SERVED.keys():
        off, remedy = _NOT_SERVED[name]
        if value[name] is not None and not any(_same(value[name], allowed) for allowed in off):
            raise ApiError(
                400, f"{name} is not served: {remedy}", code="unsupported_parameter", param=str(name)
            )
    try:
        request = ChatRequest.model_validate(known)
    except ValidationError as error:
        raise _named(error) from error
    if request.max_tokens is not None and request.max_completion_tokens is not None:
        raise ApiError(
            400,
            "give max_tokens or max_completion_tokens, not both",
            code="invalid_value",
            param="max_completion_tokens",
        )
    if request.top_logprobs and not request.logprobs:
        raise ApiError(400, "top_logprobs needs logprobs: true", code="invalid_value", param="top_logprobs")
    if request.stream_options is not None and not request.stream:
        raise ApiError(400, "stream_options needs stream: true", code="invalid_value", param="stream_options")
    return request


def _same(value: object, allowed: object) -> bool:
    if isinstance(allowed, bool) or isinstance(value, bool):
        return value is allowed
    return value == allowed


_TAGS = {"text", "parts", "one", "list", "image_url", "video_url", "audio_url", "input_audio"}


def _named(error: ValidationError) -> ApiError:
    first = error.errors(include_url=False, include_context=True)[0]
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
    code = "invalid_value"
    if kind == "extra_forbidden":
        code, message = "unknown_parameter", f"unknown field {param}: remove it"
    elif kind == "missing":
        code, message = "missing_required_parameter", f"{param} is missing"
    elif kind == "union_tag_invalid":
        given = str(first["ctx"].get("tag"))[:64]
        message = (
            f"{param}: unknown part type {given!r}; use text, image_url, video_url, audio_url or input_audio"
        )
    elif kind == "union_tag_not_found":
        code, message = "missing_required_parameter", f"{param}.type is missing"
        param += ".type"
    elif kind.endswith("_type"):
        code, message = "invalid_type", f"{param}: {message}"
    else:
        message = f"{param}: {message}"
    return ApiError(400, message[:1000], code=code, param=param[:200] or None)


# --- media and text of a conversation -------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class MediaSource:
    """One medium of a request as given. `param` names the part; `url` is http(s) or data; `format` only for input_audio."""

    modality: Literal["image", "video", "audio"]
    param: str
    url: str


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
            source = _source(part, f"messages[{m}].content[{p}]")
            media.append(source)
            parts.append({"type": source.modality})
        messages.append({"role": role, "content": parts})
    return messages, media


def _source(part: ImagePart | VideoPart | AudioUrlPart | InputAudioPart, param: str) -> MediaSource:
    if isinstance(part, ImagePart):
        return MediaSource("image", f"{param}.image_url.url", part.image_url.url)
    if isinstance(part, VideoPart):
        return MediaSource("video", f"{param}.video_url.url", part.video_url.url)
    if isinstance(part, AudioUrlPart):
        return MediaSource("audio", f"{param}.audio_url.url", part.audio_url.url)
    sound = part.input_audio
    return MediaSource("audio", f"{param}.input_audio.data", f"data:audio/{sound.format};base64,{sound.data}")


# --- responses ------------------------------------------------------------------------------------------------


class TopLogprob(BaseModel):
    """A token that might have been chosen."""

    token: str
    logprob: float
    bytes: list[int] | None


class TokenLogprobs(TopLogprob):
    """A token that was chosen, with the likeliest ones."""

    top_logprobs: list[TopLogprob]


class ChoiceLogprobs(BaseModel):
    """Log probabilities of the tokens of a choice or chunk."""

    content: list[TokenLogprobs]
    refusal: None = None


class PromptTokensDetails(BaseModel):
    """Where prompt tokens come from; the modalities add up to `prompt_tokens`."""

    cached_tokens: int = 0
    text_tokens: int = 0
    image_tokens: int = 0
    video_tokens: int = 0
    audio_tokens: int = 0


class Usage(BaseModel):
    """Token counts of a request."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


FinishReason = Literal["stop", "length"]


class AssistantMessage(BaseModel):
    """The answer."""

    role: Literal["assistant"] = "assistant"
    content: str
    refusal: None = None


class Choice(BaseModel):
    """One of n answers."""

    index: int
    message: AssistantMessage
    logprobs: ChoiceLogprobs | None = None
    finish_reason: FinishReason


class ChatCompletion(BaseModel):
    """A whole answer. `timings` (milliseconds by phase) only when asked for."""

    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    choices: list[Choice]
    usage: Usage
    timings: dict[str, float] | None = None


class Delta(BaseModel):
    """What a chunk adds to a choice."""

    role: Literal["assistant"] | None = None
    content: str | None = None


class ChunkChoice(BaseModel):
    """A choice's part of a chunk."""

    index: int
    delta: Delta
    logprobs: ChoiceLogprobs | None = None
    finish_reason: FinishReason | None = None


class ChatCompletionChunk(BaseModel):
    """One server-sent event. The last one has no choices, and `usage` and `timings` where asked for."""

    id: str
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    created: int
    model: str
    choices: list[ChunkChoice]
    usage: Usage | None = None
    timings: dict[str, float] | None = None
