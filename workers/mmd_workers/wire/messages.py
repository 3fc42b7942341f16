"""What goes over the wire: frozen dataclasses, packed with msgpack, validated on arrival. Read this file to know the system.

Times are Unix seconds (float) unless a name says otherwise; sizes carry their unit in the name. Tensors never travel in
these messages: they follow as raw bytes (`Frame`), described by `TensorHeader`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

Modality = Literal["image", "video", "audio"]
Role = Literal["encode", "prefill", "decode"]
FinishReason = Literal["stop", "length", "cancelled"]
PodState = Literal["loading", "ready", "draining", "drained"]


@dataclass(frozen=True, slots=True)
class TensorHeader:
    """Name, dtype (torch name without `torch.`) and shape of a tensor whose raw bytes follow, C order."""

    name: str
    dtype: str
    shape: list[int]
    num_bytes: int


# --- media and features ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class FeatureRef:
    """One medium of a request: its identity, where its rows go in the prompt, and what the model must know of its shape.

    `feature_id` is derived once, by the gateway, from (digest, pipeline revision, sampling settings).
    `ranges` are [start, length] pairs of placeholder positions in the prompt's token ids; their lengths add up to
    `num_tokens`. `geometry` holds the model's small shape facts (`image_grid_thw`, `video_second_per_grid`, ...), computed
    from dimensions before decoding; the encoder must arrive at the same.
    `work` is what the encoder will do, in the units of its calibrated throughput (patches for pixels, frames for sound).
    """

    feature_id: str
    digest: str
    modality: Modality
    num_bytes: int
    num_tokens: int
    ranges: list[list[int]]
    geometry: dict[str, Any]
    sampling: dict[str, Any]
    work: int


@dataclass(frozen=True, slots=True)
class MediaRead:
    """Encoder to gateway: bytes `offset .. offset+length` of a held medium. The reply is a `MediaSlice` frame."""

    digest: str
    offset: int
    length: int


@dataclass(frozen=True, slots=True)
class MediaSlice:
    """Header of the reply to `MediaRead`; the bytes follow in the frame. `total_bytes` < 0: this gateway does not hold it."""

    digest: str
    offset: int
    total_bytes: int


@dataclass(frozen=True, slots=True)
class EncodeJob:
    """One medium to encode, published by the worker that needs the feature (it owns retries and the deadline).

    `receiver`/`receiver_incarnation`: the pod whose `embedding` subject takes the OFFER. `gateway` holds the bytes.
    """

    job_id: str
    feature: FeatureRef
    gateway: str
    receiver: str
    receiver_incarnation: str
    deadline: float
    published: float
    request_id: str
    trace: dict[str, str] = field(default_factory=dict)
    attempt: int = 0  # of the request


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
    `wait`: no budget now, offer again after `retry_seconds`. `refuse`: nobody needs it (cancelled, unknown, other revision).
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
class EmbeddingCredit:
    """Receiver to sender while chunks flow: everything up to `received_bytes` has arrived; ACK when `complete`."""

    transfer_id: str
    received_bytes: int
    complete: bool = False
    error: str = ""


@dataclass(frozen=True, slots=True)
class EncodeFailed:
    """Encoder to receiver: this feature will not come. `retryable` is False for bad media (poison)."""

    feature_id: str
    job_id: str
    code: str
    message: str
    retryable: bool


# --- requests -------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Sampling:
    """How to choose tokens. Temperature 0 is greedy. `top_k` 0 and `top_p` 1 mean no limit.

    A seeded draw depends on (seed, index of the output token) alone, so it survives migration.
    """

    max_tokens: int
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int = 0
    logprobs: int | None = None
    ignore_eos: bool = False


@dataclass(frozen=True, slots=True)
class GenerateRequest:
    """A request placed on a prefill-capable pod.

    `attempt` counts placements from 0: events of older attempts are ignored by the gateway. `output_token_ids` holds what the
    client has already been sent (not empty after a migration): generation goes on at index `len(output_token_ids)`.
    `decode_pods` are candidates in the router's order of preference; empty: the prefill pod decodes itself.
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


@dataclass(frozen=True, slots=True)
class Placed:
    """Reply to `GenerateRequest`. Not accepted: the router tries another pod; `code` says why."""

    request_id: str
    accepted: bool
    code: str = ""
    message: str = ""


@dataclass(frozen=True, slots=True)
class Cancel:
    """The client is gone or the gateway placed the request elsewhere: attempts up to `attempt` are freed everywhere."""

    request_id: str
    attempt: int


