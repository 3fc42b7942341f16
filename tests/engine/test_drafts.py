"""Prompt lookup: what is drafted, whether it is worth a step, and that it changes no token."""

from __future__ import annotations

import random

import pytest
import torch
import transformers
from hypothesis import given
from hypothesis import strategies as st

from mmd_workers.engine.choosing.drafts import ROW_SHARE_BEFORE, Drafts, PromptLookup, RowCosts
from mmd_workers.engine.interface import SamplingParams, SequenceInput, StepOutput
from support.oracles.devices import DEVICE
from support.oracles.engine_oracle import (
    SMALL,
    TEXT_MODELS,
    Outcome,
    TextModel,
    generate,
    make_engine,
    prompt_of,
    run,
    text_input,
)

NEW_TOKENS = 40


def naive(tokens: list[int], most: int) -> list[int]:
    """The same by looking at every place."""
    for size in (3, 2):
        for start in range(len(tokens) - 1, size - 1, -1):
            if tokens[start - size : start] == tokens[-size:]:
                found = list(tokens)
                while len(found) < len(tokens) + most:
                    found.append(found[start + len(found) - len(tokens)])
                return found[len(tokens) :]
    return []


@given(st.lists(st.sampled_from([0, 1, 2, 256, 65536, 16843009]), min_size=1, max_size=60), st.integers(1, 9))
def test_a_draft_is_what_followed_the_last_tokens_the_last_time(tokens, most):
    lookup = PromptLookup()
    for end in range(1, len(tokens) + 1):
        assert lookup.draft(tokens[:end], most) == naive(tokens[:end], most)


def test_a_sequence_that_goes_round_is_drafted_going_round():
    assert PromptLookup().draft([9, 5, 6, 7, 5, 6, 7], 7) == [5, 6, 7, 5, 6, 7, 5]


def test_nothing_is_drafted_where_nothing_repeats():
    assert PromptLookup().draft(list(range(100)), 4) == []


def test_the_chance_follows_what_was_accepted_and_fades_to_what_it_was():
    lookup = PromptLookup()
    assert lookup.chance == 0.5
    for _ in range(50):
        lookup.learn(4, 4)
    assert lookup.chance > 0.9
    for _ in range(50):
        lookup.learn(4, 0)
    low = lookup.chance
    assert low < 0.2
    for _ in range(400):
        lookup.learn(0, 0)
    assert low < lookup.chance == pytest.approx(0.5, abs=0.01)


@pytest.mark.parametrize("each", [0.0, 0.0005, 0.004])
def test_the_cost_of_rows_is_that_of_the_steps(each):
    costs = RowCosts()
    generator = random.Random(1)
    for _ in range(300):
        rows = generator.randint(1, 12)
        costs.add(rows, 0.01 + each * rows)
    for rows in (1, 4, 12):
        assert costs.share(rows) == pytest.approx(each * rows / (0.01 + each * rows), abs=0.02)


def test_steps_of_one_size_leave_the_cost_of_rows_as_assumed():
    costs = RowCosts()
    assert costs.share(1) == ROW_SHARE_BEFORE
    for _ in range(100):
        costs.add(1, 0.02)
    assert costs.share(1) == pytest.approx(ROW_SHARE_BEFORE)
    assert costs.share(1000) <= 1.0


def test_a_pause_changes_the_cost_of_rows_little():
    costs = RowCosts()
    for number in range(300):
        costs.add(1 + number % 8, 0.01 + 0.001 * (1 + number % 8))
    before = costs.share(4)
    costs.add(8, 60.0)
    assert costs.share(4) == pytest.approx(before, abs=0.1)


@given(st.lists(st.tuples(st.integers(0, 64), st.floats(0, 10)), max_size=50), st.integers(1, 64))
def test_the_share_of_rows_is_a_share(steps, rows):
    costs = RowCosts()
    for step in steps:
        costs.add(*step)
    assert 0.0 <= costs.share(rows) <= 1.0


