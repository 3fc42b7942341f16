"""KV in 8 bits in the pool: tokens are those of a cache that rounds every key and value, however a sequence is computed and wherever it goes."""

import ctypes
import platform
import subprocess

import pytest
import torch
import transformers

from mmd_workers.basics import packing
from mmd_workers.engine import attention
from mmd_workers.engine.cpu import library
from mmd_workers.engine.memory.kv_pool import KvPool
from mmd_workers.model.prompt import KvLayout
from support.harness.needed import NO_COMPILER, lacking
from support.oracles.engine_oracle import (
    TEXT_MODELS,
    Outcome,
    TextModel,
    make_engine,
    prompt_of,
    run,
    text_input,
)

KV_DTYPES = ("Int8", "Fp8")
TOKENS = 16
LEAST_GAP = 0.03
"""Between the two largest logits: a code that float32 rounds to another side moves them by less."""
CPU = torch.device("cpu")


class RoundedCache(transformers.DynamicCache):
    """Keeps what packed rows would hold."""

    def __init__(self, config, kv_dtype):
        super().__init__(config=config)
        self.kv_dtype = kv_dtype

    def update(self, key_states, value_states, *args, **kwargs):
        return super().update(
            *(rounded(x, self.kv_dtype) for x in (key_states, value_states)), *args, **kwargs
        )


def rounded(values, kv_dtype):
    rows = torch.empty(*values.shape[:-1], packing.row_bytes(values.shape[-1], kv_dtype), dtype=torch.uint8)
    packing.pack(values.cpu(), rows, kv_dtype)
    return packing.unpack(rows, values.shape[-1], values.dtype, kv_dtype).to(values.device)


@torch.inference_mode()
def steady_prompts(full, kv_dtype, lengths):
    """Prompts of these lengths and the oracle's answers to them, none of which a tie decides."""
    found = {}
    for length in lengths:
        for seed in range(40):
            ids = torch.tensor([prompt_of(length, 100 * length + seed)], device=full.device)
            made = full.generate(
                input_ids=ids,
                attention_mask=torch.ones_like(ids),
                past_key_values=RoundedCache(full.config, kv_dtype),
                max_new_tokens=TOKENS,
                do_sample=False,
                output_logits=True,
                return_dict_in_generate=True,
            )
            first, second = torch.cat(made.logits).float().topk(2).values.unbind(-1)
            if (first - second).min() > LEAST_GAP:
                found[tuple(ids[0].tolist())] = made.sequences[0, length:].tolist()
                break
        else:
            raise AssertionError("every answer has a tie")
    return found


def answers(engine, model, prompts, after_step=lambda: None):
    for number, prompt in enumerate(prompts):
        engine.add(text_input(model, str(number), list(prompt), TOKENS))
    outcome = Outcome()
    while engine.has_work():
        outcome.take(engine.step())
        after_step()
    return [outcome.tokens[str(number)] for number in range(len(prompts))]


def spoil_unreferenced(engine):
    """Overwrite what nobody may read any more with NaN."""
    unheld = [block for block, count in enumerate(engine.blocks._references) if not count]
    for tensor in (*engine.kv.keys, *engine.kv.values):
        tensor.index_fill_(0, torch.tensor(unheld, dtype=torch.int64, device=tensor.device), 0xFF)


def handed_over(prefill, decode, model, prompts):
    """The answers of a decoder that gets the KV of another engine."""
    outcome = Outcome()
    for number, prompt in enumerate(prompts):
        name, item = (
            str(number),
            text_input(model, str(number), list(prompt), TOKENS, stop_after_prefill=True),
        )
        prefill.add(item)
        run(prefill, outcome)
        decode.reserve(name, len(prompt), TOKENS)
        decode.write_kv(name, 0, prefill.read_kv(name, 0, len(prompt)))
        decode.attach(name, list(prompt), item.sampling, outcome.tokens[name], item.prompt.next_position, [])
        prefill.abort(name)
    run(decode, outcome)
    return [outcome.tokens[str(number)] for number in range(len(prompts))]


@pytest.mark.parametrize(
    ("name", "kv_dtype"),
    [("llama", "Int8"), ("llama", "Fp8"), ("odd", "Fp8"), ("mistral", "Int8"), ("gemma2", "Int8")],
)
def test_tokens_are_the_same_for_all_chunks_kernels_preemptions_and_pods(name, kv_dtype):
    expected = steady_prompts(TEXT_MODELS[name](), kv_dtype, (3, 30, 21))
    own = [*expected.values()]
    model, eager = (TextModel(TEXT_MODELS[name]()) for _ in range(2))
    for chunk_tokens in (512, 7, 1):
        engine = make_engine(model, chunk_tokens=chunk_tokens, kv_dtype=kv_dtype)
        for _ in ("computed", "from the prefix cache"):
            assert answers(engine, model, expected) == own
    few = make_engine(
        model, blocks=13, block_tokens=4, chunk_tokens=16, prefix_cache=False, kv_dtype=kv_dtype
    )
    assert answers(few, model, expected, lambda: spoil_unreferenced(few)) == own
    assert few.stats().preemptions > 0 or name == "mistral"
    plain = make_engine(eager, chunk_tokens=7, kv_dtype=kv_dtype, fused_layers=False, block_tokens=5)
    assert handed_over(engine, plain, model, expected) == own
    plain.model_runner.kernel = attention.torch_kernel
    assert answers(plain, eager, [*expected]) == own


