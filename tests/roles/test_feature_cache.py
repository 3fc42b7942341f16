"""The cache of encoded features as a timeline: what was used often and recently stays."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mmd_workers.features.cache import HALF_LIFE_SECONDS, FeatureCache
from mmd_workers.features.held import HeldFeatures, feature_identity
from mmd_workers.model.prompt import Feature

ROW_BYTES = 4


def feature(num_bytes: int = ROW_BYTES) -> Feature:
    return Feature("image", {"embeddings": torch.zeros(num_bytes // ROW_BYTES, 1)})


class Timed:
    """A cache of so many features of one row, and its clock."""

    def __init__(self, most: int) -> None:
        self.now = 1000.0
        self.held = HeldFeatures()
        self.cache = FeatureCache(most * ROW_BYTES, self.held, clock=lambda: self.now)

    def kept(self, names: str) -> str:
        return "".join(name for name in names if name in self.cache)


def test_of_features_used_once_the_oldest_goes_first() -> None:
    timed = Timed(2)
    for name in "abc":
        timed.cache.put(name, feature())
        timed.now += 1
    assert timed.kept("abc") == "bc"


def test_a_feature_that_is_used_often_outlives_many_that_are_used_once() -> None:
    timed = Timed(3)
    timed.cache.put("often", feature())
    for _ in range(4):
        timed.cache.get("often")
    for n in range(100):
        timed.now += 1
        timed.cache.put(f"once-{n}", feature())
    assert "often" in timed.cache


def test_a_feature_that_was_used_often_long_ago_goes() -> None:
    timed = Timed(1)
    timed.cache.put("often", feature())
    for _ in range(3):
        timed.cache.get("often")
    timed.now += 2 * HALF_LIFE_SECONDS
    assert not timed.cache.put_handed_over("young", feature(), -1), "four uses fade to one"
    timed.now += 2
    assert timed.cache.put_handed_over("young", feature(), 0)
    assert "often" not in timed.cache


def test_a_handed_over_feature_never_evicts_a_hotter_one() -> None:
    """One that does not fit evicts nothing."""
    timed = Timed(3)
    for name in "abc":
        timed.cache.put(name, feature())
        timed.now += 1
    assert not timed.cache.put_handed_over("large", feature(2 * ROW_BYTES), -2.5), "b is hotter"
    assert timed.kept("abc") == "abc"
    assert timed.cache.put_handed_over("large", feature(2 * ROW_BYTES), -1.5)
    assert timed.kept("abc") == "c"
    assert not timed.cache.put_handed_over("larger", feature(4 * ROW_BYTES), 1000)


def test_the_hottest_features_are_named_first_within_their_bytes() -> None:
    timed = Timed(4)
    for name in "abcd":
        timed.cache.put(name, feature())
        timed.now += 1
    timed.cache.get("a")
    hottest = timed.cache.hottest(10, 3 * ROW_BYTES)
    assert "".join(hot.feature_id for hot in hottest) == "adc"
    assert [hot.heat_seconds > 0 for hot in hottest] == [True, False, False]
    assert [hot.feature_id for hot in timed.cache.hottest(1, 100)] == ["a"]


@pytest.mark.parametrize("most_bytes", [0, 40, 100])
@given(
    steps=st.lists(
        st.tuples(
            st.sampled_from(["put", "get", "hand over"]),
            st.sampled_from("abcdefgh"),
            st.integers(0, 12),
            st.floats(-900, 900),
        ),
        max_size=60,
    )
)
def test_bytes_and_reports_match_what_is_kept(
    most_bytes: int, steps: list[tuple[str, str, int, float]]
) -> None:
    now, held = 0.0, HeldFeatures()
    cache = FeatureCache(most_bytes, held, clock=lambda: now)
    for what, name, rows, seconds in steps:
        now += abs(seconds)
        if what == "put":
            cache.put(name, feature(rows * ROW_BYTES))
        elif what == "get":
            cache.get(name)
        else:
            least = seconds + 1e-6  # what is this much hotter is so whichever way times round
            hotter = {hot.feature_id for hot in cache.hottest(99, 1000) if hot.heat_seconds >= least}
            cache.put_handed_over(name, feature(rows * ROW_BYTES), seconds)
            assert all(one in cache for one in hotter)
        kept = cache.hottest(99, 1000)
        assert cache.used_bytes == sum(hot.feature.num_bytes for hot in kept) <= most_bytes
        assert len(cache._coldest) == len(kept) == len(cache)
        assert all((feature_identity(name) in held.changes) == (name in cache) for name in "abcdefgh")
