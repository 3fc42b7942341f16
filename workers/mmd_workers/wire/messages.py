"""What goes over the wire: frozen dataclasses, packed with msgpack, validated on arrival. Read this file to know the system.

Times are Unix seconds (float) unless a name states otherwise; sizes carry their unit in the name. Tensors never travel in
these messages: they follow as raw bytes (`Frame`), described by `TensorHeader`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from mmd_api.contract.answers import FinishReason, Grammar
from mmd_api.contract.load import PodLoad, WorkerState
from mmd_api.contract.pools import Modality, Role
from mmd_api.contract.sampling import Guidance, LogitRules


@dataclass(frozen=True, slots=True)
class TensorHeader:
    """Name, dtype (torch name without `torch.`) and shape of a tensor whose raw bytes follow, C order."""

    name: str
    dtype: str
    shape: list[int]
    num_bytes: int


@dataclass(frozen=True, slots=True)
class Acknowledged:
    """Reply without content: the message has been received and acted upon."""


# --- media and features ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class FeatureRef:
    """One medium of a request: its identity, where its rows go in the prompt, and what the model must know of its shape.

    `feature_id` is derived once, by the gateway, from (digest, pipeline revision, sampling settings).
    `ranges` are [start, length] pairs of placeholder positions in the prompt's token ids; their lengths add up to
    `num_tokens`. `geometry` holds the model's small shape facts (`image_grid_thw`, `video_second_per_grid`, ...), computed
    from dimensions before decoding; the encoder must arrive at the same.
    `work` is what the encoder will do, in the units of its calibrated throughput (patches for pixels, frames for sound).
    `host_bytes`: host memory of what it is decoded to and of the tower's inputs made of that, without the file's `num_bytes`.
    `size`: to which the model's processor resizes an image, in its own terms; empty: as it is set up.
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
    host_bytes: int = 0
    size: dict[str, int] = field(default_factory=dict)


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
    `tried` counts the deliveries of earlier messages of this job: an encoder that gives it back unbegun publishes it again.
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
    tried: int = 0


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
class EmbeddingCredit:
    """Receiver to sender while chunks flow: everything up to `received_bytes` has arrived; ACK when `complete`."""

    transfer_id: str
    received_bytes: int
    complete: bool = False
    error: str = ""


@dataclass(frozen=True, slots=True)
class EncodeTaken:
    """Reply to an `EncodeJob` that was sent to an encoder that reports the feature, past the queue; it is sent again twice a second until the
    feature arrives. Not `taken`: the encoder neither has the feature nor is making it; ask another one, or queue the job. `making`: it is not
    complete yet; otherwise it is being sent, or waits for its turn.
    """

    job_id: str
    taken: bool
    making: bool = False


@dataclass(frozen=True, slots=True)
class GivenFeature:
    """A feature in the cache of an encoder that drains. `heat_seconds`: how often and recently it was used, see `features/cache.py`."""

    feature_id: str
    modality: Modality
    num_bytes: int
    heat_seconds: float


@dataclass(frozen=True, slots=True)
class FeaturesGiven:
    """An encoder that drains to each that remains, as a request: what it has, hottest first, and for how long it can send it."""

    sender: str
    features: list[GivenFeature]
    seconds: float


@dataclass(frozen=True, slots=True)
class FeaturesWanted:
    """Reply to `FeaturesGiven`, by feature id: what is `held` already, and what is `wanted`, because there is room or only colder features
    would have to go. What the other encoder does not offer in its seconds is forgotten.
    """

    held: list[str]
    wanted: list[str]


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


# --- requests -------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Sampling:
    """How to choose tokens. Temperature 0 is greedy. `top_k` 0, `top_p` 1 and `min_p` 0 mean no limit.

    A seeded draw depends on (seed, index of the output token) alone, so it survives migration. So do the `rules`, which depend on the tokens
    so far. `stop_token_ids` end the answer, as end-of-sequence tokens do unless `ignore_eos`; neither is sampled before `min_tokens` others.
    `grammar`: what the answer must match; each pod follows it from the output tokens. `prompt_logprobs`: the first token brings log probabilities of
    the prompt's tokens, as many of each as `logprobs` has.
    """

    max_tokens: int
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int = 0
    logprobs: int | None = None
    ignore_eos: bool = False
    min_p: float = 0.0
    min_tokens: int = 0
    stop_token_ids: list[int] = field(default_factory=list)
    rules: LogitRules | None = None
    grammar: Grammar | None = None
    prompt_logprobs: bool = False


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


# --- tokens ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """A token id with its natural-log probability."""

    token_id: int
    logprob: float


@dataclass(frozen=True, slots=True)
class PromptLogprob:
    """Of a token of a prompt, after those before it: the natural-log probability that the model gives it, and those of the likeliest ones."""

    logprob: float
    top_logprobs: list[TokenLogprob]


