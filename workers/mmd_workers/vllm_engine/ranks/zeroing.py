"""Makes vLLM zero each block that it gives to a sequence, which it otherwise does only for some models.

Attention on CPUs reads beyond the last token of a block, where an earlier sequence may have left KV that is not numbers.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.platforms import current_platform
from vllm.v1.kv_cache_interface import KVCacheConfig


def zero_new_blocks() -> None:
    """Enable zeroing in this process. Needed where vLLM schedules, and in each rank."""
    KVCacheConfig.needs_kv_cache_zeroing = property(lambda _: True)
    if current_platform.is_cpu():
        from vllm.v1.worker.cpu_model_runner import CPUModelRunner

        CPUModelRunner._zero_block_ids = _zero_blocks


def _zero_blocks(runner: Any, block_ids: list[int]) -> None:
    """Zero blocks in all layers. vLLM's own function for CPUs omits models whose layers differ in their heads."""
    layers = runner.compilation_config.static_forward_context.values()
    caches = [cache for layer in layers if torch.is_tensor(cache := getattr(layer, "kv_cache", None))]
    for cache in {cache.data_ptr(): cache for cache in caches if cache.numel()}.values():
        for block in block_ids:
            cache[block].zero_()
