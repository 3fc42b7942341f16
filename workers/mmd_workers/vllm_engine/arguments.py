"""What the spec means for vLLM: its arguments and its environment."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from mmd_api.contract.pools import MODALITIES
from mmd_workers import memory
from mmd_workers.memory import MEBIBYTE, MemoryBudget
from mmd_workers.model import source
from mmd_workers.model.adapters import adapter_for
from mmd_workers.pod import Pod

CPU_BLOCK_TOKENS = 32  # blocks of vLLM's attention on CPUs are multiples of this
CPU_ACTIVATION_BYTES = 256 * MEBIBYTE


def block_tokens(wanted: int, device: torch.device) -> int:
    """Tokens of a block: as the spec says, rounded up to what vLLM's attention takes on this device."""
    return -(-wanted // CPU_BLOCK_TOKENS) * CPU_BLOCK_TOKENS if device.type == "cpu" else wanted


def engine_arguments(pod: Pod, folder: Path, device: torch.device, engine_id: str) -> dict[str, Any]:
    """Keyword arguments of vLLM's `EngineArgs` for this pod."""
    from mmd_workers.vllm_engine import features, sampling, weights

    spec, config = pod.spec, source.load_config(folder)
    size = block_tokens(spec.decode.kv_block_tokens, device)
    longest = source.resolve_max_model_len(spec.model, config)
    module = features.__name__
    return {
        "model": str(folder),
        "hf_overrides": weights.as_published,
        "load_format": weights.LOAD_FORMAT,
        "model_loader_extra_config": {weights.SUPPRESSED: _placeholders(config)},
        "dtype": str(source.resolve_dtype(spec.model, config)).removeprefix("torch."),
        "max_model_len": longest,
        "block_size": size,
        "max_num_seqs": spec.decode.max_sequences,
        "max_num_batched_tokens": max(pod.prefill_spec.chunk_tokens, spec.decode.max_sequences),
        "enable_prefix_caching": pod.prefill_spec.prefix_cache,
        "enforce_eager": device.type == "cpu",
        "async_scheduling": False,  # KV may be read only after the step that computes it
        "distributed_executor_backend": "uni",
        "disable_hybrid_kv_cache_manager": True,  # one block table for all layers: what moves between pods
        "limit_mm_per_prompt": dict.fromkeys(MODALITIES, 0),  # no tower: features come from encoders
        "enable_mm_embeds": True,
        "skip_mm_profiling": True,
        "mm_processor_cache_gb": 0,
        "logits_processors": [sampling.Draws],
        "ec_transfer_config": {
            "ec_connector": features.FeatureConnector.__name__,
            "ec_connector_module_path": module,
            "ec_role": "ec_consumer",
            "engine_id": engine_id,
        },
        "ec_manager_config": {
            "encoder_cache_manager_cls": f"{module}.{features.FeatureCacheManager.__name__}"
        },
        **_memory(pod, folder, device, config, longest, size),
    }


def _placeholders(config: Any) -> list[int]:
    """Tokens that stand for media: they must never be sampled."""
    adapter, vocabulary = adapter_for(config), config.get_text_config().vocab_size
    found = {adapter.placeholder_id(modality) for modality in MODALITIES}
    return sorted(i for i in found if i is not None and i < vocabulary)


def _memory(
    pod: Pod, folder: Path, device: torch.device, config: Any, longest: int, size: int
) -> dict[str, Any]:
    """How much memory the KV pool takes: on a GPU vLLM measures what is left.

    Raises:
        MemoryBudgetError: it does not hold one request of full length.
    """
    spec, pool = pod.spec, pod.kv_spec
    percent = pool.kv_cache_percent or memory.default_percent(device)
    if device.type != "cpu":
        if pool.kv_cache_mebibytes:
            return {"kv_cache_memory_bytes": pool.kv_cache_mebibytes * MEBIBYTE}
        return {"gpu_memory_utilization": percent / 100}
    text = config.get_text_config()
    heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    head_dim = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    width = source.resolve_dtype(spec.model, config).itemsize
    total, used = memory.measure(device, pod.settings.memory_fraction)
    weights = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    override = pool.kv_cache_mebibytes and pool.kv_cache_mebibytes * MEBIBYTE
    budget = MemoryBudget(total, used + weights, CPU_ACTIVATION_BYTES, percent, override)
    return {
        "kv_cache_memory_bytes": budget.kv_bytes(
            bytes_per_token=2 * text.num_hidden_layers * heads * head_dim * width,
            block_tokens=size,
            max_model_len=longest,
            max_sequences=spec.decode.max_sequences,
            pool="prefill" if pool is spec.prefill else "decode",
        )
    }
