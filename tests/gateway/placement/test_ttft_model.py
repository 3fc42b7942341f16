"""The estimate of the time to the first token follows what requests took, and nothing makes it absurd."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mmd_workers.gateway.placement.link_speeds import RATE_BOUNDS, Links
from mmd_workers.gateway.placement.ttft_model import FACTOR_BOUNDS, OVERHEAD_BOUNDS_SECONDS, Terms, TtftModel

ESTIMATES = [
    ("nothing", Terms(), 0.0),
    ("a queue, then the prompt", Terms(queue=2.0, prefill=0.5), 2.5),
    ("media while others wait", Terms(queue=2.0, encode=1.0, transfer=0.5, prefill=0.5), 2.5),
    ("media longer than the queue", Terms(queue=1.0, encode=1.5, transfer=0.5, prefill=0.5), 2.5),
]


@pytest.mark.parametrize(
    ("terms", "seconds"), [row[1:] for row in ESTIMATES], ids=[row[0] for row in ESTIMATES]
)
def test_before_the_first_outcome_an_estimate_is_that_of_the_figures(terms: Terms, seconds: float) -> None:
    assert TtftModel().estimate(terms) == pytest.approx(seconds)


def drawn(rng: random.Random) -> Terms:
    return Terms(
        rng.expovariate(2), rng.choice([0.0, rng.expovariate(2)]), rng.random() * 0.05, rng.expovariate(5)
    )


def took(terms: Terms) -> float:
    """Queues are half as long as reported, encoding takes twice as long, prompts half as long again, and 30 ms go elsewhere."""
    media = 2.0 * terms.encode + terms.transfer
    return max(0.5 * terms.queue, media) + 1.5 * terms.prefill + 0.03


def mean_error(model: TtftModel, rng: random.Random) -> float:
    errors = [
        abs(model.estimate(terms) - took(terms)) / took(terms) for terms in (drawn(rng) for _ in range(500))
    ]
    return sum(errors) / len(errors)


def test_factors_go_where_the_outcomes_are() -> None:
    model, rng = TtftModel(), random.Random(1)
    before = mean_error(model, random.Random(2))
    for _ in range(5000):
        terms = drawn(rng)
        model.learn(terms, took(terms) * rng.uniform(0.9, 1.1))
    assert mean_error(model, random.Random(2)) < before / 4
    assert model.factors.queue == pytest.approx(0.5, abs=0.1)
    assert model.factors.encode == pytest.approx(2.0, abs=0.2)
    assert model.factors.prefill == pytest.approx(1.5, abs=0.2)
    assert model.factors.overhead == pytest.approx(0.03, abs=0.02)


def test_a_term_that_did_not_count_is_not_changed() -> None:
    model = TtftModel()
    model.learn(Terms(queue=1.0, encode=0.1, transfer=0.1, prefill=0.5), 3.0)
    assert (model.factors.encode, model.factors.transfer) == (1.0, 1.0)
    assert model.factors.queue > 1
    model.learn(Terms(queue=0.1, encode=1.0, transfer=0.5, prefill=0.5), 0.5)
    assert model.factors.encode < 1


@pytest.mark.parametrize("seconds", [0.0, 1e6])
def test_one_outlier_moves_an_estimate_by_a_tenth_at_most(seconds: float) -> None:
    model, terms = TtftModel(), Terms(queue=1.0, prefill=0.5)
    before = model.estimate(terms)
    model.learn(terms, seconds)
    assert model.estimate(terms) == pytest.approx(before, rel=0.1)


@given(st.lists(st.tuples(*[st.floats(0, 1e6)] * 5), max_size=100))
@settings(max_examples=100, deadline=None)
def test_factors_stay_within_their_bounds_whatever_comes(outcomes: list[tuple[float, ...]]) -> None:
    model = TtftModel()
    for *terms, seconds in outcomes:
        model.learn(Terms(*terms), seconds)
        factors = model.factors
        for factor in (factors.queue, factors.encode, factors.transfer, factors.prefill):
            assert FACTOR_BOUNDS[0] <= factor <= FACTOR_BOUNDS[1]
        assert OVERHEAD_BOUNDS_SECONDS[0] <= factors.overhead <= OVERHEAD_BOUNDS_SECONDS[1]


def links() -> Links:
    return Links(4e9, 1e9, 100.0)


def moved(
    one: Links,
    receiver: str = "d",
    *,
    seconds: float,
    num_bytes: int = 10**7,
    tokens: int = 1000,
    now: float = 0.0,
) -> None:
    """A transfer between two nodes."""
    one.note("p", receiver, same_node=False, tokens=tokens, num_bytes=num_bytes, seconds=seconds, now=now)


def rate(one: Links, receiver: str = "d", now: float = 0.0) -> float:
    return one.rate("p", receiver, same_node=False, now=now)


def test_an_unmeasured_pair_has_the_rate_of_its_kind() -> None:
    one = links()
    assert (one.rate_of_kind(same_node=True), one.rate_of_kind(same_node=False)) == (4e9, 1e9)
    for _ in range(100):
        moved(one, seconds=0.2)
        moved(one, "fast", seconds=0.1)
    assert (rate(one), rate(one, "fast")) == pytest.approx((0.5e8, 1e8))
    assert rate(one) < rate(one, "other") < rate(one, "fast")
    assert rate(one, "other") == one.rate_of_kind(same_node=False)
    assert one.rate("p", "other", same_node=True, now=0.0) == one.rate_of_kind(same_node=True) == 4e9
    assert one.bytes_per_token == 10**4


def test_one_slow_transfer_of_many_does_not_make_a_pair_slow() -> None:
    one = links()
    for _ in range(20):
        moved(one, seconds=0.01)
    before = rate(one)
    moved(one, seconds=0.02)
    assert before > rate(one) > 0.75 * before


@pytest.mark.parametrize("seconds", [1e-9, 1e9])
def test_a_rate_stays_within_bounds(seconds: float) -> None:
    one = links()
    moved(one, seconds=seconds, num_bytes=10**9)
    assert RATE_BOUNDS[0] <= rate(one) <= RATE_BOUNDS[1]


def test_what_is_too_small_to_measure_is_not_measured() -> None:
    one = links()
    moved(one, seconds=1.0, num_bytes=100)
    moved(one, seconds=1.0, num_bytes=0, tokens=0)
    moved(one, seconds=0.0)
    assert rate(one) == one.rate_of_kind(same_node=False) == 1e9


def test_pairs_are_bounded_and_those_that_moved_something_last_stay() -> None:
    one = links()
    for number in range(5000):
        moved(one, f"d-{number}", seconds=100.0 if number in (0, 2500) else 0.01)
    assert rate(one, "d-0") == one.rate_of_kind(same_node=False)
    assert rate(one, "d-2500") < rate(one, "d-0")


def test_a_pairs_measured_rate_fades_with_time_whatever_others_move() -> None:
    one = links()
    moved(one, "slow", seconds=10.0)
    for _ in range(100):
        moved(one, seconds=0.01)
    kind = one.rate_of_kind(same_node=False)
    seconds_a_byte = [1 / rate(one, "slow", now=now) - 1 / kind for now in (0.0, 20.0, 40.0, 600.0)]
    first = seconds_a_byte[0]
    assert first > 0
    assert seconds_a_byte == pytest.approx([first, first / 2, first / 4, 0.0], abs=first / 1000)
