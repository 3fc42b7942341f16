"""Sampling: what each parameter does, and that a draw depends on (seed, index, logits) alone."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mmd_workers.engine.choosing.sampler import Draw, sample, uniform
from mmd_workers.engine.interface import SamplingParams


def draw(index=0, **parameters):
    return Draw(SamplingParams(max_tokens=1, **parameters), index)


def logits_of(*probabilities):
    return torch.tensor([probabilities]).log()


def shares(logits, count=4000, **parameters):
    """How often each token comes, over `count` output indices."""
    rows = logits.expand(count, -1)
    tokens = [s.token_id for s in sample(rows, [draw(i, **parameters) for i in range(count)])]
    return [tokens.count(token) / count for token in range(logits.shape[-1])]


def test_temperature_zero_is_greedy():
    assert sample(logits_of(0.2, 0.5, 0.3), [draw()])[0].token_id == 1


def test_temperature_one_draws_by_probability():
    assert shares(logits_of(0.2, 0.5, 0.3), temperature=1.0, seed=3) == pytest.approx(
        [0.2, 0.5, 0.3], abs=0.03
    )


def test_a_low_temperature_sharpens():
    weights = [p**2 for p in (0.2, 0.5, 0.3)]
    expected = [w / sum(weights) for w in weights]
    assert shares(logits_of(0.2, 0.5, 0.3), temperature=0.5) == pytest.approx(expected, abs=0.03)


def test_top_k_keeps_the_k_most_likely():
    got = shares(logits_of(0.1, 0.4, 0.3, 0.2), temperature=1.0, top_k=2)
    assert got == pytest.approx([0, 4 / 7, 3 / 7, 0], abs=0.03)


def test_top_p_keeps_the_smallest_set_that_reaches_p():
    got = shares(logits_of(0.1, 0.4, 0.3, 0.2), temperature=1.0, top_p=0.6)
    assert got == pytest.approx([0, 4 / 7, 3 / 7, 0], abs=0.03)
    assert shares(logits_of(0.1, 0.4, 0.3, 0.2), 50, temperature=1.0, top_p=0.0)[1] == 1


def test_only_what_cuts_the_distribution_sorts_the_vocabulary(monkeypatch):
    sort, sorted_rows = torch.sort, []
    monkeypatch.setattr(torch, "sort", lambda x, **more: sorted_rows.append(len(x)) or sort(x, **more))
    logits = torch.randn(4, 30)
    sample(logits.clone(), [draw(), draw(temperature=1.0), draw(temperature=2.0), draw(logprobs=3)])
    assert sorted_rows == []
    sample(logits.clone(), [draw(), draw(temperature=1.0), draw(temperature=2.0, top_p=0.5), draw()])
    assert sorted_rows == [1]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_rows_that_suppress_different_tokens(temperature):
    logits = logits_of(0.1, 0.6, 0.3).repeat(3, 1)
    draws = [
        Draw(SamplingParams(1, temperature=temperature, suppress_token_ids=tokens, seed=1), 0, own)
        for tokens, own in (((1,), (2, 999)), ((), (0, 1)), ((0, 2), ()))
    ]
    assert [s.token_id for s in sample(logits, draws)] == [0, 2, 1]


def test_suppressed_tokens_never_come_nor_count():
    logits = logits_of(0.1, 0.6, 0.3)
    item = Draw(SamplingParams(max_tokens=1, suppress_token_ids=(1,), logprobs=2), 0, suppress=(999,))
    [result] = sample(logits, [item])
    assert result.token_id == 2
    assert result.logprob == pytest.approx(math.log(0.75), abs=1e-5)
    assert [token for token, _ in result.top_logprobs] == [2, 0]


def test_logprobs_are_of_the_model_not_of_the_temperature():
    [result] = sample(logits_of(0.2, 0.5, 0.3), [draw(temperature=0.01, logprobs=1)])
    assert result.top_logprobs == ((1, pytest.approx(math.log(0.5), abs=1e-5)),)
    [none] = sample(logits_of(0.2, 0.5, 0.3), [draw(logprobs=0)])
    assert none.logprob == pytest.approx(math.log(0.5), abs=1e-5)
    assert none.top_logprobs == ()


BROKEN_ROWS = {
    "nan": [math.nan] * 3,
    "one nan": [math.nan, 1.0, 2.0],
    "minus infinity": [-math.inf] * 3,
    "plus infinity": [math.inf, 1.0, 2.0],
    "all suppressed": [0.0, 1.0, 2.0],
}


@pytest.mark.parametrize("how", [{}, {"temperature": 1.0}, {"temperature": 0.7, "top_p": 0.5, "top_k": 2}])
@pytest.mark.parametrize("logprobs", [None, 2])
@pytest.mark.parametrize("broken", BROKEN_ROWS)
def test_a_row_without_a_finite_logit_yields_no_token(broken, logprobs, how):
    good = [0.0, 3.0, 1.0]
    item = draw(seed=5, logprobs=logprobs, **how)
    suppress = (0, 1, 2) if broken == "all suppressed" else ()
    bad = Draw(SamplingParams(max_tokens=1, logprobs=logprobs, **how), 0, suppress)
    [alone] = sample(torch.tensor([good]), [item])
    before, none, after = sample(torch.tensor([good, BROKEN_ROWS[broken], good]), [item, bad, item])
    assert none is None
    assert before == after == alone


CUTS = st.sampled_from([{}, {"top_k": 20, "top_p": 0.9}, {"top_k": 3}, {"top_p": 0.5}])


@given(st.integers(-(2**63), 2**64), st.integers(0, 10**6), st.integers(1, 9), CUTS)
def test_a_draw_is_the_same_in_any_batch(seed, index, size, cut):
    generator = torch.Generator().manual_seed(abs(seed) % 2**31)
    logits = torch.randn(size, 40, generator=generator) * 3
    item = draw(index, temperature=0.8, seed=seed, **cut)
    others = [draw(i, temperature=0.5 * (i % 3), top_k=5 * (i % 2), seed=i) for i in range(1, size)]
    alone = sample(logits[:1].clone(), [item])[0].token_id
    assert sample(logits, [item, *others])[0].token_id == alone
    assert 0 <= uniform(seed, index) < 1


def test_seeds_and_indices_give_independent_draws():
    values = {uniform(seed, index) for seed in range(30) for index in range(30)}
    assert len(values) == 900
