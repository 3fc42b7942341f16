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
    claim_name: Name | None = None
    sub_path: Annotated[str, Field(max_length=1024)] | None = None
    token_secret: Name | None = None


class ModelSpec(ApiModel):
    """The model: a hub id, an absolute path (on the claim, mounted at /models, or in the image), or `builtin/demo`.

    A path that starts with `./` or `../` is for `mmd up` alone, which takes it from the file's folder.
    """

    id: Annotated[str, Field(max_length=512, pattern=r"^(/|\./|\.\./)?[A-Za-z0-9._][A-Za-z0-9._/-]*$")]
    revision: Annotated[str, Field(max_length=128, pattern=r"^[A-Za-z0-9][A-Za-z0-9._/-]*$")] | None = None
    dtype: Dtype = "Auto"
    max_model_len: Annotated[int, Field(ge=16, le=10_000_000)] | None = None
    storage: ModelStorage = ModelStorage()

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
    value: Annotated[str, Field(max_length=4096)] = ""


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
    operator: Literal["Exists", "Equal"] = "Equal"
    value: LabelValue | None = None
    effect: Literal["NoSchedule", "PreferNoSchedule", "NoExecute"] | None = None
    toleration_seconds: Annotated[int, Field(ge=0, le=2**31 - 1)] | None = None


class Resources(ApiModel):
    """CPU and memory of a pod; GPUs are asked for by the pool's `gpus`."""

    cpu: CpuQuantity | None = None
    memory: Quantity | None = None


