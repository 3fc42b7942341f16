"""The feature store: bytes are reserved before work starts, shared by whoever asks, and never exceed the budget."""

from __future__ import annotations

import asyncio
import itertools
from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mmd_api.contract.errors import BadMediaError, CapacityError
from mmd_workers.features.store import FeatureState, FeatureStore
from mmd_workers.model.prompt import Feature
from support.harness.waiting import DEADLINE_SECONDS


def feature(num_bytes: int) -> Feature:
    return Feature("image", {"embeddings": torch.zeros(num_bytes // 4, 1)})


def store(budget: int) -> tuple[FeatureStore, Counter[tuple[FeatureState | None, FeatureState]]]:
    seen: Counter[tuple[FeatureState | None, FeatureState]] = Counter()
    return FeatureStore(budget, lambda before, after: seen.update([(before, after)])), seen


async def test_a_feature_two_requests_need_is_made_once_and_given_to_both() -> None:
    features, _ = store(1000)
    assert await features.admit("first", {"f": 400}) == ["f"]
    assert await features.admit("second", {"f": 400}) == []
    features.deliver("f", feature(400))
    assert (await features.arrival("f")).num_bytes == 400
    assert features.used_bytes == 400


async def test_a_request_waits_until_earlier_ones_free_their_bytes() -> None:
    features, _ = store(1000)
    await features.admit("first", {"a": 800})
    waiting = asyncio.create_task(features.admit("second", {"b": 800}))
    await asyncio.sleep(0)
    assert not waiting.done()
    features.deliver("a", feature(800))
    features.release("first")
    assert await asyncio.wait_for(waiting, DEADLINE_SECONDS) == ["b"]
    assert features.used_bytes == 800


async def test_requests_are_admitted_in_order_even_when_a_later_one_would_fit() -> None:
    features, _ = store(1000)
    await features.admit("first", {"a": 600})
    large = asyncio.create_task(features.admit("large", {"b": 800}))
    await asyncio.sleep(0)
    small = asyncio.create_task(features.admit("small", {"c": 100}))
    await asyncio.sleep(0)
    assert not small.done()
    features.release("first")
    assert await asyncio.wait_for(large, DEADLINE_SECONDS) == ["b"]
    assert await asyncio.wait_for(small, DEADLINE_SECONDS) == ["c"]


async def test_a_cancelled_wait_lets_the_next_in_line_go_on() -> None:
    features, _ = store(1000)
    await features.admit("first", {"a": 600})
    large = asyncio.create_task(features.admit("large", {"b": 800}))
    small = asyncio.create_task(features.admit("small", {"c": 100}))
    await asyncio.sleep(0)
    large.cancel()
    assert await asyncio.wait_for(small, DEADLINE_SECONDS) == ["c"]


async def test_what_can_never_fit_is_refused_with_the_field_to_raise() -> None:
    features, _ = store(1000)
    with pytest.raises(CapacityError, match="featureBudgetMebibytes"):
        await features.admit("r", {"a": 600, "b": 600})


async def test_a_failure_reaches_everybody_who_waits_and_frees_the_room() -> None:
    features, _ = store(1000)
    await features.admit("first", {"a": 600})
    await features.admit("second", {"a": 600})
    arrival = features.arrival("a")
    features.fail("a", BadMediaError("not an image"))
    with pytest.raises(BadMediaError):
        await arrival
    assert features.used_bytes == 0
    assert await features.admit("third", {"a": 600}) == ["a"]


async def test_an_offer_is_wanted_only_while_a_request_waits_for_it() -> None:
    features, _ = store(1000)
    await features.admit("r", {"a": 600})
    assert features.verdict("a", 600) == "send"
    assert features.verdict("a", 601) == "refuse"
    assert features.verdict("unknown", DEADLINE_SECONDS) == "refuse"
    features.deliver("a", feature(600))
    assert features.verdict("a", 600) == "have"


async def test_a_request_that_leaves_before_its_feature_came_ends_the_wait() -> None:
    features, seen = store(1000)
    await features.admit("r", {"a": 600})
    features.encoding("a")
    features.release("r")
    assert features.verdict("a", 600) == "refuse"
    assert features.used_bytes == 0
    assert seen[(FeatureState.ENCODING, FeatureState.DISCARDED)] == 1


async def test_finished_features_stay_as_cache_until_their_bytes_are_needed() -> None:
    features, _ = store(1000)
    for name in ("a", "b"):
        await features.admit(f"r{name}", {name: 400})
        features.deliver(name, feature(400))
        features.release(f"r{name}")
    assert features.newest(9) == ["b", "a"]
    assert await features.admit("again", {"a": 400}) == []  # touched: b is now the older one
    features.release("again")
    await features.admit("new", {"c": 400})
    assert features.newest(9) == ["a"]


async def test_every_step_of_a_life_is_counted() -> None:
    features, seen = store(1000)
    await features.admit("r", {"a": 400})
    features.encoding("a")
    features.deliver("a", feature(400))
    features.merged("a")
    features.release("r")
    states = [None, *FeatureState][:6]
    assert seen == Counter(itertools.pairwise(states))


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.sampled_from(["admit", "deliver", "fail", "release"]), st.integers(0, 5), st.integers(0, 5)
        ),
        max_size=60,
    )
)
def test_bytes_in_use_never_exceed_the_budget(events: list[tuple[str, int, int]]) -> None:
    async def play() -> None:
        features, _ = store(1000)
        tasks = []
        for kind, request, number in events:
            name, size = f"f{number}", 4 * (40 + 20 * number)
            if kind == "admit":
                needs = {name: size, f"f{(number + 1) % 6}": 4 * (40 + 20 * ((number + 1) % 6))}
                tasks.append(asyncio.create_task(features.admit(f"r{request}", needs)))
            elif kind == "deliver" and features.verdict(name, size) == "send":
                features.deliver(name, feature(size))
            elif kind == "fail":
                features.fail(name, BadMediaError("no"))
            elif kind == "release":
                features.release(f"r{request}")
            await asyncio.sleep(0)
            assert 0 <= features.used_bytes <= 1000
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for request in range(6):
            features.release(f"r{request}")
        assert await asyncio.wait_for(features.admit("all", {"whole": 1000}), DEADLINE_SECONDS) == ["whole"]

    asyncio.run(play())


async def test_needed_bytes_cover_running_and_waiting_requests_but_no_cache() -> None:
    features, _ = store(1000)
    await features.admit("first", {"a": 400, "b": 300})
    assert features.needed_bytes == 700
    waiting = asyncio.create_task(features.admit("second", {"a": 400, "c": 500}))
    await asyncio.sleep(0)
    assert features.needed_bytes == 1200
    features.deliver("a", feature(400))
    features.deliver("b", feature(300))
    features.release("first")
    await asyncio.wait_for(waiting, DEADLINE_SECONDS)
    assert (features.needed_bytes, features.used_bytes) == (900, 900)
    features.release("second")
    assert features.needed_bytes == 0, "what is left is cache"
