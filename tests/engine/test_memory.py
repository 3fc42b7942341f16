"""How a pod's memory is divided, and what is refused because one request would not fit."""

from __future__ import annotations

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from mmd_api.contract.errors import MemoryBudgetError
from mmd_api.contract.sampling import LogitRules
from mmd_workers.basics import memory
from mmd_workers.basics.memory import MEBIBYTE, MemoryBudget
from mmd_workers.engine import attention, profile
from mmd_workers.engine.batch import Batch
from mmd_workers.engine.choosing.logit_rules import rule_state
from mmd_workers.engine.choosing.sampler import Draw, compute
from mmd_workers.engine.fusion import prepare
from mmd_workers.engine.interface import SamplingParams
from mmd_workers.engine.memory.kv_pool import KvPool
from mmd_workers.engine.pieces import Work
from mmd_workers.engine.profile import LiveBytes, activation_bytes, fused_kernel, gpu_kernel
from mmd_workers.engine.sequence import Sequence
from mmd_workers.model.prompt import KvLayout
from support.harness.needed import NO_COMPILER, needs
from support.oracles.devices import cpu_only
from support.oracles.engine_oracle import SMALL, TextModel, llama, vary

GIB = 1024 * MEBIBYTE
POOL = {
    "bytes_per_token": 57_344,
    "block_tokens": 16,
    "max_model_len": 32_768,
    "max_sequences": 128,
    "pool": "decode",
}


def test_the_kv_pool_takes_its_share_of_what_weights_and_activations_leave():
    budget = MemoryBudget(80 * GIB, 16 * GIB, 4 * GIB, percent=90)
    assert budget.kv_bytes(**POOL) == 54 * GIB
    assert budget.kv_bytes(**POOL) > 30 * 32_768 * 57_344, "30 requests of the longest kind and more"


def test_the_override_is_taken_as_it_is():
    budget = MemoryBudget(80 * GIB, 16 * GIB, 4 * GIB, percent=90, override_bytes=2 * GIB)
    assert budget.kv_bytes(**POOL) == 2 * GIB


def test_no_more_is_taken_than_all_sequences_can_use():
    budget = MemoryBudget(80 * GIB, 16 * GIB, 4 * GIB, percent=90)
    assert budget.kv_bytes(**{**POOL, "max_model_len": 1000, "max_sequences": 2}) == 2 * 1008 * 57_344


def test_a_share_too_small_for_one_request_is_refused_with_the_remedy():
    budget = MemoryBudget(20 * GIB, 16 * GIB, 3 * GIB, percent=90)
    with pytest.raises(MemoryBudgetError) as caught:
        budget.kv_bytes(**POOL)
    message = caught.value.message
    for part in ("20480 MiB", "16384 MiB", "3072 MiB", "90 %", "922 MiB", "1792 MiB", "32768"):
        assert part in message
    fits = 921 * MEBIBYTE // (16 * 57_344) * 16  # tokens
    named = int(message.partition("maxModelLen to ")[2].split()[0])
    assert fits <= named
    assert budget.kv_bytes(**{**POOL, "max_model_len": named}) <= budget.left_bytes * 90 // 100


def test_an_override_too_small_for_one_request_names_the_size_needed():
    budget = MemoryBudget(80 * GIB, 16 * GIB, 4 * GIB, percent=90, override_bytes=512 * MEBIBYTE)
    with pytest.raises(MemoryBudgetError, match=r"512 MiB holds KV for 9360 tokens.*needs 1792 MiB"):
        budget.kv_bytes(**POOL)


def test_weights_larger_than_the_memory_are_refused_and_not_divided():
    with pytest.raises(MemoryBudgetError, match="0 MiB, enough KV for 0 tokens"):
        MemoryBudget(10 * GIB, 16 * GIB, 4 * GIB, percent=90).kv_bytes(**POOL)


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_live_bytes_count_concurrent_tensors_and_not_earlier_ones(device):
    before = torch.zeros(1000, device=device)
    with LiveBytes() as live:
        first = before + 1  # 4000 bytes
        del first
        second = before.view(10, 100) * 2  # 4000
        third = torch.cat([second, second])  # 8000 more
        third.flatten()[0:10].add_(1)
        del second, third
    assert live.peak == 12_000


