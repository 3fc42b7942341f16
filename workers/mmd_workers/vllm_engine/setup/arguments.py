"""Translates the spec into vLLM's arguments."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from vllm.platforms import current_platform

from mmd_api.contract.errors import MemoryBudgetError
from mmd_api.contract.pools import MODALITIES
from mmd_workers.basics import memory
from mmd_workers.basics.memory import MEBIBYTE
from mmd_workers.model import source
from mmd_workers.model.adapters.base import Adapter
from mmd_workers.model.prompt import KvLayout
from mmd_workers.process.pod import Pod
from mmd_workers.sequences.kv_memory import kv_pool_bytes
from mmd_workers.vllm_engine import features, sampling, scheduling, structured
from mmd_workers.vllm_engine.ranks import rank_executor, worker
from mmd_workers.vllm_engine.setup import extra_arguments, lora, weights

CPU_BLOCK_TOKENS = 32  # blocks of vLLM's attention on CPUs are multiples of this
CPU_ACTIVATION_BYTES = 256 * MEBIBYTE
RENDEZVOUS_SECONDS = 600  # NCCL's own limit
LEAST_UTILIZATION = 0.01
"""vLLM refuses to start if less than this share of a GPU is free, even if its KV pool has a fixed size. Other
pods may use the GPU too."""
KV_DTYPES = {"Auto": "auto", "Fp8E4M3": "fp8_e4m3", "Fp8E5M2": "fp8_e5m2"}
TORCH_KV_DTYPES = {"Fp8E4M3": "float8_e4m3fn", "Fp8E5M2": "float8_e5m2"}


def block_tokens(wanted: int, device: torch.device) -> int:
    """Return the tokens per block: the spec's number, rounded up to one that vLLM's attention accepts on this device."""
    return -(-wanted // CPU_BLOCK_TOKENS) * CPU_BLOCK_TOKENS if device.type == "cpu" else wanted


def engine_arguments(
    pod: Pod,
    folder: Path,
    adapter: Adapter,
    device: torch.device,
    engine_id: str,
    loras: Sequence[lora.Lora] = (),
    tower_bytes: int = 0,
) -> dict[str, Any]:
    """Return keyword arguments of vLLM's `EngineArgs` for this pod.

    `adapter`: the adapter of the architecture of the model in `folder`. `loras`: LoRA adapters that requests
    may name. `tower_bytes`: activations of a tower on the same device.

    Raises:
        EngineSettingsError: vLLM refuses a setting of spec.engine.
        MemoryBudgetError: the KV pool does not hold one request of full length.
    """
    spec, config = pod.spec, adapter.config
    vocabulary = config.get_text_config().vocab_size
    settings, field = pod.vllm_spec, f"spec.engine.{pod.pool}"
    batched, eager, drafts = settings.max_num_batched_tokens, settings.enforce_eager, settings.speculative
    split = settings.ranks > 1
    kv_block_tokens = block_tokens(spec.decode.kv_block_tokens, device)
    max_model_len = source.resolve_max_model_len(spec.model, config)
    tokens = batched or max(pod.prefill_spec.chunk_tokens, spec.decode.max_sequences)
    if (atomic_tokens := adapter.atomic_tokens_of_media()) and "prefill" in pod.roles:
        # An image takes one step, and sequences that decode must not keep it out of all steps.
        decode_tokens = 1 + (drafts.num_speculative_tokens if drafts else 0)
        tokens = max(tokens, atomic_tokens + spec.decode.max_sequences * decode_tokens)
    dtype = source.resolve_dtype(spec.model, config)
    lora.check_dtype(loras, dtype, device)
    lora_bytes = lora.memory_bytes(loras, folder, device, dtype.itemsize, tokens)
    module = features.__name__
    row = feature_row_bytes(adapter, dtype)
    most_rows, features_bytes = max_model_len, 0
    if "prefill" in pod.roles:  # others get no features
        most_rows = max(1, min(max_model_len, pod.prefill_spec.feature_budget_mebibytes * MEBIBYTE // row))
        features_bytes = most_rows * row
    return {
        **_patience(pod),
        **extra_arguments.parsed(settings.extra_args, field),
        "model": str(folder),
        "served_model_name": spec.model.own_name,
        "hf_overrides": weights.as_published,
        "load_format": weights.LOAD_FORMAT,
        "model_loader_extra_config": {weights.SUPPRESSED: list(adapter.placeholder_ids(vocabulary))},
        "dtype": str(dtype).removeprefix("torch."),
        "max_model_len": max_model_len,
        "block_size": kv_block_tokens,
        "max_num_seqs": spec.decode.max_sequences,
        "max_num_batched_tokens": tokens,
        "scheduler_cls": qualified(scheduling.PoolScheduler),
        "scheduling_policy": "priority",  # by arrival at the gateway, since no request has a priority
        "enable_prefix_caching": pod.prefill_spec.prefix_cache,
        "enforce_eager": device.type == "cpu" if eager is None else eager,
        "quantization": extra_arguments.checked_quantization(settings.quantization, field),
        "kv_cache_dtype": KV_DTYPES[settings.kv_cache_dtype],
        "tensor_parallel_size": settings.tensor_parallel_size,
        "pipeline_parallel_size": settings.pipeline_parallel_size,
        "speculative_config": drafts and drafts.model_dump(exclude_none=True),
        "async_scheduling": False,  # KV may be read only after the step that computes it
        "distributed_executor_backend": "mp" if split else "uni",
        "worker_cls": qualified(rank_executor.Rank if split else worker.MaskedWorker),
        "disable_hybrid_kv_cache_manager": True,  # one block table for all layers, as KV moves between pods
        "limit_mm_per_prompt": dict.fromkeys(MODALITIES, 0),  # no tower: features come from encoders
        "enable_mm_embeds": True,
        "skip_mm_profiling": True,
        "mm_processor_cache_gb": 0,
        "logits_processors": [structured.Constraints, sampling.Draws] if drafts is None else None,
        "ec_transfer_config": {
            "ec_connector": features.FeatureConnector.__name__,
            "ec_connector_module_path": module,
            "ec_role": "ec_consumer",
            "engine_id": engine_id,
        },
        "ec_manager_config": {
            "encoder_cache_manager_cls": f"{module}.{features.FeatureCacheManager.__name__}",
            "manager_config": {features.MOST_ROWS: most_rows},
        },
        **lora.arguments(loras, device),
        **_group(pod),
        **_memory(
            pod,
            folder,
            device,
            config,
            max_model_len,
            kv_block_tokens,
            lora_bytes,
            features_bytes,
            tower_bytes,
        ),
    }


def qualified(kind: type) -> str:
    """Return the name by which vLLM finds a class in any process."""
    return f"{kind.__module__}.{kind.__name__}"


def feature_row_bytes(adapter: Adapter, dtype: torch.dtype) -> int:
    """Return the bytes of one token of a feature, all of its tensors included."""
    tensors = 1 + len(adapter.extra_names())
    return int(tensors * adapter.config.get_text_config().hidden_size * dtype.itemsize)


def _group(pod: Pod) -> dict[str, Any]:
    """Return vLLM's arguments for the ranks in the other pods of a replica."""
    if (group := pod.settings.group) is None:
        return {}
    return {
        "nnodes": group.size,
        "node_rank": group.rank,
        "master_addr": group.leader,
        "master_port": pod.settings.ranks_port,
    }


