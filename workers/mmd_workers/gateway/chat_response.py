"""What clients get: OpenAI's chat completions as pydantic models. Independent of the network."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Literal

from pydantic import BaseModel, Field

from mmd_workers.gateway.call_parser import CallPart


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

    `truncated_audio_seconds`: sound beyond the model's window, which it did not get.
    """

    cached_tokens: int = 0
    text_tokens: int = 0
    image_tokens: int = 0
    video_tokens: int = 0
    audio_tokens: int = 0
    truncated_audio_seconds: float = 0.0


class Usage(BaseModel):
    """Token counts of a request."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


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
    tool_calls: list[ToolCallDelta] | None = None


class ChunkChoice(BaseModel):
    """A choice's part of a chunk. What chat completions do not show: `stop`, the stop string that ended it, and `pieces`, its text and parts
    of calls in their order."""

    index: int
    delta: Delta
    logprobs: ChoiceLogprobs | None = None
    finish_reason: ApiFinishReason | None = None
    token_ids: list[int] | None = None
    stop: Annotated[str | None, Field(exclude=True)] = None
    pieces: Annotated[Sequence[str | CallPart], Field(exclude=True)] = ()


class ChatCompletionChunk(BaseModel):
    """One server-sent event. The last one has no choices, and `usage` and `timings` where asked for."""

    id: str
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    created: int
    model: str
    choices: list[ChunkChoice]
    usage: Usage | None = None
    timings: dict[str, float] | None = None
