"""Responses of /v1/messages as pydantic models, for the OpenAPI document. `messages_shape` writes them."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field


class AnsweredText(BaseModel):
    """Text of an answer."""

    type: Literal["text"]
    text: str


class AnsweredThinking(BaseModel):
    """The reasoning before an answer. Its signature is empty."""

    type: Literal["thinking"]
    thinking: str
    signature: str


class AnsweredToolUse(BaseModel):
    """A call of a tool. `input`: its arguments, as far as they are complete."""

    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]


AnsweredBlock = Annotated[AnsweredText | AnsweredThinking | AnsweredToolUse, Field(discriminator="type")]


class AnsweredTokensDetails(BaseModel):
    """What the answer consists of."""

    thinking_tokens: int


class MessageUsage(BaseModel):
    """Token counts of a message. `input_tokens` exclude cached tokens."""

    input_tokens: int
    cache_creation_input_tokens: int
    cache_read_input_tokens: int
    output_tokens: int
    output_tokens_details: AnsweredTokensDetails


class AnsweredMessage(BaseModel):
    """A complete answer. `timings` (milliseconds by phase) only on request."""

    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[AnsweredBlock]
    stop_reason: Literal[
        "end_turn", "max_tokens", "model_context_window_exceeded", "stop_sequence", "tool_use"
    ]
    stop_sequence: str | None
    usage: MessageUsage
    timings: dict[str, float] | None = Field(None, exclude_if=lambda timings: timings is None)


class TokenCount(BaseModel):
    """Response of /v1/messages/count_tokens."""

    input_tokens: int
