"""What a spec means for vLLM, and which of its command line arguments a spec may not name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from mmd_workers.memory import MEBIBYTE
from mmd_workers.model.adapters import adapter_for
from mmd_workers.model.source import load_config
from mmd_workers.vllm_engine.arguments import engine_arguments

from . import cores

CPU, GPU = cores.CPU, torch.device("cuda")


@pytest.fixture(scope="module")
def llava(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return cores.checkpoint("llava", tmp_path_factory.mktemp("models"))


def arguments(folder: Path, device: torch.device = CPU, **vllm: Any) -> dict[str, Any]:
    pod = cores.pod_of(folder, vllm=vllm)
    return engine_arguments(pod, folder, adapter_for(load_config(folder)), device, "engine")


def test_ranks_share_the_memory_that_a_pod_has_for_kv(llava):
    for device in (CPU, GPU):
        one = arguments(llava, device)["kv_cache_memory_bytes"]
        two = arguments(llava, device, tensorParallelSize=2)["kv_cache_memory_bytes"]
        assert (one, two) == (16 * MEBIBYTE, 8 * MEBIBYTE)
