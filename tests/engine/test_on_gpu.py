"""What only a GPU shows: attention and answers in half precision, what steps take from its memory, and what its errors leave usable."""

import subprocess
import sys

import pytest
import torch

from mmd_workers.engine.attention import torch_kernel
from mmd_workers.engine.batch import Batch
from mmd_workers.engine.interface import SamplingParams
from mmd_workers.engine.memory.kv_pool import KvPool
from mmd_workers.engine.pieces import Work
from mmd_workers.engine.profile import activation_bytes
from mmd_workers.engine.sequence import Sequence
from mmd_workers.model.prompt import KvLayout
from support.oracles.devices import DEVICE, needs_gpu
from support.oracles.engine_oracle import (
    TEXT_MODELS,
    TextModel,
    llama,
    make_engine,
    prompt_of,
    run,
    text_input,
)

pytestmark = needs_gpu

BLOCK_TOKENS = 16


def sequence(blocks):
    return Sequence("s", 0, [], 0, 0, SamplingParams(max_tokens=1), [], None, blocks=blocks)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("dim", [16, 64, 128, 256])
@pytest.mark.parametrize("window", [None, 100])
def test_attention_in_half_precision_is_that_of_float32_up_to_rounding(dtype, dim, window):
    """Single rows and chunks, whose blocks lie apart, at the end of a context and in its middle."""
    layout = KvLayout(1, [2], [dim], dtype)
    pool = KvPool(layout, 70, BLOCK_TOKENS, DEVICE)
    generator = torch.Generator(DEVICE).manual_seed(dim)
    for tensor in (*pool.keys, *pool.values):
        tensor.copy_(torch.randn(tensor.shape, generator=generator, device=DEVICE))
    places = torch.randperm(70, generator=torch.Generator().manual_seed(dim)).tolist()
    work = []
    for start, end in ((299, 300), (0, 1), (100, 400), (0, 200)):
        count = -(-end // BLOCK_TOKENS)
        work.append(Work(sequence(places[:count]), start, end))
        places = places[count:]
    batch = Batch(pool, work)
    query = torch.randn(
        batch.num_rows, 8, dim, generator=generator, device=DEVICE, dtype=getattr(torch, dtype)
    )
    exact_pool = KvPool(KvLayout(1, [2], [dim], "float32"), 70, BLOCK_TOKENS, DEVICE)
    exact_pool.keys, exact_pool.values = (
        [t.float() for t in tensors] for tensors in (pool.keys, pool.values)
    )
    expected = torch_kernel(Batch(exact_pool, work), 0, query.float(), dim**-0.5, window, None)
    tolerance = 2e-3 if dtype == "float16" else 2e-2
    got = torch_kernel(batch, 0, query, dim**-0.5, window, None).float()
    torch.testing.assert_close(got, expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("name", TEXT_MODELS)
def test_in_half_precision_every_token_is_the_likeliest_up_to_rounding(name):
    """A token chosen by logits that are wrong by at most d is at most 2 d below the likeliest. d: by how much transformers' own logits
    of the same tokens are wrong in bfloat16."""
    exact = TEXT_MODELS[name]()
    half = TEXT_MODELS[name]().to(torch.bfloat16)
    model = TextModel(TEXT_MODELS[name]().to(torch.bfloat16))
    engine = make_engine(model, blocks=24, block_tokens=BLOCK_TOKENS, chunk_tokens=64, prefix_cache=False)
    assert engine.model_runner.kernel is torch_kernel
    prompts = {str(n): prompt_of(length, n) for n, length in enumerate((5, 33, 64, 150, 1))}
    for key, prompt in prompts.items():
        engine.add(text_input(model, key, prompt, 14))
    outcome = run(engine)
    for key, prompt in prompts.items():
        answer = outcome.tokens[key]
        assert len(answer) == 14
        ids = torch.tensor([prompt + answer[:-1]], device=DEVICE)
        with torch.no_grad():
            logits, rounded = (
                each(input_ids=ids, use_cache=False).logits[0, len(prompt) - 1 :].float()
                for each in (exact, half)
            )
        chosen = logits.gather(-1, torch.tensor(answer, device=DEVICE)[:, None])[:, 0]
        wrong_by = (rounded - logits).abs().max()
        assert wrong_by < 0.5 * logits.std(), "a bound that any token meets"
        assert (logits.amax(-1) - chosen).max() <= 2 * wrong_by


@pytest.mark.parametrize(("spans", "bounded"), [([(0, 899, "cat")], True), ([], False)])
def test_a_bounded_step_that_samples_nothing_ends_when_its_kernels_have_run(spans, bounded):
    """Those that come next would wait for them. Others do not end with them, and what they took is nobody's measure."""
    model = TextModel(llama().to(DEVICE))
    engine = make_engine(model, blocks=200, chunk_tokens=64, prefix_cache=False, step_seconds=60.0)
    engine.add(text_input(model, "came", prompt_of(5, 1), 2))
    engine.abort("came")
    engine.add(text_input(model, "long", prompt_of(900, 1), 2, media_spans=spans))
    for _ in range(10):
        torch.cuda._sleep(20_000_000)  # cycles on the stream: about 10 ms before the step's kernels
        step = engine.step()
        assert not step.tokens
        assert step.timed is bounded
        if bounded:
            assert torch.cuda.current_stream(DEVICE).query()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("block_tokens", [16, 256])
def test_no_step_takes_more_memory_than_was_measured(dtype, block_tokens):
    """Seven sequences decode in a context that all of them share the room of, while a prompt of full length is prefilled."""
    sizes = {"max_sequences": 8, "chunk_tokens": 256, "max_model_len": 1024}
    model = TextModel(llama().to(dtype))
    measured = activation_bytes(model, block_tokens=block_tokens, **sizes)
    engine = make_engine(
        model, blocks=9 * 1024 // block_tokens, block_tokens=block_tokens, prefix_cache=False, **sizes
    )
    most = 0
    for attempt in "ab":  # the first time libraries set up their workspaces
        for number in range(7):
            engine.add(text_input(model, f"{attempt}{number}", prompt_of(90, number), 30))
        engine.step()
        engine.add(text_input(model, f"{attempt}long", prompt_of(1000, 9), 20))
        most = run_memory(engine)
    assert 0 < most <= measured


def run_memory(engine):
    """Run what the engine has; the largest peak of a step."""
    most = 0
    while engine.has_work():
        torch.cuda.synchronize(DEVICE)
        torch.cuda.reset_peak_memory_stats(DEVICE)
        before = torch.cuda.memory_allocated(DEVICE)
        engine.step()
        torch.cuda.synchronize(DEVICE)
        most = max(most, torch.cuda.max_memory_allocated(DEVICE) - before)
    return most


LOSE = """
import sys, torch
from mmd_api.contract.errors import DeviceLostError
from mmd_workers.basics.device import check_device
device = torch.device(sys.argv[1])
try:
    torch.empty(1 << 50, dtype=torch.uint8, device=device)
except torch.OutOfMemoryError as error:
    check_device(error, device)
try:
    torch.ones(2, 3, device=device) @ torch.ones(2, 3, device=device)
except RuntimeError as error:
    check_device(error, device)
try:
    torch.zeros(4, device=device)[torch.tensor([9], device=device)].tolist()
except RuntimeError as error:
    try:
        check_device(error, device)
    except DeviceLostError as lost:
        print(lost.message)
"""


def test_an_assertion_loses_the_device_and_other_errors_do_not():
    """The other errors are memory that does not suffice and shapes that differ."""
    ran = subprocess.run(
        [sys.executable, "-c", LOSE, str(DEVICE)], capture_output=True, text=True, timeout=120, check=False
    )
    assert ran.returncode == 0, ran.stderr[-2000:]
    assert ran.stdout.startswith(
        f"the accelerator of this process ({DEVICE}) failed and cannot be used again: CUDA error: "
    )
