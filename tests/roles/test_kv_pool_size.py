"""The KV pool of a pod has the size that its budget gives, and `mmd plan-memory` promises no more."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
import pytest_asyncio
import torch

from mmd_api.contract.errors import MemoryBudgetError
from mmd_api.pipeline import PipelineConfig
from mmd_api.spec.deployment import MultimodalDeploymentSpec
from mmd_api.spec.model import ModelSpec
from mmd_cli import plan_memory
from mmd_cli.plan_memory import PROCESS_BYTES
from mmd_workers.basics import memory
from mmd_workers.basics.memory import MEBIBYTE
from mmd_workers.engine.profile import activation_bytes
from mmd_workers.model.language import HfLanguageModel, load_language_model
from mmd_workers.process.pod import Pod
from mmd_workers.process.settings import WorkerSettings
from mmd_workers.sequences.native import NativeHost

CPU = torch.device("cpu")
PERCENT = 37
TOWER_BYTES = 11 * MEBIBYTE
SPEC = MultimodalDeploymentSpec.model_validate(
    {
        "model": {"id": "builtin/demo", "dtype": "Float32"},
        "encoder": {"gpus": 0},
        "prefill": {"gpus": 0, "chunkTokens": 512},
        "transfer": {"kv": {"backend": "Gloo"}},
        "decode": {"gpus": 0, "kvCachePercent": PERCENT, "maxSequences": 64},
    }
)


@pytest.fixture(scope="module")
def model() -> HfLanguageModel:
    return load_language_model(ModelSpec(id="builtin/demo", dtype="Float32"), CPU)


@pytest.fixture(scope="module")
def activations(model: HfLanguageModel) -> int:
    assert SPEC.prefill is not None
    return activation_bytes(
        model,
        chunk_tokens=SPEC.prefill.chunk_tokens,
        max_sequences=SPEC.decode.max_sequences,
        block_tokens=SPEC.decode.kv_block_tokens,
        max_model_len=model.max_model_len,
    )


@pytest_asyncio.fixture
async def host(model: HfLanguageModel) -> AsyncIterator[NativeHost]:
    """The part of a decode pod that makes the engine, with its weights loaded."""
    pipeline = PipelineConfig(namespace="test", name="size", revision="r1", spec=SPEC)
    settings = WorkerSettings(pipeline, "decode-0", "127.0.0.1", 0, "nats://unused", threads=1)
    made = NativeHost(Pod.of(settings, "decode", ("decode",)), CPU, lambda: TOWER_BYTES)
    made._model = model
    yield made
    await made.stop()


@pytest.fixture
def pod_memory(monkeypatch: pytest.MonkeyPatch, model: HfLanguageModel) -> Callable[[int], int]:
    """Give the pod this much memory beside weights and process; returns its total."""

    def give(left_bytes: int) -> int:
        used = model.loaded_bytes + PROCESS_BYTES
        measured: Any = lambda *_: (used + left_bytes, used)  # noqa: E731
        monkeypatch.setattr(memory, "measure", measured)
        return used + left_bytes

    return give


def request_bytes(model: HfLanguageModel) -> int:
    """KV of one request of full length."""
    tokens = SPEC.decode.kv_block_tokens
    return -(-model.max_model_len // tokens) * tokens * model.kv_layout.bytes_per_token()


async def test_a_workers_pool_is_its_share_of_the_remaining_memory(
    host: NativeHost, model: HfLanguageModel, activations: int, pod_memory: Callable[[int], int]
) -> None:
    share = 4 * request_bytes(model)
    total = pod_memory(activations + TOWER_BYTES + share * 100 // PERCENT)
    await host.start()
    await host.sample()
    assert host.stats is not None
    block_bytes = SPEC.decode.kv_block_tokens * model.kv_layout.bytes_per_token()
    assert abs(host.stats.blocks_total - share // block_bytes) <= 1
    planned = plan_memory.plan(SPEC, {"decode": total}).pools[-1]
    assert planned.kv_bytes is not None
    # A plan's activations are an upper bound, and it knows of no tower here.
    difference = (TOWER_BYTES - (planned.activation_bytes - activations)) * PERCENT // 100
    assert abs(planned.kv_bytes - difference - host.stats.blocks_total * block_bytes) <= 2 * block_bytes


async def test_a_worker_without_room_for_activations_and_a_request_never_starts(
    host: NativeHost, model: HfLanguageModel, activations: int, pod_memory: Callable[[int], int]
) -> None:
    needed = request_bytes(model) * 100 // PERCENT + activations + TOWER_BYTES
    pod_memory(needed - MEBIBYTE)
    mebibytes = -(-activations // MEBIBYTE)
    with pytest.raises(
        MemoryBudgetError, match=rf"{mebibytes} MiB by activations, 11 MiB by those of the tower; {PERCENT} %"
    ):
        await host.start()
    pod_memory(needed + MEBIBYTE)
    await host.start()
