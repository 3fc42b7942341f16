"""vLLM's engine core as an engine of the pools, with real cores of small random models."""

from __future__ import annotations

import math
import subprocess
import sys
from dataclasses import replace

import pytest

from mmd_api.contract.errors import (
    BadLogitsError,
    CapacityError,
    CountMismatchError,
    OverloadedError,
    PreemptedError,
    StepFailedError,
)
from mmd_api.contract.sampling import LogitRules
from mmd_workers.engine.interface import SamplingParams, SequenceInput
from mmd_workers.engine.memory.blocks import extend_identities
from mmd_workers.features.references import media_spans
from mmd_workers.model.prompt import Feature
from mmd_workers.prefill.kv_sender import prefix_of
from mmd_workers.vllm_engine.features import LEAST_AHEAD_TOKENS
from support.oracles import engine_oracle
from support.oracles import model_zoo as zoo

from .cores import (
    BLOCK,
    CHUNK,
    IDENTITY,
    Outcome,
    ask,
    assert_empty,
    checkpoint,
    clear,
    forget,
    hand_over,
    make,
    native,
    preempt,
    question,
    run,
    served,
    step,
    supply,
    text_request,
)

LONG = "tell me which of these is the larger one, and what else you see there, and then all the rest of it"
TOKENS = 12


@pytest.fixture(scope="session")
def models(tmp_path_factory):
    """Each `generate` is asked before vLLM changes what it needs: llava and qwen2_5_vl are vLLM's own classes."""
    folder = tmp_path_factory.mktemp("models")
    return {arch: checkpoint(arch, folder) for arch in ("llava", "qwen2_5_vl")}


@pytest.fixture(scope="session")
def llava(models):
    return models["llava"]


@pytest.fixture(scope="session")
def shared(llava):
    """Two cores of one model with room for everything."""
    return [make(llava), make(llava)]


@pytest.fixture
def core(shared):
    yield shared[0]
    clear(shared)


@pytest.fixture
def other(shared):
    return shared[1]


@pytest.fixture(scope="session")
def asked(llava):
    """A prompt with an image in the middle of it, two chunks long."""
    return question(llava, "what is this? " + LONG, zoo.image(100, 64, 1), LONG)


@pytest.fixture(scope="session")
def answer(asked):
    return asked.answer(TOKENS)


def prompt_of(blocks, seed=0, more=5):
    return engine_oracle.prompt_of(blocks * BLOCK + more, seed)


# --- answers ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "parts",
    [
        [LONG],
        [zoo.image(100, 64, 1), LONG],
        [LONG, zoo.image(100, 64, 1)],
        [LONG, zoo.image(60, 60, 4), "and", zoo.image(150, 40, 5), LONG],
        [zoo.image(60, 60, 4), zoo.image(60, 60, 4), "twice the same"],
    ],
    ids=["text", "image first", "image last", "images", "one image twice"],
)
def test_a_sequence_has_the_tokens_of_generate(core, llava, parts):
    one = question(llava, *parts)
    assert ask(core, one) == one.answer(TOKENS)
    assert_empty(core)


@pytest.mark.parametrize("known", [1, 5, TOKENS - 1])
def test_a_sequence_goes_on_after_known_output_tokens(core, asked, answer, known):
    outcome = run(core, asked, asked.after(answer[:known]))
    assert outcome.tokens["a"] == answer[known:]
    assert [t.index for s in outcome.steps for t in s.tokens] == list(range(known, TOKENS))


def test_sequences_side_by_side_answer_as_they_do_alone(core, llava, asked, answer):
    texts = [question(llava, f"{n} {LONG}") for n in "abc"]
    for number, one in enumerate([*texts, asked]):
        core.add(str(number), one.request, stop_after_prefill=False)
        supply(core, str(number), one)
    outcome = step(core)
    assert outcome.tokens["3"] == answer
    assert [outcome.tokens[str(n)] for n in range(3)] == [one.answer(TOKENS) for one in texts]


def test_two_sequences_share_the_feature_that_one_brought(core, asked, answer):
    core.add("a", asked.request, stop_after_prefill=False)
    supply(core, "a", asked)
    core.add("b", asked.request, stop_after_prefill=False)
    core.abort("a")
    outcome = step(core)
    assert outcome.tokens["b"] == answer
    assert_empty(core)


def test_max_tokens_stop_tokens_and_the_context_end_an_answer(core, asked, answer):
    assert run(core, asked, asked.with_(max_tokens=3)).reasons["a"] == "length"
    core._builder._eos, eos = [answer[4]], core._builder._eos
    try:
        stopped = run(core, asked, asked.with_(ignore_eos=False))
        assert (stopped.tokens["a"], stopped.reasons["a"]) == (answer[: answer.index(answer[4]) + 1], "stop")
        assert ask(core, asked) == answer
    finally:
        core._builder._eos = eos
    prompt = engine_oracle.prompt_of(core.max_model_len - 3, 1)
    core.add("b", text_request(prompt, max_tokens=50), stop_after_prefill=False)
    outcome = step(core)
    assert (len(outcome.tokens["b"]), outcome.reasons["b"]) == (3, "length")
    assert_empty(core)