def steps_of(each: float) -> Drafts:
    drafts = Drafts(8, 10**6)
    for rows in (1, 4, 9) * 40:
        drafts.finish_step(
            StepOutput(decode_sequences=1, draft_tokens=rows - 1, duration_seconds=0.01 + each * rows)
        )
    return drafts


def test_drafts_shorten_to_none_as_rows_become_costlier():
    tokens = [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 1, 2, 3]
    lengths = [len(steps_of(each).draft(PromptLookup(), tokens, 99, 1)) for each in (0.0001, 0.001, 0.05)]
    assert lengths[0] > lengths[1] > lengths[2] == 0
    assert lengths[0] <= 8


def test_a_draft_ends_before_what_is_never_sampled():
    tokens = [1, 2, 3, 4, 77, 6, 1, 2, 3]
    free = [StepOutput(decode_sequences=1, draft_tokens=rows, duration_seconds=0.01) for rows in (0, 4) * 40]
    for drafts, expected in (
        (Drafts(5, 100), [4, 77, 6, 1, 2]),
        (Drafts(5, 100, [77]), [4]),
        (Drafts(5, 77), [4]),
        (Drafts(5, 100, [4]), []),
    ):
        for step in free:
            drafts.finish_step(step)
        assert drafts.draft(PromptLookup(), tokens, 9, 1) == expected


def test_many_sequences_have_shorter_drafts():
    tokens = [1, 2, 3, 4, 5, 6, 7, 8, 1, 2, 3]
    drafts = steps_of(0.001)
    assert len(drafts.draft(PromptLookup(), tokens, 9, 1)) > len(drafts.draft(PromptLookup(), tokens, 9, 16))


def test_prompt_steps_and_untimed_steps_do_not_change_drafts():
    drafts = steps_of(0.001)
    before = len(drafts.draft(PromptLookup(), [1, 2, 3, 4, 1, 2], 9, 1))
    for _ in range(100):
        drafts.finish_step(
            StepOutput(decode_sequences=1, draft_tokens=8, prefill_tokens=500, duration_seconds=9.0)
        )
        drafts.finish_step(StepOutput(decode_sequences=1, draft_tokens=8, duration_seconds=9.0, timed=False))
    assert len(drafts.draft(PromptLookup(), [1, 2, 3, 4, 1, 2], 9, 1)) == before


def repeating(seed: int) -> list[int]:
    """A prompt that says the same again and again, in part."""
    part = prompt_of(9, seed)
    return [*part, *prompt_of(4, seed + 1), *part, *part, *prompt_of(2, seed + 2), *part[:5]]


def always(engine) -> None:
    """Rows are free: every draft is computed."""
    engine.scheduler.drafts._costs.share = lambda _rows: 0.0


@pytest.mark.parametrize("draft_tokens", [1, 5, 16])
@pytest.mark.parametrize("name", TEXT_MODELS)
def test_drafts_change_no_token(name, draft_tokens):
    reference = TEXT_MODELS[name]()
    prompts = [repeating(seed) for seed in range(6)]
    answers = [generate(reference, prompt, NEW_TOKENS) for prompt in prompts]
    model = TextModel(TEXT_MODELS[name]())
    engine = make_engine(model, draft_tokens=draft_tokens, max_sequences=32)
    always(engine)
    outcome = Outcome()
    for number, prompt in enumerate(prompts):
        engine.add(text_input(model, str(number), prompt, NEW_TOKENS))
        outcome.take(engine.step())
    run(engine, outcome)
    assert [outcome.tokens[str(number)] for number in range(len(prompts))] == answers
    stats = engine.stats()
    assert stats.blocks_free == stats.blocks_total
    assert stats.draft_tokens > 0
    assert max(step.decode_sequences + step.draft_tokens for step in outcome.steps) <= 32


def test_a_sequence_that_repeats_itself_takes_fewer_steps():
    torch.manual_seed(0)
    model = TextModel(transformers.LlamaForCausalLM(transformers.LlamaConfig(**SMALL)).eval().to(DEVICE))
    loop = prompt_of(5, 1)  # as small weights have it, the answer goes round
    steps = []
    for draft_tokens in (0, 8):
        engine = make_engine(model, draft_tokens=draft_tokens)
        if draft_tokens:
            always(engine)
        engine.add(text_input(model, "0", loop, 200))
        steps.append(len(run(engine).steps))
    stats = engine.stats()
    assert stats.accepted_tokens > 100
    assert steps[1] < steps[0] - 100


