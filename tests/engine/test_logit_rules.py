"""Rules of logits equal transformers' processors and `generate` with them, and depend on the tokens so far alone: not on batch, chunk, pod."""

import functools
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import (
    LogitsProcessor,
    LogitsProcessorList,
    MinNewTokensLengthLogitsProcessor,
    MinPLogitsWarper,
    NoBadWordsLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    SuppressTokensLogitsProcessor,
)

from mmd_api.contract.errors import OverloadedError, PreemptedError
from mmd_api.contract.sampling import LogitRules
from mmd_workers.engine.choosing import sampler
from mmd_workers.engine.choosing.logit_rules import RuleState, apply_rules, rule_state
from mmd_workers.engine.choosing.sampler import Draw, sample
from mmd_workers.engine.interface import SamplingParams, SequenceInput
from support.oracles.engine_oracle import TextModel, llama, make_engine, prompt_of, qwen2, run

VOCAB = 40
tokens = st.lists(st.integers(0, VOCAB - 1), max_size=12)
seeds = st.integers(0, 2**31)


def logits_of(seed, rows=1):
    return torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(seed)) * 4


def ruled(logits, rules, prompt=(), outputs=(), min_tokens=0, ends=()):
    """A copy of one row's logits after its rules."""
    changed = logits.clone()
    state = RuleState(rules, min_tokens, ends, prompt)
    state.follow(outputs)
    apply_rules(changed, [(0, state)])
    return changed


def equal(got, expected):
    torch.testing.assert_close(got, expected, rtol=1e-6, atol=1e-6)


# --- what each rule does ------------------------------------------------------------------------------------------


@settings(deadline=None)
@given(seeds, tokens, tokens, st.floats(0.1, 5))
def test_the_repetition_penalty_is_that_of_transformers_over_prompt_and_output(
    seed, prompt, outputs, penalty
):
    logits, known = logits_of(seed), torch.tensor([prompt + outputs], dtype=torch.int64)
    expected = RepetitionPenaltyLogitsProcessor(penalty)(known, logits.clone())
    equal(ruled(logits, LogitRules(repetition_penalty=penalty), prompt, outputs), expected)


@settings(deadline=None)
@given(seeds, tokens, st.lists(tokens.filter(bool).map(lambda word: word[:3]), min_size=1, max_size=6))
def test_bad_words_are_those_of_transformers_over_the_output(seed, outputs, words):
    outputs = outputs + words[0][:-1]
    logits, known = logits_of(seed), torch.tensor([outputs], dtype=torch.int64)
    expected = NoBadWordsLogitsProcessor(words)(known, logits.clone())
    equal(ruled(logits, LogitRules(bad_words=words), [3, 4], outputs), expected)
    assert expected[0, words[0][-1]] == -math.inf


@settings(deadline=None)
@given(seeds, tokens, st.integers(0, 12), st.sets(st.integers(0, VOCAB - 1), min_size=1, max_size=4))
def test_min_tokens_are_those_of_transformers(seed, outputs, least, ends):
    logits, known = logits_of(seed), torch.tensor([[1, 2, 3, *outputs]], dtype=torch.int64)
    expected = MinNewTokensLengthLogitsProcessor(3, least, list(ends))(known, logits.clone())
    equal(ruled(logits, LogitRules(), [1, 2, 3], outputs, least, ends), expected)


@settings(deadline=None)
@given(seeds, st.dictionaries(st.integers(0, VOCAB - 1), st.floats(-100, 100), min_size=1, max_size=8))
def test_the_bias_is_that_of_transformers(seed, biases):
    logits = logits_of(seed)
    bias = [[[token], float(value)] for token, value in biases.items()]
    expected = SequenceBiasLogitsProcessor(bias)(torch.zeros(1, 1, dtype=torch.int64), logits.clone())
    equal(ruled(logits, LogitRules(logit_bias=list(biases.items()))), expected)