@cpu_only
def test_what_a_step_takes_is_measured_without_weights_as_with_them(monkeypatch):
    """The figure of `plan-memory` (meta device) and that of a worker at its start."""
    monkeypatch.setattr(attention.cpu_library, "load", lambda: None)  # the same kernels on both devices
    sizes = {"block_tokens": 8, "max_model_len": 256}
    real, planned = TextModel(llama()), TextModel(llama().to("meta"))
    for chunk, sequences in ((16, 4), (128, 4), (16, 64)):
        work = {"chunk_tokens": chunk, "max_sequences": sequences, **sizes}
        measured = activation_bytes(real, **work)
        assert measured <= activation_bytes(planned, **work) < 3 * measured, "it also counts attention scores"
        fused = activation_bytes(planned, kernel=fused_kernel, **work)
        assert 0 < fused < activation_bytes(planned, kernel=gpu_kernel, **work)
        assert fused <= 1.01 * measured, "on the meta device, masks select all rows"
    small = activation_bytes(real, chunk_tokens=16, max_sequences=4, **sizes)
    assert activation_bytes(real, chunk_tokens=128, max_sequences=4, **sizes) > 2 * small
    assert activation_bytes(real, chunk_tokens=16, max_sequences=64, **sizes) > 2 * small


RULES = LogitRules(list(range(1000)), [[1], [2, 3]], [(token, 1.0) for token in range(1000)], 1.2, 0.5, 0.5)
MIXES = {
    "temperature": [{}],
    "top_k": [{"top_k": 20}],
    "top_p": [{"top_p": 0.8}],
    "mixed": [{}, {"top_k": 20, "top_p": 0.8}],
    "one uncut": [{}, *[{"top_p": 0.8}] * 15],
    "one greedy": [{"temperature": 0.0}, {}, *[{"top_p": 0.8}] * 14],
    "min_p": [{"min_p": 0.1}],
    "rules": [{"logprobs": 20, "rules": RULES}],
    "rules of some": [{}, *[{"top_p": 0.8, "min_p": 0.1, "logprobs": 20, "rules": RULES}] * 15],
    "log probabilities": [{}, *[{"top_p": 0.8, "logprobs": 20}] * 15],
}


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("mix", MIXES)
def test_sampling_takes_no_more_memory_than_was_measured(mix, device):
    vocab, rows = 5000, 16
    model = TextModel(vary(LlamaForCausalLM(LlamaConfig(**(SMALL | {"vocab_size": vocab})))).to(device))
    sizes = {"chunk_tokens": 1, "max_sequences": rows, "block_tokens": 8, "max_model_len": vocab}
    measured = activation_bytes(model, **sizes, kernel=fused_kernel)
    asked = [
        SamplingParams(1, **({"temperature": 1.0} | MIXES[mix][i % len(MIXES[mix])])) for i in range(rows)
    ]
    logits = torch.randn(rows, vocab, device=device)
    with torch.no_grad(), LiveBytes() as live:
        prompt = range(vocab)
        compute(logits, [Draw(params, 0, (), rule_state(params, (), prompt)) for params in asked])
    assert measured >= live.peak + logits.nbytes


@cpu_only
@needs(attention.cpu_library.load(), NO_COMPILER)
@pytest.mark.parametrize("fused_layers", [True, False])
def test_scores_that_the_threads_of_the_cpu_kernels_keep_are_measured(fused_layers, monkeypatch):
    model = TextModel(llama())
    prepare(model, fused_layers=fused_layers)
    sizes = {"chunk_tokens": 1, "max_sequences": 2, "block_tokens": 8, "max_model_len": 100_000}
    one = activation_bytes(model, **sizes)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    heads = 4
    assert activation_bytes(model, **sizes) - one >= heads * 100_000 * 4


