"""Greedy output of the engine equals that of `generate`, token for token, however the work is cut, batched, cached or moved."""

import functools

import pytest

from mmd_api.contract.errors import CapacityError, OverloadedError
from mmd_workers.engine.interface import StepOutput
from mmd_workers.engine.memory.blocks import extend_identities, root_of
from support.oracles.engine_oracle import (
    TEXT_MODELS,
    Outcome,
    TextModel,
    decoded_elsewhere,
    generate,
    greedy,
    make_engine,
    prompt_of,
    run,
    text_input,
)

LENGTHS = [5, 33, 17, 64, 1, 40]
NEW_TOKENS = 14
UNWINDOWED = [name for name in TEXT_MODELS if name != "mistral"]  # answers fill a pool


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


@pytest.mark.parametrize("chunk_tokens", [1, 7, 64, 512])
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


@pytest.mark.parametrize("step_seconds", [1e-6, 0.003, 60.0])
@pytest.mark.parametrize("name", TEXT_MODELS)
def test_steps_of_bounded_time_change_nothing(name, step_seconds):
    model, prompts, answers = model_and_answers(name)
    engine = make_engine(model, chunk_tokens=64, prefix_cache=False, step_seconds=step_seconds)
    outcome = Outcome()
    for number, prompt in enumerate(prompts):
        spans = [(0, len(prompt) - 1, str(number))] if number % 3 else []
        engine.add(text_input(model, str(number), prompt, NEW_TOKENS, media_spans=spans))
        outcome.take(engine.step())
    assert outputs(run(engine, outcome)) == answers
    assert max(step.prefill_tokens for step in outcome.steps) <= 64
    assert engine.stats().blocks_free == engine.stats().blocks_total


def test_a_step_is_timed_unless_the_model_ran_twice():
    model = TextModel(TEXT_MODELS["llama"]())
    engine = make_engine(model)
    engine.add(text_input(model, "0", prompt_of(9, 1), 9))
    forward, broken = model.forward, []

    def fails_once(*rows):
        if not broken:
            broken.append(rows)
            raise RuntimeError("for this once")
        return forward(*rows)

    assert engine.step().timed
    engine.add(text_input(model, "1", prompt_of(9, 2), 9))
    model.forward = fails_once
    step = engine.step()
    assert not step.failed
    assert not step.timed
    model.forward = lambda *rows: forward(*rows) * float("nan")
    step = engine.step()
    assert len(step.failed) == 2, "as requests may fail in every step, and the time is still that of one run"
    assert step.timed


@pytest.mark.parametrize(("spans", "most"), [([(0, 149, "cat")], 8), ([], 64)])
def test_only_steps_with_media_are_bounded_in_time(spans, most):
    model, _, _ = model_and_answers("llama")
    engine = make_engine(model, chunk_tokens=64, prefix_cache=False, step_seconds=1e-9)
    for tokens in (1, 24, 48, 64):
        engine.scheduler.pace.add(StepOutput(prefill_tokens=tokens, duration_seconds=tokens / 1000))
    assert not engine.stats().somebody_waits
    engine.add(text_input(model, "came", prompt_of(5, 1), 1))
    engine.abort("came")
    assert engine.stats().somebody_waits
    engine.add(text_input(model, "0", prompt_of(150, 1), 1, media_spans=spans))
    assert engine.stats().media_step_tokens == 8
    assert engine.step().prefill_tokens == most


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
@pytest.mark.parametrize("name", UNWINDOWED)
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
                prefill.abort(ready.sequence_id)
        outcome.take(decode.step())
    assert outputs(run(decode, outcome)) == answers
    for engine in (prefill, decode):
        assert engine.stats().blocks_free == engine.stats().blocks_total
        assert engine.stats().held_sequences == engine.stats().blocks_reserved == 0