@settings(deadline=None)
@given(seeds, st.sets(st.integers(0, VOCAB - 1), min_size=1))
def test_no_token_but_the_allowed_ones_is_left(seed, allowed):
    logits = logits_of(seed)
    others = sorted(set(range(VOCAB)) - allowed)
    expected = SuppressTokensLogitsProcessor(others)(torch.zeros(1, 1, dtype=torch.int64), logits.clone())
    equal(ruled(logits, LogitRules(allowed_token_ids=sorted(allowed))), expected)


@settings(deadline=None)
@given(seeds, tokens, tokens, st.floats(-2, 2), st.floats(-2, 2))
def test_frequency_and_presence_penalties_count_the_output_alone(seed, prompt, outputs, frequency, presence):
    logits = logits_of(seed)
    expected = logits.clone()
    for token in set(outputs):
        expected[0, token] -= frequency * outputs.count(token) + presence
    rules = LogitRules(frequency_penalty=frequency, presence_penalty=presence)
    torch.testing.assert_close(ruled(logits, rules, prompt, outputs), expected, rtol=1e-5, atol=1e-5)


def test_the_order_is_exclusions_then_bias_then_penalties():
    logits = torch.tensor([[1.0, 1.0, -3.0, 1.0]])
    rules = LogitRules([0, 1, 2], [[1]], [(0, 3.0), (1, 9.0), (2, 2.0)], 2.0, 0.5, 0.25)
    got = ruled(logits, rules, prompt=[2], outputs=[0, 0])
    assert got.tolist() == [[4 / 2 - 2 * 0.5 - 0.25, -math.inf, -1 * 2, -math.inf]]


@settings(deadline=None)
@given(seeds, st.floats(0.01, 1), st.floats(0.2, 2))
def test_min_p_leaves_the_tokens_that_transformers_leaves(seed, least, temperature):
    logits = logits_of(seed)
    scaled = MinPLogitsWarper(least)(torch.zeros(1, 1, dtype=torch.int64), logits / temperature)
    left = {token for token in range(VOCAB) if scaled[0, token] > -math.inf}
    params = SamplingParams(1, temperature, min_p=least, seed=seed)
    drawn = sample(logits.expand(300, -1).clone(), [Draw(params, index) for index in range(300)])
    assert {token.token_id for token in drawn} <= left
    often = torch.softmax(scaled, -1)[0] > 0.05
    assert {token.token_id for token in drawn} >= {token for token in range(VOCAB) if often[token]}


def test_top_p_is_of_what_min_p_leaves():
    logits = torch.tensor([[0.5, 0.3, 0.2]]).log()
    params = SamplingParams(1, 1.0, top_p=0.6, min_p=0.5)  # 0.5 is more than 0.6 of the 0.8 that are left
    drawn = sample(logits.expand(50, -1).clone(), [Draw(params, index) for index in range(50)])
    assert {token.token_id for token in drawn} == {0}


# --- in a batch ---------------------------------------------------------------------------------------------------

RULES = st.builds(
    LogitRules,
    allowed_token_ids=st.sampled_from([[], list(range(0, VOCAB, 2))]),
    bad_words=st.lists(tokens.filter(bool).map(lambda word: word[:2]), max_size=3),
    logit_bias=st.dictionaries(st.integers(0, VOCAB + 5), st.floats(-9, 9), max_size=3).map(
        lambda biases: list(biases.items())
    ),
    repetition_penalty=st.sampled_from([1.0, 1.3]),
    frequency_penalty=st.sampled_from([0.0, 0.7]),
    presence_penalty=st.sampled_from([0.0, -0.4]),
)
HOW = st.sampled_from([{}, {"temperature": 0.9}, {"temperature": 1.5, "min_p": 0.2, "top_k": 9}])


