"""The spec of a MultimodalDeployment: the one source of truth for the CRD, the operator, the workers and the local runner.

Units stand in names, fractions are percent or milli integers, every list and string is bounded (CEL cost and etcd size
depend on it).
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from mmd_api.base import ApiModel

Dtype = Literal["Auto", "Float32", "BFloat16", "Float16"]
ModelSource = Literal["Builtin", "HubId", "AbsolutePath", "RelativePath"]
Name = Annotated[str, Field(max_length=253, pattern=r"^[a-z0-9]([-a-z0-9.]*[a-z0-9])?$")]


class ModelStorage(ApiModel):
    """Where the weights are. Hub: fetched by id. PersistentVolumeClaim: a folder on a claim. Image: baked into the worker image."""

    type: Literal["Hub", "PersistentVolumeClaim", "Image"] = "Image"
    """Hub: fetched by id when a pod starts. PersistentVolumeClaim: mounted at /models. Image: part of the worker image."""
    claim_name: Name | None = None
    """The claim that holds the weights."""
    sub_path: Annotated[str, Field(max_length=1024)] | None = None
    """Folder of the claim that is mounted; the whole claim if not set."""
    token_secret: Name | None = None
    """Secret with the key `token`, for models that need one."""


class ModelSpec(ApiModel):
    """The model: a hub id, an absolute path (on the claim, mounted at /models, or in the image), or `builtin/demo`.

    A path that starts with `./` or `../` is for `mmd up` alone, which takes it from the file's folder.
    """

    id: Annotated[str, Field(max_length=512, pattern=r"^(/|\./|\.\./)?[A-Za-z0-9._][A-Za-z0-9._/-]*$")]
    """Hub id, path or `builtin/demo`."""
    revision: Annotated[str, Field(max_length=128, pattern=r"^[A-Za-z0-9][A-Za-z0-9._/-]*$")] | None = None
    """Commit, tag or branch of a hub id; a commit never changes under a running pipeline."""
    dtype: Dtype = "Auto"
    """Of weights, embeddings and KV. Auto: what the checkpoint says."""
    max_model_len: Annotated[int, Field(ge=16, le=10_000_000)] | None = None
    """Tokens of prompt and answer together; the model's own limit if not set."""
    storage: ModelStorage = ModelStorage()
    """Where the weights are."""

    @property
    def source(self) -> ModelSource:
        """What kind of name `id` is, by how it begins."""
        if self.id.startswith(("./", "../")):
            return "RelativePath"
        if self.id.startswith("/"):
            return "AbsolutePath"
        return "Builtin" if self.id.startswith("builtin/") else "HubId"