def test_kv_is_announced_without_gaps_and_cached_kv_with_the_first_chunk():
    model, prompts, _ = model_and_answers("llama")
    engine = make_engine(model, chunk_tokens=10)
    engine.add(text_input(model, "a", prompts[3], 4, stop_after_prefill=True))
    events = [event for step in run(engine).steps for event in step.kv_ready]
    assert events[0].start == 0
    assert events[-1].end == 64
    assert [e.end for e in events[:-1]] == [e.start for e in events[1:]]
    assert [e.last for e in events] == [False] * (len(events) - 1) + [True]
    engine.abort("a")
    engine.add(text_input(model, "b", prompts[3], 4, stop_after_prefill=True))
    steps = [step for step in run(engine).steps if step.kv_ready]
    assert len(steps) == 1, "cached blocks are announced with the first chunk"
    events = steps[0].kv_ready
    assert [(e.start, e.end) for e in events] == [*((n, n + 10) for n in range(0, 60, 10)), (60, 64)]
    assert [e.last for e in events] == [False] * 6 + [True]


def test_a_request_placed_again_with_its_tokens_continues_at_the_next_index():
    model, prompts, answers = model_and_answers("llama")
    engine = make_engine(model)
    item = text_input(model, "1", prompts[1] + answers[1][:6], NEW_TOKENS, output_token_ids=answers[1][:6])
    engine.add(item)
    outcome = run(engine)
    assert outcome.steps[0].tokens[0].index == 6
    assert outcome.tokens["1"] == answers[1][6:]


@pytest.mark.parametrize("name", UNWINDOWED)
def test_sequences_preempted_for_older_ones_continue_elsewhere_and_lose_nothing(name):
    model, prompts, _ = model_and_answers(name)
    reference = TEXT_MODELS[name]()
    answers = [generate(reference, prompt, 40) for prompt in prompts]
    prefill = make_engine(model)
    # Any one of them fits alone (64 + 40 tokens are 26 blocks), no two of the long ones do to their end.
    decoders = [make_engine(model, blocks=27, block_tokens=4) for _ in range(2)]
    got, yields = decoded_elsewhere(
        decoders,
        len(prompts),
        lambda decoder, number, outputs: place(prefill, decoder, model, prompts[number], outputs, number),
    )
    assert got == answers
    assert yields > 0, "the pools were never full"
    assert [decoder.stats().blocks_free for decoder in decoders] == [27, 27]


def place(prefill, decoder, model, prompt, outputs, number):
    """Offer a request with its tokens so far to a decoder, prefill it, and hand it over; False: no room."""
    known = prompt + outputs
    try:
        decoder.reserve(str(number), len(known), 40 - len(outputs))
    except OverloadedError:
        return False
    item = text_input(model, str(number), known, 40, output_token_ids=list(outputs), stop_after_prefill=True)
    prefill.add(item)
    first = [token for step in run(prefill).steps for token in step.tokens]
    outputs.append(first[0].token_id)
    move_kv(prefill, decoder, str(number), 0, len(known), 16)
    prefill.abort(str(number))
    decoder.attach(
        str(number), prompt, item.sampling, list(outputs), item.prompt.next_position, [], float(number)
    )
    if len(outputs) == 40:
        decoder.abort(str(number))
    return True


def test_a_reservation_takes_the_prompt_and_not_the_longest_answer():
    model = model_and_answers("llama")[0]
    engine = make_engine(model, blocks=40, block_tokens=8, max_model_len=320)
    for number in range(3):
        engine.reserve(str(number), 64, 256)
    assert engine.stats().blocks_reserved == 3 * 9
    with pytest.raises(CapacityError, match="give the pool more memory"):
        make_engine(model, blocks=39, block_tokens=8, max_model_len=320).reserve("never", 64, 256)


def test_a_waiting_prompt_gets_the_place_that_hand_overs_ask_for_too():
    """Hand-overs ask before every step, so each place that became free was theirs."""
    model, prompts, answers = model_and_answers("llama")
    engine = make_engine(model, max_sequences=2)
    engine.reserve("0", 8, NEW_TOKENS)
    engine.reserve("1", 8, NEW_TOKENS)
    engine.add(text_input(model, "text", prompts[1], NEW_TOKENS))
    assert not engine.step().tokens
    engine.abort("0")
    with pytest.raises(OverloadedError, match="2 of 2 sequence slots"):
        engine.reserve("2", 8, NEW_TOKENS)
    assert run(engine).tokens["text"] == answers[1]
    engine.reserve("2", 8, NEW_TOKENS)


