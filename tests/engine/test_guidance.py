"""Guided answers equal those of `generate(guidance_scale=…, negative_prompt_ids=…)`, token for token, and a sequence is never without its companion."""

from __future__ import annotations

import functools

import pytest
import torch

from mmd_api.contract.errors import (
    BadLogitsError,
    CapacityError,
    CountMismatchError,
    OverloadedError,
)
from mmd_api.contract.sampling import Guidance
from mmd_workers.engine.choosing.guidance import guide
from mmd_workers.engine.interface import SequenceInput
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
)

LENGTHS = [5, 33, 17, 64, 1, 40]
CASES: list[tuple[float, int] | None] = [(1.5, 0), (3.0, 9), (2.0, 40), None, (7.5, 1), (1.1, 20)]
"""For each prompt: the scale, and the length of the negative prompt, 0 where there is none; None: the answer is not guided."""
NEW_TOKENS = 14
FEW = ["llama", "gemma2"]  # answers of both fill a pool
CUTS = [
    *((name, 7, None) for name in TEXT_MODELS),
    *((name, *cut) for name in FEW for cut in ((1, None), (512, None), (64, 1e-6))),
]


def guidance_of(number: int, prompt: list[int]) -> Guidance | None:
    if (case := CASES[number]) is None:
        return None
    scale, length = case
    return Guidance(scale, prompt_of(length, 50 + number) if length else prompt[-1:])


def reference(full: torch.nn.Module, number: int, prompt: list[int], tokens: int) -> list[int]:
    if (case := CASES[number]) is None:
        return generate(full, prompt, tokens)
    scale, length = case
    negative = {}
    if length:
        negative["negative_prompt_ids"] = torch.tensor([prompt_of(length, 50 + number)], device=full.device)
    return generate(full, prompt, tokens, guidance_scale=scale, **negative)


@functools.cache
def model_and_answers(name: str):
    """The engine's model, and `generate`'s answers of an equal but untouched model."""
    full = TEXT_MODELS[name]()
    prompts = [prompt_of(length, seed) for seed, length in enumerate(LENGTHS)]
    answers = [reference(full, number, prompt, NEW_TOKENS) for number, prompt in enumerate(prompts)]
    guided = [number for number, case in enumerate(CASES) if case is not None]
    assert any(answers[n] != generate(full, prompts[n], NEW_TOKENS) for n in guided), (
        "guidance changes nothing"
    )
    return TextModel(TEXT_MODELS[name]()), prompts, answers


def guided_input(
    model: TextModel, number: int, prompt: list[int], tokens: int = NEW_TOKENS, **more
) -> SequenceInput:
    outputs = more.pop("output_token_ids", [])
    return SequenceInput(
        str(number),
        model.lower(prompt, (), outputs),
        greedy(tokens),
        guidance=guidance_of(number, prompt),
        output_token_ids=list(outputs),
        **more,
    )


def outputs(outcome: Outcome) -> list[list[int]]:
    return [outcome.tokens[str(number)] for number in range(len(LENGTHS))]


@pytest.mark.parametrize(("name", "chunk_tokens", "step_seconds"), CUTS)
def test_guided_answers_beside_others_are_those_of_generate(name, chunk_tokens, step_seconds):
    model, prompts, answers = model_and_answers(name)
    most = 7  # an odd number of places: one is left over beside pairs
    engine = make_engine(
        model, chunk_tokens=chunk_tokens, max_sequences=most, prefix_cache=False, step_seconds=step_seconds
    )
    outcome = Outcome()
    for number, prompt in enumerate(prompts):
        spans = [(0, len(prompt) - 1, str(number))] if step_seconds and len(prompt) > 1 else []
        engine.add(guided_input(model, number, prompt, media_spans=spans))
        outcome.take(engine.step())
        outcome.take(engine.step())
    assert outputs(run(engine, outcome)) == answers
    assert any(step.prefill_tokens and step.decode_sequences for step in outcome.steps)
    rows = [step.prefill_tokens + step.decode_sequences for step in outcome.steps]
    assert max(rows) <= chunk_tokens + most, "memory is measured for so many"
    assert max(step.decode_sequences for step in outcome.steps) <= most
    assert engine.stats().blocks_free == engine.stats().blocks_total


@pytest.mark.parametrize("prefix_cache", [True, False])
@pytest.mark.parametrize("name", FEW)
def test_preemption_takes_the_blocks_of_both_and_changes_no_token(name, prefix_cache):
    model, prompts, answers = model_and_answers(name)
    engine = make_engine(model, blocks=36, block_tokens=4, chunk_tokens=16, prefix_cache=prefix_cache)
    for number, prompt in enumerate(prompts):
        engine.add(guided_input(model, number, prompt, arrived=float(number)))
    assert outputs(run(engine)) == answers
    assert engine.stats().preemptions > 0
    assert engine.stats().blocks_free == 36


