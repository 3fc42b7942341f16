"""Messages that gateways receive, with their replies: reads of media, tokens, reports, claims on answers with an idempotency key."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from mmd_api.contract.answers import FinishReason
from mmd_workers.wire.messages.message_parts import Phase, PromptLogprob, TokenLogprob


@dataclass(frozen=True, slots=True)
class MediaRead:
    """Encoder to gateway: bytes `offset .. offset+length` of a held medium. The reply is a `MediaSlice` frame."""

    digest: str
    offset: int
    length: int


@dataclass(frozen=True, slots=True)
class MediaSlice:
    """Header of the reply to `MediaRead`; the bytes follow in the frame. `total_bytes` < 0: this gateway does not hold the medium."""

    digest: str
    offset: int
    total_bytes: int


@dataclass(frozen=True, slots=True)
class TokenItem:
    """Token number `index` of a request's output (0 is the first, made by prefill).

    `prompt_logprobs`: log probabilities of the prompt's tokens from the second on, with the first token of a request that asks for them.
    """

    request_id: str
    attempt: int
    index: int
    token_id: int
    finish_reason: FinishReason | None = None
    logprob: float | None = None
    top_logprobs: list[TokenLogprob] = field(default_factory=list)
    prompt_logprobs: list[PromptLogprob] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class TokenBatch:
    """All tokens that one engine step made for one gateway."""

    pod: str
    step: int
    items: list[TokenItem]


@dataclass(frozen=True, slots=True)
class RequestFailed:
    """A worker gives up a request. `retryable`: the gateway may place it again, tokens so far included.

    `feature_id`: feature of the medium on which all encoders failed, or which they did not finish within the timeout of its job; empty:
    the failure is not about a medium.
    """

    request_id: str
    attempt: int
    pod: str
    code: str
    message: str
    retryable: bool
    feature_id: str = ""


@dataclass(frozen=True, slots=True)
class HeldSequence:
    """One line of a `SequenceReport`: an attempt that the pod answers for.

    `tokens` is the index after the last token that the pod has made. `open`: it still works on the attempt; otherwise the attempt
    has ended there, and the pod keeps everything that the gateway has not confirmed.
    """

    request_id: str
    attempt: int
    tokens: int
    open: bool


@dataclass(frozen=True, slots=True)
class SequenceReport:
    """Request from worker to gateway, once a second: every attempt of this gateway that the pod answers for.

    Cancellations, tokens and failures are sent once and may be lost. The report and its reply find the difference, so both sides
    learn the end of every attempt: attempts that the gateway does not want are freed, tokens that it has not received are sent again,
    and an attempt that no pod reports is placed again.
    """

    pod: str
    sequences: list[HeldSequence]


@dataclass(frozen=True, slots=True)
class SequenceReceipt:
    """Reply to a `SequenceReport`, line by line: tokens received without a gap, or -1 for an attempt that is not wanted."""

    received: list[int]


@dataclass(frozen=True, slots=True)
class PhaseReport:
    """Phases a pod has finished for a request, each reported once; the gateway joins them into the request's timeline."""

    request_id: str
    attempt: int
    pod: str
    phases: list[Phase]


@dataclass(frozen=True, slots=True)
class AnswerClaim:
    """A gateway to the gateway that keeps the claims of this name: `gateway` is about to make the answer, under the new `claim`.

    Without a claim, `gateway` only looks for the answer, or gives up its own claim, which is then `lost`. `name`: digest of tenant, path
    and key of the request. `lost`: claim whose gateway does not have the answer after all.
    """

    name: str
    tenant: str
    gateway: str
    claim: str = ""
    lost: str = ""


@dataclass(frozen=True, slots=True)
class AnswerClaimed:
    """Reply to `AnswerClaim`: the gateway that now has the answer (`holder`), and its claim; empty: none has it."""

    holder: str
    claim: str


@dataclass(frozen=True, slots=True)
class AnswerRead:
    """A gateway to the holder of an answer: send at most `most_bytes` of it, from byte `skip` of block `at` on.

    The reply is a frame with an `AnswerPiece`. `body`: digest of the request's body. `reader`: names the reader from one message to the
    next. `run`: run of the answer that the reader has begun to read; empty: none yet.
    """

    name: str
    body: str
    reader: str
    run: str
    at: int
    skip: int
    most_bytes: int


@dataclass(frozen=True, slots=True)
class AnswerPiece:
    """Header of the reply to `AnswerRead`; blocks of `lengths` bytes follow.

    `status` 0: the answer has not begun. `cut`: the last block continues. `end`: how the answer ends behind these blocks, if it does;
    `unknown`: this gateway does not have the answer; `beyond`: the answer has not reached block `at`.
    """

    status: int
    headers: list[list[str]]
    lengths: list[int]
    cut: bool
    end: Literal["", "complete", "failed", "broken", "unknown", "beyond"]
