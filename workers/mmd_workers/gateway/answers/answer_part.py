"""The parts of an answer, in a form independent of any API, of HTTP, workers and the model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from mmd_workers.gateway.output.call_parser import CallPart
from mmd_workers.gateway.output.reasoning_parser import ReasoningPart
from mmd_workers.gateway.output.token_texts import DecodedToken

ApiFinishReason = Literal["stop", "length", "tool_calls"]

Piece = str | CallPart | ReasoningPart
"""Text of an answer, part of a call, or part of the reasoning."""


class Candidate(NamedTuple):
    """A token that could have been chosen."""

    token_id: int
    token: DecodedToken
    logprob: float


@dataclass(slots=True)
class ScoredToken:
    """A token with its log probability and the likeliest tokens in its position.

    `logprob`: None for the first token of a prompt, which has no context.
    """

    token_id: int
    token: DecodedToken
    logprob: float | None
    likeliest: Sequence[Candidate]


@dataclass(slots=True)
class AnswerPart:
    """A part of one choice's answer.

    `begins`: True for the choice's first part. `pieces`: text, reasoning and calls in order. `logprobs`: log probabilities of the part's
    tokens; None if the request asks for none. `prompt_logprobs`: log probabilities of the prompt, in the first part only. `stop`: the stop
    string that ended the answer.
    """

    index: int
    pieces: Sequence[Piece] = ()
    begins: bool = False
    token_ids: Sequence[int] = ()
    logprobs: Sequence[ScoredToken] | None = None
    prompt_logprobs: Sequence[ScoredToken] = ()
    finish_reason: ApiFinishReason | None = None
    stop: str | None = None

    @property
    def content(self) -> str:
        """The text, without reasoning and calls."""
        return "".join(piece for piece in self.pieces if isinstance(piece, str))

    @property
    def reasoning(self) -> str:
        """The text of the reasoning."""
        return "".join(piece.text for piece in self.pieces if isinstance(piece, ReasoningPart))

    @property
    def calls(self) -> list[CallPart]:
        """The parts of calls."""
        return [piece for piece in self.pieces if isinstance(piece, CallPart)]