@pytest.mark.parametrize("name", FEW)
def test_pairs_are_handed_over_and_go_on_elsewhere_when_they_are_preempted(name):
    model, prompts, _ = model_and_answers(name)
    full = TEXT_MODELS[name]()
    answers = [reference(full, number, prompt, 24) for number, prompt in enumerate(prompts)]
    prefill = make_engine(model, chunk_tokens=16)
    decoders = [make_engine(model, blocks=40, block_tokens=4, chunk_tokens=8) for _ in range(2)]
    got, yields = decoded_elsewhere(
        decoders,
        len(prompts),
        lambda decoder, number, outputs: hand_over(prefill, decoder, model, prompts[number], outputs, number),
    )
    assert got == answers
    assert yields > 0, "the pools were never full"
    assert [decoder.stats().blocks_free for decoder in decoders] == [40, 40]
    assert prefill.stats().blocks_free == prefill.stats().blocks_total


def hand_over(prefill, decoder, model, prompt, outputs, number) -> bool:
    """Offer a request with its tokens so far to a decoder, prefill it, and hand it over; False: no room."""
    known, guidance = len(prompt) + len(outputs), guidance_of(number, prompt)
    beside = 0 if guidance is None else len(guidance.token_ids) + len(outputs)
    try:
        decoder.reserve(str(number), known, 24 - len(outputs), (), beside)
    except OverloadedError:
        return False
    item = guided_input(model, number, prompt, 24, output_token_ids=outputs, stop_after_prefill=True)
    prefill.add(item)
    outputs += [token.token_id for step in run(prefill).steps for token in step.tokens]
    assert prefill.stats().held_sequences == 1
    decoder.write_kv(str(number), 0, prefill.read_kv(str(number), 0, known))
    prefill.abort(str(number))
    decoder.attach(
        *(str(number), prompt, item.sampling, list(outputs), item.prompt.next_position, []),
        arrived=float(number),
        guidance=guidance,
    )
    if len(outputs) == 24:
        decoder.abort(str(number))
    return True


def test_the_second_time_both_prompts_are_cached():
    model, prompts, answers = model_and_answers("llama")
    engine = make_engine(model)
    engine.add(guided_input(model, 2, prompts[2]))
    first = run(engine)
    engine.add(guided_input(model, 2, prompts[2]))
    again = run(engine)
    assert first.tokens["2"] == again.tokens["2"] == answers[2]
    assert sum(step.prefill_tokens for step in first.steps) == 17 + 40
    assert sum(step.prefill_tokens for step in again.steps) == 1 + 8, "2 of 3 blocks, and 4 of 5"


def test_a_held_sequence_has_no_companion_and_its_kv_travels_alone():
    model, prompts, _ = model_and_answers("llama")
    engine = make_engine(model, block_tokens=8, prefix_cache=False)
    engine.add(guided_input(model, 2, prompts[2], stop_after_prefill=True))
    events = [event for step in run(engine).steps for event in step.kv_ready]
    assert [(event.start, event.end, event.last) for event in events] == [(0, 17, True)]
    assert engine.stats().blocks_total - engine.stats().blocks_free == 3
    engine.abort("2")
    assert engine.stats().blocks_free == engine.stats().blocks_total


def test_a_pair_takes_two_places_here_and_in_what_is_reserved():
    model, prompts, _ = model_and_answers("llama")
    engine = make_engine(model, max_sequences=4)
    engine.add(guided_input(model, 1, prompts[1]))
    engine.step()
    assert engine.stats().running_sequences == 2
    engine.reserve("reserved", 8, 4, (), 8)
    assert engine.stats().reserved_sequences == 2
    with pytest.raises(OverloadedError, match="4 of 4"):
        engine.reserve("one more", 8, 4)
    engine.add(guided_input(model, 3, prompts[3]))
    engine.step()
    assert engine.stats().waiting_sequences == 1
    before = engine.stats().blocks_free
    engine.abort("reserved")
    assert engine.stats().blocks_free - before == 2 * 2
    engine.step()
    assert engine.stats().running_sequences == 3


def test_the_last_place_is_kept_for_a_pair_often_passed_over():
    model, prompts, _ = model_and_answers("llama")
    engine = make_engine(model, max_sequences=2, prefix_cache=False)
    engine.add(SequenceInput("runs", model.lower(prompt_of(4, 0)), greedy(200)))
    engine.step()
    engine.add(guided_input(model, 1, prompts[1]))
    passed = 0
    for number in range(40):
        engine.add(SequenceInput(f"short {number}", model.lower(prompt_of(4, number)), greedy(1)))
        passed += sum("short" in token.sequence_id for token in engine.step().tokens)
    assert 0 < passed <= 17
    engine.abort("runs")
    engine.step()
    assert engine.stats().running_sequences == 2
    assert "1" in {token.sequence_id for token in engine.step().tokens}


