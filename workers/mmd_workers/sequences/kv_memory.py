"""The size of a pod's KV pool, from its spec and its memory. Independent of the engine."""

from __future__ import annotations

import logging

import torch

from mmd_workers.basics import memory
from mmd_workers.basics.memory import MEBIBYTE, MemoryBudget
from mmd_workers.model.prompt import KvLayout
from mmd_workers.process.pod import Pod

log = logging.getLogger(__name__)


def kv_pool_bytes(
    pod: Pod,
    device: torch.device,
    layout: KvLayout,
    *,
    block_tokens: int,
    max_model_len: int,
    activation_bytes: int,
    weight_bytes: int = 0,
    tower_bytes: int = 0,
) -> int:
    """Bytes of the KV pool. `weight_bytes`: weights still to be loaded. `tower_bytes`: activations of a tower on the same device.

    Raises:
        MemoryBudgetError: the pool does not hold one request of full length.
    """
    spec, pool = pod.spec, pod.kv_spec
    total, used = memory.measure(device, pod.settings.memory_fraction)
    budget = MemoryBudget(
        total,
        used + weight_bytes,
        activation_bytes,
        pool.kv_cache_percent or memory.default_percent(device),
        pool.kv_cache_mebibytes and pool.kv_cache_mebibytes * MEBIBYTE,
        tower_bytes,
    )
    num_bytes = budget.kv_bytes(
        bytes_per_token=layout.bytes_per_token(),
        block_tokens=block_tokens,
        max_model_len=max_model_len,
        max_sequences=spec.decode.max_sequences,
        pool="prefill" if pool is spec.prefill else "decode",
    )
    log.info("memory: %s; the KV pool uses %d bytes", budget, num_bytes)
    return num_bytes
