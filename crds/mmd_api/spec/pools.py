"""Pools, their sizes and their autoscaling."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from mmd_api.base import ApiModel
from mmd_api.rule import Rule
from mmd_api.spec.fields import Labels, Name, keyed_by
from mmd_api.spec.pods import PodTemplate, Resources, Toleration

NVIDIA_GPU = "nvidia.com/gpu"
SCHEDULING_DEADLINE_SECONDS = 900
"""Cluster autoscalers take minutes to add a GPU node; the common ones give up on a node after a quarter of an hour."""


START_DEADLINE_SECONDS = 600
"""Long enough for an image pull, or for weights of some 100 GB from a disk. Larger weights need more."""


def _min_below_max(a: Autoscaling) -> bool:
    return a.min_replicas <= a.max_replicas


def _schedules_below_max(a: Autoscaling) -> bool:
    return all(s.min_replicas <= a.max_replicas for s in a.schedules)


def _claims_unique(p: Pool) -> bool:
    return len({claim.name for claim in p.resource_claims}) == len(p.resource_claims)


def _claims_have_gpus(p: Pool) -> bool:
    return p.gpus > 0 or not p.resource_claims


def _replicas_or_autoscaling(p: Pool) -> bool:
    return p.replicas is None or p.autoscaling is None


AUTOSCALING = (
    Rule(
        field="minReplicas",
        cel="self.minReplicas <= self.maxReplicas",
        holds=_min_below_max,
        problem="minReplicas is greater than maxReplicas",
        remedy="lower minReplicas or raise maxReplicas",
    ),
    Rule(
        field="schedules",
        cel="self.schedules.all(s, s.minReplicas <= self.maxReplicas)",
        holds=_schedules_below_max,
        problem="a schedule's minReplicas is greater than maxReplicas",
        remedy="lower its minReplicas or raise maxReplicas",
    ),
)


POOL = (
    Rule(
        field="replicas",
        cel="!(has(self.replicas) && has(self.autoscaling))",
        holds=_replicas_or_autoscaling,
        problem="replicas and autoscaling are mutually exclusive",
        remedy="keep one of them (autoscaling has minReplicas and maxReplicas)",
    ),
    Rule(
        field="resourceClaims",
        cel=None,
        holds=_claims_unique,
        problem="duplicate claim name",
        remedy="keep one of them",
    ),
    Rule(
        field="resourceClaims",
        cel="self.gpus > 0 || size(self.resourceClaims) == 0",
        holds=_claims_have_gpus,
        problem="claims provide GPUs, but the pool has gpus: 0",
        remedy="set gpus to the number of GPUs that a pod's claims have, or remove resourceClaims",
    ),
)


class Schedule(ApiModel):
    """Recurring window with a higher minimum size. `cron` has five numeric fields and is evaluated in UTC."""

    cron: Annotated[str, Field(max_length=64, pattern=r"^[0-9*/,-]+( [0-9*/,-]+){4}$")]
    """Start of the window: minute, hour, day of month, month, day of week."""
    duration_minutes: Annotated[int, Field(ge=1, le=10_080)]
    """Length of the window."""
    min_replicas: Annotated[int, Field(ge=0, le=1000)]
    """Minimum number of replicas during the window."""


class Autoscaling(ApiModel, rules=AUTOSCALING):
    """Bounds, targets and behaviour of the autoscaler of a pool."""

    min_replicas: Annotated[int, Field(ge=0, le=1000)] = 1
    """Minimum number of replicas. 0 enables scale to zero."""
    max_replicas: Annotated[int, Field(ge=1, le=1000)]
    """Maximum number of replicas."""
    mode: Literal["Active", "Shadow", "External"] = "Active"
    """Active scales the pool by its load; Shadow only reports its decisions; External follows spec.replicas of the pool's MultimodalPool,
    which kubectl scale, an HPA or KEDA may set."""
    target_backlog_milliseconds: Annotated[int, Field(ge=1, le=600_000)] = 1000
    """Target backlog per replica, as time to process it. Applies to encoder and prefill."""
    target_utilization_percent: Annotated[int, Field(ge=1, le=100)] = 75
    """Target utilization: KV blocks in use for decode, busy time for encoder."""
    scale_up_stabilization_seconds: Annotated[int, Field(ge=0, le=3600)] = 0
    """Window over which the lowest recommendation is used when scaling up."""
    scale_down_stabilization_seconds: Annotated[int, Field(ge=0, le=86_400)] = 300
    """Window over which the highest recommendation is used when scaling down."""
    scale_up_cooldown_seconds: Annotated[int, Field(ge=0, le=3600)] = 0
    """Minimum time between two scale-ups."""
    scale_down_cooldown_seconds: Annotated[int, Field(ge=0, le=3600)] = 60
    """Minimum time between two scale-downs."""
    max_scale_up_percent: Annotated[int, Field(ge=1, le=10_000)] = 100
    """Maximum scale-up step, relative to the current size."""
    max_scale_down_percent: Annotated[int, Field(ge=1, le=100)] = 50
    """Maximum scale-down step, relative to the current size."""
    panic_window_seconds: Annotated[int, Field(ge=0, le=600)] = 6
    """Short window for detecting bursts. 0 disables panic mode."""
    panic_threshold_percent: Annotated[int, Field(ge=100, le=10_000)] = 200
    """Load over the panic window, relative to the capacity of the pool, that starts panic mode."""
    scale_to_zero_after_seconds: Annotated[int, Field(ge=1, le=86_400)] = 300
    """How long a pool must be idle before it is scaled to zero."""
    schedules: Annotated[list[Schedule], Field(max_length=16)] = []
    """Recurring windows with a higher minimum size."""


class ResourceClaim(ApiModel):
    """Claim of each pod, made from a template and used by its container."""

    name: Annotated[str, Field(max_length=63, pattern=r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?$")]
    """Name of the claim in the pod."""
    resource_claim_template_name: Name
    """Name of the ResourceClaimTemplate."""


class Pool(ApiModel, rules=POOL):
    """Fields common to all pools. `replicas` and `autoscaling` are mutually exclusive; without either, the pool has one replica."""

    replicas: Annotated[int, Field(ge=0, le=1000)] | None = None
    """Fixed number of replicas."""
    autoscaling: Autoscaling | None = None
    """Autoscaling by load."""
    gpus: Annotated[int, Field(ge=0, le=16)] = 1
    """Number of GPUs per pod. 0 runs the pool on CPU."""
    gpu_resource: Annotated[
        str,
        Field(
            max_length=317,
            pattern=r"^[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?/[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?$",
        ),
    ] = NVIDIA_GPU
    """Name of the resource that `gpus` counts, such as amd.com/gpu or nvidia.com/mig-1g.10gb."""
    resource_claims: Annotated[
        list[ResourceClaim], Field(max_length=8, json_schema_extra=keyed_by("name"))
    ] = []
    """Claims (DRA) that provide the GPUs in place of `gpuResource`. `gpus` states how many they are."""
    resources: Resources = Resources()
    """CPU and memory of each pod."""
    node_selector: Labels = {}
    """Labels that a node must have to run the pods."""
    tolerations: Annotated[list[Toleration], Field(max_length=16)] = []
    """Taints that the pods tolerate."""
    scheduling_deadline_seconds: Annotated[int, Field(ge=0, le=86_400)] = SCHEDULING_DEADLINE_SECONDS
    """How long a pod may wait for a node, such as one that a cluster autoscaler adds, before a problem is reported."""
    start_deadline_seconds: Annotated[int, Field(ge=0, le=86_400)] = START_DEADLINE_SECONDS
    """How long a container may take from its start until the pod is Ready, before it is considered not starting. The pods of a replica that
    spans several wait for one another for as long, and for at least a minute."""
    template: PodTemplate = PodTemplate()
    """Overrides for the pods."""

    @property
    def min_replicas(self) -> int:
        """Minimum number of replicas; without autoscaling, the only number.

        With neither `replicas` nor `autoscaling`, it is one.
        """
        if self.autoscaling is not None:
            return self.autoscaling.min_replicas
        return 1 if self.replicas is None else self.replicas

    @property
    def grace_seconds(self) -> int:
        """Time from the deletion of a pod to SIGKILL."""
        return self.template.termination_grace_period_seconds

    @property
    def drain_seconds(self) -> int:
        """Time from SIGTERM to SIGKILL."""
        return self.grace_seconds


class EncoderBatching(ApiModel):
    """Batching of encode jobs."""

    max_items: Annotated[int, Field(ge=1, le=256)] = 8
    """Maximum number of media items per tower run."""
    max_work: Annotated[int, Field(ge=1, le=2**31)] = 32_768
    """Maximum number of patches or audio frames per tower run. Larger videos and audio are split across runs where the model's tower allows
    it; other larger media items run alone."""
    max_wait_milliseconds: Annotated[int, Field(ge=0, le=1000)] = 2
    """How long a media item waits for others to form a batch."""


class DiskCache(ApiModel):
    """Volume for embeddings that were evicted from memory. Each pod has a directory of its own in it."""

    size_mebibytes: Annotated[int, Field(ge=16, le=16_777_216)]
    """Maximum size of a pod's embeddings on disk."""
    claim_name: Name | None = None
    """Name of the PersistentVolumeClaim to use, which outlives the pods; it must be ReadWriteMany if they run on several nodes. Nothing outside
    its directory `.mmd-features` is touched. Defaults to an emptyDir, which outlives the container alone."""


