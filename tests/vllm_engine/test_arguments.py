"""What a spec means for vLLM, and which of its command line arguments a spec may not name."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from mmd_api.contract.errors import MemoryBudgetError
from mmd_api.spec.engine_arguments import HAVE_A_FIELD, NOT_SERVED, OF_THE_OPERATOR, expression
from mmd_workers.basics import memory
from mmd_workers.basics.memory import MEBIBYTE
from mmd_workers.model.adapters import adapter_for
from mmd_workers.model.source import load_config
from mmd_workers.process.settings import Group
from mmd_workers.vllm_engine.features import MOST_ROWS
from mmd_workers.vllm_engine.setup import arguments as arguments_of_vllm
from mmd_workers.vllm_engine.setup.arguments import LEAST_UTILIZATION, engine_arguments
from mmd_workers.vllm_engine.setup.extra_arguments import EngineArgs, _Parser, refused

from . import cores

CPU, GPU = cores.CPU, torch.device("cuda")
FIELD = "spec.engine.decode"


@pytest.fixture(scope="module")
def llava(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return cores.checkpoint("llava", tmp_path_factory.mktemp("models"))


def arguments(folder: Path, device: torch.device = CPU, **vllm: Any) -> dict[str, Any]:
    pod = cores.pod_of(folder, vllm=vllm)
    return engine_arguments(pod, folder, adapter_for(load_config(folder)), device, "engine")


def test_every_argument_that_the_operator_sets_is_refused_under_each_name(llava):
    named = re.compile("|".join(map(expression, (HAVE_A_FIELD, OF_THE_OPERATOR, NOT_SERVED))))
    mine = arguments(llava, speculative={"method": "ngram", "numSpeculativeTokens": 2}).keys()
    mine |= arguments(llava, GPU).keys()
    actions = {action.dest: action.option_strings for action in EngineArgs.add_cli_args(_Parser())._actions}
    free = {
        option
        for name in mine & actions.keys()
        for option in actions[name]
        if option.startswith("--") and not named.match(option)
    }
    assert not free


def test_ranks_share_the_memory_that_a_pod_has_for_kv(llava):
    for device in (CPU, GPU):
        one = arguments(llava, device)["kv_cache_memory_bytes"]
        two = arguments(llava, device, tensorParallelSize=2)["kv_cache_memory_bytes"]
        assert (one, two) == (16 * MEBIBYTE, 8 * MEBIBYTE)


@pytest.mark.parametrize(
    ("deadline", "extra", "seconds"),
    [(3600, [], 3600), (60, [], 600), (3600, ["--distributed-timeout-seconds=90"], 90)],
    ids=["the pool's", "not less than NCCL's own", "an argument"],
)
def test_ranks_of_several_pods_wait_as_long_as_their_pool_may_start(
    llava: Path, deadline: int, extra: list[str], seconds: int
):
    vllm = {"tensorParallelSize": 2, "extraArgs": extra}
    pod = cores.pod_of(llava, vllm=vllm)
    decode = pod.spec.decode.model_copy(update={"start_deadline_seconds": deadline})
    pod.spec = pod.spec.model_copy(update={"decode": decode})
    pod.settings.group, pod.settings.ranks_port = Group(2, 1, "leader"), 1
    given = engine_arguments(pod, llava, adapter_for(load_config(llava)), CPU, "engine")
    assert given["distributed_timeout_seconds"] == seconds
    assert "distributed_timeout_seconds" not in arguments(llava, tensorParallelSize=2)


def test_a_refusal_names_the_argument_and_leaves_out_its_value():
    (refusal,) = refused(["--hf-tokn=secret"], FIELD)
    assert refusal.startswith(f"{FIELD}.extraArgs[0]: vLLM ")
    assert "unrecognized arguments: --hf-tokn" in refusal
    assert "secret" not in refusal


def test_a_refusal_of_a_structured_value_leaves_out_what_pydantic_adds():
    (refusal,) = refused(['--kernel-config={"secret": 1}'], FIELD)
    assert "Unexpected keyword argument" in refusal
    assert "input_value" not in refusal
    assert "pydantic.dev" not in refusal


def test_an_argument_with_two_values_is_refused():
    assert refused(["--seed=1", "--seed=2"], FIELD) == [
        f"{FIELD}.extraArgs[1]: --seed is given more than once; keep one"
    ]
    (refusal,) = refused(["--enable-eplb", "--no-enable-eplb"], FIELD)
    assert "--no-enable-eplb is given more than once" in refusal
    assert not refused(["--compilation-config.mode=0", "--compilation-config.backend=eager"], FIELD)


def gpu_arguments(folder: Path, total: int, *, budget: int = 16, tower: int = 0) -> dict[str, Any]:
    """Of a pod that has a quarter of a GPU of `total` MiB and no fixed KV pool. `budget`: of features in MiB. `tower`: its activations."""
    pod = cores.pod_of(folder, max_model_len=4096)
    pod.settings.memory_fraction = 0.25
    changes = {
        "decode": pod.spec.decode.model_copy(update={"kv_cache_mebibytes": None}),
        "prefill": pod.spec.prefill
        and pod.spec.prefill.model_copy(update={"feature_budget_mebibytes": budget}),
    }
    pod.spec = pod.spec.model_copy(update=changes)
    platform = mock.Mock()
    platform.get_device_total_memory.return_value = total * MEBIBYTE
    measured = mock.patch.object(arguments_of_vllm, "current_platform", platform)
    reserved = mock.patch.object(torch.cuda, "memory_reserved", return_value=tower * MEBIBYTE // 2)
    with measured, reserved:
        adapter = adapter_for(load_config(folder))
        return engine_arguments(pod, folder, adapter, GPU, "engine", (), tower * MEBIBYTE)


def test_pods_sharing_a_gpu_get_the_specified_kv_or_their_share(llava):
    """vLLM refuses to start when less memory than that share is free, even when its KV pool has a fixed size."""
    told = arguments(llava, GPU)
    assert told["kv_cache_memory_bytes"] == 16 * MEBIBYTE
    assert told["gpu_memory_utilization"] == LEAST_UTILIZATION
    measured = gpu_arguments(llava, 10**6)
    assert measured["gpu_memory_utilization"] == pytest.approx(0.9 * 0.25, abs=1e-4)
    assert "kv_cache_memory_bytes" not in measured


ROW = cores.WIDE * 4  # bytes of a feature's token


@pytest.mark.parametrize(("budget", "rows"), [(16, 4096), (1, MEBIBYTE // ROW)], ids=["context", "budget"])
def test_features_that_steps_hold_are_bounded_by_context_and_budget(llava: Path, budget: int, rows: int):
    given = gpu_arguments(llava, 1000, budget=budget)
    assert given["ec_manager_config"]["manager_config"] == {MOST_ROWS: rows}


def test_a_gpu_keeps_room_for_features_and_a_tower(llava: Path):
    features = 4096 * ROW / MEBIBYTE
    alone = gpu_arguments(llava, 1000)["gpu_memory_utilization"]
    assert alone == pytest.approx(0.9 * 0.25 - features / 1000)
    beside = gpu_arguments(llava, 1000, tower=100)["gpu_memory_utilization"]
    assert beside == pytest.approx(alone - 150 / 1000)
    with pytest.raises(MemoryBudgetError, match="features take 2 MiB and a tower 300 MiB"):
        gpu_arguments(llava, 1000, tower=200)


def test_kv_on_a_cpu_leaves_room_for_a_tower(llava: Path):
    pod = cores.pod_of(llava, max_model_len=4096, max_sequences=1024)
    pod.spec = pod.spec.model_copy(
        update={"decode": pod.spec.decode.model_copy(update={"kv_cache_mebibytes": None})}
    )
    adapter = adapter_for(load_config(llava))
    with mock.patch.object(memory, "measure", return_value=(1000 * MEBIBYTE, 100 * MEBIBYTE)):
        alone, beside = (
            engine_arguments(pod, llava, adapter, CPU, "engine", (), tower)["kv_cache_memory_bytes"]
            for tower in (0, 100 * MEBIBYTE)
        )
    assert alone - beside == 50 * MEBIBYTE


def test_a_step_holds_an_image_that_is_never_cut_beside_all_that_decode(llava: Path, tmp_path: Path):
    gemma = cores.checkpoint("gemma3", tmp_path)
    image = load_config(gemma).mm_tokens_per_image
    assert arguments(llava, maxNumBatchedTokens=16)["max_num_batched_tokens"] == 16
    assert arguments(gemma, maxNumBatchedTokens=16)["max_num_batched_tokens"] == image + 16
    drafts = {"method": "ngram", "numSpeculativeTokens": 2}
    given = arguments(gemma, maxNumBatchedTokens=16, speculative=drafts)
    assert given["max_num_batched_tokens"] == image + 3 * 16
    assert arguments(gemma, maxNumBatchedTokens=512)["max_num_batched_tokens"] == 512