def test_log_probabilities_are_those_of_the_native_engine(core, asked):
    tokens, logprobs = native(asked, TOKENS)
    outcome = run(core, asked, asked.with_(logprobs=4))
    assert outcome.tokens["a"] == tokens
    assert outcome.logprobs["a"] == pytest.approx(logprobs, abs=1e-4)
    banned = set(asked.served.language.suppress_token_ids)
    for chosen, top in zip(logprobs, outcome.top["a"], strict=True):
        assert len(top) == 4
        assert not banned & {token for token, _ in top}
        assert top[0][1] == pytest.approx(chosen, abs=1e-4)


def test_prompt_log_probabilities_equal_those_of_the_native_engine(core, llava):
    language, prompt = served(llava).language, prompt_of(3)
    params = SamplingParams(2, logprobs=3, ignore_eos=True, prompt_logprobs=True)
    engine = engine_oracle.make_engine(language, blocks=64, block_tokens=BLOCK)
    engine.add(SequenceInput("a", language.lower(prompt, []), params))
    expected = [
        token.prompt_logprobs for output in engine_oracle.run(engine).steps for token in output.tokens
    ]
    assert [len(each) for each in expected] == [len(prompt) - 1, 0]
    request = text_request(prompt, max_tokens=2, logprobs=3, prompt_logprobs=True)
    for name in ("a", "cached", "handed over", "preempted"):
        core.add(name, request, stop_after_prefill=name == "handed over")
        outcome = step(core, until=lambda o: o.steps)
        assert outcome.steps[0].admitted == {name: 0}, "each prompt is computed whole"
        if name == "preempted":
            preempt(core, name)
        until = (lambda o: o.tokens) if name == "handed over" else None
        first, *others = [
            token.prompt_logprobs for s in step(core, outcome, until).steps for token in s.tokens
        ]
        assert not any(others)
        for (value, top), (wanted, likeliest) in zip(first, expected[0], strict=True):
            assert value == pytest.approx(wanted, abs=1e-4)
            assert [v for _, v in top] == pytest.approx([v for _, v in likeliest], abs=1e-4)
        core.abort(name)
    core.add("goes on", replace(request, output_token_ids=[5]), stop_after_prefill=False)
    assert not any(token.prompt_logprobs for s in step(core).steps for token in s.tokens)


def test_placeholders_are_never_sampled(core, llava):
    banned = set(served(llava).language.suppress_token_ids)
    assert banned
    for seed in range(4):
        request = text_request(prompt_of(1, seed), 64, temperature=2.0, seed=seed)
        core.add(str(seed), request, stop_after_prefill=False)
    outcome = step(core)
    assert not banned & {token for tokens in outcome.tokens.values() for token in tokens}


@pytest.mark.parametrize("sampling", [{}, {"top_k": 5}, {"top_p": 0.6}], ids=["all", "top k", "top p"])
def test_seeded_draws_are_those_of_the_native_engine_and_go_on_elsewhere(core, other, asked, sampling):
    params = SamplingParams(TOKENS, temperature=1.5, seed=7, ignore_eos=True, **sampling)
    expected = native(asked, TOKENS, params=params)[0]
    drawn = asked.with_(temperature=1.5, seed=7, **sampling)
    assert ask(core, asked, drawn) == expected
    assert ask(core, asked, drawn) == expected, "also where the prefix is cached"
    assert ask(other, asked, replace(drawn, output_token_ids=expected[:5])) == expected[5:]
    assert ask(core, asked, asked.with_(temperature=1.5, seed=8, **sampling)) != expected


def test_draws_of_one_request_do_not_depend_on_the_others(core, asked, llava):
    drawn = asked.with_(temperature=1.5, seed=7)
    alone = ask(core, asked, drawn)
    forget(core)
    for number in range(3):
        core.add(f"greedy {number}", text_request(prompt_of(3, number), 3 + number), stop_after_prefill=False)
        core.add(f"{number}", drawn, stop_after_prefill=False)
        supply(core, f"{number}", asked)
        core.step()
    outcome = step(core)
    assert [outcome.tokens[f"{number}"][-4:] for number in range(3)] == [alone[-4:]] * 3


RULES = {
    "allowed": lambda answer: LogitRules(allowed_token_ids=[*range(3, 150, 2), answer[0]]),
    "bad words": lambda answer: LogitRules(bad_words=[[answer[1]], answer[3:5]]),
    "bias": lambda answer: LogitRules(logit_bias=[(answer[0], -9.0), (40, 3.0)]),
    "repetition": lambda _: LogitRules(repetition_penalty=1.8),
    "frequency": lambda _: LogitRules(frequency_penalty=-6.0),
    "presence": lambda _: LogitRules(presence_penalty=-6.0),
    "all": lambda answer: LogitRules([], [[answer[1]], answer[3:5]], [(answer[0], -2.0)], 1.2, -0.9, -2.0),
}


@pytest.mark.parametrize(
    "how", [{}, {"temperature": 1.5, "seed": 7, "min_p": 0.05}], ids=["greedy", "seeded"]
)
@pytest.mark.parametrize("rules", RULES)
def test_rules_act_as_in_the_native_engine_and_count_earlier_tokens(core, other, asked, answer, rules, how):
    rule = RULES[rules](answer)
    expected = native(asked, TOKENS, params=SamplingParams(TOKENS, ignore_eos=True, rules=rule, **how))[0]
    assert expected != native(asked, TOKENS, params=SamplingParams(TOKENS, ignore_eos=True, **how))[0]
    ruled = asked.with_(rules=rule, **how)
    assert ask(core, asked, ruled) == expected
    for known in (1, 4, TOKENS - 1):
        assert ask(other, asked, replace(ruled, output_token_ids=expected[:known])) == expected[known:]
    assert hand_over(core, other, replace(asked, request=ruled), name="moved") == expected