@pytest.mark.parametrize("name", TEXT_MODELS)
def test_what_the_decoder_has_cached_is_not_moved_again(name):
    model, prompts, answers = model_and_answers(name)
    prefill = make_engine(model, block_tokens=16, chunk_tokens=32, prefix_cache=False)
    decode = make_engine(model, block_tokens=8)

    def hand_over(sequence, prompt):
        item, outcome = text_input(model, sequence, prompt, NEW_TOKENS, stop_after_prefill=True), Outcome()
        prefill.add(item)
        while not outcome.tokens.get(sequence):
            outcome.take(prefill.step())
        identities: list[bytes] = []
        extend_identities(identities, prompt, [], 8, len(prompt) // 8)
        cached = decode.reserve(sequence, len(prompt), NEW_TOKENS, identities)
        move_kv(prefill, decode, sequence, cached, len(prompt), 7)
        first, position = outcome.tokens[sequence], item.prompt.next_position
        decode.attach(sequence, item.prompt.token_ids, item.sampling, first, position, [])
        prefill.abort(sequence)
        return cached, run(decode, outcome).tokens[sequence]

    prompt, answer = prompts[3], answers[3]
    assert hand_over("first", prompt) == (0, answer)
    assert hand_over("again", prompt) == (64, answer)
    assert hand_over("half", prompt[:37]) == (32, generate(TEXT_MODELS[name](), prompt[:37], NEW_TOKENS))
    turn = [*prompt, *answer, *prompts[0]]
    assert hand_over("next turn", turn) == (72, generate(TEXT_MODELS[name](), turn, NEW_TOKENS))
    assert decode.stats().blocks_free == decode.stats().blocks_total


def test_prompts_share_cached_blocks_only_within_one_salt():
    model, prompts, answers = model_and_answers(next(iter(TEXT_MODELS)))
    engine, prompt, answer = make_engine(model, block_tokens=8), prompts[3], answers[3]
    cached = []
    for number, salt in enumerate(["", "one", "one", "other", ""]):
        name = str(number)
        engine.add(text_input(model, name, prompt, NEW_TOKENS, root=root_of("", salt)))
        outcome = run(engine)
        cached += [step.admitted[name] for step in outcome.steps if name in step.admitted]
        assert outcome.tokens[name] == answer
    reused = (len(prompt) - 1) // 8 * 8
    assert cached == [0, 0, reused, 0, reused]

    decode, root = make_engine(model, block_tokens=8), root_of("", "one")
    identities, _ = engine.prefix(prompt, [], root)
    decode.reserve("a", len(prompt), NEW_TOKENS, identities)
    item, outcome = text_input(model, "a", prompt, NEW_TOKENS, stop_after_prefill=True), Outcome()
    engine.add(item)
    while not outcome.tokens.get("a"):
        outcome.take(engine.step())
    move_kv(engine, decode, "a", 0, len(prompt), 7)
    decode.attach("a", prompt, item.sampling, outcome.tokens["a"], item.prompt.next_position, [], root=root)
    assert decode.prefix(prompt, [], root)[1] == reused
    assert decode.prefix(prompt, [])[1] == 0


def test_forgotten_cached_kv_is_not_found_through_sequences_that_share_it():
    model, prompts, _ = model_and_answers(next(iter(TEXT_MODELS)))
    engine, prompt = make_engine(model, block_tokens=8), prompts[3]
    engine.add(text_input(model, "a", prompt, 30))
    engine.step()
    identities: list[bytes] = []
    extend_identities(identities, prompt, [], 8, len(prompt) // 8)
    assert engine.reserve("b", len(prompt), 5, identities) == 64
    engine.blocks.forget(identities)
    engine.attach("b", prompt, greedy(5), [7], len(prompt), [])
    assert engine.blocks.find(identities) == []
