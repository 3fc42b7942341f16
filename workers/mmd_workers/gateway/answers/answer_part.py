"""What an answer grows by, in the shape of no API. Independent of HTTP, workers and the model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from mmd_workers.gateway.constraints.call_parser import CallPart
from mmd_workers.gateway.constraints.reasoning_parser import ReasoningPart

FinishReason = Literal["stop", "length", "tool_calls"]

Piece = str | CallPart | ReasoningPart
"""Text of an answer, or a part of a call or of the reasoning."""


class Candidate(NamedTuple):
    """A token that might have been chosen. `text`: what it decodes to on its own."""

    text: str
    logprob: float


@dataclass(slots=True)
class ScoredToken:
    """A token with its log probability and the likeliest tokens at its place. `logprob`: None for the first token of a prompt, which follows
    nothing.
    """

    text: str
    logprob: float | None
    likeliest: Sequence[Candidate]


@dataclass(slots=True)
class AnswerPart:
    """A part of one choice's answer.

    `begins`: whether it is the choice's first part. `pieces`: text, reasoning and calls in their order. `logprobs`: of its tokens; None
    where the request asks for none. `prompt_logprobs`: of the prompt, in the first part. `stop`: the stop string that ended the answer.
    """

    index: int
    pieces: Sequence[Piece] = ()
    begins: bool = False
    token_ids: Sequence[int] = ()
    logprobs: Sequence[ScoredToken] | None = None
    prompt_logprobs: Sequence[ScoredToken] = ()
    finish_reason: FinishReason | None = None
    stop: str | None = None

    @property
    def content(self) -> str:
        """Its text, without reasoning and calls."""
        return "".join(piece for piece in self.pieces if isinstance(piece, str))

    @property
    def reasoning(self) -> str:
        """The text of its reasoning."""
        return "".join(piece.text for piece in self.pieces if isinstance(piece, ReasoningPart))

    @property
    def calls(self) -> list[CallPart]:
        """Its parts of calls."""
        return [piece for piece in self.pieces if isinstance(piece, CallPart)]
