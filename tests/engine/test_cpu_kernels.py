"""The compiled CPU kernels equal PyTorch's operators, and PyTorch serves exactly where they cannot be built."""

import ctypes
import platform
from pathlib import Path

import pytest
import torch
import transformers
from torch.nn import functional

from mmd_workers.engine import attention
from mmd_workers.engine.batch import Batch
from mmd_workers.engine.cpu import library, modules
from mmd_workers.engine.interface import SamplingParams
from mmd_workers.engine.memory.kv_pool import KvPool
from mmd_workers.engine.pieces import Work
from mmd_workers.engine.sequence import Sequence
from mmd_workers.model.prompt import KvLayout, LoweredPrompt
from support.harness.needed import NO_COMPILER, lacking
from support.oracles.engine_oracle import (
    SMALL,
    TEXT_MODELS,
    TextModel,
    generate,
    make_engine,
    prompt_of,
    run,
    text_input,
)

CPU = torch.device("cpu")


LEVELS = ["x86-64", *library.LEVELS] if platform.machine() in ("x86_64", "AMD64") else ["native"]


@pytest.fixture
def kernels():
    loaded = library.load()
    if loaded is None:
        lacking(NO_COMPILER)
    return loaded


@pytest.fixture(scope="module", params=LEVELS)
def variant(request, tmp_path_factory):
    """The kernels for each level of the processor that this machine can run."""
    if not library.LEVELS.get(request.param, set()) <= set(library._features().split()):
        pytest.skip(f"this processor is not {request.param}")
    if (compiler := library._compiler()) is None:
        lacking(NO_COMPILER)
    path = tmp_path_factory.mktemp("kernels") / "kernels.so"
    return library.Library(library._build(compiler, request.param, path))


