"""Responses of /v1/chat/completions: OpenAI's chat completions as pydantic models. Independent of the network."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, Field

from mmd_workers.gateway.answers.answer_part import ApiFinishReason
from mmd_workers.gateway.answers.prompt_scores import PromptToken
from mmd_workers.gateway.answers.usage import Usage


class TopLogprob(BaseModel):
    """A token that might have been chosen. `bytes`: what it adds to the text."""

    token: str
    logprob: float
    bytes: list[int]


class TokenLogprobs(TopLogprob):
    """A token that was chosen, with the likeliest ones."""

    top_logprobs: list[TopLogprob]


class ChoiceLogprobs(BaseModel):
    """Log probabilities of the tokens of a choice or chunk."""

    content: list[TokenLogprobs]
    refusal: None = None


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
    """A complete answer. `timings` (milliseconds by phase), `prompt_logprobs` and each choice's `token_ids` only on request."""

    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    choices: list[Choice]
    usage: Usage
    timings: dict[str, float] | None = None
    prompt_logprobs: list[dict[int, PromptToken] | None] | None = Field(
        None, exclude_if=lambda scores: scores is None
    )


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
    """A choice's part of a chunk."""

    index: int
    delta: Delta
    logprobs: ChoiceLogprobs | None = None
    finish_reason: ApiFinishReason | None = None
    token_ids: list[int] | None = None


class ChatCompletionChunk(BaseModel):
    """One server-sent event. The last one has no choices, and `usage` and `timings` where asked for."""

    id: str
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    created: int
    model: str
    choices: list[ChunkChoice]
    usage: Usage | None = None
    timings: dict[str, float] | None = None