def computed_kv(model, chunk_tokens, kv_dtype, kernel=None):
    """The KV of a prompt, all values of all layers."""
    engine = make_engine(model, chunk_tokens=chunk_tokens, kv_dtype=kv_dtype, fused_layers=kernel is None)
    engine.model_runner.kernel = kernel or engine.model_runner.kernel
    engine.add(text_input(model, "a", prompt_of(60, 5), 1, stop_after_prefill=True))
    run(engine)
    layers = engine.read_kv("a", 0, 60)
    if kv_dtype != "Model":
        layers = [packing.unpack(rows, 16, torch.float32, kv_dtype) for rows in layers]
    return torch.stack(layers)


@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
def test_rows_of_a_chunk_read_packed_what_the_same_chunk_writes(kv_dtype):
    """Else KV would depend on where a prompt is cut."""
    fused, eager = (TextModel(TEXT_MODELS["llama"]()) for _ in range(2))
    one_by_one, exact = computed_kv(fused, 1, kv_dtype), computed_kv(fused, 512, "Model")
    changed = (one_by_one[1] - exact[1]).norm()
    for made in (
        computed_kv(fused, 512, kv_dtype),
        computed_kv(fused, 7, kv_dtype),
        computed_kv(eager, 512, kv_dtype, attention.torch_kernel),
    ):
        assert (made - one_by_one).norm() < changed / 50


SHIM = """
#include "packed.h"
extern "C" void pack_rows(int64_t format, const float* x, int64_t rows, int64_t dim, uint8_t* to) {
  for (int64_t r = 0; r < rows; r++) pack(format, x + r * dim, dim, to + r * (dim + UNIT_BYTES));
}
extern "C" void unpack_rows(int64_t format, const uint8_t* from, int64_t rows, int64_t dim, float* to) {
  unpack(format, from, dim + UNIT_BYTES, dim, rows, to);
}
"""


LEVELS = ["x86-64", *library.LEVELS] if platform.machine() in ("x86_64", "AMD64") else ["native"]


@pytest.fixture(scope="module", params=LEVELS)
def shim(request, tmp_path_factory):
    """The two functions of packed.h for each level of the processor that this machine can run."""
    if not library.LEVELS.get(request.param, set()) <= set(library._features().split()):
        pytest.skip(f"this processor is not {request.param}")
    if (compiler := library._compiler()) is None:
        lacking(NO_COMPILER)
    folder = tmp_path_factory.mktemp("packed")
    (folder / "shim.cpp").write_text(SHIM)
    flags = [*library.FLAGS, f"-march={request.param}", f"-I{library.SOURCE.parent}"]
    subprocess.run([compiler, *flags, folder / "shim.cpp", "-o", folder / "shim.so"], check=True)
    loaded = ctypes.CDLL(str(folder / "shim.so"))
    size, pointer = ctypes.c_int64, ctypes.c_void_p
    loaded.pack_rows.argtypes = [size, pointer, size, size, pointer]
    loaded.unpack_rows.argtypes = [size, pointer, size, size, pointer]
    return loaded


@pytest.mark.parametrize("dim", [16, 80])
@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
def test_the_kernels_pack_and_unpack_the_bytes_of_pytorch(shim, kv_dtype, dim):
    """Rows of any magnitude, ties between codes, zeros, the largest and the least numbers, and values that are not finite."""
    generator = torch.Generator().manual_seed(dim)
    info, count = torch.finfo(torch.float32), 400
    values = torch.randn(count, dim, generator=generator)
    values[:300] *= 10 ** torch.linspace(-44, 37, 300)[:, None]
    values[300:340] = (torch.arange(40 * dim).view(40, dim) % 4096 - 2048) / 32
    values[300:340, 0] = packing_limit(kv_dtype)
    for row, value in enumerate((0.0, info.max, -info.max, info.tiny, info.smallest_normal / 4)):
        values[340 + row] = value
    for row, value in enumerate((torch.nan, -torch.nan, torch.inf, -torch.inf)):
        values[350 + row, 3 + row] = value
    expected = torch.empty(count, packing.row_bytes(dim, kv_dtype), dtype=torch.uint8)
    packing.pack(values, expected, kv_dtype)
    rows, number = torch.empty_like(expected), library.FORMATS.index(kv_dtype)
    shim.pack_rows(number, values.data_ptr(), count, dim, rows.data_ptr())
    assert torch.equal(rows, expected)
    unpacked = torch.empty_like(values)
    shim.unpack_rows(number, rows.data_ptr(), count, dim, unpacked.data_ptr())
    again = packing.unpack(rows, dim, torch.float32, kv_dtype)
    assert torch.equal(
        unpacked.clamp(-info.max, info.max).nan_to_num(nan=1234.5), again.nan_to_num(nan=1234.5)
    )


def packing_limit(kv_dtype):
    """A row with this value has a scale of 1."""
    return 127.0 if kv_dtype == "Int8" else 448.0


@pytest.mark.parametrize(("kv_dtype", "row"), [("Model", 256), ("Int8", 66), ("Fp8", 66)])
def test_as_many_blocks_fit_as_the_bytes_of_their_rows_allow(kv_dtype, row):
    layout = KvLayout(2, [2, 4], [64, 64], "float32").packed_as(kv_dtype)
    assert layout.bytes_per_token() == 2 * 6 * row
    pool = KvPool.of_bytes(layout, 10 * 8 * layout.bytes_per_token() + 1, 8, CPU)
    assert pool.num_blocks == pool.zero_block == 10
    num_bytes = sum(tensor.nbytes for tensor in (*pool.keys, *pool.values))
    assert num_bytes == 11 * 8 * layout.bytes_per_token(), "a step's measurement includes the block of zeros"