def test_kernels_that_an_image_has_built_need_no_compiler(tmp_path, monkeypatch):
    monkeypatch.setattr(library, "BUILT", tmp_path / "built")
    library.main()
    if not (tmp_path / "built").exists():
        lacking(f"{NO_COMPILER}, or no x86-64 processor")
    monkeypatch.setattr(library, "_compiler", lambda: None)
    loaded = library.load.__wrapped__()
    assert loaded is not None
    x, weight = torch.randn(3, 20), torch.randn(40, 20)
    product = loaded.linear(x, loaded.pack(weight), 40, None)
    torch.testing.assert_close(product, functional.linear(x, weight), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("vocab", [1, 31, 32, 33, 1000])
@pytest.mark.parametrize("share", [0.0, 0.01, 0.5, 0.99, 1.0])
def test_a_mask_leaves_what_its_bits_allow_and_other_rows(variant, vocab, share):
    generator = torch.Generator().manual_seed(vocab)
    words = -(-vocab // 32) + 1  # of a tokenizer with more tokens than the model
    allowed = torch.rand(3, 32 * words, generator=generator) < share
    bits = (allowed.view(3, -1, 8) * (1 << torch.arange(8))).sum(-1).to(torch.uint8)
    logits = torch.randn(5, vocab, generator=generator)
    expected = logits.clone()
    expected[[4, 0, 2]] = expected[[4, 0, 2]].masked_fill(~allowed[:, :vocab], -torch.inf)
    variant.mask(logits, [4, 0, 2], bits)
    assert torch.equal(logits, expected)


@pytest.mark.parametrize(("rows", "width"), [([0], 6), ([0], 4), ([2], 8), ([-1], 8), ([0, 1], 8)])
def test_a_mask_that_does_not_fit_the_logits_is_refused(kernels, rows, width):
    with pytest.raises(ValueError, match="cannot mask rows"):
        kernels.mask(torch.zeros(2, 40), rows, torch.zeros(1, width, dtype=torch.uint8))


def test_a_mask_that_is_no_row_of_bytes_is_refused(kernels):
    bits = torch.zeros(8, 2, dtype=torch.uint8)
    for wrong in (bits.t()[:1], bits.t(), torch.zeros(1, 8, dtype=torch.int32)):
        with pytest.raises(ValueError, match="cannot mask rows"):
            kernels.mask(torch.zeros(2, 40), [0] * len(wrong), wrong)
    with pytest.raises(ValueError, match="cannot mask rows"):
        kernels.mask(torch.zeros(40, 2).t(), [0], torch.zeros(1, 8, dtype=torch.uint8))


@pytest.mark.parametrize("rows", [1, 2, 7, 13, 40, 131])
@pytest.mark.parametrize(("n", "k"), [(64, 64), (50, 33), (1, 1), (129, 300)])
def test_a_packed_linear_layer_equals_the_plain_one(variant, rows, n, k):
    generator = torch.Generator().manual_seed(rows + n)
    plain = torch.nn.Linear(k, n)
    x = torch.randn(2, rows, k, generator=generator)
    packed = modules.PackedLinear(plain, variant)
    torch.testing.assert_close(packed(x), plain(x).detach(), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(packed(x[:, ::2]), plain(x[:, ::2]).detach(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "x",
    [torch.zeros(3, 65), torch.zeros(3, 63), torch.zeros(3, 64, dtype=torch.float16)],
    ids=["wider", "narrower", "half"],
)
def test_a_packed_linear_layer_refuses_another_width_or_dtype(variant, x):
    packed = modules.PackedLinear(torch.nn.Linear(64, 8), variant)
    with pytest.raises(ValueError, match="64 float32 columns"):
        packed(x)


def test_a_linear_layer_keeps_its_code_where_the_kernels_differ(variant, monkeypatch):
    layers = torch.nn.Sequential(torch.nn.Linear(64, 8))
    monkeypatch.setattr(type(variant), "linear", lambda self, x, packed, n, bias: torch.zeros(len(x), n))
    assert modules.pack_linears(layers, variant) == 0
    assert type(layers[0]) is torch.nn.Linear


def test_what_is_not_packed_leaves_the_memory_it_was_loaded_into(variant):
    layers = torch.nn.Sequential(torch.nn.LayerNorm(64), torch.nn.Linear(64, 8))
    assert modules.pack_linears(layers, variant) == 1
    # kept, or their addresses would be used again
    loaded = [tensor.detach() for tensor in (*layers.parameters(), layers[1].bias)]
    packed = layers[1].packed.data_ptr()
    modules.own_memory(layers)
    before = {tensor.data_ptr() for tensor in loaded}
    assert before.isdisjoint(tensor.data_ptr() for tensor in (*layers.parameters(), layers[1].bias))
    assert layers[1].packed.data_ptr() == packed


def random_pool(kv_heads, dim, generator, kv_dtype="Model"):
    pool = KvPool(KvLayout(1, [kv_heads], [dim], "float32").packed_as(kv_dtype), 80, 5, CPU)
    keys, values = torch.randn(2, 400, kv_heads, dim, generator=generator)
    pool.put(0, torch.arange(400), keys, values)
    return pool


@pytest.mark.parametrize("kv_dtype", library.FORMATS)
@pytest.mark.parametrize("softcap", [None, 3.0])
@pytest.mark.parametrize("window", [None, 6, 90])
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(4, 2, 16), (3, 1, 48), (8, 8, 64), (20, 1, 80)])
def test_attention_over_pages_equals_pytorch(variant, heads, kv_heads, dim, window, softcap, kv_dtype):
    """Rows alone and chunks, at the start and later, over several tiles, with ranges that are bidirectional inside."""
    generator = torch.Generator().manual_seed(1)
    pool = random_pool(kv_heads, dim, generator, kv_dtype)
    free = torch.randperm(80, generator=generator).tolist()
    work = []
    for start, length in ((0, 1), (4, 5), (17, 18), (46, 47), (0, 7), (9, 11), (0, 70), (65, 132)):
        blocks = [free.pop() for _ in range(-(-length // 5))]
        ranges = [(1, 4), (20, 40), (100, 110)] if length - start > 1 else []
        prompt = LoweredPrompt([], torch.empty(0), 0, {}, ranges)
        sequence = Sequence("a", 0, [0] * length, 0, 0, SamplingParams(1), [], prompt, blocks=blocks)
        work.append(Work(sequence, start, length))
    batch = Batch(pool, work)
    query = torch.randn(batch.num_rows, heads, dim, generator=generator) * 3
    arguments = (batch, 0, query, 0.3, window, softcap)
    torch.testing.assert_close(
        attention.compiled_kernel(variant)(*arguments),
        attention.torch_kernel(*arguments),
        rtol=1e-4,
        atol=2e-5,
    )


@pytest.mark.parametrize("kv_dtype", library.FORMATS)
def test_attention_reads_nothing_that_a_sequence_does_not_own(kernels, kv_dtype):
    """What else is in its blocks may be the NaN of another request."""
    generator = torch.Generator().manual_seed(2)
    pool = random_pool(2, 32, generator, kv_dtype)
    work = []
    for number, (start, length) in enumerate(((12, 13), (3, 22))):
        blocks = list(range(10 * number, 10 * number + 6))
        work.append(
            Work(
                Sequence("a", 0, [0] * length, 0, 0, SamplingParams(1), [], None, blocks=blocks),
                start,
                length,
            )
        )
    query = torch.randn(20, 4, 32, generator=generator)
    arguments = (Batch(pool, work), 0, query, 0.2, None, None)
    kernel = attention.compiled_kernel(kernels)
    expected = kernel(*arguments)
    for number, item in enumerate(work):
        for tensor in (pool.keys[0], pool.values[0]):
            others = tensor[10 * number : 10 * number + 10].flatten(0, 1)[item.end :]
            others.fill_(float("nan")) if kv_dtype == "Model" else others.fill_(0xFF)
    assert torch.equal(kernel(*arguments), expected)


def test_norms_are_fused_only_where_the_numbers_are_the_same():
    plain = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SMALL)).model
    gemma = transformers.Gemma2ForCausalLM(transformers.Gemma2Config(**SMALL, head_dim=16)).model
    x = torch.randn(3, 64)
    for decoder, norms in ((plain, 5), (gemma, 9)):
        for module in decoder.modules():
            if type(module).__name__.endswith("RMSNorm"):
                module.weight.data = torch.rand(64)
        expected = decoder.norm(x)
        assert modules.fuse_norms(decoder) == norms
        torch.testing.assert_close(decoder.norm(x), expected, rtol=1e-5, atol=1e-5)

    class OtherRMSNorm(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.weight, self.eps = torch.nn.Parameter(torch.rand(64)), 1e-6

        def forward(self, x):
            return 2 * functional.rms_norm(x, (64,), self.weight, self.eps)

    other = OtherRMSNorm()
    assert modules.fuse_norms(other) == 0


@pytest.mark.parametrize("name", TEXT_MODELS)
def test_without_a_compiler_pytorch_serves_the_same_tokens(name, monkeypatch):
    monkeypatch.setattr(library, "load", lambda: None)
    model = TextModel(TEXT_MODELS[name]())
    engine = make_engine(model, chunk_tokens=12)
    assert engine.model_runner.kernel is attention.torch_kernel
    prompts = [prompt_of(length, length) for length in (3, 30, 21)]
    for number, prompt in enumerate(prompts):
        engine.add(text_input(model, str(number), prompt, 12))
    reference = TEXT_MODELS[name]()
    assert run(engine).tokens == {str(n): generate(reference, p, 12) for n, p in enumerate(prompts)}


@pytest.mark.parametrize("what", ["truncated", "foreign", "text"])
def test_a_file_in_the_cache_that_cannot_be_loaded_is_built_again(what, tmp_path, monkeypatch, caplog):
    if library.load() is None:
        lacking(NO_COMPILER)
    monkeypatch.setattr(library, "BUILT", tmp_path / "none")
    monkeypatch.setattr(library, "FLAGS", ["-O1", *library.FLAGS[1:]])
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "first"))
    assert library.load.__wrapped__() is not None
    (first,) = tmp_path.rglob("*.so")
    whole = first.read_bytes()
    monkeypatch.setenv(
        "XDG_CACHE_HOME", str(tmp_path / "second")
    )  # what is loaded from a path is not loaded again
    built = library._cache(first.name) / first.name
    other = Path(ctypes.__file__).with_name("__init__.py").read_bytes()
    foreign = next(Path(torch.__file__).parent.glob("_C*.so")).read_bytes()
    built.write_bytes({"truncated": whole[: len(whole) // 2], "foreign": foreign, "text": other}[what])
    assert library.load.__wrapped__() is not None
    assert "cannot be loaded" in caplog.text
    assert len(built.read_bytes()) == len(whole)


def test_a_user_without_a_home_has_the_kernels_too(monkeypatch):
    def home():
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(library.Path, "home", home)
    assert library._cache("x.so").is_dir()


def test_a_compiler_that_fails_leaves_pytorch_to_serve(monkeypatch, tmp_path, caplog):
    broken = tmp_path / "c++"
    broken.write_text("#!/bin/sh\necho first >&2; echo no room left >&2; exit 1\n")
    broken.chmod(0o700)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert library.load.__wrapped__() is None
    assert ": no room left); using PyTorch" in caplog.text