def test_a_failing_pair_fails_alone_and_as_one():
    model, prompts, answers = model_and_answers("llama")
    engine = make_engine(model, prefix_cache=False)
    for number in (1, 3):
        engine.add(guided_input(model, number, prompts[number]))
    engine.step()
    engine.add(guided_input(model, 2, prompts[2]))
    forward, negative = model.forward, model.embed(torch.tensor(prompt_of(40, 52)[:1]))[0]

    def fails_with_the_companion(embeds, positions, extras):
        if (embeds == negative).all(dim=1).any():
            raise RuntimeError("a row that breaks it")
        return forward(embeds, positions, extras)

    model.forward = fails_with_the_companion
    try:
        step = engine.step()
    finally:
        model.forward = forward
    assert [name for name, _ in step.failed] == ["2"]
    outcome = run(engine)
    assert [outcome.tokens[str(number)] for number in (1, 3)] == [answers[number][2:] for number in (1, 3)]
    assert engine.stats().blocks_free == engine.stats().blocks_total


def test_broken_companion_logits_end_the_pair_and_cache_nothing():
    model, prompts, _ = model_and_answers("llama")
    engine, logits = make_engine(model), model.logits
    engine.add(guided_input(model, 2, prompts[2]))

    def breaks_the_companion(hidden):
        return torch.cat([logits(hidden[:1]), logits(hidden[1:]) * float("nan")])

    model.logits = breaks_the_companion
    try:
        step = engine.step()
    finally:
        model.logits = logits
    ((name, error),) = step.failed
    assert name == "2"
    assert isinstance(error, BadLogitsError)
    engine.add(guided_input(model, 2, prompts[2]))
    engine.step()
    assert engine.stats().prefix_hit_tokens == 0


def test_a_guided_answer_that_goes_on_elsewhere_has_the_same_tokens():
    model, prompts, answers = model_and_answers("llama")
    engine = make_engine(model, draft_tokens=4)
    engine.add(guided_input(model, 1, prompts[1], output_token_ids=answers[1][:6]))
    outcome = run(engine)
    assert outcome.first_index["1"] == 6
    assert outcome.tokens["1"] == answers[1][6:]
    assert not any(step.draft_tokens for step in outcome.steps)


def test_what_never_fits_is_refused_with_the_remedy():
    model, prompts, _ = model_and_answers("llama")
    with pytest.raises(CapacityError, match=r"raise spec\.decode\.maxSequences"):
        make_engine(model, max_sequences=1).add(guided_input(model, 1, prompts[1]))
    with pytest.raises(CapacityError, match="the negative prompt has 40 tokens"):
        make_engine(model, max_model_len=30).add(guided_input(model, 2, prompts[2]))
    # 17 + 14 tokens and 40 + 14 need 4 and 7 blocks
    make_engine(model, blocks=11).add(guided_input(model, 2, prompts[2]))
    with pytest.raises(CapacityError, match="85 tokens of prompt and output need 11 KV blocks"):
        make_engine(model, blocks=10).add(guided_input(model, 2, prompts[2]))
    engine = make_engine(model)
    engine.reserve("2", 1, 4)
    engine.write_kv(
        "2",
        0,
        [
            torch.zeros(2, 1, h, d, device=model.device)
            for h, d in zip(model.kv_layout.num_kv_heads, model.kv_layout.head_dim, strict=True)
        ],
    )
    with pytest.raises(CountMismatchError, match="its companion's tokens"):
        engine.attach("2", [5], greedy(4), [6], 1, [], guidance=Guidance(2.0, [7, 8]))


def test_an_answer_ends_where_the_longer_of_both_fills_the_context():
    model, prompts, answers = model_and_answers("llama")
    engine = make_engine(model, max_model_len=46)
    engine.add(guided_input(model, 2, prompts[2]))
    outcome = run(engine)
    assert outcome.tokens["2"] == answers[2][:6]
    (last,) = outcome.steps[-1].tokens
    assert last.finish_reason == "length"


def test_log_probabilities_are_those_after_guidance():
    model, prompts, answers = model_and_answers("llama")
    engine = make_engine(model)
    item = guided_input(model, 2, prompts[2])
    item.sampling = greedy(1, logprobs=2)
    engine.add(item)
    ((token,),) = [step.tokens for step in run(engine).steps]
    full = TEXT_MODELS["llama"]()
    with torch.inference_mode():
        own, companion = (
            full(torch.tensor([ids], device=full.device)).logits[0, -1:]
            for ids in (prompts[2], prompt_of(40, 52))
        )
        guide(own, [0], companion, [2.0])
    expected = torch.log_softmax(own, dim=-1)[0]
    assert token.token_id == answers[2][0]
    assert token.logprob == pytest.approx(expected[answers[2][0]].item(), abs=1e-3)
