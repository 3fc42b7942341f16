"""What the spec means for vLLM: its arguments."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from mmd_api.contract.pools import MODALITIES
from mmd_workers import memory
from mmd_workers.memory import MEBIBYTE
from mmd_workers.model import source
from mmd_workers.model.adapters.base import Adapter
from mmd_workers.model.prompt import KvLayout
from mmd_workers.pod import Pod
from mmd_workers.sequences.kv_memory import kv_pool_bytes
from mmd_workers.vllm_engine import features, sampling, weights

CPU_BLOCK_TOKENS = 32  # blocks of vLLM's attention on CPUs are multiples of this
CPU_ACTIVATION_BYTES = 256 * MEBIBYTE


def block_tokens(wanted: int, device: torch.device) -> int:
    """Tokens of a block: as the spec says, rounded up to what vLLM's attention takes on this device."""
    return -(-wanted // CPU_BLOCK_TOKENS) * CPU_BLOCK_TOKENS if device.type == "cpu" else wanted


def engine_arguments(
    pod: Pod, folder: Path, adapter: Adapter, device: torch.device, engine_id: str
) -> dict[str, Any]:
    """Keyword arguments of vLLM's `EngineArgs` for this pod. `adapter`: of the model in `folder`."""
    spec, config = pod.spec, adapter.config
    vocabulary = config.get_text_config().vocab_size
    size = block_tokens(spec.decode.kv_block_tokens, device)
    longest = source.resolve_max_model_len(spec.model, config)
    module = features.__name__
    return {
        "model": str(folder),
        "hf_overrides": weights.as_published,
        "load_format": weights.LOAD_FORMAT,
        "model_loader_extra_config": {weights.SUPPRESSED: list(adapter.placeholder_ids(vocabulary))},
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


def _memory(
    pod: Pod, folder: Path, device: torch.device, config: Any, longest: int, size: int
) -> dict[str, Any]:
    """How much memory the KV pool takes: on a GPU vLLM measures what is left.

    Raises:
        MemoryBudgetError: it does not hold one request of full length.
    """
    spec, pool = pod.spec, pod.kv_spec
    if device.type != "cpu":
        if pool.kv_cache_mebibytes:
            return {"kv_cache_memory_bytes": pool.kv_cache_mebibytes * MEBIBYTE}
        percent = pool.kv_cache_percent or memory.default_percent(device)
        return {"gpu_memory_utilization": percent / 100}
    text, dtype = config.get_text_config(), source.resolve_dtype(spec.model, config)
    layers = int(text.num_hidden_layers)
    heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    head_dim = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    layout = KvLayout(layers, [heads] * layers, [head_dim] * layers, str(dtype).removeprefix("torch."))
    weight_bytes = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    return {
        "kv_cache_memory_bytes": kv_pool_bytes(
            pod,
            device,
            layout,
            block_tokens=size,
            max_model_len=longest,
            activation_bytes=CPU_ACTIVATION_BYTES,
            weight_bytes=weight_bytes,
        )
    }
