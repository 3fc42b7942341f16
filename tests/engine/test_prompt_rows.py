"""On the device are the rows of a prompt that a step computes, and no others; features stay in host memory for as long as they may be needed."""

import torch

from mmd_workers.model.prompt import Feature
from support.oracles.engine_oracle import (
    TEXT_MODELS,
    Outcome,
    TextModel,
    generate,
    make_engine,
    prompt_of,
    text_input,
)

PROMPT, MEDIUM, NEW_TOKENS = prompt_of(90, 3), (20, 61), 12


def test_a_step_builds_only_its_rows_and_rebuilds_them_after_preemption():
    model, made = TextModel(TEXT_MODELS["llama"]()), []
    rows = model.rows

    def noting(prompt, start, end):
        made.append((start, end))
        return rows(prompt, start, end)

    model.rows = noting
    with torch.inference_mode():
        feature = Feature("image", {"embeddings": model.embed(torch.tensor(PROMPT[slice(*MEDIUM)]))[0]})
    engine, outcome = make_engine(model, block_tokens=8, chunk_tokens=16, prefix_cache=False), Outcome()
    item = text_input(model, "a", PROMPT, NEW_TOKENS)
    item.prompt.missing[0] = MEDIUM
    engine.add(item)
    for _ in range(4):
        outcome.take(engine.step())
    assert made == [(0, 16), (16, 20)], "the next rows wait for the feature"
    engine.fill("a", 0, feature)
    while len(outcome.tokens.get("a", [])) < 5:
        outcome.take(engine.step())
    chunks = [(start, min(start + 16, 90)) for start in range(20, 90, 16)]
    assert made[2:] == chunks, "generated tokens are no rows of the prompt"
    engine.scheduler._preempt(engine.table.sequences["a"])
    while engine.has_work():
        outcome.take(engine.step())
    assert outcome.tokens["a"] == generate(TEXT_MODELS["llama"](), PROMPT, NEW_TOKENS)
    assert made[2 + len(chunks) :] == [(start, min(start + 16, 90)) for start in range(0, 90, 16)]
