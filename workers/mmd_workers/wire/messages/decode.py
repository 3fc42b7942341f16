"""Messages that decode pods receive, with their replies: KV of sequences."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from mmd_workers.wire.messages.prefill import GenerateRequest


@dataclass(frozen=True, slots=True)
class KvOffer:
    """Request from prefill to decode: reserve room for this sequence. It is sent before prefill starts (reserve, then produce).

    - `link_endpoint`: where the prefill worker's half of the KV link listens.
    - `layout`, `backend`: must equal the decoder's own.
    - `failed_epoch`: newest epoch of this pair's link that the prefill worker has seen fail (-1: none).
    - `prompt_tokens`: tokens whose KV has to travel, outputs of earlier attempts included. 0: the offer is for the link alone, before a
      request needs it, and is granted without a lease.
    - `max_tokens`: tokens that may follow.
    - `arrived`: Unix seconds; the oldest request that waits is passed by at most 16 others.
    - `prefix`: identities of the leading whole blocks.
    - `companion_tokens`: tokens of a companion, whose KV does not travel but takes room; 0: there is none.
    """

    request_id: str
    attempt: int
    pod: str
    incarnation: str
    prompt_tokens: int
    max_tokens: int
    layout: dict[str, Any]
    backend: str
    link_endpoint: str
    lease_seconds: float
    arrived: float
    failed_epoch: int = -1
    prefix: list[bytes] = field(default_factory=list)
    companion_tokens: int = 0


@dataclass(frozen=True, slots=True)
class KvGrant:
    """Reply to a KvOffer. `lease_id` names the granted blocks until commit or the end of the lease.

    The decoder already has the KV of the first `cached_tokens`: sending begins there. If not `granted`, `code` and `reason` state why;
    `too_large` means never, at this pod.
    """

    request_id: str
    granted: bool
    lease_id: str = ""
    epoch: int = 0
    link_endpoint: str = ""
    cached_tokens: int = 0
    code: str = ""
    reason: str = ""


@dataclass(frozen=True, slots=True)
class KvChunk:
    """Request from prefill to decode, sent before the bytes of a chunk and answered when they are being received.

    KV of tokens [start, start + num_tokens), all layers, follows on the link of (`pod`, `epoch`) as tensors tagged `first_tag`,
    `first_tag` + 1, ... Chunks are announced in the order sent, and again if the acknowledgement does not come. An acknowledged chunk is
    always sent, so the receiver takes it off the link even if it is no longer needed. Once the lease has ended a chunk is refused with
    `lease_ended`, and not sent. A chunk of 0 tokens only renews the lease.
    """

    pod: str
    epoch: int
    lease_id: str
    sequence: int
    start: int
    num_tokens: int
    first_tag: int


@dataclass(frozen=True, slots=True)
class KvCommit:
    """Request from prefill to decode after the last chunk: everything the decoder needs to continue.

    A repeated commit gets the answer of the first. `output_token_ids` ends with the token that prefill sampled. `next_position` is the
    rotary position of the next token.
    """

    lease_id: str
    request: GenerateRequest
    output_token_ids: list[int]
    next_position: int
    num_chunks: int


@dataclass(frozen=True, slots=True)
class KvCommitted:
    """Reply to a KvCommit: the decoder owns the sequence (`ok`), or it does not and the prefill worker reports the failure."""

    lease_id: str
    ok: bool
    reason: str = ""


@dataclass(frozen=True, slots=True)
class KvRelease:
    """Request from prefill to decode: free the blocks granted for this attempt (it ended, failed or goes elsewhere).

    `lease_id` is empty if the answer to the offer never came; then everything granted for the attempt is meant.
    """

    request_id: str
    attempt: int
    lease_id: str = ""