@settings(deadline=None)
@given(seeds, st.lists(st.tuples(st.none() | RULES, HOW, tokens, tokens), min_size=1, max_size=6))
def test_a_row_is_sampled_the_same_in_any_batch(seed, rows):
    logits = logits_of(seed, len(rows))

    def draw(rules, how, prompt, outputs):
        params = SamplingParams(99, seed=7, logprobs=2, rules=rules, **how)
        if (state := rule_state(params, (), prompt)) is not None:
            state.follow(outputs)
        return Draw(params, len(outputs), (3,), state)

    alone = [sample(logits[[n]].clone(), [draw(*row)])[0] for n, row in enumerate(rows)]
    assert sample(logits.clone(), [draw(*row) for row in rows]) == alone


def test_log_probabilities_are_those_before_the_rules():
    logits = torch.tensor([[0.2, 0.5, 0.3]]).log()
    params = SamplingParams(1, logprobs=2, rules=LogitRules(logit_bias=[(0, 50.0)], bad_words=[[1]]))
    [made] = sample(logits, [Draw(params, 0, (), rule_state(params, (), ()))])
    assert made.token_id == 0
    assert made.logprob == pytest.approx(math.log(0.2), abs=1e-5)
    assert [token for token, _ in made.top_logprobs] == [1, 2]
    assert [value for _, value in made.top_logprobs] == pytest.approx(
        [math.log(0.5), math.log(0.3)], abs=1e-5
    )


def test_rows_without_rules_pay_nothing_for_them(monkeypatch):
    monkeypatch.setattr(sampler, "apply_rules", lambda *_: pytest.fail("rules were applied"))
    params = SamplingParams(1, temperature=1.0, top_k=3, logprobs=2)
    assert rule_state(params, (1,), (2,)) is None
    assert sample(logits_of(0), [Draw(params, 0)])


def test_tokens_beyond_the_vocabulary_change_nothing():
    far = [VOCAB, VOCAB + 7, 2**40]
    rules = LogitRules([1, *far], [[far[0]], [2, far[1]]], [(token, 5.0) for token in far], 1.5, 1.0, 1.0)
    state = RuleState(rules, 3, far, [2, *far])
    state.follow([2, far[0]])
    logits = logits_of(0)
    apply_rules(logits, [(0, state)])
    assert [token for token in range(VOCAB) if logits[0, token] > -math.inf] == [1]


@settings(deadline=None)
@given(
    seeds,
    st.lists(
        st.tuples(tokens, tokens, st.floats(0.1, 5), st.sampled_from([0.0, 0.7])), min_size=1, max_size=5
    ),
)
def test_a_token_of_prompt_and_output_is_penalized_once_and_exactly(seed, rows):
    logits = logits_of(seed, len(rows))
    expected, states = logits.clone(), []
    for row, (prompt, outputs, penalty, frequency) in enumerate(rows):
        known = sorted({*prompt, *outputs})
        less = torch.tensor([frequency * outputs.count(token) for token in known], dtype=torch.float32)
        values, factor = expected[row, known], torch.tensor([penalty], dtype=torch.float32)
        expected[row, known] = torch.where(values > 0, values / factor, values * factor) - less
        state = RuleState(LogitRules(repetition_penalty=penalty, frequency_penalty=frequency), 0, (), prompt)
        state.follow(outputs)
        states.append((row, state))
    again = logits.clone()
    apply_rules(logits, states)
    for _, state in states[::2]:
        state.leave_device()
    apply_rules(again, states)
    assert torch.equal(logits, expected)
    assert torch.equal(again, expected)


def test_the_tokens_of_a_prompt_go_to_the_device_once(monkeypatch):
    sizes, from_numpy = [], torch.from_numpy
    monkeypatch.setattr(torch, "from_numpy", lambda array: sizes.append(array.size) or from_numpy(array))
    rules = LogitRules(repetition_penalty=1.3, frequency_penalty=0.5)
    states = [(row, RuleState(rules, 0, (), range(VOCAB - row))) for row in range(3)]
    for step in range(4):
        for row, state in states:
            state.follow([row] * (step + 1))
        apply_rules(logits_of(step, 3), states)
        assert (max(sizes) >= VOCAB) == (step == 0)
        sizes.clear()


