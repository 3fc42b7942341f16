"""Greedy output of the engine is what `generate` says, token for token, however the work is cut, batched, cached or moved."""

import functools

import pytest
from engine_oracle import TEXT_MODELS, Outcome, TextModel, generate, make_engine, prompt_of, run, text_input

LENGTHS = [5, 33, 17, 64, 1, 40]
NEW_TOKENS = 14


@functools.cache
def model_and_answers(name):
    """The engine's model, and `generate`'s answers of an equal but untouched model."""
    reference = TEXT_MODELS[name]()
    prompts = [prompt_of(length, seed) for seed, length in enumerate(LENGTHS)]
    answers = [generate(reference, prompt, NEW_TOKENS) for prompt in prompts]
    assert min(len(set(answer)) for answer in answers) > 4, "answers that repeat one token prove nothing"
    return TextModel(TEXT_MODELS[name]()), prompts, answers


def outputs(outcome):
    return [outcome.tokens[str(number)] for number in range(len(LENGTHS))]


@pytest.mark.parametrize("name", TEXT_MODELS)
def test_one_sequence_alone(name):
    model, prompts, answers = model_and_answers(name)
    for number, prompt in enumerate(prompts):
        engine = make_engine(model)
        engine.add(text_input(model, "0", prompt, NEW_TOKENS))
        assert run(engine).tokens["0"] == answers[number]


@pytest.mark.parametrize("chunk_tokens", [1, 7, 16, 512])
@pytest.mark.parametrize("name", TEXT_MODELS)
def test_staggered_batch_in_chunks(name, chunk_tokens):
    model, prompts, answers = model_and_answers(name)
    engine = make_engine(model, chunk_tokens=chunk_tokens, prefix_cache=False)
    outcome = Outcome()
    for number, prompt in enumerate(prompts):
        engine.add(text_input(model, str(number), prompt, NEW_TOKENS))
        outcome.take(engine.step())
        outcome.take(engine.step())
    assert outputs(run(engine, outcome)) == answers
    assert any(step.prefill_tokens and step.decode_sequences for step in outcome.steps)
    assert max(step.prefill_tokens for step in outcome.steps) <= chunk_tokens
    assert engine.stats().blocks_free == engine.stats().blocks_total
