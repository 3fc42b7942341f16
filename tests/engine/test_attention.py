"""Masks equal those transformers makes, and what cannot be computed exactly is refused at start."""

import pytest
import torch
import transformers
from transformers.masking_utils import create_causal_mask, create_sliding_window_causal_mask

from mmd_api.contract.errors import UnsupportedModelError
from mmd_workers.engine import attention
from mmd_workers.engine.batch import Batch
from mmd_workers.engine.interface import SamplingParams
from mmd_workers.engine.memory.kv_pool import KvPool
from mmd_workers.engine.pieces import Work
from mmd_workers.engine.sequence import Sequence
from mmd_workers.model.prompt import KvLayout, LoweredPrompt
from support.oracles.engine_oracle import SMALL, llama

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
    prompt = LoweredPrompt([0] * TOKENS, nothing, TOKENS, {}, ranges)
    sequence = Sequence(
        "a", 0, [0] * TOKENS, TOKENS, TOKENS, SamplingParams(1), [], prompt, blocks=list(range(10))
    )
    mask = Batch(pool, [Work(sequence, past, TOKENS)]).chunk_mask(0, window)
    if mask is None:
        mask = torch.ones(TOKENS, TOKENS, dtype=torch.bool).tril()
    assert torch.equal(mask, expected[past:])


def test_a_single_row_within_a_bidirectional_range_sees_it_beyond_the_window():
    """It is a chunk of one row. Rows outside a range, and of generated tokens, need no mask of their own."""
    prompt = LoweredPrompt([0] * 39, torch.empty(0), 39, {}, [(5, 20), (20, 39)])
    sequence = Sequence("a", 0, [0] * TOKENS, 39, 39, SamplingParams(1), [], prompt, blocks=list(range(10)))
    pool = KvPool(KvLayout(1, [1], [4], "float32"), 10, 4, torch.device("cpu"))
    works = [Work(sequence, place, place + 1) for place in (4, 39, 19, 38)]
    assert [work.is_single for work in works] == [True, True, False, False]
    batch = Batch(pool, works)
    assert batch.num_single == 2
    assert batch.single_mask(8).sum(dim=1).tolist() == [5, 8]
    assert [int(batch.chunk_mask(number, 8).sum()) for number in (0, 1)] == [15, 19]
    assert batch.visible(8).tolist() == [[0, 5], [32, 40], [5, 20], [20, 39]]


def test_a_decoder_with_sinks_or_chunked_attention_is_refused_with_the_reason():
    decoder = llama().get_decoder()
    decoder.config.layer_types = ["full_attention", "chunked_attention"]
    with pytest.raises(UnsupportedModelError, match="chunked_attention"):
        attention.install(decoder)
    decoder.config.layer_types = ["full_attention", "full_attention"]
    decoder.layers[1].self_attn.sinks = torch.nn.Parameter(torch.zeros(4))
    with pytest.raises(UnsupportedModelError, match="sinks"):
        attention.install(decoder)