def test_a_rule_that_leaves_nothing_yields_no_token():
    params = SamplingParams(1, rules=LogitRules([2], [[2]]))
    assert sample(logits_of(0), [Draw(params, 0, (), rule_state(params, (), ()))]) == [None]


@settings(deadline=None)
@given(tokens, st.lists(st.integers(1, 4), max_size=6), st.integers(0, 12))
def test_following_in_pieces_is_following_at_once(outputs, pieces, first):
    rules = LogitRules(bad_words=[[5], [1, 2], [3, 1, 2]], repetition_penalty=1.2)
    at_once, in_pieces = RuleState(rules, 0, (), [1, 9]), RuleState(rules, 0, (), [1, 9])
    at_once.follow(outputs)
    first = min(first, len(outputs))
    in_pieces.follow(outputs[:first])
    for end in np.cumsum([first, *pieces]):
        in_pieces.follow(outputs[first : max(first, end)], first)
    in_pieces.follow(outputs[first:], first)
    assert in_pieces.num_outputs == at_once.num_outputs == len(outputs)
    assert sorted(in_pieces.excluded()) == sorted(at_once.excluded())
    counts = [
        dict(zip(s.counts.ids.tolist(), s.counts.counts.tolist(), strict=True)) for s in (at_once, in_pieces)
    ]
    assert counts[0] == counts[1] == {token: outputs.count(token) for token in outputs}


# --- in the engine ------------------------------------------------------------------------------------------------

NEW_TOKENS = 24


@functools.cache
def of(make):
    return make(), TextModel(make())


class Penalties(LogitsProcessor):
    """As OpenAI documents them."""

    def __init__(self, prompt_length, frequency, presence):
        self.prompt_length, self.frequency, self.presence = prompt_length, frequency, presence

    def __call__(self, input_ids, scores):
        outputs = input_ids[0, self.prompt_length :].tolist()
        for token in set(outputs):
            scores[0, token] -= self.frequency * outputs.count(token) + self.presence
        return scores


@torch.inference_mode()
def generated(full, prompt, processors=(), **settings):
    """What `generate` answers with these settings and, after their processors, these."""
    ids = torch.tensor([prompt], device=full.device)
    out = full.generate(
        input_ids=ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=NEW_TOKENS,
        do_sample=False,
        logits_processor=LogitsProcessorList(processors),
        **settings,
    )
    return out[0, len(prompt) :].tolist()


def answer_of(engine, model, prompt, outputs=(), max_tokens=NEW_TOKENS, **sampling):
    """The engine's answer, and why it ended."""
    params = SamplingParams(max_tokens, **sampling)
    outputs = list(outputs)
    engine.add(SequenceInput("a", model.lower([*prompt, *outputs]), params, output_token_ids=outputs))
    made = [token for step in run(engine).steps for token in step.tokens]
    assert [token.index for token in made] == list(range(len(outputs), len(outputs) + len(made)))
    return [token.token_id for token in made], made[-1].finish_reason


