"""Makes vLLM's engine core for a pod, or only the ranks for a pod that follows its group's leader."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from vllm.config import VllmConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.v1.engine.core import EngineCore
from vllm.v1.executor import Executor

from mmd_workers.model import source
from mmd_workers.model.adapters import adapter_for
from mmd_workers.model.adapters.base import Adapter
from mmd_workers.process.pod import Pod
from mmd_workers.sequences.links import device_of_kv
from mmd_workers.vllm_engine.core import VllmCore, set_num_threads
from mmd_workers.vllm_engine.features import shelf_of
from mmd_workers.vllm_engine.kv import PagedKv
from mmd_workers.vllm_engine.ranks import rank_executor
from mmd_workers.vllm_engine.ranks.kv_of_ranks import Kv, RankedKv
from mmd_workers.vllm_engine.requests import FRAMES, RequestBuilder
from mmd_workers.vllm_engine.setup import lora
from mmd_workers.vllm_engine.setup.arguments import engine_arguments, feature_row_bytes
from mmd_workers.vllm_engine.structured import grammars_of


def make_core(
    pod: Pod, device: torch.device, rank_lost: rank_executor.RankLost = lambda _: None, tower_bytes: int = 0
) -> VllmCore:
    """Load the model's weights, without its towers, and make the KV pool.

    `rank_lost`: called from any thread when the process of a rank has ended, with a text that says which and
    how. `tower_bytes`: activations of a tower on the same device.

    Raises:
        EngineSettingsError: vLLM refuses a setting of spec.engine, or an adapter.
        MemoryBudgetError: the pool does not hold one request of full length.
        UnsupportedModelError: an adapter is not available.
        Exception: vLLM cannot serve this model, or not on this machine.
    """
    spec, threads = pod.spec, pod.settings.compute_threads
    set_num_threads(threads)
    prepared = _Prepared.of(pod, device, tower_bytes)
    config, arguments = prepared.adapter.config, prepared.arguments
    with rank_executor.starting(arguments, threads, rank_lost) as make_executor:
        core = EngineCore(arguments, make_executor, log_stats=True)
        lora_requests = lora.load(core, prepared.loras)
    builder = RequestBuilder(
        source.eos_token_ids(prepared.folder, config),
        core.request_block_hasher,
        getattr(config, "vision_start_token_id", None) if config.model_type in FRAMES else None,
        drafts=arguments.speculative_config is not None,
        seeded=device.type != "cpu",
        lora_requests=lora_requests,
    )
    return VllmCore(
        core,
        shelf_of(pod.settings.incarnation),
        builder,
        grammars_of(prepared.folder),
        _kv(core, device_of_kv(pod, device)) if pod.spec.prefill is not None else None,
        spec.decode.kv_block_tokens,
        feature_row_bytes(prepared.adapter, arguments.model_config.dtype),
        threads,
    )


def _kv(core: EngineCore, device: torch.device) -> Kv:
    block_tokens, config = int(core.scheduler.block_size), core.vllm_config
    if config.parallel_config.world_size > 1:
        return RankedKv(core.model_executor, block_tokens, device)
    return PagedKv(config.compilation_config.static_forward_context, block_tokens)


def make_ranks(pod: Pod, device: torch.device, rank_lost: rank_executor.RankLost) -> Executor:
    """Load this pod's part of the weights, in ranks that take commands from the leader's engine core.

    `rank_lost` and exceptions: as in `make_core`.
    """
    arguments = _Prepared.of(pod, device).arguments  # the leader makes each rank load the adapters
    with rank_executor.starting(arguments, pod.settings.compute_threads, rank_lost) as make_executor:
        return make_executor(arguments)


@dataclass(frozen=True)
class _Prepared:
    """Model and adapters that a pod loads, with vLLM's configuration."""

    folder: Path
    adapter: Adapter
    loras: Sequence[lora.Lora]
    arguments: VllmConfig

    @classmethod
    def of(cls, pod: Pod, device: torch.device, tower_bytes: int = 0) -> _Prepared:
        """Find the weights, and let vLLM check its settings."""
        folder = source.resolve(pod.spec.model, weights=True)
        adapter = adapter_for(source.load_config(folder))
        loras = lora.found(pod.spec.engine.adapters)
        return cls(folder, adapter, loras, _configured(pod, folder, adapter, device, loras, tower_bytes))


def _configured(
    pod: Pod,
    folder: Path,
    adapter: Adapter,
    device: torch.device,
    loras: Sequence[lora.Lora],
    tower_bytes: int,
) -> VllmConfig:
    settings = pod.settings
    arguments = engine_arguments(pod, folder, adapter, device, settings.incarnation, loras, tower_bytes)
    if settings.group is not None:
        os.environ["VLLM_HOST_IP"] = settings.pod_ip  # where ranks of other pods reach those of this pod
    headless = settings.group is not None and settings.group.rank > 0
    config = EngineArgs(**arguments).create_engine_config(headless=headless)
    if loras:
        lora.check_architecture(config.model_config)
    return config