def test_sampled_tokens_are_those_without_drafts():
    model = TextModel(TEXT_MODELS["qwen2"]())
    found = []
    for draft_tokens in (0, 6):
        engine = make_engine(model, draft_tokens=draft_tokens)
        if draft_tokens:
            always(engine)
        for seed in range(4):
            sampling = SamplingParams(
                max_tokens=NEW_TOKENS, temperature=0.3, top_p=0.9, seed=seed, logprobs=2
            )
            engine.add(SequenceInput(str(seed), model.lower(repeating(seed)), sampling))
        outcome = run(engine)
        found.append(outcome.tokens)
    assert engine.stats().draft_tokens > 0
    assert found[0] == found[1]


def test_rules_and_the_end_of_an_answer_are_kept():
    model = TextModel(TEXT_MODELS["llama"]())
    prompt = repeating(3)
    whole = run(_engine_with(model, 0, prompt, SamplingParams(max_tokens=30))).tokens["0"]
    for stop in (whole[3], whole[10], whole[17]):
        sampling = SamplingParams(max_tokens=30, stop_token_ids=frozenset([stop]))
        plain = run(_engine_with(model, 0, prompt, sampling)).tokens["0"]
        engine = _engine_with(model, 8, prompt, sampling)
        always(engine)
        assert run(engine).tokens["0"] == plain
        assert engine.stats().blocks_free == engine.stats().blocks_total


def test_a_sequence_with_rules_has_no_drafts():
    model = TextModel(TEXT_MODELS["llama"]())
    engine = _engine_with(model, 8, repeating(3), SamplingParams(max_tokens=30, min_tokens=5))
    always(engine)
    run(engine)
    assert engine.stats().draft_tokens == 0


def _engine_with(model, draft_tokens: int, prompt: list[int], sampling: SamplingParams):
    engine = make_engine(model, draft_tokens=draft_tokens)
    engine.add(SequenceInput("0", model.lower(prompt), sampling))
    return engine


def test_drafts_in_a_full_pool_preempt_nobody_and_change_no_token():
    reference = TEXT_MODELS["llama"]()
    prompts = [repeating(seed) for seed in range(5)]
    answers = [generate(reference, prompt, NEW_TOKENS) for prompt in prompts]
    model = TextModel(TEXT_MODELS["llama"]())
    counts = []
    for draft_tokens in (0, 8):
        engine = make_engine(model, draft_tokens=draft_tokens, blocks=28, prefix_cache=False)
        if draft_tokens:
            always(engine)
        for number, prompt in enumerate(prompts):
            engine.add(text_input(model, str(number), prompt, NEW_TOKENS))
        outcome = run(engine)
        assert [outcome.tokens[str(number)] for number in range(len(prompts))] == answers
        counts.append(engine.stats().preemptions)
    assert counts[1] <= counts[0] + len(prompts)


def test_a_sequence_that_was_handed_over_has_drafts():
    model = TextModel(TEXT_MODELS["llama"]())
    prompt = repeating(2)
    answer = generate(TEXT_MODELS["llama"](), prompt, NEW_TOKENS)
    prefill, decode = make_engine(model), make_engine(model, draft_tokens=8)
    always(decode)
    prefill.add(text_input(model, "0", prompt, NEW_TOKENS, stop_after_prefill=True))
    first = run(prefill).tokens["0"]
    decode.reserve("0", len(prompt), NEW_TOKENS)
    decode.write_kv("0", 0, prefill.read_kv("0", 0, len(prompt)))
    decode.attach("0", prompt, SamplingParams(max_tokens=NEW_TOKENS), first, len(prompt), [])
    assert first + run(decode).tokens["0"] == answer
    assert decode.stats().draft_tokens > 0