@pytest.mark.parametrize("make", [llama, qwen2])
def test_greedy_answers_under_each_rule_equal_those_of_generate(make, subtests):
    full, model = of(make)
    prompt = prompt_of(30, 5)
    plain = generated(full, prompt)
    bad = [[plain[0]], [plain[3], plain[4]], plain[6:9]]
    assert not {word[0] for word in bad[1:]} & {prompt[-1]}, (
        "transformers sees words that begin in the prompt"
    )
    half = list(range(0, 200, 2))
    biases = {plain[1]: -20.0, 7: 6.5}
    cases = {
        "repetition": ({"repetition_penalty": 1.7}, LogitRules(repetition_penalty=1.7)),
        "below one": ({"repetition_penalty": 0.6}, LogitRules(repetition_penalty=0.6)),
        "bad words": ({"bad_words_ids": bad}, LogitRules(bad_words=bad)),
        "allowed": (
            {"prefix_allowed_tokens_fn": lambda *_: half},
            LogitRules(allowed_token_ids=half),
        ),
        "bias": (
            {"sequence_bias": [[[token], value] for token, value in biases.items()]},
            LogitRules(logit_bias=list(biases.items())),
        ),
        "frequency": (
            {"processors": [Penalties(len(prompt), 1.5, 0.0)]},
            LogitRules(frequency_penalty=1.5),
        ),
        "presence": ({"processors": [Penalties(len(prompt), 0.0, 2.0)]}, LogitRules(presence_penalty=2.0)),
        "all": (
            {
                "processors": [Penalties(len(prompt), 0.8, 0.5)],
                "sequence_bias": [[[token], value] for token, value in biases.items()],
                "repetition_penalty": 1.2,
                "bad_words_ids": bad,
            },
            LogitRules([], bad, list(biases.items()), 1.2, 0.8, 0.5),
        ),
    }
    for name, (settings_, rules) in cases.items():
        with subtests.test(name):
            expected = generated(full, prompt, **settings_)
            assert expected != plain
            assert answer_of(make_engine(model), model, prompt, rules=rules)[0] == expected


def test_min_tokens_hold_back_what_ends_an_answer_as_in_generate():
    full, model = of(llama)
    prompt = prompt_of(30, 5)
    plain = generated(full, prompt)
    eos = plain[2]
    engine = make_engine(model)
    ends = {"eos_token_ids": frozenset({eos})}
    assert answer_of(engine, model, prompt, **ends) == (plain[:3], "stop")
    expected = generated(full, prompt, min_new_tokens=8, eos_token_id=eos)
    got, reason = answer_of(engine, model, prompt, min_tokens=8, **ends)
    assert len(got) >= 8
    assert eos not in got[:8]
    assert got == expected
    assert reason == ("stop" if got[-1] == eos else "length")
    assert answer_of(engine, model, prompt, ignore_eos=True, min_tokens=8, **ends) == (plain, "length")


def test_stop_token_ids_end_an_answer_also_where_eos_is_ignored():
    full, model = of(llama)
    prompt = prompt_of(30, 5)
    plain = generated(full, prompt)
    stop = {"stop_token_ids": frozenset({plain[4], 199}), "ignore_eos": True}
    engine = make_engine(model)
    first = plain.index(plain[4])
    assert answer_of(engine, model, prompt, **stop) == (plain[: first + 1], "stop")
    got, _ = answer_of(engine, model, prompt, min_tokens=first + 2, **stop)
    assert got == generated(full, prompt, min_new_tokens=first + 2, eos_token_id=[plain[4], 199])
    assert not {plain[4], 199} & set(got[: first + 2])


ALL = {
    "rules": LogitRules([], [[11], [12, 13]], [(3, 2.0), (5, -4.0)], 1.3, 0.6, 0.3),
    "min_tokens": 9,
    "stop_token_ids": frozenset({21, 33, 60, 101, 150}),
    "eos_token_ids": frozenset({44, 45, 46}),
}
HOWS = {"greedy": {}, "seeded": {"temperature": 1.3, "seed": 11, "min_p": 0.02, "top_p": 0.95}}


@functools.cache
def uninterrupted(how):
    _, model = of(llama)
    prompts = [prompt_of(length, seed) for seed, length in enumerate((5, 33, 17, 64, 40))]
    answers = [answer_of(make_engine(model), model, p, **ALL, **HOWS[how])[0] for p in prompts]
    plain = [answer_of(make_engine(model), model, p, **HOWS[how])[0] for p in prompts]
    assert all(answer != other for answer, other in zip(answers, plain, strict=True)), (
        "the rules change nothing"
    )
    return model, prompts, answers


@pytest.mark.parametrize("how", HOWS)
def test_an_answer_continues_elsewhere_after_any_token(how):
    model, prompts, answers = uninterrupted(how)
    engine = make_engine(model)
    for known in range(1, len(answers[1])):
        rest, _ = answer_of(engine, model, prompts[1], answers[1][:known], **ALL, **HOWS[how])
        assert rest == answers[1][known:], f"after {known} tokens"


