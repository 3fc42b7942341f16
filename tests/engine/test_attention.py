"""Masks equal those transformers makes, and what cannot be computed exactly is refused at start."""

import pytest
import torch
import transformers
from torch.nn import functional
from transformers.masking_utils import create_causal_mask, create_sliding_window_causal_mask

from mmd_api.contract.errors import UnsupportedModelError
from mmd_workers.engine import attention
from mmd_workers.engine.batch import Batch
from mmd_workers.engine.interface import SamplingParams
from mmd_workers.engine.kv_pool import KvPool
from mmd_workers.engine.scheduler import Work
from mmd_workers.engine.sequence import Sequence
from mmd_workers.model.prompt import KvLayout, LoweredPrompt
from tests.support.engine_oracle import SMALL, llama

TOKENS = 40


@pytest.mark.parametrize("window", [None, 8])
@pytest.mark.parametrize("ranges", [[], [(5, 9)], [(3, 20), (20, 33)]])
@pytest.mark.parametrize("past", [0, 3])
def test_chunk_masks_equal_those_of_transformers(window, ranges, past):
    """Also where a bidirectional range is longer than the sliding window."""
    config = transformers.Gemma3TextConfig(**SMALL, sliding_window=8)
    config._attn_implementation = "sdpa"
    groups = torch.full((1, TOKENS), -1)
    for number, (start, end) in enumerate(ranges):
        groups[0, start:end] = number
    make = create_causal_mask if window is None else create_sliding_window_causal_mask
    expected = make(
        config,
        torch.zeros(1, TOKENS, 1),
        None,
        None,
        block_sequence_ids=groups,
        allow_is_causal_skip=False,
    )[0, 0]
    pool = KvPool(KvLayout(1, [1], [4], "float32"), 10, 4, torch.device("cpu"))
    nothing = torch.empty(0)
    prompt = LoweredPrompt([0] * TOKENS, nothing, TOKENS, nothing, {}, {}, ranges)
    sequence = Sequence(
        "a", 0, [0] * TOKENS, TOKENS, TOKENS, SamplingParams(1), [], prompt, blocks=list(range(10))
    )
    mask = Batch(pool, [Work(sequence, past, TOKENS)]).chunk_mask(0, window)
    if mask is None:
        mask = torch.ones(TOKENS, TOKENS, dtype=torch.bool).tril()
    assert torch.equal(mask, expected[past:])


def reference_varlen(
    query,
    pages_k,
    pages_v,
    starts_q,
    starts_k,
    max_q,
    max_k,
    *,
    scale,
    window_size,
    enable_gqa,
    seqused_k,
    block_table,
):
    """PyTorch's `varlen_attn` over pages, as its CUDA kernel takes them: the starts of queries and keys both, blocks of 256 tokens."""
    assert (starts_q is None) == (starts_k is None)
    assert enable_gqa
    assert pages_k.shape[1] % attention.FLASH_BLOCK_TOKENS == 0
    assert starts_k.diff().tolist() == seqused_k.tolist()
    assert (starts_q.diff().max(), seqused_k.max()) == (max_q, max_k)
    left, right = window_size
    assert right == 0
    out = torch.empty_like(query)
    for number, (start, end) in enumerate(zip(starts_q[:-1].tolist(), starts_q[1:].tolist(), strict=True)):
        context = int(seqused_k[number])
        keys, values = (
            pages[block_table[number].long()].flatten(0, 1)[:context].transpose(0, 1)
            for pages in (pages_k, pages_v)
        )
        rows = torch.arange(context - (end - start), context)[:, None]
        columns = torch.arange(context)[None]
        seen = (columns <= rows) if left < 0 else (columns <= rows) & (columns >= rows - left)
        out[start:end] = functional.scaled_dot_product_attention(
            query[start:end].transpose(0, 1), keys, values, attn_mask=seen, scale=scale, enable_gqa=True
        ).transpose(0, 1)
    return out


@pytest.mark.parametrize("window", [None, 100])
def test_a_batch_is_described_to_pytorchs_paged_kernel_as_the_exact_one_computes_it(window, monkeypatch):
    monkeypatch.setattr(attention, "varlen_attn", reference_varlen)
    pool = KvPool(KvLayout(1, [2], [16], "float32"), 9, attention.FLASH_BLOCK_TOKENS, torch.device("cpu"))
    generator = torch.Generator().manual_seed(0)
    for tensor in (*pool.keys, *pool.values):
        tensor.copy_(torch.randn(tensor.shape, generator=generator))
    spans = [([7, 0], 299, 300), ([3], 0, 1), ([5, 2, 8], 400, 700), ([1], 0, 200)]
    work = [
        Work(Sequence("a", 0, [], 0, 0, SamplingParams(1), [], None, blocks=blocks), start, end)
        for blocks, start, end in spans
    ]
    batch = Batch(pool, work)
    query = torch.randn(batch.num_rows, 8, 16, generator=generator)
    expected = attention.torch_kernel(batch, 0, query, 0.25, window, None)
    got = attention.varlen_kernel(batch, 0, query, 0.25, window, None)
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("tokens", "remedy"), [(16, "; set spec.decode.kvBlockTokens to 256"), (512, "")])
def test_what_the_paged_kernel_does_not_take_is_logged_once_with_its_reason(
    tokens, remedy, monkeypatch, caplog
):
    def refuse(*_, **__):
        raise RuntimeError("Paged KV cache block size must be divisible by 256\nmore")

    monkeypatch.setattr(attention, "varlen_attn", refuse)
    where = (3, 8, torch.bfloat16, tokens, torch.device("cpu"))
    assert attention._varlen_refusal(*where) == attention._varlen_refusal(*where) != ""
    (record,) = caplog.records
    assert record.getMessage().endswith(
        f"not take them (Paged KV cache block size must be divisible by 256){remedy}"
    )


def test_a_decoder_with_sinks_or_chunked_attention_is_refused_with_the_reason():
    decoder = llama().get_decoder()
    decoder.config.layer_types = ["full_attention", "chunked_attention"]
    with pytest.raises(UnsupportedModelError, match="chunked_attention"):
        attention.install(decoder)
    decoder.config.layer_types = ["full_attention", "full_attention"]
    decoder.layers[1].self_attn.sinks = torch.nn.Parameter(torch.zeros(4))
    with pytest.raises(UnsupportedModelError, match="sinks"):
        attention.install(decoder)