@dataclass(frozen=True, slots=True)
class TokenItem:
    """Token number `index` of a request's output (0 is the first, made by prefill). `prompt_logprobs`: of the prompt's tokens from the second one on,
    with the first token of a request that wants them.
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
    """All tokens one engine step made for one gateway."""

    pod: str
    step: int
    items: list[TokenItem]


@dataclass(frozen=True, slots=True)
class RequestFailed:
    """A worker gives a request up. `retryable`: the gateway may place it again, tokens so far included. `feature_id`: of the medium that all
    encoders failed on, or did not finish within the timeout of its job; empty: the failure is about no medium.
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

    `tokens` is the index after the last token the pod has made. `open`: it still works on the attempt; otherwise the attempt
    has ended there and the pod keeps what the gateway has not confirmed.
    """

    request_id: str
    attempt: int
    tokens: int
    open: bool


@dataclass(frozen=True, slots=True)
class SequenceReport:
    """Worker to gateway, as a request, once a second: every attempt of this gateway that the pod answers for.

    Cancellations, tokens and failures are sent once and may be lost. The report and its reply find the difference, so both sides
    learn the end of every attempt: what the gateway does not want is freed, what it has not received is sent again, and an
    attempt that no pod reports is placed again.
    """

    pod: str
    sequences: list[HeldSequence]


@dataclass(frozen=True, slots=True)
class SequenceReceipt:
    """Reply to a `SequenceReport`, line by line: tokens received without a gap, or -1 for an attempt that is not wanted."""

    received: list[int]


@dataclass(frozen=True, slots=True)
class Phase:
    """One interval of a request's life on one pod, Unix seconds. Names: queue, encode, embedding_transfer, prefill,
    kv_transfer, decode; `detail` carries sizes (tokens, bytes) and identities, and of a transfer `wire_seconds`: how long its bytes travelled,
    by the receiver's clock alone.
    """

    name: str
    start: float
    end: float
    detail: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class PhaseReport:
    """Phases a pod has finished for a request, each reported once; the gateway joins them into the request's timeline."""

    request_id: str
    attempt: int
    pod: str
    phases: list[Phase]


# --- KV -------------------------------------------------------------------------------------------------------


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


# --- answers with an idempotency key -----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class AnswerClaim:
    """Gateway to the gateway that keeps the claims of this name: `gateway` is about to make the answer of that request, under the new `claim`.
    Without one it only looks for the answer, or gives its own claim up, which is `lost`. `name`: the digest of tenant, path and key. `lost`: the
    claim whose gateway does not have the answer after all.
    """

    name: str
    tenant: str
    gateway: str
    claim: str = ""
    lost: str = ""


@dataclass(frozen=True, slots=True)
class AnswerClaimed:
    """Reply to `AnswerClaim`: the gateway whose answer it is now, and under which claim; empty: none has it."""

    holder: str
    claim: str


@dataclass(frozen=True, slots=True)
class AnswerRead:
    """Gateway to the holder of an answer: at most `most_bytes` of it from byte `skip` of block `at` on. The reply is a frame with an
    `AnswerPiece`. `body`: the digest of the request's body. `reader` names the one who reads from one message to the next. `run`: of the
    answer that it has begun to read; empty: none yet.
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
    """Header of the reply to `AnswerRead`; blocks of `lengths` bytes follow. `status` 0: the answer has not begun. `cut`: the last block goes
    on. `end`: of the answer, behind these blocks; `unknown`: this gateway does not have it; `beyond`: it has not come to block `at`.
    """

    status: int
    headers: list[list[str]]
    lengths: list[int]
    cut: bool
    end: Literal["", "complete", "failed", "broken", "unknown", "beyond"]


# --- pods -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """State of a pod, twice a second. A pod without heartbeats for `heartbeat_timeout` is lost; a new incarnation is a new pod.

    `sent` is Unix time by the pod's own clock: it orders the heartbeats of one incarnation, and means nothing compared with another clock.
    `identity` names the code and the weights that it runs, `commit` the commit of the model's hub repository,
    `adapter_commits` those of the adapters from the hub, by name.
    `prefix_number`, `feature_number`: of its newest `CacheReport` of its prefix cache, and of its features; 0: none yet.
    `node`: the same for all pods of one machine; empty: unknown. `takes_prompts`: a decode pod that also computes prompts which need no media.
    `encodes_small_media`: a prefill pod that takes requests with `encode_here`.
    `api_endpoint`: where a gateway serves clients (`ip:port`); empty: it does not now. `requests`: that run there, of `max_requests` that may.
    """

    pod: str
    pool: str
    roles: list[Role]
    incarnation: str
    revision: str
    state: WorkerState
    http_endpoint: str
    sent: float
    load: PodLoad
    max_model_len: int = 0
    identity: str = ""
    commit: str = ""
    adapter_commits: dict[str, str] = field(default_factory=dict)
    prefix_number: int = 0
    feature_number: int = 0
    node: str = ""
    takes_prompts: bool = False
    encodes_small_media: bool = False
    api_endpoint: str = ""
    requests: int = 0
    max_requests: int = 0


@dataclass(frozen=True, slots=True)
class CacheReport:
    """Identities that a pod's cache has gained and lost since its report before: of KV blocks of `block_tokens` tokens, or of features (1).

    `number` counts from 1 in each incarnation, without gaps: who has missed one asks for all with `CacheWanted`. `begins`: what was reported
    before is void once a report is `complete`; from there on, reports are changes again. None names more than 4096 identities.
    """

    pod: str
    incarnation: str
    number: int
    block_tokens: int
    added: list[bytes]
    evicted: list[bytes]
    begins: bool = False
    complete: bool = True


@dataclass(frozen=True, slots=True)
class CacheWanted:
    """Somebody to a pod, as a request: report all that it has cached again, because reports of this incarnation were missed."""

    by: str
    incarnation: str


MESSAGES: tuple[type, ...] = tuple(
    kind for kind in list(globals().values()) if isinstance(kind, type) and kind.__module__ == __name__
)
"""Every message, and the parts of messages, of this module."""
