"""Messages that pods computing prompts receive, with their replies: requests, and embeddings of their media."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from mmd_api.contract.sampling import Guidance
from mmd_workers.wire.messages.message_parts import FeatureRef, Sampling, TensorHeader


@dataclass(frozen=True, slots=True)
class EmbeddingOffer:
    """Request from encoder to receiver: the ready tensors, and their blake2b-128 digest over all bytes in order."""

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

    `send`: publish chunks on `inbox`, never more than `window_bytes` unacknowledged. `have`: the feature is already here, the job is
    done. `wait`: no budget in the time for an answer, offer again after `retry_seconds` to keep the turn. `refuse`: the feature is not needed (cancelled, unknown, other
    revision).
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
class EncodeRun:
    """The run of a job by an encoder. `incarnation`: the encoder's."""

    encoder: str
    incarnation: str


@dataclass(frozen=True, slots=True)
class EncodeCheck:
    """Request from encoder to receiver, before a run of a job and every second during it: is the feature still wanted?

    `run`: the run that is to begin, or with `in_progress` goes on. `ended`: a run that ended without the feature. `failed`: it counts as
    an attempt, because it failed on the medium or its encoder died.
    """

    feature_id: str
    job_id: str
    run: EncodeRun | None = None
    in_progress: bool = False
    ended: EncodeRun | None = None
    failed: bool = False


@dataclass(frozen=True, slots=True)
class EncodeWanted:
    """Reply to an `EncodeCheck`. Not `wanted`: nothing waits for the feature any longer; drop the job.

    `other`: a run that has not ended; until the encoder reports it as ended, its own run has not begun. `attempt`: 1, and one for
    each failed run.
    """

    job_id: str
    wanted: bool
    attempt: int = 1
    other: EncodeRun | None = None


@dataclass(frozen=True, slots=True)
class EncodeFailed:
    """Request from encoder to receiver: this feature will not come. Until it is acknowledged, the job stays in the queue.

    `retryable` is False for bad media (poison).
    """

    feature_id: str
    job_id: str
    code: str
    message: str
    retryable: bool


@dataclass(frozen=True, slots=True)
class GenerateRequest:
    """A request placed on a pod that computes its prompt.

    - `attempt`: counts placements from 0; the gateway ignores events of older attempts.
    - `output_token_ids`: tokens already sent to the client (not empty after a migration); generation continues at index
      `len(output_token_ids)`.
    - `decode_pods`: candidates in the router's order of preference; empty: the pod that gets the prompt decodes itself.
    - `adapter`: name of the LoRA adapter that computes the request; empty: the model alone.
    - `engine_failures`: attempts that ended because the engine failed in a step that ran the request (`SuspectError`); others do not
      count.
    - `cached_tokens`: leading tokens of the prompt that the router knows to be in the pod's prefix cache. They are no load of the pod
      until its engine's figures show the prompt, for a second at most.
    - `first_attempt`: first attempt with this prompt: after a medium could not be encoded, the same request has another prompt.
    - `encode_here`: the pod's own tower encodes the media, although there are encoder pods.
    - `cache_salt`: the prefix is shared with requests of the same salt.
    - `guidance`: each pod that runs the request computes the companion's prompt itself.
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
        """Tokens of the companion's prompt, with the generated ones; 0: there is no companion."""
        return 0 if self.guidance is None else len(self.guidance.token_ids) + len(self.output_token_ids)


@dataclass(frozen=True, slots=True)
class Placed:
    """Reply to `GenerateRequest`. If not `accepted`, the router tries another pod; `code` has the reason."""

    request_id: str
    accepted: bool
    code: str = ""
    message: str = ""


@dataclass(frozen=True, slots=True)
class Cancel:
    """The client disconnected, or the gateway placed the request elsewhere: attempts up to `attempt` are freed everywhere."""

    request_id: str
    attempt: int
