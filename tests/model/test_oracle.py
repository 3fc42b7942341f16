"""The split model answers as the whole one: greedy tokens equal `generate`, for every architecture and medium."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from support.oracles import model_zoo as zoo

from .cases import CASES, ORACLE

pytestmark = pytest.mark.models


@pytest.mark.parametrize(("arch", "case"), ORACLE, ids=[f"{a}-{c}" for a, c in ORACLE])
def test_greedy_tokens_of_the_split_model_equal_generate(
    arch: str, case: str, checkpoint: Callable[[str], Path]
) -> None:
    served = zoo.serve(checkpoint(arch))
    parts = CASES[case][1]()
    messages = zoo.conversation(*parts)
    media = [p for p in parts if isinstance(p, zoo.Medium)]

    layout = served.frontend.layout(messages, [m.info for m in media])
    inputs = zoo.hf_inputs(served, messages, media, layout)
    assert layout.token_ids == inputs["input_ids"][0].tolist()

    expected = zoo.generate(served, inputs)
    prompt = zoo.lowered(served, layout, media)
    assert zoo.greedy(served, prompt) == expected
    assert len(set(expected)) > 2, "a model that repeats itself proves nothing"

    carried = expected[:5]  # a sequence that moved here after five tokens
    resumed = zoo.lowered(served, layout, media, carried)
    assert carried + zoo.greedy(served, resumed, zoo.NEW_TOKENS - 5) == expected
    assert torch.equal(resumed.positions[:, : len(layout.token_ids)], prompt.positions)
