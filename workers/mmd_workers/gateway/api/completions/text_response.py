"""Responses of /v1/completions: OpenAI's text completions as pydantic models. Independent of the network."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, Field

from mmd_workers.gateway.answers.answer_part import ApiFinishReason
from mmd_workers.gateway.answers.prompt_scores import PromptToken
from mmd_workers.gateway.answers.usage import Usage


class TextLogprobs(BaseModel):
    """Log probabilities, one item a token; null for the first one of a prompt. `text_offset`: characters of the tokens before it."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None] | None
    text_offset: list[int]


class TextChoice(BaseModel):
    """One of the answers, or what a chunk adds to it."""

    index: int
    text: str
    logprobs: TextLogprobs | None = None
    finish_reason: ApiFinishReason | None = None
    token_ids: list[int] | None = None
    prompt_logprobs: list[dict[int, PromptToken] | None] | None = Field(
        None, exclude_if=lambda scores: scores is None
    )


class TextCompletion(BaseModel):
    """A complete answer, or one server-sent event. The last event has no choices, and `usage` and `timings` where asked for."""

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    choices: list[TextChoice]
    usage: Usage | None = None
    timings: dict[str, float] | None = None