def test_rules_of_one_request_do_not_depend_on_the_others(core, asked, answer):
    ruled = asked.with_(rules=RULES["all"](answer))
    alone = ask(core, asked, ruled)
    forget(core)
    for number in range(3):
        core.add(f"greedy {number}", text_request(prompt_of(3, number), 3 + number), stop_after_prefill=False)
        core.add(f"{number}", ruled, stop_after_prefill=False)
        supply(core, f"{number}", asked)
        core.step()
    outcome = step(core)
    assert [outcome.tokens[f"{number}"][-4:] for number in range(3)] == [alone[-4:]] * 3


def test_log_probabilities_are_those_before_the_rules(core, asked, answer):
    rule = RULES["all"](answer)
    params = SamplingParams(TOKENS, ignore_eos=True, logprobs=0, rules=rule)
    tokens, logprobs = native(asked, TOKENS, params=params)
    outcome = run(core, asked, asked.with_(logprobs=2, rules=rule))
    assert outcome.tokens["a"] == tokens
    assert outcome.logprobs["a"] == pytest.approx(logprobs, abs=1e-4)
    assert outcome.top["a"][0][0][0] == answer[0], "the likeliest token of the model, which was not chosen"


def test_stop_tokens_end_an_answer_unless_min_tokens_hold_them_back(core, other, asked, answer):
    stop = asked.with_(stop_token_ids=[answer[4], 150])
    first = answer.index(answer[4])
    stopped = run(core, asked, stop)
    assert (stopped.tokens["a"], stopped.reasons["a"]) == (answer[: first + 1], "stop")
    params = SamplingParams(
        TOKENS, ignore_eos=True, min_tokens=first + 3, stop_token_ids=frozenset({answer[4], 150})
    )
    expected = native(asked, TOKENS, params=params)[0]
    assert len(expected) >= first + 3
    held = replace(stop, sampling=replace(stop.sampling, min_tokens=first + 3))
    assert ask(core, asked, held) == expected
    for known in (1, first, first + 2):
        assert ask(other, asked, replace(held, output_token_ids=expected[:known])) == expected[known:]
    assert hand_over(core, other, replace(asked, request=held), name="moved") == expected


# --- features -----------------------------------------------------------------------------------------------------


def test_a_late_feature_delays_nobody_else_and_text_before_it_is_computed(core, llava):
    text = question(llava, LONG)
    asked = question(llava, *[LONG] * 4, zoo.image(100, 64, 1), LONG)
    core.add("late", asked.request, stop_after_prefill=False)
    core.add("text", text.request, stop_after_prefill=False)
    outcome = step(core, until=lambda o: len(o.tokens.get("text", ())) == TOKENS)
    assert outcome.tokens["text"] == text.answer(TOKENS)
    start = asked.request.features[0].ranges[0][0]
    assert start >= LEAST_AHEAD_TOKENS
    assert core.table.sequences["late"].request.num_computed_tokens == start
    stats = core.stats()
    assert stats.waiting_tokens == stats.blocked_tokens == len(asked.request.token_ids) - start
    supply(core, "late", asked)
    assert core.stats().blocked_tokens == 0
    assert step(core).tokens["late"] == asked.answer(TOKENS)
    assert_empty(core)


def test_little_text_before_a_late_feature_is_computed_with_it(core, llava):
    """A step for it alone would take as long as any, and cores from the tower."""
    asked = question(llava, "what is this?", zoo.image(100, 64, 1), LONG)
    assert 0 < asked.request.features[0].ranges[0][0] < LEAST_AHEAD_TOKENS
    core.add("late", asked.request, stop_after_prefill=False)
    for _ in range(3):
        assert not core.step().prefill_tokens
    supply(core, "late", asked)
    assert core.step().prefill_tokens == CHUNK
    assert step(core).tokens["late"] == asked.answer(TOKENS)


def test_few_tokens_before_a_late_feature_are_computed_with_it(core, llava, asked, answer):
    assert ask(core, asked) == answer
    other = question(llava, "what is this? " + LONG, zoo.image(100, 64, 2), LONG)
    cached = core.cached_tokens(other.request)
    assert 0 < other.request.features[0].ranges[0][0] - cached < LEAST_AHEAD_TOKENS
    core.add("late", other.request, stop_after_prefill=False)
    for _ in range(3):
        assert not core.step().prefill_tokens
    supply(core, "late", other)
    assert step(core).tokens["late"] == other.answer(TOKENS)


def test_a_step_is_empty_while_all_wait_for_features(core, asked):
    core.add("a", asked.request, stop_after_prefill=False)
    core.add("b", asked.request, stop_after_prefill=False)
    for _ in range(6):
        output = core.step()
    assert core.has_work()
    assert (output.prefill_tokens, output.decode_sequences, output.failed) == (0, 0, [])
    for name in "ab":
        core.abort(name)
    assert_empty(core)