class PodTemplate(ApiModel):
    """Narrow overrides of a pool's pods."""

    labels: Labels = {}
    annotations: Annotations = {}
    env: Annotated[
        list[EnvVar],
        Field(
            max_length=64,
            json_schema_extra={"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["name"]},
        ),
    ] = []
    service_account_name: Name | None = None
    priority_class_name: Name | None = None
    runtime_class_name: Name | None = None
    termination_grace_period_seconds: Annotated[int, Field(ge=5, le=3600)] = 120


class Schedule(ApiModel):
    """At least `minReplicas` during a window that `cron` (five numeric fields, UTC) opens for `durationMinutes`."""

    cron: Annotated[str, Field(max_length=64, pattern=r"^[0-9*/,-]+( [0-9*/,-]+){4}$")]
    duration_minutes: Annotated[int, Field(ge=1, le=10_080)]
    min_replicas: Annotated[int, Field(ge=0, le=1000)]


class Autoscaling(ApiModel):
    """Bounds and behaviour of one pool's scaler; targets are per pool."""

    min_replicas: Annotated[int, Field(ge=0, le=1000)] = 1
    max_replicas: Annotated[int, Field(ge=1, le=1000)]
    mode: Literal["Active", "Shadow"] = "Active"
    target_backlog_milliseconds: Annotated[int, Field(ge=1, le=600_000)] = 1000
    target_utilization_percent: Annotated[int, Field(ge=1, le=100)] = 75
    scale_up_stabilization_seconds: Annotated[int, Field(ge=0, le=3600)] = 0
    scale_down_stabilization_seconds: Annotated[int, Field(ge=0, le=86_400)] = 300
    scale_up_cooldown_seconds: Annotated[int, Field(ge=0, le=3600)] = 0
    scale_down_cooldown_seconds: Annotated[int, Field(ge=0, le=3600)] = 60
    max_scale_up_percent: Annotated[int, Field(ge=1, le=10_000)] = 100
    max_scale_down_percent: Annotated[int, Field(ge=1, le=100)] = 50
    panic_window_seconds: Annotated[int, Field(ge=0, le=600)] = 6
    panic_threshold_percent: Annotated[int, Field(ge=100, le=10_000)] = 200
    scale_to_zero_after_seconds: Annotated[int, Field(ge=1, le=86_400)] = 300
    schedules: Annotated[list[Schedule], Field(max_length=16)] = []


class Pool(ApiModel):
    """What encoder, prefill and decode pools share. Give `replicas` or `autoscaling`, not both; neither means one replica."""

    replicas: Annotated[int, Field(ge=0, le=1000)] | None = None
    autoscaling: Autoscaling | None = None
    gpus: Annotated[int, Field(ge=0, le=16)] = 1
    tensor_parallel_size: Annotated[int, Field(ge=1, le=16)] = 1
    resources: Resources = Resources()
    node_selector: Labels = {}
    tolerations: Annotated[list[Toleration], Field(max_length=16)] = []
    template: PodTemplate = PodTemplate()


class ImagePolicy(ApiModel):
    """Limits of one image."""

    max_bytes: Annotated[int, Field(ge=1024, le=2**40)] = 20 * 2**20
    max_pixels: Annotated[int, Field(ge=1024, le=2**40)] = 50_000_000


class VideoPolicy(ApiModel):
    """Limits and sampling of one video. `framesPerSecondMilli`: 2000 is two frames a second."""

    max_bytes: Annotated[int, Field(ge=1024, le=2**40)] = 512 * 2**20
    max_duration_seconds: Annotated[int, Field(ge=1, le=86_400)] = 600
    max_frames: Annotated[int, Field(ge=1, le=4096)] = 64
    frames_per_second_milli: Annotated[int, Field(ge=1, le=120_000)] = 2000


class AudioPolicy(ApiModel):
    """Limits of one audio clip."""

    max_bytes: Annotated[int, Field(ge=1024, le=2**40)] = 100 * 2**20
    max_duration_seconds: Annotated[int, Field(ge=1, le=86_400)] = 600


class MediaPolicy(ApiModel):
    """What media a request may carry and where they may come from."""

    max_items_per_request: Annotated[int, Field(ge=0, le=256)] = 16
    image: ImagePolicy = ImagePolicy()
    video: VideoPolicy = VideoPolicy()
    audio: AudioPolicy = AudioPolicy()
    allow_http: bool = True
    allowed_hosts: Annotated[list[Name], Field(max_length=64)] = []
    allow_private_addresses: bool = False
    fetch_timeout_seconds: Annotated[int, Field(ge=1, le=600)] = 20
    decode_timeout_seconds: Annotated[int, Field(ge=1, le=600)] = 60


class EncoderBatching(ApiModel):
    """How encode jobs are joined into one tower run."""

    max_items: Annotated[int, Field(ge=1, le=256)] = 8
    max_wait_milliseconds: Annotated[int, Field(ge=0, le=1000)] = 2


class EncoderSpec(Pool):
    """The encoder pool: vision and audio towers."""

    batching: EncoderBatching = EncoderBatching()
    cache_mebibytes: Annotated[int, Field(ge=0, le=1_048_576)] = 512
    failure_policy: Literal["Fail", "DegradeFrames", "DegradeResolution", "TextOnly"] = "Fail"
    max_deliveries: Annotated[int, Field(ge=1, le=20)] = 3
    job_timeout_seconds: Annotated[int, Field(ge=1, le=3600)] = 120


class PrefillSpec(Pool):
    """The prefill pool: builds the KV of prompts."""

    chunk_tokens: Annotated[int, Field(ge=16, le=131_072)] = 512
    prefix_cache: bool = True
    feature_budget_mebibytes: Annotated[int, Field(ge=16, le=1_048_576)] = 1024
    max_waiting_requests: Annotated[int, Field(ge=1, le=65_536)] = 512
    kv_cache_mebibytes: Annotated[int, Field(ge=16, le=16_777_216)] | None = None


class DecodeSpec(Pool):
    """The decode pool: continuous batching over the block-paged KV pool."""

    max_sequences: Annotated[int, Field(ge=1, le=4096)] = 64
    kv_block_tokens: Literal[16, 32, 64, 128, 256] = 16
    kv_dtype: Literal["Auto", "Float8E4M3", "Float8E5M2", "Int8"] = "Auto"
    kv_cache_mebibytes: Annotated[int, Field(ge=16, le=16_777_216)] | None = None


class EmbeddingTransfer(ApiModel):
    """Embeddings over NATS: chunk size and credit window."""

    chunk_kibibytes: Annotated[int, Field(ge=16, le=960)] = 512
    window_kibibytes: Annotated[int, Field(ge=16, le=65_536)] = 8192
    timeout_seconds: Annotated[int, Field(ge=1, le=600)] = 30


class KvTransfer(ApiModel):
    """KV from prefill to decode."""

    backend: Literal["Nccl", "Gloo"] = "Nccl"
    wire_precision: Literal["Native", "Float8E4M3", "Int8"] = "Native"
    layer_pipelining: Literal["Chunk", "Layer"] = "Chunk"
    lease_seconds: Annotated[int, Field(ge=1, le=3600)] = 60
    chunk_timeout_milliseconds: Annotated[int, Field(ge=50, le=60_000)] = 2000


class TransferSpec(ApiModel):
    """How bytes move between pools."""

    embedding: EmbeddingTransfer = EmbeddingTransfer()
    kv: KvTransfer = KvTransfer()


class GatewaySpec(ApiModel):
    """The HTTP front door."""

    replicas: Annotated[int, Field(ge=1, le=100)] = 1
    resources: Resources = Resources()
    node_selector: Labels = {}
    tolerations: Annotated[list[Toleration], Field(max_length=16)] = []
    template: PodTemplate = PodTemplate()
    media: MediaPolicy = MediaPolicy()
    max_body_mebibytes: Annotated[int, Field(ge=1, le=4096)] = 256
    max_concurrent_requests: Annotated[int, Field(ge=1, le=100_000)] = 1024
    request_timeout_seconds: Annotated[int, Field(ge=1, le=86_400)] = 600
    max_retries: Annotated[int, Field(ge=0, le=20)] = 5
    web_page: bool = True


class NatsSpec(ApiModel):
    """The message bus: managed by the operator, or an existing one at `url`.

    `credentialsSecret` names a Secret with the keys `username` and `password` (URL-encoded).
    """

    managed: bool = True
    url: Annotated[str, Field(max_length=512, pattern=r"^(nats|tls|ws|wss)://[^/\s]+$")] | None = None
    credentials_secret: Name | None = None
    storage_mebibytes: Annotated[int, Field(ge=64, le=1_048_576)] = 1024
    resources: Resources = Resources()


class SloSpec(ApiModel):
    """What users were promised; the autoscaler holds the pools to it."""

    ttft_milliseconds: Annotated[int, Field(ge=1, le=3_600_000)] | None = None
    itl_milliseconds: Annotated[int, Field(ge=1, le=600_000)] | None = None
    percentile: Literal[50, 90, 95, 99] = 95


class ObservabilitySpec(ApiModel):
    """Metrics, logs, traces."""

    log_level: Literal["Debug", "Info", "Warning", "Error"] = "Info"
    metrics: bool = True
    otlp_endpoint: Annotated[str, Field(max_length=512, pattern=r"^https?://\S+$")] | None = None
    heartbeat_milliseconds: Annotated[int, Field(ge=100, le=10_000)] = 500
    heartbeat_timeout_milliseconds: Annotated[int, Field(ge=300, le=60_000)] = 2500


class ImageSpec(ApiModel):
    """Container images of the pods."""

    worker: Annotated[str, Field(min_length=1, max_length=512)] = "multimodal-worker:latest"
    nats: Annotated[str, Field(min_length=1, max_length=512)] = "multimodal-nats:latest"
    pull_policy: Literal["Always", "IfNotPresent", "Never"] = "IfNotPresent"
    pull_secrets: Annotated[list[Name], Field(max_length=8)] = []


class MultimodalDeploymentSpec(ApiModel):
    """A whole multimodal pipeline. A pool that is left out is served by the next one downstream."""

    model: ModelSpec
    image: ImageSpec = ImageSpec()
    gateway: GatewaySpec = GatewaySpec()
    encoder: EncoderSpec | None = None
    prefill: PrefillSpec | None = None
    decode: DecodeSpec
    transfer: TransferSpec = TransferSpec()
    nats: NatsSpec = NatsSpec()
    slo: SloSpec = SloSpec()
    gpu_budget: Annotated[int, Field(ge=0, le=100_000)] | None = None
    observability: ObservabilitySpec = ObservabilitySpec()
    paused: bool = False