def _patience(pod: Pod) -> dict[str, Any]:
    """Return how long the ranks of several pods wait for one another. An argument of the spec overrides it."""
    if pod.settings.group is None:
        return {}
    return {"distributed_timeout_seconds": max(pod.kv_spec.start_deadline_seconds, RENDEZVOUS_SECONDS)}


def _memory(
    pod: Pod,
    folder: Path,
    device: torch.device,
    config: Any,
    max_model_len: int,
    kv_block_tokens: int,
    lora_bytes: int,
    features_bytes: int,
    tower_bytes: int,
) -> dict[str, Any]:
    """Return the memory of each rank's KV pool, as arguments for vLLM.

    On a GPU vLLM measures the remaining memory, and `features_bytes` of steps and a tower are subtracted. On
    CPUs the ranks of a pod share the machine's memory, and features are in the half that is not divided.

    Raises:
        MemoryBudgetError: the pool does not hold one request of full length.
    """
    spec, pool = pod.spec, pod.kv_spec
    settings = pod.vllm_spec
    pods = pod.settings.group.size if pod.settings.group is not None else 1
    ranks_per_pod = settings.ranks // pods
    if device.type != "cpu":
        if pool.kv_cache_mebibytes:
            return {
                "kv_cache_memory_bytes": pool.kv_cache_mebibytes * MEBIBYTE // ranks_per_pod,
                "gpu_memory_utilization": LEAST_UTILIZATION,
            }
        percent = settings.gpu_memory_utilization_percent or memory.default_percent(device)
        gpu_share = percent / 100 * pod.settings.memory_fraction
        return {"gpu_memory_utilization": _without(gpu_share, device, features_bytes, tower_bytes)}
    text, dtype = config.get_text_config(), source.resolve_dtype(spec.model, config)
    # A pod holds a share of the KV, whichever way it is divided.
    layers = -(-int(text.num_hidden_layers) // pods)
    heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    head_dim = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    kv_dtype = TORCH_KV_DTYPES.get(settings.kv_cache_dtype, str(dtype).removeprefix("torch."))
    layout = KvLayout(
        layers, [max(heads, settings.tensor_parallel_size)] * layers, [head_dim] * layers, kv_dtype
    )
    weight_bytes = sum(file.stat().st_size for file in folder.glob("*.safetensors")) // pods
    try:
        num_bytes = kv_pool_bytes(
            pod,
            device,
            layout,
            block_tokens=kv_block_tokens,
            max_model_len=max_model_len,
            activation_bytes=CPU_ACTIVATION_BYTES * ranks_per_pod,
            weight_bytes=weight_bytes + lora_bytes * ranks_per_pod,
            tower_bytes=tower_bytes,
        )
    except MemoryBudgetError as error:
        if not lora_bytes:
            raise
        mebibytes = lora_bytes * ranks_per_pod // MEBIBYTE
        raise MemoryBudgetError(
            f"{error.message}; {mebibytes} MiB are for spec.engine.adapters: remove some, or use smaller ranks"
        ) from error
    return {"kv_cache_memory_bytes": num_bytes // ranks_per_pod}


def _without(share: float, device: torch.device, features_bytes: int, tower_bytes: int) -> float:
    """Subtract from a share of a GPU what vLLM does not measure: features in steps, and a tower, whose
    weights are already loaded.

    Raises:
        MemoryBudgetError: nothing remains.
    """
    total = int(current_platform.get_device_total_memory(device.index or 0))  # asking CUDA would take memory
    tower = tower_bytes + torch.cuda.memory_reserved(device)
    remaining_share: float = share - (features_bytes + tower) / total
    if remaining_share < LEAST_UTILIZATION:
        raise MemoryBudgetError(
            f"spec.engine: of the {share * total / MEBIBYTE:.0f} MiB of the GPU that this pod may use, features take "
            f"{features_bytes // MEBIBYTE} MiB and a tower {tower // MEBIBYTE} MiB; lower spec.prefill.featureBudgetMebibytes or the limits of "
            "spec.gateway.media, add an encoder pool (spec.encoder), or give the pod more memory"
        )
    return remaining_share