def test_a_medium_whose_prefix_was_evicted_is_reported_and_waits(core, asked, answer):
    assert ask(core, asked) == answer
    assert core.cached_tokens(asked.request) > sum(asked.request.features[0].ranges[-1])
    forget(core)
    core.add("b", asked.request, stop_after_prefill=False)
    outcome = Outcome()
    for _ in range(6):
        outcome.take(core.step())
    start = asked.request.features[0].ranges[0][0]
    assert outcome.admitted["b"]
    assert max(outcome.admitted["b"]) <= start, "prefill supplies a medium that is not covered"
    assert not outcome.failed
    supply(core, "b", asked)
    assert step(core).tokens["b"] == answer


def test_a_cached_prefix_needs_no_feature(core, asked, answer):
    assert ask(core, asked) == answer
    core.add("b", asked.request, stop_after_prefill=False)
    outcome = step(core)
    assert outcome.tokens["b"] == answer
    assert outcome.admitted["b"] == [core.cached_tokens(asked.request)]
    assert core.stats().prefix_hit_tokens >= core.cached_tokens(asked.request)


@pytest.mark.parametrize("stop", [False, True], ids=["decodes here", "is handed over"])
def test_a_sequence_has_no_features_from_its_first_token_on(core, asked, answer, stop):
    core.add("a", asked.request, stop_after_prefill=stop)
    supply(core, "a", asked)
    assert core._shelf._features
    outcome = step(core, until=lambda o: o.tokens.get("a"))
    assert core.table.sequences["a"]
    assert not core._shelf._features
    if not stop:
        assert step(core, outcome).tokens["a"] == answer
    core.abort("a")


def test_a_feature_stays_for_those_that_still_need_it(core, llava, asked, answer):
    other = question(llava, LONG, zoo.image(100, 64, 1), LONG)
    (feature_id,) = {one.request.features[0].feature_id for one in (asked, other)}
    for name, one in {"a": asked, "b": other}.items():
        core.add(name, one.request, stop_after_prefill=False)
        supply(core, name, one)
    outcome = step(core, until=lambda o: o.tokens.get("a"))
    assert not outcome.tokens.get("b")
    assert core._shelf._users == {feature_id: {"b"}}
    step(core, outcome)
    assert outcome.tokens == {"a": answer, "b": other.answer(TOKENS)}
    assert_empty(core)


def test_a_sequence_asks_for_its_features_again_whenever_it_is_preempted(llava, asked, answer):
    core = make(llava, prefix_cache=False)
    core.add("a", asked.request, stop_after_prefill=False)
    supply(core, "a", asked)
    outcome, again = Outcome(), {"a": asked}
    for made in (2, 5):
        step(core, outcome, until=lambda o, made=made: len(o.tokens.get("a", ())) == made, asked=again)
        preempt(core, "a")
    step(core, outcome, asked=again)
    assert outcome.admitted["a"] == [0, 0, 0], "at its admission and after each preemption"
    assert outcome.tokens["a"] == answer
    assert_empty(core)


def test_a_feature_of_another_size_fails_alone(core, asked, answer, llava):
    (feature,) = asked.features
    rows = feature.tensors["embeddings"]
    core.add("a", asked.request, stop_after_prefill=False)
    for wrong in (rows[:-1], rows[:, :-1]):
        with pytest.raises(CountMismatchError):
            core.fill("a", 0, Feature("image", {"embeddings": wrong}))
    supply(core, "a", asked)
    assert step(core).tokens["a"] == answer


@pytest.fixture(scope="session")
def rotary(models):
    return make(models["qwen2_5_vl"])


def assert_fails_alone(core, broken):
    """Whether it is added or attached: before vLLM has it, and nothing is kept of it."""
    with pytest.raises(StepFailedError):
        core.add("broken", broken, stop_after_prefill=False)
    core.reserve("broken", len(broken.token_ids), 5)
    core.table.reservations["broken"].written = len(broken.token_ids)
    with pytest.raises(StepFailedError):
        core.attach("broken", broken, [1])
    core.abort("broken")
    assert_empty(core)


def test_a_request_that_the_model_cannot_run_fails_alone(rotary, models):
    one = question(models["qwen2_5_vl"], LONG, zoo.image(100, 64, 1), "tell me")
    expected = one.answer(TOKENS)
    ref = one.request.features[0]
    for geometry in ({}, {"image_grid_thw": [7]}):
        broken = replace(one.request, features=[replace(ref, geometry=geometry)])
        assert_fails_alone(rotary, broken)
    assert ask(rotary, one) == expected


# --- KV -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("more", [0, 1, BLOCK - 1, BLOCK, 2 * CHUNK + 3])
def test_kv_that_moved_to_another_core_gives_the_tokens_of_one(core, other, llava, more):
    one = question(llava, LONG)
    base = one.request.token_ids
    filler = prompt_of(8, 3)[: -len(base) % BLOCK + more]
    request = replace(one.request, token_ids=filler + base)
    core.add("alone", request, stop_after_prefill=False)
    expected = step(core).tokens["alone"]
    forget(core)
    one.request = request
    assert hand_over(core, other, one) == expected
    assert_empty(core)
    assert_empty(other)


def test_kv_of_a_media_prompt_moves_whether_cached_or_not(core, other, asked, answer):
    for _ in range(2):
        outcome = Outcome()
        assert hand_over(core, other, asked, outcome) == answer
        forget(other)
    assert core.cached_tokens(asked.request) > CHUNK
    assert all(end - start <= CHUNK for start, end in outcome.ready["a"]), "a cached prefix travels in chunks"


