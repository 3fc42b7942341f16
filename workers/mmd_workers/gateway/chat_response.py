"""What clients get: OpenAI's chat completions as pydantic models. Independent of the network."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Literal

from pydantic import BaseModel, Field

from mmd_workers.gateway.call_parser import CallPart
from mmd_workers.gateway.reasoning_parser import ReasoningPart
from mmd_workers.model.prompt import DegradedBy

Piece = str | CallPart | ReasoningPart
"""Of an answer: text, or a part of a call or of the reasoning."""


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
    """Where prompt tokens come from; the modalities add up to `prompt_tokens`.

    `truncated_audio_seconds`: sound beyond the model's window, which it did not get; `omitted_video_frames`, `omitted_pixels`: frames, and pixels of
    images and of the other frames, that it did not get although the request's choice comes to them; `replaced_media`: of which it got a text that
    says they could not be read; `degraded_by`: why: `context`, `load`, `failure`.
    """

    cached_tokens: int = 0
    text_tokens: int = 0
    image_tokens: int = 0
    video_tokens: int = 0
    audio_tokens: int = 0
    truncated_audio_seconds: float = 0.0
    omitted_video_frames: int = 0
    omitted_pixels: int = 0
    replaced_media: int = 0
    degraded_by: list[DegradedBy] = []


class CompletionTokensDetails(BaseModel):
    """What answers consist of. `reasoning_tokens`: before their content, markers included."""

    reasoning_tokens: int = 0


class Usage(BaseModel):
    """Token counts of a request."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails


ApiFinishReason = Literal["stop", "length", "tool_calls"]


class AnsweredFunction(BaseModel):
    """The function of a call. `arguments`: JSON, unless the answer was cut or the model wrote something else."""

    name: str
    arguments: str


class AnsweredCall(BaseModel):
    """A call that the model makes."""

    id: str
    type: Literal["function"] = "function"
    function: AnsweredFunction


class AssistantMessage(BaseModel):
    """The answer."""

    role: Literal["assistant"] = "assistant"
    content: str | None
    refusal: None = None
    reasoning_content: str | None = Field(None, exclude_if=lambda text: text is None)
    tool_calls: list[AnsweredCall] | None = Field(None, exclude_if=lambda calls: calls is None)


class Choice(BaseModel):
    """One of n answers."""

    index: int
    message: AssistantMessage
    logprobs: ChoiceLogprobs | None = None
    finish_reason: ApiFinishReason
    token_ids: list[int] | None = None


class ChatCompletion(BaseModel):
    """A complete answer. `timings` (milliseconds by phase) and each choice's `token_ids` only on request."""

    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    choices: list[Choice]
    usage: Usage
    timings: dict[str, float] | None = None


class FunctionDelta(BaseModel):
    """What a chunk adds to the function of a call."""

    name: str | None = None
    arguments: str


class ToolCallDelta(BaseModel):
    """What a chunk adds to a call: the first one has all fields, the others more of the arguments."""

    index: int
    id: str | None = None
    type: Literal["function"] | None = None
    function: FunctionDelta


class Delta(BaseModel):
    """What a chunk adds to a choice."""

    role: Literal["assistant"] | None = None
    content: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[ToolCallDelta] | None = None


class ChunkChoice(BaseModel):
    """A choice's part of a chunk. What chat completions do not show: `stop`, the stop string that ended it, `pieces`, its reasoning, text and
    parts of calls in their order, and `prompt`, the tokens of its prompt, of which the first has no probability."""

    index: int
    delta: Delta
    logprobs: ChoiceLogprobs | None = None
    finish_reason: ApiFinishReason | None = None
    token_ids: list[int] | None = None
    stop: Annotated[str | None, Field(exclude=True)] = None
    pieces: Annotated[Sequence[Piece], Field(exclude=True)] = ()
    prompt: Annotated[list[TokenLogprobs], Field(exclude=True)] = []


class ChatCompletionChunk(BaseModel):
    """One server-sent event. The last one has no choices, and `usage` and `timings` where asked for."""

    id: str
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    created: int
    model: str
    choices: list[ChunkChoice]
    usage: Usage | None = None
    timings: dict[str, float] | None = None