class EncoderCache(ApiModel):
    """What is below the embedding cache in host memory."""

    disk: DiskCache | None = None
    """Disk for evicted embeddings. Defaults to none."""


class EncoderSpec(Pool):
    """Encoder pool, which runs the vision and audio towers."""

    batching: EncoderBatching = EncoderBatching()
    """Batching of encode jobs."""
    cache_mebibytes: Annotated[int, Field(ge=0, le=1_048_576)] = 512
    """Size of the content-addressed embedding cache, in host memory."""
    cache: EncoderCache = EncoderCache()
    """What is below the embedding cache in host memory."""
    media_mebibytes: Annotated[int, Field(ge=16, le=1_048_576)] = 2048
    """Host memory for media that are being encoded: files, pixels and samples. Larger media are rejected."""
    max_deliveries: Annotated[int, Field(ge=1, le=20)] = 3
    """Maximum number of encoders that may fail on a media item before its request is rejected."""
    job_timeout_seconds: Annotated[int, Field(ge=1, le=3600)] = 120
    """Deadline of an encode job, including the transfer of its result."""


class PrefillSpec(Pool):
    """Prefill pool, which computes the KV of prompts."""

    chunk_tokens: Annotated[int, Field(ge=16, le=131_072)] = 512
    """Maximum number of prompt tokens per engine step."""
    prefix_cache: bool = True
    """Whether requests with a common prompt prefix share KV blocks."""
    feature_budget_mebibytes: Annotated[int, Field(ge=16, le=1_048_576)] = 1024
    """Maximum size of the embeddings that a pod holds. Further embeddings wait in the encoder."""
    local_encode_tokens: Annotated[int, Field(ge=0, le=131_072)] = 0
    """Where there is an encoder pool: a prefill pod encodes the media of a request itself if they have at most this many tokens and that is
    estimated to be sooner. Above 0, prefill pods load the towers too, which run as `encoder` says. 0: encoder pods encode all media."""
    max_waiting_requests: Annotated[int, Field(ge=1, le=65_536)] = 512
    """Maximum number of requests that a pod queues before it rejects new ones."""
    kv_cache_percent: Annotated[int, Field(ge=1, le=95)] | None = None
    """Percentage of the memory left by weights and activations used for the KV pool. Defaults to 90 on GPUs and 50 on CPUs."""
    kv_cache_mebibytes: Annotated[int, Field(ge=16, le=16_777_216)] | None = None
    """Size of the KV pool of a pod. Overrides kvCachePercent."""


class DecodeSpec(Pool):
    """Decode pool, which generates tokens with continuous batching."""

    max_sequences: Annotated[int, Field(ge=1, le=4096)] = 64
    """Maximum number of sequences per engine step."""
    kv_block_tokens: Literal[16, 32, 64, 128, 256] = 16
    """Number of tokens per KV block."""
    local_prefill_tokens: Annotated[int, Field(ge=0, le=131_072)] = 128
    """Where there is a prefill pool: a decode pod computes a prompt itself if at most this many of its tokens are not in the pod's prefix
    cache, none of them of a medium. 0: prefill pods compute all prompts."""
    kv_cache_percent: Annotated[int, Field(ge=1, le=95)] | None = None
    """Percentage of the memory left by weights and activations used for the KV pool. Defaults to 90 on GPUs and 50 on CPUs."""
    kv_cache_mebibytes: Annotated[int, Field(ge=16, le=16_777_216)] | None = None
    """Size of the KV pool of a pod. Overrides kvCachePercent."""
