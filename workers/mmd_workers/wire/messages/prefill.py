"""What pods that compute prompts receive, with the replies they give: requests, and embeddings of their media."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from mmd_api.contract.sampling import Guidance
from mmd_workers.wire.messages.message_parts import FeatureRef, Sampling, TensorHeader


@dataclass(frozen=True, slots=True)
class EmbeddingOffer:
    """Encoder to receiver, as a request: the tensors that are ready, and their blake2b-128 digest over all bytes in order."""

    transfer_id: str
    feature_id: str
    sender: str
    tensors: list[TensorHeader]
    total_bytes: int
    digest: str
    timings: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class EmbeddingGrant:
    """Receiver's reply to an OFFER.

    `send`: publish chunks on `inbox`, never more than `window_bytes` unacknowledged. `have`: already here, the job is done.
    `wait`: no budget now, offer again after `retry_seconds`. `refuse`: it is not needed (cancelled, unknown, other revision).
    """

    transfer_id: str
    verdict: Literal["send", "have", "wait", "refuse"]
    inbox: str = ""
    window_bytes: int = 0
    chunk_bytes: int = 0
    retry_seconds: float = 0.0
    reason: str = ""


@dataclass(frozen=True, slots=True)
class EmbeddingChunk:
    """Header of one chunk frame; `sequence` counts from 0 without gaps, `offset` is into the concatenated tensors."""

    transfer_id: str
    sequence: int
    offset: int
    last: bool


@dataclass(frozen=True, slots=True)
class EncodeCheck:
    """Encoder to receiver, as a request, before a job that has waited and every second during one: is it still wanted?"""

    feature_id: str
    job_id: str


@dataclass(frozen=True, slots=True)
class EncodeWanted:
    """Reply to an `EncodeCheck`. Not `wanted`: nothing waits for the feature any longer; drop the job."""

    job_id: str
    wanted: bool


@dataclass(frozen=True, slots=True)
class EncodeFailed:
    """Encoder to receiver, as a request: this feature will not come. Until it is acknowledged the job stays in the queue.
    `retryable` is False for bad media (poison)."""

    feature_id: str
    job_id: str
    code: str
    message: str
    retryable: bool


@dataclass(frozen=True, slots=True)
class GenerateRequest:
    """A request placed on a pod that computes its prompt.

    `attempt` counts placements from 0: events of older attempts are ignored by the gateway. `output_token_ids` holds what the
    client has already been sent (not empty after a migration): generation goes on at index `len(output_token_ids)`.
    `decode_pods` are candidates in the router's order of preference; empty: the pod that gets the prompt decodes itself.
    `adapter`: name of the LoRA adapter that computes it; empty: the model alone. `engine_failures`: attempts that ended because the
    engine failed in a step that ran it (`SuspectError`); others do not count. `cached_tokens`: leading tokens of the prompt that the
    router knows to be in the pod's prefix cache; they are no load of the pod until its engine's figures show the prompt, for a second at most.
    `first_attempt`: of those with this prompt: after a medium could not be encoded the same request has another one.
    `encode_here`: the pod's own tower encodes the media, although there are encoder pods. `cache_salt`: its prefix is shared with requests of
    the same one. `guidance`: each pod that runs it computes the companion's prompt itself.
    """

    request_id: str
    attempt: int
    gateway: str
    token_ids: list[int]
    features: list[FeatureRef]
    sampling: Sampling
    decode_pods: list[str]
    deadline: float
    arrived: float
    output_token_ids: list[int] = field(default_factory=list)
    trace: dict[str, str] = field(default_factory=dict)
    adapter: str = ""
    engine_failures: int = 0
    cached_tokens: int = 0
    encode_here: bool = False
    cache_salt: str = ""
    first_attempt: int = 0
    guidance: Guidance | None = None

    @property
    def companion_tokens(self) -> int:
        """Of its companion's prompt, with what has been generated; 0: it has none."""
        return 0 if self.guidance is None else len(self.guidance.token_ids) + len(self.output_token_ids)


@dataclass(frozen=True, slots=True)
class Placed:
    """Reply to `GenerateRequest`. Not accepted: the router tries another pod; `code` has the reason."""

    request_id: str
    accepted: bool
    code: str = ""
    message: str = ""


@dataclass(frozen=True, slots=True)
class Cancel:
    """The client disconnected or the gateway placed the request elsewhere: attempts up to `attempt` are freed everywhere."""

    request_id: str
    attempt: int
