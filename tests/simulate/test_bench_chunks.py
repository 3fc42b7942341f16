"""What the bench of chunk sizes measures, with the engine and a small model."""

from __future__ import annotations

import pytest

from bench.chunks import ALONE_STEPS, Line, measure
from support.oracles.engine_oracle import TextModel, llama, make_engine, prompt_of


@pytest.mark.parametrize(("chunk_tokens", "steps"), [(8, 5), (16, 3), (40, 1)])
def test_each_prompt_step_is_one_chunk_beside_tokens_of_others(chunk_tokens: int, steps: int) -> None:
    engine, line = make_engine(TextModel(llama()), prefix_cache=False, blocks=300), Line(chunk_tokens)
    for _ in range(2):
        measure(engine, line, prompt_of(40, 1), [prompt_of(4, seed) for seed in (2, 3)])
    found = line.as_dict()
    assert found["steps"] == steps
    assert len(line.alone) == 2 * ALONE_STEPS
    assert found["alone_ms"] > 0
    assert line.ttft == pytest.approx([sum(line.beside[:steps]), sum(line.beside[steps:])])
    assert line.longest == [max(line.beside[:steps]), max(line.beside[steps:])]
    assert not engine.has_work()
