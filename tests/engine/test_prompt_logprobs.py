"""Log probabilities of a prompt's tokens are those of the model in one pass over it, however the prompt is cut and batched."""

from __future__ import annotations

import pytest
import torch

from mmd_workers.engine.interface import SequenceInput
from support.oracles.engine_oracle import (
    TEXT_MODELS,
    TextModel,
    greedy,
    make_engine,
    prompt_of,
    run,
    text_input,
)

LENGTHS = [1, 2, 33, 70]


@torch.inference_mode()
def of_model(full: torch.nn.Module, prompt: list[int]) -> torch.Tensor:
    """Log probabilities [tokens - 1, vocab] of what may come after each token but the last."""
    ids = torch.tensor([prompt], device=full.device)
    return torch.log_softmax(full(input_ids=ids).logits[0, :-1].float(), dim=-1)


def wanted(model: TextModel, name: str, prompt: list[int], count: int = 3, **more) -> SequenceInput:
    sampling = greedy(4, logprobs=count, prompt_logprobs=True)
    return SequenceInput(name, model.lower(prompt), sampling, **more)


def found_in(outcome, name: str):
    """What came with each token of a sequence."""
    return [
        token.prompt_logprobs for step in outcome.steps for token in step.tokens if token.sequence_id == name
    ]


@pytest.mark.parametrize("chunk_tokens", [1, 7, 64])
@pytest.mark.parametrize("name", TEXT_MODELS)
def test_they_are_those_of_one_pass_over_the_prompt(name, chunk_tokens):
    full, model = TEXT_MODELS[name](), TextModel(TEXT_MODELS[name]())
    engine = make_engine(model, chunk_tokens=chunk_tokens, max_sequences=5, draft_tokens=4)
    prompts = [prompt_of(length, seed) for seed, length in enumerate(LENGTHS)]
    for number, prompt in enumerate(prompts):
        engine.add(wanted(model, str(number), prompt))
    outcome = run(engine)
    for number, prompt in enumerate(prompts):
        first, *others = found_in(outcome, str(number))
        assert not any(others)
        assert len(first) == len(prompt) - 1
        for at, ((logprob, likeliest), row) in enumerate(zip(first, of_model(full, prompt), strict=True)):
            assert logprob == pytest.approx(row[prompt[at + 1]].item(), abs=2e-4)
            assert [value for _, value in likeliest] == pytest.approx(row.topk(3).values.tolist(), abs=2e-4)
    assert engine.stats().blocks_free == engine.stats().blocks_total


def test_a_prefilled_sequence_that_moves_on_has_them_with_its_first_token():
    model = TextModel(TEXT_MODELS["llama"]())
    engine = make_engine(model, chunk_tokens=16)
    engine.add(wanted(model, "0", prompt_of(40, 1), stop_after_prefill=True))
    (first,) = found_in(run(engine), "0")
    assert len(first) == 39


def test_a_preempted_prompt_has_each_of_them_once():
    model = TextModel(TEXT_MODELS["llama"]())
    engine = make_engine(model, blocks=12, chunk_tokens=8, prefix_cache=False)
    for number in range(4):
        engine.add(wanted(model, str(number), prompt_of(30, number), arrived=float(number)))
    outcome = run(engine)
    for number in range(4):
        assert [len(one) for one in found_in(outcome, str(number))] == [29, 0, 0, 0]


def test_a_request_that_goes_on_elsewhere_has_them_no_second_time():
    model = TextModel(TEXT_MODELS["llama"]())
    engine, prompt, outputs = make_engine(model), prompt_of(20, 3), [5, 6]
    sampling = greedy(4, logprobs=1, prompt_logprobs=True)
    engine.add(SequenceInput("0", model.lower(prompt, (), outputs), sampling, output_token_ids=outputs))
    assert not any(found_in(run(engine), "0"))


def test_a_prompt_with_a_cached_prefix_has_all_its_log_probabilities():
    model = TextModel(TEXT_MODELS["llama"]())
    engine, prompt = make_engine(model, chunk_tokens=8), prompt_of(40, 3)
    engine.add(wanted(model, "left", prompt))
    engine.step()
    engine.step()
    engine.abort("left")  # its blocks stay
    for name in ("again", "at last"):
        engine.add(wanted(model, name, prompt))
        first, *_ = found_in(run(engine), name)
        assert len(first) == 39
    before = engine.stats().prefix_hit_tokens
    engine.add(text_input(model, "other", prompt, 2))
    run(engine)
    assert engine.stats().prefix_hit_tokens - before == 32


def test_without_likely_tokens_there_are_the_prompts_own():
    model = TextModel(TEXT_MODELS["llama"]())
    engine = make_engine(model)
    engine.add(wanted(model, "0", prompt_of(20, 3), count=0))
    first, *_ = found_in(run(engine), "0")
    assert len(first) == 19
    assert all(not likeliest for _, likeliest in first)
