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
from mmd_workers.basics.overtaking import MAX_OVERTAKEN
from mmd_workers.features.store import FeatureState, FeatureStore
from mmd_workers.model.prompt import Feature
from support.harness.waiting import DEADLINE_SECONDS


def feature(num_bytes: int) -> Feature:
    return Feature("image", {"embeddings": torch.zeros(num_bytes // 4, 1)})


def store(budget: int) -> tuple[FeatureStore, Counter[tuple[FeatureState | None, FeatureState]]]:
    seen: Counter[tuple[FeatureState | None, FeatureState]] = Counter()
    return FeatureStore(budget, lambda before, after: seen.update([(before, after)])), seen


async def admit(features: FeatureStore, request: str, needs: dict[str, int]) -> list[str]:
    """Ids of the features that nobody encoded yet."""
    return (await features.admit(request, needs, lambda _: None)).new_ids


async def test_a_feature_two_requests_need_is_made_once_and_given_to_both() -> None:
    features, _ = store(1000)
    assert await admit(features, "first", {"f": 400}) == ["f"]
    assert await admit(features, "second", {"f": 400}) == []
    features.deliver("f", feature(400))
    assert (await features.arrival("f")).num_bytes == 400
    assert features.used_bytes == 400


async def test_a_request_waits_until_earlier_ones_free_their_bytes() -> None:
    features, _ = store(1000)
    await admit(features, "first", {"a": 800})
    waiting = asyncio.create_task(admit(features, "second", {"b": 800}))
    await asyncio.sleep(0)
    assert not waiting.done()
    features.deliver("a", feature(800))
    features.release("first")
    assert await asyncio.wait_for(waiting, DEADLINE_SECONDS) == ["b"]
    assert features.used_bytes == 800


async def test_a_request_that_fits_passes_one_that_does_not() -> None:
    features, _ = store(1000)
    await admit(features, "first", {"a": 600})
    large = asyncio.create_task(admit(features, "large", {"b": 800}))
    await asyncio.sleep(0)
    assert await admit(features, "small", {"c": 100}) == ["c"]
    features.release("first")
    assert await asyncio.wait_for(large, DEADLINE_SECONDS) == ["b"]


async def test_the_oldest_request_is_overtaken_only_so_often() -> None:
    features, _ = store(1000)
    await admit(features, "first", {"a": 600})
    large = asyncio.create_task(admit(features, "large", {"b": 800}))
    await asyncio.sleep(0)
    for number in range(MAX_OVERTAKEN):
        await admit(features, f"small {number}", {f"s{number}": 300})
        features.release(f"small {number}")
    late = asyncio.create_task(admit(features, "late", {"late": 300}))
    await asyncio.sleep(0)
    assert not late.done()
    features.release("first")
    assert await asyncio.wait_for(large, DEADLINE_SECONDS) == ["b"]
    features.release("large")
    assert await asyncio.wait_for(late, DEADLINE_SECONDS) == ["late"]


async def test_a_cancelled_wait_lets_the_next_in_line_go_on() -> None:
    features, _ = store(1000)
    await admit(features, "first", {"a": 600})
    large = asyncio.create_task(admit(features, "large", {"b": 800}))
    small = asyncio.create_task(admit(features, "small", {"c": 500}))
    await asyncio.sleep(0)
    features.release("first")
    large.cancel()
    assert await asyncio.wait_for(small, DEADLINE_SECONDS) == ["c"]
    assert features.used_bytes == 500


async def test_a_feature_is_requested_by_whoever_adds_it_at_once() -> None:
    features, _ = store(1000)
    await admit(features, "first", {"full": 1000})
    asked: list[str] = []
    leaving = asyncio.create_task(features.admit("leaving", {"x": 100, "y": 100}, asked.append))
    staying = asyncio.create_task(features.admit("staying", {"x": 100}, asked.append))
    await asyncio.sleep(0)
    features.release("first")
    leaving.cancel()  # it was admitted, but its task has not resumed
    arrival = (await asyncio.wait_for(staying, DEADLINE_SECONDS)).arrivals["x"]
    await asyncio.wait([leaving])
    assert asked == ["x", "y"]
    features.deliver("x", feature(100))
    assert (await asyncio.wait_for(arrival, DEADLINE_SECONDS)).num_bytes == 100


async def test_a_feature_that_fails_before_its_user_resumes_fails_it() -> None:
    features, _ = store(1000)
    await admit(features, "first", {"a": 600})
    second = asyncio.create_task(features.admit("second", {"a": 600}, lambda _: None))
    await asyncio.sleep(0)  # it is admitted, and has not resumed
    features.fail("a", BadMediaError("not an image"))
    third = asyncio.create_task(admit(features, "third", {"a": 600}))
    arrival = (await second).arrivals["a"]
    await third
    features.release("third")
    with pytest.raises(BadMediaError):
        await arrival


async def test_what_can_never_fit_is_refused_with_the_field_to_raise() -> None:
    features, _ = store(1000)
    with pytest.raises(CapacityError, match="featureBudgetMebibytes"):
        await admit(features, "r", {"a": 600, "b": 600})


async def test_a_failure_reaches_everybody_who_waits_and_frees_the_room() -> None:
    features, _ = store(1000)
    await admit(features, "first", {"a": 600})
    await admit(features, "second", {"a": 600})
    arrival = features.arrival("a")
    features.fail("a", BadMediaError("not an image"))
    with pytest.raises(BadMediaError):
        await arrival
    assert features.used_bytes == 0
    assert await admit(features, "third", {"a": 600}) == ["a"]


async def test_an_offer_is_wanted_only_while_a_request_waits_for_it() -> None:
    features, _ = store(1000)
    await admit(features, "r", {"a": 600})
    assert features.verdict("a", 600) == "send"
    assert features.verdict("a", 601) == "refuse"
    assert features.verdict("unknown", DEADLINE_SECONDS) == "refuse"
    features.deliver("a", feature(600))
    assert features.verdict("a", 600) == "have"


async def test_a_request_that_leaves_before_its_feature_came_ends_the_wait() -> None:
    features, seen = store(1000)
    await admit(features, "r", {"a": 600})
    features.release("r")
    assert features.verdict("a", 600) == "refuse"
    assert features.used_bytes == 0
    assert seen[(FeatureState.ENCODING, FeatureState.DISCARDED)] == 1


async def test_finished_features_stay_as_cache_until_their_bytes_are_needed() -> None:
    features, _ = store(1000)
    for name in ("a", "b"):
        await admit(features, f"r{name}", {name: 400})
        features.deliver(name, feature(400))
        features.release(f"r{name}")
    assert features.newest(9) == ["b", "a"]
    assert await admit(features, "again", {"a": 400}) == []  # touched: b is now the older one
    features.release("again")
    await admit(features, "new", {"c": 400})
    assert features.newest(9) == ["a"]


async def test_every_step_of_a_life_is_counted() -> None:
    features, seen = store(1000)
    await admit(features, "r", {"a": 400})
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
                tasks.append(asyncio.create_task(admit(features, f"r{request}", needs)))
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
        assert await asyncio.wait_for(admit(features, "all", {"whole": 1000}), DEADLINE_SECONDS) == ["whole"]

    asyncio.run(play())


async def test_needed_bytes_cover_running_and_waiting_requests_but_no_cache() -> None:
    features, _ = store(1000)
    await admit(features, "first", {"a": 400, "b": 300})
    assert features.needed_bytes == 700
    waiting = asyncio.create_task(admit(features, "second", {"a": 400, "c": 500}))
    await asyncio.sleep(0)
    assert features.needed_bytes == 1200
    features.deliver("a", feature(400))
    features.deliver("b", feature(300))
    features.release("first")
    await asyncio.wait_for(waiting, DEADLINE_SECONDS)
    assert (features.needed_bytes, features.used_bytes) == (900, 900)
    features.release("second")
    assert features.needed_bytes == 0, "what is left is cache"
