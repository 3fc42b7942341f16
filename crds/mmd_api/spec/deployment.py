"""The spec of a deployment, and the rules between its parts."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Annotated, Literal

from pydantic import Field

from mmd_api.base import ApiModel
from mmd_api.contract.pools import POOL_NAMES, PoolName
from mmd_api.rule import Rule
from mmd_api.spec.engine import EngineSpec, VllmPoolSpec
from mmd_api.spec.gateway import FILE_OVERHEAD_DIVISOR, FILES_PER_MEBIBYTE, GatewaySpec
from mmd_api.spec.model import MODELS_FOLDER, NO_HUB_ID, PATH, ModelSpec, begins_with
from mmd_api.spec.nats import NatsSpec
from mmd_api.spec.network import NetworkSpec
from mmd_api.spec.observability import ObservabilitySpec, SloSpec
from mmd_api.spec.pods import ImageSpec
from mmd_api.spec.pools import DecodeSpec, EncoderSpec, Pool, PrefillSpec
from mmd_api.spec.rollout import RolloutSpec
from mmd_api.spec.transfer import KvBackend, TransferSpec

LanguagePool = Literal["prefill", "decode"]

QUEUES_MEBIBYTES = 144
"""NATS storage for the encode queues of two revisions (64 MiB each), and for the tokens of tenants."""
_CEL_STORED = (
    f"(self.gateway.files.maxMebibytes + (self.gateway.files.maxMebibytes + {FILE_OVERHEAD_DIVISOR - 1}) / {FILE_OVERHEAD_DIVISOR}"
    f" + self.gateway.files.maxFiles / {FILES_PER_MEBIBYTE} + 1)"
)

_CEL_MINIMUM = "(has({p}.autoscaling) ? {p}.autoscaling.minReplicas : has({p}.replicas) ? {p}.replicas : 1)"


_CEL_REPLICA_GPUS = (
    "({p}.gpus == 0 || self.engine.type == 'Native' || !has({e}) ? {p}.gpus"
    " : {e}.tensorParallelSize * {e}.pipelineParallelSize)"
)
"""GPUs of a replica: those of its pod, or one for each rank."""


_CEL_WINDOW = (
    "(!has({p}.autoscaling) || {p}.autoscaling.panicWindowSeconds == 0"
    " || {p}.autoscaling.panicWindowSeconds * 1000 >= 2 * self.observability.heartbeatMilliseconds)"
)


def _each_pool(template: str, absent: str, joiner: str) -> str:
    """One CEL expression over all pools. `absent` stands for an optional pool that is left out."""
    parts = [f"(has(self.{p}) ? {template.format(p=f'self.{p}')} : {absent})" for p in ("encoder", "prefill")]
    return joiner.join([*parts, template.format(p="self.decode")])


def _cel_gpus() -> str:
    """CEL for the least number of GPUs that all pools need."""
    encoder = f"(has(self.encoder) ? {_CEL_MINIMUM} * {{p}}.gpus : 0)".format(p="self.encoder")
    language = [
        f"{_CEL_MINIMUM} * {_CEL_REPLICA_GPUS}".format(p=f"self.{name}", e=f"self.engine.{name}")
        for name in ("prefill", "decode")
    ]
    return f"{encoder} + (has(self.prefill) ? {language[0]} : 0) + {language[1]}"


def _pools(s: MultimodalDeploymentSpec) -> list[Pool]:
    return [p for p in (s.encoder, s.prefill, s.decode) if p is not None]


def _zero_from_upstream(s: MultimodalDeploymentSpec) -> bool:
    return s.decode.min_replicas > 0 or all(p.min_replicas == 0 for p in _pools(s))


def _budget_covers_minima(s: MultimodalDeploymentSpec) -> bool:
    least = sum(
        pool.min_replicas * s.replica_gpus(name)
        for name in POOL_NAMES
        if (pool := getattr(s, name)) is not None
    )
    return s.gpu_budget is None or least <= s.gpu_budget


def _kv_pools_have_gpus(s: MultimodalDeploymentSpec) -> bool:
    return s.prefill is not None and min(s.prefill.gpus, s.decode.gpus) >= 1


def _nccl_has_gpus(s: MultimodalDeploymentSpec) -> bool:
    return s.prefill is None or s.transfer.kv.backend != "Nccl" or _kv_pools_have_gpus(s)


def _groups_fit(s: MultimodalDeploymentSpec) -> bool:
    return s.model.pooled_video_frames <= s.gateway.media.video.max_frames


def _engine_packs_kv(s: MultimodalDeploymentSpec) -> bool:
    return s.engine.type == "Native" or s.transfer.kv.wire_format == "Model"


def _pool_packs_kv_alone(s: MultimodalDeploymentSpec) -> bool:
    return s.engine.kv_dtype == "Model" or s.transfer.kv.wire_format in ("Model", s.engine.kv_dtype)


def _job_outlives_transfer(s: MultimodalDeploymentSpec) -> bool:
    return s.encoder is None or s.encoder.job_timeout_seconds >= s.transfer.embedding.timeout_seconds


def _job_outlives_decoding(s: MultimodalDeploymentSpec) -> bool:
    return s.encoder is None or s.encoder.job_timeout_seconds >= s.gateway.media.decode_timeout_seconds


def _files_fit_the_store(s: MultimodalDeploymentSpec) -> bool:
    files = s.gateway.files
    room = s.nats.storage_mebibytes - QUEUES_MEBIBYTES
    return files is None or not s.nats.managed or files.stored_mebibytes <= room


def _uploads_have_encoders(s: MultimodalDeploymentSpec) -> bool:
    files = s.gateway.files
    return files is None or not files.encode_on_upload or s.encoder is not None


def _windows_see_samples(s: MultimodalDeploymentSpec) -> bool:
    heartbeat = s.observability.heartbeat_milliseconds
    windows = [p.autoscaling.panic_window_seconds for p in _pools(s) if p.autoscaling is not None]
    return all(w == 0 or w * 1000 >= 2 * heartbeat for w in windows)


def _vllm(name: LanguagePool, s: MultimodalDeploymentSpec) -> VllmPoolSpec:
    """Settings of vLLM in the pods of a pool, or its defaults if the spec has none."""
    settings: VllmPoolSpec | None = getattr(s.engine, name)
    return settings or VllmPoolSpec()


def _prefill_settings_have_a_pool(s: MultimodalDeploymentSpec) -> bool:
    return s.engine.prefill is None or s.prefill is not None


def _ranks_have_gpus(name: LanguagePool, s: MultimodalDeploymentSpec) -> bool:
    pool: Pool | None = getattr(s, name)
    if s.engine.type == "Native" or pool is None or pool.gpus == 0:
        return True
    return _vllm(name, s).ranks % pool.gpus == 0


def _one_gpu(name: PoolName, s: MultimodalDeploymentSpec) -> bool:
    pool: Pool | None = getattr(s, name)
    return pool is None or pool.gpus <= 1 or (name != "encoder" and s.engine.type == "VLLM")


def _steps_hold_sequences(name: LanguagePool, s: MultimodalDeploymentSpec) -> bool:
    tokens = _vllm(name, s).max_num_batched_tokens
    return tokens is None or tokens >= s.decode.max_sequences


def _memory_has_gpus(name: LanguagePool, s: MultimodalDeploymentSpec) -> bool:
    percent, pool = _vllm(name, s).gpu_memory_utilization_percent, getattr(s, name)
    return percent is None or pool is None or pool.gpus > 0


def _share_is_vllms(name: LanguagePool, s: MultimodalDeploymentSpec) -> bool:
    pool: DecodeSpec | PrefillSpec | None = getattr(s, name)
    return s.engine.type == "Native" or pool is None or pool.gpus == 0 or pool.kv_cache_percent is None


def _both_have_same(setting: Callable[[VllmPoolSpec], object], s: MultimodalDeploymentSpec) -> bool:
    kv_moves = s.engine.type == "VLLM" and s.prefill is not None
    return not kv_moves or setting(_vllm("prefill", s)) == setting(_vllm("decode", s))


def _prefill_without_drafts(s: MultimodalDeploymentSpec) -> bool:
    return s.engine.prefill is None or s.engine.prefill.speculative is None


def _drafts_without_kv(s: MultimodalDeploymentSpec) -> bool:
    drafts = _vllm("decode", s).speculative
    return s.prefill is None or drafts is None or drafts.method == "ngram"


def _vllm_rules(pool: LanguagePool) -> tuple[Rule, ...]:
    """Rules between a pool and its settings of vLLM."""
    settings = f"self.engine.{pool}"
    unset = f"!has({settings})"
    return (
        Rule(
            field=f"engine.{pool}.tensorParallelSize",
            cel=f"self.engine.type == 'Native' || !has(self.{pool}) || self.{pool}.gpus == 0"
            f" || ({unset} ? 1 : {settings}.tensorParallelSize * {settings}.pipelineParallelSize) % self.{pool}.gpus == 0",
            holds=partial(_ranks_have_gpus, pool),
            problem=f"tensorParallelSize times pipelineParallelSize, the GPUs of a replica, is not a multiple of {pool}.gpus, the GPUs of a pod",
            remedy=f"set {pool}.gpus to a divisor of their product, or to their product if it fits on a node",
        ),
        Rule(
            field=f"engine.{pool}.maxNumBatchedTokens",
            cel=f"{unset} || !has({settings}.maxNumBatchedTokens) || {settings}.maxNumBatchedTokens >= self.decode.maxSequences",
            holds=partial(_steps_hold_sequences, pool),
            problem="maxNumBatchedTokens is less than decode.maxSequences, each of which takes a token of a step",
            remedy="raise maxNumBatchedTokens or lower decode.maxSequences",
        ),
        Rule(
            field=f"engine.{pool}.gpuMemoryUtilizationPercent",
            cel=f"{unset} || !has({settings}.gpuMemoryUtilizationPercent) || !has(self.{pool})"
            f" || self.{pool}.gpus > 0",
            holds=partial(_memory_has_gpus, pool),
            problem=f"gpuMemoryUtilizationPercent is the share of a GPU, but {pool} has gpus: 0",
            remedy=f"remove gpuMemoryUtilizationPercent, or set {pool}.gpus",
        ),
        Rule(
            field=f"{pool}.kvCachePercent",
            cel=f"self.engine.type == 'Native' || !has(self.{pool}) || self.{pool}.gpus == 0 || !has(self.{pool}.kvCachePercent)",
            holds=partial(_share_is_vllms, pool),
            problem="vLLM gives KV what the other parts leave of its share of a GPU, not a share of what they leave",
            remedy=f"set engine.{pool}.gpuMemoryUtilizationPercent or {pool}.kvCacheMebibytes instead",
        ),
    )


def _native_gpus(pool: LanguagePool) -> Rule:
    return Rule(
        field=f"{pool}.gpus",
        cel=f"self.engine.type == 'VLLM' || !has(self.{pool}) || self.{pool}.gpus <= 1",
        holds=partial(_one_gpu, pool),
        problem="the engine is Native, which uses one GPU of a pod",
        remedy=f"set {pool}.gpus: 1 and more replicas, or engine.type: VLLM with engine.{pool}.tensorParallelSize",
    )


def _adapters_from_the_hub(s: MultimodalDeploymentSpec) -> bool:
    return s.model.storage.type != "Hub" or all(a.source == "HubId" for a in s.engine.adapters)


def _no_adapters_of_a_url(s: MultimodalDeploymentSpec) -> bool:
    return s.model.storage.type != "Url" or not s.engine.adapters


def _adapters_on_claim(s: MultimodalDeploymentSpec) -> bool:
    return s.model.storage.type != "PersistentVolumeClaim" or all(
        a.id.startswith(f"{MODELS_FOLDER}/") for a in s.engine.adapters
    )


def _adapters_beside_model(s: MultimodalDeploymentSpec) -> bool:
    return not {a.name for a in s.engine.adapters} & set(s.model.names)


ADAPTERS = (
    Rule(
        field="engine.adapters",
        cel=f"self.model.storage.type != 'Hub' || self.engine.adapters.all(a, !({begins_with('a.id', NO_HUB_ID)}))",
        holds=_adapters_from_the_hub,
        problem="adapters are where model.storage has the model, and a path cannot be downloaded from the hub",
        remedy="set id to a hub id such as org/adapter, or model.storage.type: Image or PersistentVolumeClaim",
    ),
    Rule(
        field="engine.adapters",
        cel="self.model.storage.type != 'Url' || size(self.engine.adapters) == 0",
        holds=_no_adapters_of_a_url,
        problem="adapters are where model.storage has the model, and a URL has the files of one model",
        remedy="remove the adapters, or set model.storage.type: Hub or PersistentVolumeClaim",
    ),
    Rule(
        field="engine.adapters",
        cel="self.model.storage.type != 'PersistentVolumeClaim'"
        f" || self.engine.adapters.all(a, a.id.startsWith('{MODELS_FOLDER}/'))",
        holds=_adapters_on_claim,
        problem=f"adapters are where model.storage has the model, and one is not under {MODELS_FOLDER}, where the claim is mounted",
        remedy=f"set id: {MODELS_FOLDER}/<folder on the claim>",
    ),
    Rule(
        field="engine.adapters",
        cel="self.engine.adapters.all(a, size(self.model.servedName) > 0 ? !(a.name in self.model.servedName)"
        f" : ({begins_with('self.model.id', PATH)}) ? a.name.contains('/') || !(self.model.id.endsWith('/' + a.name) || self.model.id.endsWith('/' + a.name + '/'))"
        " : a.name != self.model.id)",
        holds=_adapters_beside_model,
        problem="an adapter has a name of the model, under which clients request the model without an adapter",
        remedy="rename the adapter, or set model.servedName to other names",
    ),
)


VLLM = (
    Rule(
        field="engine.prefill",
        cel="!has(self.engine.prefill) || has(self.prefill)",
        holds=_prefill_settings_have_a_pool,
        problem="engine.prefill is for prefill pods, and there is no prefill pool",
        remedy="use engine.decode, whose pods prefill, or add a prefill pool (spec.prefill)",
    ),
    Rule(
        field="engine.decode.quantization",
        cel="!has(self.prefill) || self.engine.type == 'Native' || ("
        "(has(self.engine.prefill) && has(self.engine.prefill.quantization) ? self.engine.prefill.quantization : '')"
        " == (has(self.engine.decode) && has(self.engine.decode.quantization) ? self.engine.decode.quantization : ''))",
        holds=partial(_both_have_same, lambda v: v.quantization),
        problem="prefill and decode exchange KV, and different quantization gives it different meanings",
        remedy="set the same quantization in engine.prefill and engine.decode, or omit spec.prefill",
    ),
    Rule(
        field="engine.decode.kvCacheDtype",
        cel="!has(self.prefill) || self.engine.type == 'Native' ||"
        " (has(self.engine.prefill) ? self.engine.prefill.kvCacheDtype : 'Auto')"
        " == (has(self.engine.decode) ? self.engine.decode.kvCacheDtype : 'Auto')",
        holds=partial(_both_have_same, lambda v: v.kv_cache_dtype),
        problem="prefill and decode exchange KV, which has one data type",
        remedy="set the same kvCacheDtype in engine.prefill and engine.decode, or omit spec.prefill",
    ),
    Rule(
        field="engine.prefill.speculative",
        cel="!has(self.engine.prefill) || !has(self.engine.prefill.speculative)",
        holds=_prefill_without_drafts,
        problem="a prefill pod makes one token of each answer, so drafts would save nothing",
        remedy="move speculative to engine.decode",
    ),
    Rule(
        field="engine.decode.speculative",
        cel="!has(self.prefill) || !has(self.engine.decode) || !has(self.engine.decode.speculative)"
        " || self.engine.decode.speculative.method == 'ngram'",
        holds=_drafts_without_kv,
        problem="a model that drafts needs the prompt, and prefill pods send its KV in the served model alone",
        remedy="set method: ngram, or omit spec.prefill",
    ),
    *_vllm_rules("prefill"),
    *_vllm_rules("decode"),
)


GPUS = (
    Rule(
        field="encoder.gpus",
        cel="!has(self.encoder) || self.encoder.gpus <= 1",
        holds=partial(_one_gpu, "encoder"),
        problem="an encoder uses one GPU of a pod",
        remedy="set encoder.gpus: 1 and more replicas",
    ),
    _native_gpus("prefill"),
    _native_gpus("decode"),
)


SPEC = (
    Rule(
        field="decode",
        cel=f"{_CEL_MINIMUM.format(p='self.decode')} > 0"
        f" || ({_each_pool(_CEL_MINIMUM + ' == 0', 'true', ' && ')})",
        holds=_zero_from_upstream,
        problem="decode may scale to zero, but a pool upstream of it may not",
        remedy="set minReplicas: 0 for encoder and prefill as well, or at least 1 for decode",
    ),
    Rule(
        field="gpuBudget",
        cel=f"!has(self.gpuBudget) || {_cel_gpus()} <= self.gpuBudget",
        holds=_budget_covers_minima,
        problem="the minimum sizes of the pools need more GPUs than gpuBudget",
        remedy="raise gpuBudget, or lower replicas, minReplicas or gpus",
    ),
    Rule(
        field="transfer.kv.backend",
        cel="!has(self.prefill) || self.transfer.kv.backend != 'Nccl'"
        " || (self.prefill.gpus >= 1 && self.decode.gpus >= 1)",
        holds=_nccl_has_gpus,
        problem="Nccl transfers KV between GPUs, but prefill or decode has gpus: 0",
        remedy="leave transfer.kv.backend out, or set gpus to at least 1 for both",
    ),
    Rule(
        field="model.pooledVideoFrames",
        cel="self.model.pooledVideoFrames <= self.gateway.media.video.maxFrames",
        holds=_groups_fit,
        problem="more frames than a video may have are averaged to one",
        remedy="lower it, or raise gateway.media.video.maxFrames",
    ),
    Rule(
        field="transfer.kv.wireFormat",
        cel="self.engine.type == 'Native' || self.transfer.kv.wireFormat == 'Model'",
        holds=_engine_packs_kv,
        problem="only the native engine converts KV while it travels; vLLM has it in the format in which it travels",
        remedy="remove transfer.kv.wireFormat, and set kvCacheDtype: Fp8E4M3 in engine.prefill and engine.decode",
    ),
    Rule(
        field="transfer.kv.wireFormat",
        cel="self.engine.kvDtype == 'Model' || self.transfer.kv.wireFormat in ['Model', self.engine.kvDtype]",
        holds=_pool_packs_kv_alone,
        problem="KV that the pools have in the 8 bits of engine.kvDtype travels as it is, in no other format",
        remedy="remove transfer.kv.wireFormat, or engine.kvDtype",
    ),
    Rule(
        field="encoder.jobTimeoutSeconds",
        cel="!has(self.encoder) || self.encoder.jobTimeoutSeconds >= self.transfer.embedding.timeoutSeconds",
        holds=_job_outlives_transfer,
        problem="an encode job includes its transfer and would time out before it",
        remedy="raise jobTimeoutSeconds or lower transfer.embedding.timeoutSeconds",
    ),
    Rule(
        field="encoder.jobTimeoutSeconds",
        cel="!has(self.encoder) || self.encoder.jobTimeoutSeconds >= self.gateway.media.decodeTimeoutSeconds",
        holds=_job_outlives_decoding,
        problem="an encode job includes decoding the medium and would time out before it",
        remedy="raise jobTimeoutSeconds or lower gateway.media.decodeTimeoutSeconds",
    ),
    Rule(
        field="gateway.files.encodeOnUpload",
        cel="!has(self.gateway.files) || !self.gateway.files.encodeOnUpload || has(self.encoder)",
        holds=_uploads_have_encoders,
        problem="files are encoded on upload by encoder pods, and there is no encoder pool",
        remedy="add an encoder pool (spec.encoder), or remove encodeOnUpload",
    ),
    Rule(
        field="nats.storageMebibytes",
        cel=f"!has(self.gateway.files) || !self.nats.managed || {_CEL_STORED} <= self.nats.storageMebibytes - {QUEUES_MEBIBYTES}",
        holds=_files_fit_the_store,
        problem=f"the files of gateway.files, a {FILE_OVERHEAD_DIVISOR}nd more for what is stored with them, and {QUEUES_MEBIBYTES} MiB of queues do not fit",
        remedy="raise nats.storageMebibytes or lower gateway.files.maxMebibytes",
    ),
    Rule(
        field="observability.heartbeatMilliseconds",
        cel=_each_pool(_CEL_WINDOW, "true", " && "),
        holds=_windows_see_samples,
        problem="a pool's autoscaling.panicWindowSeconds is shorter than two heartbeats, so it would see no load",
        remedy="raise panicWindowSeconds (0 turns it off) or lower heartbeatMilliseconds",
    ),
    *GPUS,
    *VLLM,
    *ADAPTERS,
)


class MultimodalDeploymentSpec(ApiModel, rules=SPEC):
    """Desired state of a multimodal pipeline. The work of an omitted pool is done by the next pool downstream."""

    model: ModelSpec
    """Model to serve."""
    engine: EngineSpec = EngineSpec()
    """Engine that runs the language model."""
    image: ImageSpec = ImageSpec()
    """Container images of the pods."""
    gateway: GatewaySpec = GatewaySpec()
    """HTTP gateway, the entry point for clients."""
    encoder: EncoderSpec | None = None
    """Encoder pool. If omitted, prefill (or decode) encodes media."""
    prefill: PrefillSpec | None = None
    """Prefill pool. If omitted, decode computes the KV of prompts."""
    decode: DecodeSpec
    """Decode pool, which generates tokens."""
    transfer: TransferSpec = TransferSpec()
    """Data transfer between pools."""
    nats: NatsSpec = NatsSpec()
    """NATS server that the pods communicate through."""
    network: NetworkSpec = NetworkSpec()
    """NetworkPolicies of the pods."""
    slo: SloSpec = SloSpec()
    """Service level objectives."""
    gpu_budget: Annotated[int, Field(ge=0, le=100_000)] | None = None
    """Maximum number of GPUs used by all pools together."""
    observability: ObservabilitySpec = ObservabilitySpec()
    """Logging, tracing and heartbeats."""
    rollout: RolloutSpec = RolloutSpec()
    """How changes of the spec are rolled out."""
    paused: bool = False
    """Whether reconciliation is suspended."""
    deletion_protection: bool = False
    """Whether the API server refuses to delete this deployment, unless its namespace or the definition of this resource is deleted. Needs the chart's ValidatingAdmissionPolicy."""

    @property
    def local_encode_tokens(self) -> int:
        """Most tokens of media that are encoded where they are prefilled; 0: never."""
        return 0 if self.prefill is None else self.prefill.local_encode_tokens

    @property
    def kv_backend(self) -> KvBackend:
        """The transport of KV from prefill to decode pods; unused without a prefill pool."""
        backend = self.transfer.kv.backend
        if backend != "Auto":
            return backend
        return (
            "Nccl" if self.prefill is not None and min(self.prefill.gpus, self.decode.gpus) >= 1 else "Gloo"
        )

    def replica_gpus(self, pool: PoolName) -> int:
        """GPUs of one replica of a pool: of its pod, or of all pods of its group."""
        return int(getattr(self, pool).gpus) * self.group_size(pool)

    def group_size(self, pool: PoolName) -> int:
        """Pods of one replica of a pool: several where its ranks need more GPUs than a pod has."""
        part: Pool = getattr(self, pool)
        if self.engine.type == "Native" or pool == "encoder" or part.gpus == 0:
            return 1
        return _vllm(pool, self).ranks // part.gpus
