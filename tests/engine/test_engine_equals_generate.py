"""Greedy output of the engine is what `generate` says, token for token, however the work is cut, batched, cached or moved."""

import functools
import itertools

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


@pytest.mark.parametrize("name", TEXT_MODELS)
def test_prefix_cache_hits_change_nothing_and_save_the_prefill(name):
    model, prompts, answers = model_and_answers(name)
    engine = make_engine(model)
    engine.add(text_input(model, "first", prompts[3], NEW_TOKENS))
    first = run(engine)
    engine.add(text_input(model, "again", prompts[3], NEW_TOKENS))
    again = run(engine)
    assert first.tokens["first"] == again.tokens["again"] == answers[3]
    assert sum(s.prefill_tokens for s in first.steps) == 64
    assert sum(s.prefill_tokens for s in again.steps) == 8, (
        "7 of 8 blocks are cached; the last token must be computed"
    )
    follow_up = prompts[3] + answers[3] + prompt_of(5, 99)
    engine.add(text_input(model, "turn 2", follow_up, NEW_TOKENS))
    second = run(engine)
    assert second.tokens["turn 2"] == generate(TEXT_MODELS[name](), follow_up, NEW_TOKENS)
    assert sum(s.prefill_tokens for s in second.steps) == len(follow_up) - 72, (
        "generated blocks are cached too"
    )


@pytest.mark.parametrize("prefix_cache", [True, False])
@pytest.mark.parametrize("name", TEXT_MODELS)
def test_preemption_loses_and_changes_no_token(name, prefix_cache):
    model, prompts, answers = model_and_answers(name)
    engine = make_engine(model, blocks=21, block_tokens=4, chunk_tokens=16, prefix_cache=prefix_cache)
    for number, prompt in enumerate(prompts):
        engine.add(text_input(model, str(number), prompt, NEW_TOKENS))
    assert outputs(run(engine)) == answers
    assert engine.stats().preemptions > 0
    assert engine.stats().blocks_free == 21


def move_kv(source, target, name, start, end, piece):
    for first in range(start, end, piece):
        target.write_kv(name, first, source.read_kv(name, first, min(end, first + piece)))


@pytest.mark.parametrize("name", TEXT_MODELS)
def test_prefill_here_decode_there_with_other_block_sizes(name):
    model, prompts, answers = model_and_answers(name)
    prefill = make_engine(model, block_tokens=8, chunk_tokens=16)
    decode = make_engine(model, block_tokens=5)
    outcome = Outcome()
    inputs = {}
    for number, prompt in enumerate(prompts):
        inputs[str(number)] = item = text_input(
            model, str(number), prompt, NEW_TOKENS, stop_after_prefill=True
        )
        decode.reserve(str(number), len(prompt), NEW_TOKENS)
        prefill.add(item)
    while prefill.has_work():
        step = prefill.step()
        outcome.take(step)
        for ready in step.kv_ready:
            move_kv(prefill, decode, ready.sequence_id, ready.start, ready.end, 7)
            if ready.last:
                sent, first = inputs[ready.sequence_id], outcome.tokens[ready.sequence_id]
                decode.attach(
                    ready.sequence_id,
                    sent.prompt.token_ids,
                    sent.sampling,
                    first,
                    sent.prompt.next_position,
                    [],
                )
                prefill.release(ready.sequence_id)
        outcome.take(decode.step())
    assert outputs(run(decode, outcome)) == answers
    for engine in (prefill, decode):
        assert engine.stats().blocks_free == engine.stats().blocks_total
        assert engine.stats().held_sequences == engine.stats().blocks_reserved == 0


def test_kv_is_announced_without_gaps_and_without_what_the_receiver_has():
    model, prompts, _ = model_and_answers("llama")
    engine = make_engine(model, chunk_tokens=10)
    engine.add(text_input(model, "a", prompts[3], 4, stop_after_prefill=True, skip_kv_tokens=24))
    events = [event for step in run(engine).steps for event in step.kv_ready]
    assert events[0].start == 24
    assert events[-1].end == 64
    assert [e.end for e in events[:-1]] == [e.start for e in events[1:]]
    assert [e.last for e in events] == [False] * (len(events) - 1) + [True]
    engine.release("a")
    engine.add(text_input(model, "b", prompts[3], 4, stop_after_prefill=True))
    [event] = [event for step in run(engine).steps for event in step.kv_ready]
    assert (event.start, event.end, event.last) == (0, 64, True), (
        "cached blocks are announced with the first chunk"
    )


@pytest.mark.parametrize("name", TEXT_MODELS)
def test_a_decoding_sequence_moves_twice_and_its_output_goes_on(name):
    model, prompts, answers = model_and_answers(name)
    engines = [make_engine(model, block_tokens=size) for size in (8, 3, 16)]
    engines[0].add(text_input(model, "1", prompts[1], NEW_TOKENS))
    engines[0].add(text_input(model, "stays", prompts[2], NEW_TOKENS))
    outcome = Outcome()
    for source, target in itertools.pairwise(engines):
        for _ in range(4):
            outcome.take(source.step())
        move = source.export("1")
        target.reserve("1", move.kv_tokens, NEW_TOKENS)
        move_kv(source, target, "1", 0, move.kv_tokens, 10)
        target.attach(
            "1", move.token_ids, move.sampling, move.output_token_ids, move.next_position, move.media_spans
        )
        source.release("1")
    for engine in engines:
        run(engine, outcome)
    assert outcome.tokens["1"] == answers[1]
    assert outcome.tokens["stays"] == answers[2]


def test_an_export_that_failed_goes_on_where_it_was():
    model, prompts, answers = model_and_answers("llama")
    engine = make_engine(model)
    engine.add(text_input(model, "1", prompts[1], NEW_TOKENS))
    outcome = Outcome()
    outcome.take(engine.step())
    engine.export("1")
    assert not engine.has_work()
    engine.resume("1")
    assert run(engine, outcome).tokens["1"] == answers[1]


def test_a_request_placed_again_with_its_tokens_goes_on_at_the_next_index():
    model, prompts, answers = model_and_answers("llama")
    engine = make_engine(model)
    item = text_input(model, "1", prompts[1] + answers[1][:6], NEW_TOKENS, output_token_ids=answers[1][:6])
    engine.add(item)
    outcome = run(engine)
    assert outcome.steps[0].tokens[0].index == 6
    assert outcome.tokens["1"] == answers[1][6:]