def test_kv_that_the_decoder_has_cached_is_not_sent_again(core, other, asked, answer):
    tokens = len(asked.request.token_ids)
    prefix = prefix_of(asked.request, IDENTITY)
    assert hand_over(core, other, asked) == answer
    cached = other.reserve("b", tokens, 5, prefix)
    assert cached == min(tokens, len(prefix) * IDENTITY) // BLOCK * BLOCK > CHUNK
    taken = other.reserve("c", tokens, 5, prefix)
    assert taken == cached, "several sequences share it"
    with pytest.raises(CountMismatchError):
        other.write_kv("c", 0, other._kv.read([1], 0, 4))
    for name in "bc":
        other.abort(name)
    assert_empty(other)
    assert hand_over(core, other, asked, name="d") == answer
    forget(other)
    assert other.reserve("e", tokens, 5, prefix) == 0
    other.abort("e")
    assert_empty(other)


@pytest.mark.parametrize("identity", [BLOCK // 4, BLOCK, 3 * BLOCK])
def test_blocks_are_found_whatever_size_identities_have(core, other, llava, monkeypatch, identity):
    one = question(llava, LONG, LONG)
    monkeypatch.setattr(other.prefix_blocks, "identity_tokens", identity)
    tokens, prefix = len(one.request.token_ids), prefix_of(one.request, identity)
    expected = hand_over(core, other, one)
    whole = tokens // identity * identity // BLOCK
    assert other.reserve("b", tokens, 5, prefix) == whole * BLOCK > 0
    assert other.reserve("c", tokens, 5, prefix[:-1]) == (len(prefix) - 1) * identity // BLOCK * BLOCK
    assert other.reserve("d", tokens, 5, [b"unknown", *prefix[1:]]) == 0
    for name in "bcd":
        other.abort(name)
    assert_empty(other)
    monkeypatch.undo()
    assert hand_over(core, other, one, name="e") == expected


def test_kv_that_spoiled_a_sequence_is_not_found_by_the_next(core, other, asked, answer):
    tokens, prefix = len(asked.request.token_ids), prefix_of(asked.request, IDENTITY)
    assert hand_over(core, other, asked) == answer
    forget(other)
    core.add("a", asked.request, stop_after_prefill=True)
    supply(core, "a", asked)
    outcome = step(core, until=lambda o: o.tokens.get("a"))
    assert other.reserve("a", tokens, 5, prefix) == 0
    other.write_kv("a", 0, [layer * float("nan") for layer in core.read_kv("a", 0, tokens)])
    core.abort("a")
    other.attach("a", asked.request, outcome.tokens["a"])
    assert isinstance(step(other).failed["a"], BadLogitsError)
    assert_empty(other)
    assert other.reserve("b", tokens, 5, prefix) == 0
    other.abort("b")
    assert hand_over(core, other, asked, name="c") == answer


def test_an_answer_is_cached_for_the_next_turn_of_a_conversation(core, other, llava):
    one = question(llava, LONG, max_tokens=2 * BLOCK)
    answer = hand_over(core, other, one)
    turn = replace(one.request, token_ids=[*one.request.token_ids, *answer, *range(5, 15)])
    known = len(one.request.token_ids) + len(answer) - 1
    prefix = prefix_of(turn, IDENTITY)
    cached = other.reserve("b", len(turn.token_ids), 5, prefix)
    assert cached == known // BLOCK * BLOCK > len(one.request.token_ids)
    other.abort("b")
    assert_empty(other)


def test_a_reservation_is_refused_by_what_is_missing(llava):
    core = make(llava, blocks=8, max_model_len=8 * BLOCK, max_sequences=2)
    with pytest.raises(CapacityError):
        core.reserve("a", 8 * BLOCK, 5)
    core.reserve("a", 5 * BLOCK, 5)
    with pytest.raises(OverloadedError):
        core.reserve("b", 3 * BLOCK, 5)
    core.reserve("b", 4, 5)
    with pytest.raises(OverloadedError):
        core.reserve("c", 4, 5)
    with pytest.raises(ValueError, match="in use"):
        core.reserve("a", 4, 5)
    assert core.stats().blocks_reserved == 7
    assert core.stats().reserved_sequences == 2
    for name in "ab":
        core.abort(name)
    assert_empty(core)


def test_kv_with_a_gap_or_another_geometry_is_refused(core, other, asked):
    core.add("a", asked.request, stop_after_prefill=True)
    supply(core, "a", asked)
    outcome = step(core, until=lambda o: o.tokens.get("a"))
    tokens = len(asked.request.token_ids)
    read = core.read_kv("a", 0, tokens)
    other.reserve("a", tokens, 5)
    with pytest.raises(CountMismatchError):
        other.write_kv("a", 1, read)
    with pytest.raises(CountMismatchError):
        other.write_kv("a", 0, read[:-1])
    with pytest.raises(CountMismatchError):
        other.attach("a", asked.request, outcome.tokens["a"])
    other.write_kv("a", 0, read)
    other.attach("a", asked.request, outcome.tokens["a"])
    assert step(other).tokens["a"]
    core.abort("a")
    assert_empty(core)


def test_an_aborted_prefill_keeps_nothing_although_blocks_are_still_to_be_read(core, asked):
    core.add("a", asked.request, stop_after_prefill=True)
    supply(core, "a", asked)
    step(core, until=lambda o: o.ready.get("a"))
    assert not core.table.sequences["a"].made, "it is in the middle of its prompt"
    core.abort("a")
    with pytest.raises(KeyError):
        core.read_kv("a", 0, 1)
    step(core)
    assert_empty(core)


# --- a pool that is too small -------------------------------------------------------------------------------------


@pytest.mark.parametrize("prefix_cache", [True, False])
def test_prompts_with_late_features_that_would_fill_the_pool_both_go_on(llava, prefix_cache):
    asked = {n: question(llava, n + LONG, zoo.image(100, 64, 1), 3 * LONG) for n in "ab"}
    tokens = len(asked["a"].request.token_ids)
    each, before = -(-tokens // BLOCK), -(-asked["a"].request.features[0].ranges[0][0] // BLOCK)
    core = make(llava, blocks=each + before, max_model_len=each * BLOCK + 1, prefix_cache=prefix_cache)
    for name, one in asked.items():
        core.add(name, one.request, stop_after_prefill=True)
    outcome = Outcome()
    for _ in range(4):
        outcome.take(core.step())
    supply(core, "b", asked["b"])
    for _ in range(2):
        outcome.take(core.step())
    supply(core, "a", asked["a"])
    for name, one in asked.items():
        step(core, outcome, until=lambda o, n=name: o.tokens.get(n))
        assert outcome.tokens[name] == one.answer(1)
        core.abort(name)
    step(core)
    assert_empty(core)


@pytest.mark.parametrize("prefix_cache", [True, False])
def test_a_preempted_prefill_frees_its_blocks_and_becomes_readable_again(
    llava, other, asked, answer, prefix_cache
):
    core = make(
        llava, blocks=8, max_model_len=8 * BLOCK, prefix_cache=prefix_cache
    )  # all of which `d` takes in the end
    tokens = len(asked.request.token_ids)
    other.add("a", asked.request, stop_after_prefill=True)
    supply(other, "a", asked)
    step(other, until=lambda o: o.tokens.get("a"))
    alone = other.read_kv("a", 0, tokens)
    other.abort("a")
    core.add("d", text_request(prompt_of(1, 5), 200), stop_after_prefill=False)
    core.step()
    core.add("a", replace(asked.request, arrived=math.inf), stop_after_prefill=True)
    outcome = step(core, until=lambda o: core.stats().preemptions)
    announced = outcome.ready["a"][-1][1]
    assert announced == asked.request.features[0].ranges[0][0]
    assert core.read_kv("a", 0, announced) is None
    step(core, outcome, until=lambda o: o.reasons.get("d"))
    supply(core, "a", asked)
    step(core, outcome, until=lambda o: o.tokens.get("a"))
    assert [start for start, _ in outcome.ready["a"]] == sorted({start for start, _ in outcome.ready["a"]}), (
        "once"
    )
    assert outcome.ready["a"][-1][1] == tokens
    for layer, expected in zip(core.read_kv("a", 0, tokens), alone, strict=True):
        assert (layer - expected).abs().max() < 1e-4
    assert outcome.tokens["a"] == answer[:1]
    assert not outcome.failed
    core.abort("a")
    step(core)
    assert_empty(core)


@pytest.mark.parametrize("how", [{}, {"temperature": 1.5, "seed": 7}], ids=["greedy", "seeded"])
def test_rules_know_the_tokens_from_before_a_preemption(llava, other, how):
    rules = LogitRules([], [[40], [41, 42]], [(7, 2.0)], 1.3, -1.5, -0.5)
    prompts = [prompt_of(1, seed) for seed in range(3)]
    requests = [text_request(prompt, 4 * BLOCK, rules=rules, **how) for prompt in prompts]
    alone = []
    for request in requests:
        other.add("alone", request, stop_after_prefill=False)
        alone.append(step(other).tokens["alone"])
    core = make(llava, blocks=9, max_model_len=6 * BLOCK, prefix_cache=False)
    for number, request in enumerate(requests):
        core.add(str(number), request, stop_after_prefill=False)
    outcome = step(core)
    assert core.stats().preemptions > 0
    assert [outcome.tokens[str(number)] for number in range(3)] == alone
    assert_empty(core)


def test_an_older_request_that_is_placed_again_preempts_newer_ones(llava):
    core = make(llava, blocks=9, max_model_len=6 * BLOCK, prefix_cache=False)
    requests = {
        name: replace(text_request(prompt_of(1, seed), 4 * BLOCK), arrived=arrived)
        for seed, (name, arrived) in enumerate({"young": 2.0, "younger": 3.0, "again": 1.0}.items())
    }
    for name in ("young", "younger"):
        core.add(name, requests[name], stop_after_prefill=False)
    core.step()
    core.add("again", requests["again"], stop_after_prefill=False)
    placed = {name: sequence.request for name, sequence in core.table.sequences.items()}
    outcome = step(core)
    ends = [token.sequence_id for one in outcome.steps for token in one.tokens if token.finish_reason]
    assert placed["again"].num_preemptions == 0
    assert placed["younger"].num_preemptions > 0
    assert ends[0] == "again"
    assert_empty(core)


def test_a_preempted_attached_sequence_fails_retryably_and_frees_all(llava, other):
    core = make(llava, blocks=7, max_model_len=6 * BLOCK)
    names = "ab"
    for seed, name in enumerate(names):
        prompt = prompt_of(2, seed, more=0)
        request = text_request(prompt, 100)
        other.add(name, request, stop_after_prefill=True)
        made = step(other, until=lambda o, n=name: o.tokens.get(n))
        core.reserve(name, len(prompt), 100)
        core.write_kv(name, 0, other.read_kv(name, 0, len(prompt)))
        core.attach(name, request, made.tokens[name])
        other.abort(name)
    outcome = step(core)
    ((name, error),) = outcome.failed.items()
    assert name == "b"
    assert isinstance(error, PreemptedError)
    assert error.retryable
    assert core.stats().preemptions == 1
    assert len(outcome.tokens["a"]) == 99
    assert_empty(core)


def test_a_reservation_leaves_a_block_to_each_sequence_that_grows(llava, other):
    core = make(llava, blocks=8, max_model_len=6 * BLOCK)
    prompt = prompt_of(1, 3, more=0)
    request = text_request(prompt, 2 * BLOCK)
    other.add("old", request, stop_after_prefill=True)
    made = step(other, until=lambda o: o.tokens.get("old"))
    core.reserve("old", len(prompt), 2 * BLOCK)
    core.write_kv("old", 0, other.read_kv("old", 0, len(prompt)))
    core.attach("old", request, made.tokens["old"])
    other.abort("old")
    core.step()
    with pytest.raises(OverloadedError, match="spare"):
        core.reserve("young", 6 * BLOCK - 6, 5)
    core.reserve("young", 5 * BLOCK - 6, 5)
    outcome = step(core)
    assert not outcome.failed
    assert outcome.reasons["old"] == "length"
    core.abort("young")
    assert_empty(core)


def test_a_prompt_that_fills_the_context_ends_with_its_first_token(core, llava):
    tokens = prompt_of(core.max_model_len // BLOCK, 7, more=0)[: core.max_model_len - 1]
    core.add("full", text_request(tokens, 9), stop_after_prefill=True)
    outcome = step(core, until=lambda o: o.tokens.get("full"))
    assert outcome.reasons["full"] == "length"
    core.abort("full")
    step(core)
    assert_empty(core)


@pytest.mark.parametrize("wrong", ["a token", "rows", "a range", "no range"])
def test_a_request_whose_layout_is_wrong_fails_alone(core, asked, wrong):
    (ref,) = asked.request.features
    request = {
        "a token": replace(asked.request, token_ids=[*asked.request.token_ids[:-1], 10**6]),
        "rows": replace(asked.request, features=[replace(ref, num_tokens=ref.num_tokens + 1)]),
        "a range": replace(asked.request, features=[replace(ref, ranges=[[10**5, ref.num_tokens]])]),
        "no range": replace(asked.request, features=[replace(ref, ranges=[])]),
    }[wrong]
    assert_fails_alone(core, request)


def spoil(core, asked, *, stop_after_prefill=False):
    """Add a request whose features are not numbers."""
    core.add("bad", asked.request, stop_after_prefill=stop_after_prefill)
    for number, feature in enumerate(asked.features):
        broken = {name: tensor * float("nan") for name, tensor in feature.tensors.items()}
        core.fill("bad", number, Feature(feature.modality, broken))


BLOCKS = 20


def assert_every_block_is_usable(core):
    """By as many short prompts side by side, each in a block that stays nearly empty."""
    for number in range(BLOCKS):
        core.add(str(number), text_request([5 + number, 6, 7, 8], 2), stop_after_prefill=False)
    assert not step(core).failed


@pytest.mark.parametrize(
    ("moves", "stop"), [(False, False), (True, False), (True, True)], ids=["one pool", "decode", "prefill"]
)
def test_logits_that_are_not_numbers_fail_the_request_and_no_other(llava, asked, answer, moves, stop):
    core = make(llava, vllm={}, moves=moves, blocks=BLOCKS, max_sequences=BLOCKS)
    spoil(core, asked, stop_after_prefill=stop)
    outcome = step(core)
    assert isinstance(outcome.failed["bad"], BadLogitsError)
    assert not outcome.tokens.get("bad")
    assert core.cached_tokens(asked.request) == 0
    assert_every_block_is_usable(core)
    assert ask(core, asked) == answer
    assert_empty(core)


@pytest.mark.parametrize("moves", [False, True])
def test_a_request_that_leaves_before_its_logits_spoils_no_block(llava, asked, moves):
    settings = {"blocks": BLOCKS, "max_sequences": BLOCKS, "prefix_cache": False}
    core = make(llava, vllm={"maxNumBatchedTokens": CHUNK}, moves=moves, **settings)
    spoil(core, asked, stop_after_prefill=moves)
    end = sum(asked.request.features[0].ranges[-1])
    while core.table.sequences["bad"].request.num_computed_tokens < end:
        core.step()
    core.abort("bad")
    assert_every_block_is_usable(core)
    assert_empty(core)


def test_features_stay_with_vllm_as_long_as_a_request_needs_them(core, llava, asked):
    manager = core._scheduler.encoder_cache_manager
    runner = core._core.model_executor.driver_worker.worker.model_runner
    for number in range(3):
        ask(core, question(llava, zoo.image(100, 64, number), LONG))
        assert not manager.cached
        assert manager.num_free_slots == manager.num_freeable_slots == manager.cache_size
    assert not runner.encoder_cache


# --- figures ------------------------------------------------------------------------------------------------------


def test_stats_add_up(core, asked):
    total = core.stats().blocks_total
    core.add("held", text_request(prompt_of(2, 1)), stop_after_prefill=True)
    step(core, until=lambda o: o.tokens.get("held"))
    core.step()
    core.reserve("reserved", 40, 5)
    core.add("late", asked.request, stop_after_prefill=False)
    core.add("runs", text_request(prompt_of(1, 2), 50), stop_after_prefill=False)
    for _ in range(4):
        core.step()
    stats = core.stats()
    assert (stats.held_sequences, stats.reserved_sequences) == (1, 1)
    assert stats.waiting_sequences + stats.running_sequences == 2
    assert stats.blocks_reserved == 2
    start = asked.request.features[0].ranges[0][0]
    used = 3 + -(-start // BLOCK) + 2  # held, late (its text) and runs
    assert stats.blocks_total - stats.blocks_free - stats.blocks_reserved == used
    assert stats.blocks_total == total
    assert stats.blocked_tokens == len(asked.request.token_ids) - start
    assert stats.prefill_tokens_per_second > 0
    assert stats.itl_seconds > 0


def test_prefix_blocks_have_the_identities_of_the_native_engine(core, asked):
    expected: list[bytes] = []
    tokens = [*asked.request.token_ids, *ask(core, asked)[:-1]]
    extend_identities(
        expected,
        tokens,
        media_spans(asked.request.features),
        IDENTITY,
        len(tokens) // BLOCK * (BLOCK // IDENTITY),
    )
    changes, pool = core.prefix_changes, core._pool
    assert set(changes.take(1000).added) == set(expected)
    for _ in range(2):
        pool.free_blocks(
            pool.get_new_blocks(pool.get_num_free_blocks())
        )  # for which all that is cached is evicted
        assert set(changes.take(1000).evicted) == set(expected)
        assert changes.take(1000).empty
        ask(core, asked)
        assert set(changes.take(1000).added) == set(expected), "what comes back is reported again"


def test_prompts_of_one_salt_share_blocks_with_no_others(core, asked):
    salts = ["", "one", "other"]
    requests = {salt: replace(asked.request, cache_salt=salt) for salt in salts}
    answers, known = [], set()
    for salt in salts:
        assert core.cached_tokens(requests[salt]) == 0, salt
        answers.append(ask(core, asked, requests[salt]))
        core.prefix_changes.restart()
        reported = set(core.prefix_changes.take(1000).added)
        whole = set(prefix_of(requests[salt], IDENTITY))
        assert whole & reported
        assert not whole & known
        known = reported
    assert answers[0] == answers[1] == answers[2]
    for salt in salts:
        assert core.cached_tokens(requests[salt]) > 0, salt


def assert_prefixes_are_cached(core):
    """What is noted of identities is that of blocks which vLLM has cached, and no more."""
    held = {}
    for identity, hashes in core.prefix_blocks.hashes_of.items():
        assert identity in core.prefix_changes
        for known in hashes:
            assert core._pool.get_cached_block(known, [0]) is not None
            held.setdefault(known, set()).add(identity)
    assert core.prefix_blocks.identities_in == held


def test_prompts_that_diverge_within_a_block_leave_nothing_when_evicted(llava):
    """On CPUs, where both then have the identity of the first half of a block."""
    core = make(llava, blocks=12, max_model_len=8 * BLOCK, max_sequences=3)
    first, reported = prompt_of(0, more=IDENTITY), set()
    core.add(
        "long", text_request(first + prompt_of(1, seed=99), max_tokens=4 * BLOCK), stop_after_prefill=False
    )
    for number in range(40):
        if number == 20:
            core.abort("long")
        core.add("a", text_request(first + prompt_of(2, seed=number), max_tokens=4), stop_after_prefill=False)
        step(core, until=lambda outcome: outcome.reasons.get("a"))
        assert_prefixes_are_cached(core)
        delta = core.prefix_changes.take(1000)
        reported = (reported - set(delta.evicted)) | set(delta.added)
        assert reported == set(core.prefix_blocks.hashes_of)
        asked = text_request(first + prompt_of(2, seed=number))
        whole = prefix_of(asked, IDENTITY)[: 2 * BLOCK // IDENTITY]
        assert set(whole) <= reported, "the newest is known from its first block on"
    assert len(core.prefix_blocks.identities_in) <= 12
    assert_empty(core)


def test_a_warm_up_leaves_nothing(core, asked, answer):
    core.warm_up()
    assert_empty(core)
    assert core.prefix_changes.take(1000).added == []
    assert core.stats().prefix_miss_tokens == 0
    assert ask(core, asked) == answer


def test_a_warm_up_that_fails_leaves_nothing(core, asked, answer, monkeypatch):
    with monkeypatch.context() as broken:
        broken.setattr(core._core.model_executor, "execute_model", lambda *_, **__: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            core.warm_up()
    step(core)
    assert_empty(core)
    assert ask(core, asked) == answer


ON_A_THREAD = """
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
import torch
torch.set_num_threads(1)
from tests.vllm_engine import cores
core = cores.make(Path(sys.argv[1]))
ThreadPoolExecutor(1).submit(core.warm_up).result()
"""


def test_any_thread_may_step_a_core_made_by_another(llava):
    """With fewer threads than cores: what OpenMP has by itself is not what torch was told."""
    command = [sys.executable, "-c", ON_A_THREAD, str(llava)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-1000:]