class EnvVar(ApiModel):
    """A literal environment variable."""

    name: Annotated[str, Field(min_length=1, max_length=253, pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")]
    """Name; MMD_ is the operator's own prefix."""
    value: Annotated[str, Field(max_length=4096)] = ""
    """Literal value."""


CpuQuantity = Annotated[str, Field(max_length=32, pattern=r"^([0-9]+(\.[0-9]{1,3})?|[0-9]+m)$")]
Quantity = Annotated[str, Field(max_length=32, pattern=r"^[0-9]+(\.[0-9]+)?(m|k|M|G|T|Ki|Mi|Gi|Ti)?$")]
QualifiedName = Annotated[
    str,
    Field(
        max_length=317,
        pattern=r"^([a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?/)?[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?$",
    ),
]
LabelValue = Annotated[str, Field(max_length=63, pattern=r"^([A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?)?$")]
Labels = Annotated[dict[QualifiedName, LabelValue], Field(max_length=32)]
Annotations = Annotated[dict[QualifiedName, Annotated[str, Field(max_length=4096)]], Field(max_length=32)]


class Toleration(ApiModel):
    """A core/v1 toleration."""

    key: QualifiedName | None = None
    """Taint key; all keys, if not set with Exists."""
    operator: Literal["Exists", "Equal"] = "Equal"
    """How value is compared."""
    value: LabelValue | None = None
    """Taint value."""
    effect: Literal["NoSchedule", "PreferNoSchedule", "NoExecute"] | None = None
    """Taint effect; all, if not set."""
    toleration_seconds: Annotated[int, Field(ge=0, le=2**31 - 1)] | None = None
    """How long a NoExecute taint is put up with."""


class Resources(ApiModel):
    """CPU and memory of a pod; GPUs are asked for by the pool's `gpus`."""

    cpu: CpuQuantity | None = None
    """Cores asked for, such as 4 or 500m; also sets the number of compute threads."""
    memory: Quantity | None = None
    """Memory asked for, which is the limit too."""


class PodTemplate(ApiModel):
    """Narrow overrides of a pool's pods."""

    labels: Labels = {}
    """Added to the pods."""
    annotations: Annotations = {}
    """Added to the pods."""
    env: Annotated[
        list[EnvVar],
        Field(
            max_length=64,
            json_schema_extra={"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["name"]},
        ),
    ] = []
    """Added to the container; wins over what the operator would set, except MMD_ variables."""
    service_account_name: Name | None = None
    """Service account; its token is never mounted."""
    priority_class_name: Name | None = None
    """Priority class."""
    runtime_class_name: Name | None = None
    """Runtime class, such as nvidia."""
    termination_grace_period_seconds: Annotated[int, Field(ge=5, le=3600)] = 120
    """How long a pod may take to hand over or finish what it holds."""


class Schedule(ApiModel):
    """At least `minReplicas` during a window that `cron` (five numeric fields, UTC) opens for `durationMinutes`."""

    cron: Annotated[str, Field(max_length=64, pattern=r"^[0-9*/,-]+( [0-9*/,-]+){4}$")]
    """When the window opens: minute, hour, day of month, month, day of week."""
    duration_minutes: Annotated[int, Field(ge=1, le=10_080)]
    """How long it stays open."""
    min_replicas: Annotated[int, Field(ge=0, le=1000)]
    """Smallest size while it is open."""


class Autoscaling(ApiModel):
    """Bounds and behaviour of one pool's scaler; targets are per pool."""

    min_replicas: Annotated[int, Field(ge=0, le=1000)] = 1
    """Smallest size; 0 lets the pool go to zero."""
    max_replicas: Annotated[int, Field(ge=1, le=1000)]
    """Largest size."""
    mode: Literal["Active", "Shadow"] = "Active"
    """Active: decides and acts. Shadow: decides and reports, and acts on nothing."""
    target_backlog_milliseconds: Annotated[int, Field(ge=1, le=600_000)] = 1000
    """Work that may wait for each replica, in the time it takes to do it (encoder, prefill)."""
    target_utilization_percent: Annotated[int, Field(ge=1, le=100)] = 75
    """Share of KV blocks (decode) or of busy time (encoder) to aim at."""
    scale_up_stabilization_seconds: Annotated[int, Field(ge=0, le=3600)] = 0
    """The lowest wish within this window decides how far to grow."""
    scale_down_stabilization_seconds: Annotated[int, Field(ge=0, le=86_400)] = 300
    """The highest wish within this window decides how far to shrink."""
    scale_up_cooldown_seconds: Annotated[int, Field(ge=0, le=3600)] = 0
    """Time between two steps up."""
    scale_down_cooldown_seconds: Annotated[int, Field(ge=0, le=3600)] = 60
    """Time between two steps down."""
    max_scale_up_percent: Annotated[int, Field(ge=1, le=10_000)] = 100
    """Largest step up, of the present size."""
    max_scale_down_percent: Annotated[int, Field(ge=1, le=100)] = 50
    """Largest step down, of the present size."""
    panic_window_seconds: Annotated[int, Field(ge=0, le=600)] = 6
    """Short window that a burst is measured over; 0: none."""
    panic_threshold_percent: Annotated[int, Field(ge=100, le=10_000)] = 200
    """Load of the short window, of what the pool is sized for, that starts a panic."""
    scale_to_zero_after_seconds: Annotated[int, Field(ge=1, le=86_400)] = 300
    """How long a pool must be idle before it goes to zero."""
    schedules: Annotated[list[Schedule], Field(max_length=16)] = []
    """Windows with a larger smallest size."""


class Pool(ApiModel):
    """What encoder, prefill and decode pools share. Give `replicas` or `autoscaling`, not both; neither means one replica."""

    replicas: Annotated[int, Field(ge=0, le=1000)] | None = None
    """Fixed size."""
    autoscaling: Autoscaling | None = None
    """Size by load."""
    gpus: Annotated[int, Field(ge=0, le=16)] = 1
    """GPUs of each pod (nvidia.com/gpu); 0 runs on the CPU."""
    tensor_parallel_size: Annotated[int, Field(ge=1, le=16)] = 1
    """GPUs that one copy of the model is spread over."""
    resources: Resources = Resources()
    """CPU and memory of each pod."""
    node_selector: Labels = {}
    """Labels a node must have."""
    tolerations: Annotated[list[Toleration], Field(max_length=16)] = []
    """Taints the pods put up with."""
    template: PodTemplate = PodTemplate()
    """Narrow overrides of the pods."""


class ImagePolicy(ApiModel):
    """Limits of one image."""

    max_bytes: Annotated[int, Field(ge=1024, le=2**40)] = 20 * 2**20
    """Largest file."""
    max_pixels: Annotated[int, Field(ge=1024, le=2**40)] = 50_000_000
    """Largest width × height, known before a pixel is decoded."""


class VideoPolicy(ApiModel):
    """Limits and sampling of one video. `framesPerSecondMilli`: 2000 is two frames a second."""

    max_bytes: Annotated[int, Field(ge=1024, le=2**40)] = 512 * 2**20
    """Largest file."""
    max_duration_seconds: Annotated[int, Field(ge=1, le=86_400)] = 600
    """Longest clip."""
    max_frames: Annotated[int, Field(ge=1, le=4096)] = 64
    """Most frames that are sampled from one clip."""
    frames_per_second_milli: Annotated[int, Field(ge=1, le=120_000)] = 2000
    """Frames sampled per 1000 seconds of video."""


class AudioPolicy(ApiModel):
    """Limits of one audio clip."""

    max_bytes: Annotated[int, Field(ge=1024, le=2**40)] = 100 * 2**20
    """Largest file."""
    max_duration_seconds: Annotated[int, Field(ge=1, le=86_400)] = 600
    """Longest clip."""


class MediaPolicy(ApiModel):
    """What media a request may carry and where they may come from."""

    max_items_per_request: Annotated[int, Field(ge=0, le=256)] = 16
    """Images, clips and sounds of one request."""
    image: ImagePolicy = ImagePolicy()
    """Limits of one image."""
    video: VideoPolicy = VideoPolicy()
    """Limits and sampling of one video."""
    audio: AudioPolicy = AudioPolicy()
    """Limits of one sound."""
    allow_http: bool = True
    """Whether media may be named by URL; data URLs always may."""
    allowed_hosts: Annotated[list[Name], Field(max_length=64)] = []
    """Hosts that URLs may name; all, if empty."""
    allow_private_addresses: bool = False
    """Whether a URL may lead to a private, loopback or link-local address."""
    fetch_timeout_seconds: Annotated[int, Field(ge=1, le=600)] = 20
    """Deadline of fetching one URL."""
    decode_timeout_seconds: Annotated[int, Field(ge=1, le=600)] = 60
    """Deadline of decoding one medium."""


class EncoderBatching(ApiModel):
    """How encode jobs are joined into one tower run."""

    max_items: Annotated[int, Field(ge=1, le=256)] = 8
    """Most media of one tower run."""
    max_wait_milliseconds: Annotated[int, Field(ge=0, le=1000)] = 2
    """How long a medium waits for others of its shape."""


class EncoderSpec(Pool):
    """The encoder pool: vision and audio towers."""

    batching: EncoderBatching = EncoderBatching()
    """How jobs are joined."""
    cache_mebibytes: Annotated[int, Field(ge=0, le=1_048_576)] = 512
    """Embeddings kept in host memory, by content."""
    failure_policy: Literal["Fail", "DegradeFrames", "DegradeResolution", "TextOnly"] = "Fail"
    """What to do when a medium cannot be encoded. Fail: the request fails with the reason."""
    max_deliveries: Annotated[int, Field(ge=1, le=20)] = 3
    """Encoders that may try one job before it counts as poison."""
    job_timeout_seconds: Annotated[int, Field(ge=1, le=3600)] = 120
    """Deadline of one job, transfer included."""


class PrefillSpec(Pool):
    """The prefill pool: builds the KV of prompts."""

    chunk_tokens: Annotated[int, Field(ge=16, le=131_072)] = 512
    """Prompt tokens of one engine step."""
    prefix_cache: bool = True
    """Whether KV blocks of equal prompt beginnings are shared."""
    feature_budget_mebibytes: Annotated[int, Field(ge=16, le=1_048_576)] = 1024
    """Embeddings a worker may hold; more of them wait with the encoder."""
    max_waiting_requests: Annotated[int, Field(ge=1, le=65_536)] = 512
    """Requests a worker queues before it sends new ones elsewhere."""
    kv_cache_mebibytes: Annotated[int, Field(ge=16, le=16_777_216)] | None = None
    """KV pool of each worker; a share of the free memory if not set."""


class DecodeSpec(Pool):
    """The decode pool: continuous batching over the block-paged KV pool."""

    max_sequences: Annotated[int, Field(ge=1, le=4096)] = 64
    """Sequences of one engine step."""
    kv_block_tokens: Literal[16, 32, 64, 128, 256] = 16
    """Tokens of one KV block."""
    kv_dtype: Literal["Auto", "Float8E4M3", "Float8E5M2", "Int8"] = "Auto"
    """Of KV blocks; Auto: the model's dtype."""
    kv_cache_mebibytes: Annotated[int, Field(ge=16, le=16_777_216)] | None = None
    """KV pool of each worker; a share of the free memory if not set."""


class EmbeddingTransfer(ApiModel):
    """Embeddings over NATS: chunk size and credit window."""

    chunk_kibibytes: Annotated[int, Field(ge=16, le=960)] = 512
    """Bytes of one NATS message; below the server's limit of a message."""
    window_kibibytes: Annotated[int, Field(ge=16, le=65_536)] = 8192
    """Bytes on the way that the receiver has not confirmed."""
    timeout_seconds: Annotated[int, Field(ge=1, le=600)] = 30
    """Deadline of one transfer."""


class KvTransfer(ApiModel):
    """KV from prefill to decode."""

    backend: Literal["Nccl", "Gloo"] = "Nccl"
    """Nccl between GPUs, Gloo between CPUs."""
    wire_precision: Literal["Native", "Float8E4M3", "Int8"] = "Native"
    """Of KV on the way; Native: as it is kept."""
    layer_pipelining: Literal["Chunk", "Layer"] = "Chunk"
    """When KV travels: a Chunk of tokens that passed all layers, or each Layer."""
    lease_seconds: Annotated[int, Field(ge=1, le=3600)] = 60
    """How long granted blocks wait for a transfer that does not finish."""
    chunk_timeout_milliseconds: Annotated[int, Field(ge=50, le=60_000)] = 2000
    """Deadline of one chunk of bytes; a lost peer is noticed within it."""


class TransferSpec(ApiModel):
    """How bytes move between pools."""

    embedding: EmbeddingTransfer = EmbeddingTransfer()
    """From encoder to prefill."""
    kv: KvTransfer = KvTransfer()
    """From prefill to decode."""


class GatewaySpec(ApiModel):
    """The HTTP front door."""

    replicas: Annotated[int, Field(ge=1, le=100)] = 1
    """Gateway pods."""
    resources: Resources = Resources()
    """CPU and memory of each pod."""
    node_selector: Labels = {}
    """Labels a node must have."""
    tolerations: Annotated[list[Toleration], Field(max_length=16)] = []
    """Taints the pods put up with."""
    template: PodTemplate = PodTemplate()
    """Narrow overrides of the pods."""
    media: MediaPolicy = MediaPolicy()
    """What media a request may carry."""
    max_body_mebibytes: Annotated[int, Field(ge=1, le=4096)] = 256
    """Largest request body."""
    max_concurrent_requests: Annotated[int, Field(ge=1, le=100_000)] = 1024
    """Requests in flight at one gateway pod; more are told to come back."""
    request_timeout_seconds: Annotated[int, Field(ge=1, le=86_400)] = 600
    """Deadline of one request, from arrival to the last token."""
    max_retries: Annotated[int, Field(ge=0, le=20)] = 5
    """How often a request is placed again after a worker was lost."""
    web_page: bool = True
    """Whether the gateway serves its own page at /."""


class NatsResources(Resources):
    """CPU and memory of the message bus, without which no pool can work."""

    cpu: CpuQuantity | None = "250m"
    """Cores asked for: every pool stands still while the bus starves."""


class NatsSpec(ApiModel):
    """The message bus: managed by the operator, or an existing one at `url`.

    `credentialsSecret` names a Secret with the keys `username` and `password` (URL-encoded).
    """

    managed: bool = True
    """Whether the operator runs a server of its own."""
    url: Annotated[str, Field(max_length=512, pattern=r"^(nats|tls|ws|wss)://[^/\s]+$")] | None = None
    """An existing server, such as tls://nats.example.com:4222."""
    credentials_secret: Name | None = None
    """Secret with `username` and `password` for it."""
    storage_mebibytes: Annotated[int, Field(ge=64, le=1_048_576)] = 1024
    """JetStream storage of the managed server."""
    resources: NatsResources = NatsResources()
    """CPU and memory of the managed server."""


class SloSpec(ApiModel):
    """What users were promised; the autoscaler holds the pools to it."""

    ttft_milliseconds: Annotated[int, Field(ge=1, le=3_600_000)] | None = None
    """Time to the first token."""
    itl_milliseconds: Annotated[int, Field(ge=1, le=600_000)] | None = None
    """Time between tokens."""
    percentile: Literal[50, 90, 95, 99] = 95
    """Share of requests that keep both."""


class ObservabilitySpec(ApiModel):
    """Logs, traces, heartbeats; metrics are always served."""

    log_level: Literal["Debug", "Info", "Warning", "Error"] = "Info"
    """Least severe line that is written."""
    otlp_endpoint: Annotated[str, Field(max_length=512, pattern=r"^https?://\S+$")] | None = None
    """Collector of traces, OTLP over HTTP (`http://collector:4318`); without it none leave the pods."""
    heartbeat_milliseconds: Annotated[int, Field(ge=100, le=10_000)] = 500
    """How often a pod says how it is."""
    heartbeat_timeout_milliseconds: Annotated[int, Field(ge=300, le=60_000)] = 2500
    """Silence after which a pod counts as lost."""


class ImageSpec(ApiModel):
    """Container images of the pods."""

    worker: Annotated[str, Field(min_length=1, max_length=512)] = "multimodal-worker:latest"
    """Image of gateway and pools."""
    nats: Annotated[str, Field(min_length=1, max_length=512)] = "multimodal-nats:latest"
    """Image of the managed NATS server."""
    pull_policy: Literal["Always", "IfNotPresent", "Never"] = "IfNotPresent"
    """When images are pulled."""
    pull_secrets: Annotated[list[Name], Field(max_length=8)] = []
    """Secrets to pull with."""


class MultimodalDeploymentSpec(ApiModel):
    """A whole multimodal pipeline. A pool that is left out is served by the next one downstream."""

    model: ModelSpec
    """What is served."""
    image: ImageSpec = ImageSpec()
    """Container images."""
    gateway: GatewaySpec = GatewaySpec()
    """The HTTP front door."""
    encoder: EncoderSpec | None = None
    """Vision and audio towers; if left out, prefill (or decode) encodes."""
    prefill: PrefillSpec | None = None
    """Builds the KV of prompts; if left out, decode prefills."""
    decode: DecodeSpec
    """Generates tokens."""
    transfer: TransferSpec = TransferSpec()
    """How bytes move between pools."""
    nats: NatsSpec = NatsSpec()
    """The message bus."""
    slo: SloSpec = SloSpec()
    """What users were promised."""
    gpu_budget: Annotated[int, Field(ge=0, le=100_000)] | None = None
    """Most GPUs that all pools together may use."""
    observability: ObservabilitySpec = ObservabilitySpec()
    """Logs, traces, heartbeats."""
    paused: bool = False
    """The operator changes nothing while this is true."""