@pytest.mark.parametrize("how", HOWS)
@pytest.mark.parametrize("chunk_tokens", [1, 7, 512])
def test_batch_mates_chunks_and_preemptions_change_nothing(how, chunk_tokens):
    model, prompts, answers = uninterrupted(how)
    engine = make_engine(model, blocks=23, block_tokens=4, chunk_tokens=chunk_tokens, prefix_cache=False)
    params = SamplingParams(NEW_TOKENS, **ALL, **HOWS[how])
    for number, prompt in enumerate([*prompts[::-1], *prompts]):
        engine.add(SequenceInput(str(number), model.lower(prompt), params))
        engine.add(SequenceInput(f"plain {number}", model.lower(prompt[:3]), SamplingParams(6)))
    outcome = run(engine)
    assert [outcome.tokens[str(n)] for n in range(2 * len(prompts))] == [*answers[::-1], *answers]
    assert engine.stats().preemptions > 0


def test_a_preempted_sequence_leaves_nothing_on_the_device(monkeypatch):
    _, model = of(llama)
    engine = make_engine(model, blocks=23, block_tokens=4, prefix_cache=False)
    preempt, kept = engine.scheduler._preempt, []

    def noting(sequence):
        before = sequence.rules.prompt._on_device
        preempt(sequence)
        kept.append((before is not None, sequence.rules.prompt._on_device))

    monkeypatch.setattr(engine.scheduler, "_preempt", noting)
    for number in range(5):
        engine.add(
            SequenceInput(str(number), model.lower(prompt_of(20, number)), SamplingParams(NEW_TOKENS, **ALL))
        )
    run(engine)
    assert any(before for before, _ in kept)
    assert all(after is None for _, after in kept)


@pytest.mark.parametrize("how", HOWS)
def test_a_sequence_handed_over_and_then_preempted_has_the_same_tokens(how):
    model, prompts, answers = uninterrupted(how)
    prefill, got = make_engine(model), {number: list[int]() for number in range(len(prompts))}
    decoders = [make_engine(model, blocks=24, block_tokens=4) for _ in range(2)]
    params = SamplingParams(NEW_TOKENS, **ALL, **HOWS[how])
    waiting, ended, yields = set(got), set(), 0

    def place(number, decoder):
        outputs, name = got[number], str(number)
        known = prompts[number] + outputs
        try:
            decoder.reserve(name, len(known), NEW_TOKENS - len(outputs))
        except OverloadedError:
            return False
        item = SequenceInput(
            name, model.lower(known), params, output_token_ids=list(outputs), stop_after_prefill=True
        )
        prefill.add(item)
        [first] = [token for step in run(prefill).steps for token in step.tokens]
        outputs.append(first.token_id)
        decoder.write_kv(name, 0, prefill.read_kv(name, 0, len(known)))
        prefill.abort(name)
        if first.finish_reason is not None:
            decoder.abort(name)
            ended.add(number)
        else:
            position = item.prompt.next_position
            decoder.attach(name, prompts[number], params, list(outputs), position, [], float(number))
        return True

    for _ in range(500):
        for number in sorted(waiting):
            if not any(place(number, decoder) for decoder in decoders):
                break
            waiting.discard(number)
        for decoder in decoders:
            output = decoder.step()
            for token in output.tokens:
                assert token.index == len(got[int(token.sequence_id)])
                got[int(token.sequence_id)].append(token.token_id)
                if token.finish_reason is not None:
                    ended.add(int(token.sequence_id))
            for name, error in output.failed:
                assert isinstance(error, PreemptedError)
                waiting.add(int(name))
                yields += 1
        if len(ended) == len(prompts):
            break
    assert [got[number] for number in range(len(prompts))] == answers
    assert yields > 0, "the pools were never full"
