"""What pods that decode receive, with the replies they give: KV of sequences."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from mmd_workers.wire.messages.prefill import GenerateRequest


@dataclass(frozen=True, slots=True)
class KvOffer:
    """Prefill to decode, as a request: reserve room for this sequence. Sent before prefill starts (reserve, then produce).

    `link_endpoint` is where the prefill worker's half of the KV link listens. `layout` and `backend` must equal the decoder's own.
    `failed_epoch` is the newest epoch of this pair's link that the prefill worker has seen fail (-1: none). `prompt_tokens` counts
    what has to travel, outputs of earlier attempts included, `max_tokens` what may follow. Older requests (`arrived`, Unix
    seconds) get room first. `prefix`: identities of the leading whole blocks. An offer of 0 prompt tokens is for the link alone,
    before a request needs it: it is granted without a lease. `companion_tokens`: of a companion, whose KV does not travel, but takes room; 0:
    it has none.
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
    """Reply to a KvOffer. `lease_id` names the granted blocks until commit or the end of the lease. The decoder has the KV of the first
    `cached_tokens` already: what is sent begins there.

    Not granted: `code` and `reason` say why; `too_large` means never, at this pod.
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
    """Prefill to decode, as a request before the bytes are sent, answered when they are being received: KV of tokens [start, start + num_tokens), all layers, follows
    on the link of (`pod`, `epoch`) as tensors tagged `first_tag`, `first_tag` + 1, ... Announced in the order sent,
    again if the acknowledgement does not come; what is announced is always sent, so the receiver takes it off the link even when it is no longer needed.
    One of 0 tokens only renews the lease.
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
    """Prefill to decode, as a request after the last chunk: everything the decoder needs to go on. A repeated commit gets the
    answer of the first.

    `output_token_ids` ends with the token prefill sampled. `next_position` is the rotary position of the next token.
    """

    lease_id: str
    request: GenerateRequest
    output_token_ids: list[int]
    next_position: int
    num_chunks: int


@dataclass(frozen=True, slots=True)
class KvCommitted:
    """Reply to a KvCommit: the decoder owns the sequence (`ok`) or it does not (the prefill worker reports the failure)."""

    lease_id: str
    ok: bool
    reason: str = ""


@dataclass(frozen=True, slots=True)
class KvRelease:
    """Prefill to decode, as a request: the blocks granted for this attempt are not needed (it ended, failed or goes elsewhere).

    `lease_id` is empty when the answer to the offer never came: then whatever was granted for the attempt is meant.
    """

    request_id: str
    attempt: int
    lease_id: str = ""