class Cuda:
    """Where CUDA is: the first step also takes workspaces that stay, and what a step took is known only after a synchronization."""

    WEIGHTS, WORKSPACES, STEP, UNALIGNED = 7000, 500, 1000, 200

    def __init__(self, monkeypatch, model):
        self.live, self.high, self.counted, self.steps = self.WEIGHTS, 9 * self.WEIGHTS, 9 * self.WEIGHTS, 0
        monkeypatch.setattr(type(model), "device", torch.device("cuda"), raising=False)
        monkeypatch.setattr(profile, "_run_largest_step", self.step)
        monkeypatch.setattr(torch.cuda, "synchronize", self.synchronize)
        monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", self.reset)
        monkeypatch.setattr(torch.cuda, "memory_allocated", lambda _: self.live)
        monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda _: self.counted)
        monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)

    def step(self, *settings):
        self.live += 0 if self.steps else self.WORKSPACES
        self.steps += 1
        self.high = max(self.high, self.live + self.STEP + (self.UNALIGNED if settings[-1] % 16 else 0))

    def synchronize(self, _):
        self.counted = self.high

    def reset(self, _):
        self.high = self.counted = self.live


@pytest.mark.parametrize("length", [257, 256])
def test_on_a_gpu_activation_bytes_are_the_peak_above_the_workspaces(length, monkeypatch):
    """The costlier of two contexts, of which one has a mask that attention copies."""
    model = TextModel(llama())
    gpu = Cuda(monkeypatch, model)
    sizes = {"chunk_tokens": 16, "max_sequences": 4, "block_tokens": 8, "max_model_len": length}
    assert activation_bytes(model, **sizes) == gpu.STEP + gpu.UNALIGNED
    assert gpu.steps == 3


def test_gpu_attention_is_planned_with_copied_contexts_and_without_scores():
    """Of a chunk at the end of a long context: keys and values for all heads, and the mask as bool, negated, in the query's type, and
    with aligned rows."""
    heads, dim, rows, context = 8, 16, 64, 1000
    layout = KvLayout(1, [2], [dim], "float32")
    sequence = Sequence("a", 0, [], 0, 0, SamplingParams(1), [], None, blocks=[0] * context)
    batch = Batch(KvPool(layout, 1, 8, torch.device("meta")), [Work(sequence, context - rows, context)])
    query = torch.empty(rows, heads, dim, device="meta")
    with LiveBytes() as live:
        out = gpu_kernel(batch, 0, query, 0.25, None, None)
    assert out.shape == query.shape
    copied, mask = 2 * heads * context * dim * 4, rows * context
    assert (
        copied + mask * (1 + 4 + 4) <= live.peak < copied + mask * (1 + 1 + 4 + 4) + 3 * query.nbytes + 50_000
    )
    assert live.peak < heads * mask * 4 + copied, "no scores"


def test_pods_that_share_a_machine_count_on_no_more_than_it_has():
    total, used = memory.measure(torch.device("cpu"), 1.0)
    quarter, _ = memory.measure(torch.device("cpu"), 0.25)
    assert used > 0
    assert quarter == pytest.approx(total / 4, rel=0.1)
    machine = memory._meminfo("MemTotal")
    assert total <= machine


def test_a_containers_limit_is_taken_as_the_memory_of_its_pod(monkeypatch, tmp_path):
    limit = tmp_path / "memory.max"
    monkeypatch.setattr(memory, "_CGROUP_LIMITS", (str(limit),))
    assert memory.container_limit() is None
    limit.write_text("max\n")
    assert memory.container_limit() is None
    limit.write_text(f"{64 * MEBIBYTE}\n")
    assert memory.measure(torch.device("cpu"), 1.0)[0] == 64 * MEBIBYTE
