"""What a pod reports of the features that it holds: in one place or in two, from their arrival until the last one has gone."""

from __future__ import annotations

import torch

from mmd_api.contract.errors import PeerLostError
from mmd_workers.features.cache import FeatureCache
from mmd_workers.features.held import HeldFeatures, feature_identity
from mmd_workers.features.store import FeatureStore
from mmd_workers.model.prompt import Feature

ROWS = 4


def feature() -> Feature:
    return Feature("image", {"embeddings": torch.zeros(ROWS, 8)})


def change(held: HeldFeatures) -> tuple[set[bytes], set[bytes]]:
    """What has come and gone since the last call."""
    delta = held.changes.take(100)
    return set(delta.added), set(delta.evicted)


def named(*features: str) -> set[bytes]:
    return {feature_identity(name) for name in features}


def test_a_cache_reports_what_it_keeps_and_what_it_evicts() -> None:
    held = HeldFeatures()
    cache = FeatureCache(2 * feature().num_bytes, held)
    for name in ("a", "b"):
        cache.put(name, feature())
    assert change(held) == (named("a", "b"), set())
    cache.get("a")
    cache.put("c", feature())
    assert change(held) == (named("c"), named("b"))
    cache.put("c", feature())
    assert change(held) == (set(), set())


async def test_a_store_reports_a_feature_until_it_makes_room_for_another() -> None:
    held, size = HeldFeatures(), feature().num_bytes
    store = FeatureStore(size, lambda *_: None, held)
    await store.admit("r", {"a": size}, lambda _: None)
    assert change(held) == (set(), set())
    store.deliver("a", feature())
    assert change(held) == (named("a"), set())
    store.release("r")
    assert change(held) == (set(), set())
    await store.admit("s", {"b": size}, lambda _: None)
    assert change(held) == (set(), named("a"))
    store.fail("b", PeerLostError("gone"))
    await store.admit("t", {"c": size}, lambda _: None)
    store.release("t")
    assert change(held) == (set(), set()), "what never came was never there"


def test_a_feature_in_two_places_goes_with_the_second() -> None:
    held = HeldFeatures()
    held.add("a")
    held.add("a")
    assert change(held) == (named("a"), set())
    held.remove("a")
    assert change(held) == (set(), set())
    held.remove("a")
    assert change(held) == (set(), named("a"))