# --- tokens ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """A token id with its natural-log probability."""

    token_id: int
    logprob: float


@dataclass(frozen=True, slots=True)
class TokenItem:
    """Token number `index` of a request's output (0 is the first, made by prefill)."""

    request_id: str
    attempt: int
    index: int
    token_id: int
    finish_reason: FinishReason | None = None
    logprob: float | None = None
    top_logprobs: list[TokenLogprob] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class TokenBatch:
    """All tokens one engine step made for one gateway."""

    pod: str
    step: int
    items: list[TokenItem]


@dataclass(frozen=True, slots=True)
class RequestFailed:
    """A worker gives a request up. `retryable`: the gateway may place it again, tokens so far included."""

    request_id: str
    attempt: int
    pod: str
    code: str
    message: str
    retryable: bool


@dataclass(frozen=True, slots=True)
class Phase:
    """One interval of a request's life on one pod, Unix seconds. Names: queue, encode, embedding_transfer, prefill,
    kv_transfer, decode; `detail` carries sizes (tokens, bytes) and identities.
    """

    name: str
    start: float
    end: float
    detail: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class PhaseReport:
    """Phases a pod has finished for a request; the gateway joins them into the request's timeline."""

    request_id: str
    attempt: int
    pod: str
    phases: list[Phase]


# --- KV -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class KvOffer:
    """Prefill to decode, as a request: room for this sequence, please. Sent before prefill starts (reserve, then produce).

    `link_endpoint` is where the prefill worker's half of the KV link listens. `layout` must equal the decoder's own.
    `failed_epoch` is the newest epoch of this pair's link that the prefill worker has seen fail (-1: none).
    """

    request_id: str
    attempt: int
    pod: str
    incarnation: str
    prompt_tokens: int
    max_tokens: int
    layout: dict[str, Any]
    link_endpoint: str
    lease_seconds: float
    failed_epoch: int = -1


@dataclass(frozen=True, slots=True)
class KvGrant:
    """Reply to a KvOffer. `lease_id` names the granted blocks until commit or the end of the lease.

    `cached_tokens`: how much of the prompt's KV the decoder already has (always whole blocks; those need not travel).
    """

    request_id: str
    granted: bool
    lease_id: str = ""
    epoch: int = 0
    link_endpoint: str = ""
    cached_tokens: int = 0
    reason: str = ""


@dataclass(frozen=True, slots=True)
class KvChunk:
    """Prefill to decode, published just before the bytes are sent: KV of tokens [start, start + num_tokens), all layers, follows
    on the link of (`pod`, `epoch`) as tensors tagged `first_tag`, `first_tag` + 1, ... Announced in the order sent; what is
    announced is always sent, so the receiver takes it off the link even when nobody wants it any more.
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
    """Prefill to decode, as a request after the last chunk: everything the decoder needs to go on.

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
    """Prefill to decode: the blocks granted for this attempt are not needed (it ended, failed or goes elsewhere).

    `lease_id` is empty when the answer to the offer never came: then whatever was granted for the attempt is meant.
    """

    request_id: str
    attempt: int
    lease_id: str = ""


# --- pods -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Load:
    """What a pod has to do, with units. Zero where a role is not held."""

    encode_queued_work: dict[str, int] = field(default_factory=dict)  # by modality, in work units
    encode_running: int = 0
    encode_work_per_second: dict[str, float] = field(default_factory=dict)  # calibrated, by modality
    encode_busy_fraction: float = 0.0
    prefill_waiting_tokens: int = 0
    prefill_blocked_tokens: int = 0  # those of them that wait for media to be encoded
    prefill_waiting_requests: int = 0
    prefill_tokens_per_second: float = 0.0
    decode_running: int = 0
    decode_waiting: int = 0
    decode_max_sequences: int = 0
    kv_blocks_total: int = 0
    kv_blocks_free: int = 0
    kv_blocks_reserved: int = 0
    kv_block_tokens: int = 0
    feature_bytes_used: int = 0
    feature_bytes_budget: int = 0
    itl_seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """How a pod is, twice a second. A pod unheard of for `heartbeat_timeout` is lost; a new incarnation is a new pod.

    `prefix_blocks` and `features` are bounded samples of what the pod has cached, for locality in routing.
    """

    pod: str
    pool: str
    roles: list[Role]
    incarnation: str
    revision: str
    state: PodState
    http_endpoint: str
    sent: float
    load: Load
    max_model_len: int = 0
    prefix_blocks: list[str] = field(default_factory=list)
    features: list[str] = field(default_factory=list)
