"""Nobody who fits waits behind those who do not, beyond the bound, and nobody is overtaken without end: in turns of any size and order."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mmd_api.contract.pools import MODALITIES, Modality
from mmd_workers.basics.overtaking import MAX_OVERTAKEN, next_in_line
from mmd_workers.encoder.budget import ByteBudget
from mmd_workers.features.store import FeatureStore

BUDGET = 100


@dataclass
class Waiter:
    size: int
    overtaken: int = 0


def test_whoever_fits_passes_the_first_in_line_only_so_often() -> None:
    large = Waiter(80)
    for _ in range(MAX_OVERTAKEN):
        small = Waiter(10)
        assert next_in_line([large, small], lambda waiter: waiter.size <= 20) is small
    assert next_in_line([large, Waiter(10)], lambda waiter: waiter.size <= 20) is None
    assert next_in_line([large, Waiter(10)], lambda waiter: waiter.size <= 80) is large


def test_only_the_first_in_line_ages() -> None:
    first, second, small = Waiter(80), Waiter(80), Waiter(10)
    assert next_in_line([first, second, small], lambda waiter: waiter.size <= 20) is small
    assert (first.overtaken, second.overtaken) == (1, 0)


class Room(Protocol):
    """Room that is shared by size."""

    async def enter(self, name: str, size: int, modality: Modality) -> None: ...

    def leave(self, name: str) -> None: ...


class StoreRoom:
    def __init__(self) -> None:
        self._store = FeatureStore(BUDGET, lambda *_: None)

    async def enter(self, name: str, size: int, modality: Modality) -> None:
        await self._store.admit(name, {f"feature of {name}": size}, lambda _: None)

    def leave(self, name: str) -> None:
        self._store.release(name)


class BudgetRoom:
    def __init__(self) -> None:
        self._budget = ByteBudget(BUDGET, "spec.encoder.mediaMebibytes")
        self._held: dict[str, tuple[int, Modality]] = {}

    async def enter(self, name: str, size: int, modality: Modality) -> None:
        await self._budget._reserve(size, modality)
        self._held[name] = size, modality

    def leave(self, name: str) -> None:
        self._budget.free(*self._held.pop(name))


EVENTS = st.lists(
    st.one_of(
        st.tuples(
            st.just("enter"), st.one_of(st.integers(1, 12), st.integers(40, 100)), st.sampled_from(MODALITIES)
        ),
        st.tuples(st.sampled_from(["leave", "give up"]), st.integers(0, 99), st.just("image")),
    ),
    min_size=30,
    max_size=150,
)


@pytest.mark.parametrize(("room_of", "modalities"), [(StoreRoom, 3), (BudgetRoom, 1), (BudgetRoom, 3)])
@settings(max_examples=40, deadline=None)
@given(events=EVENTS)
def test_nobody_who_fits_waits_beyond_the_bound(
    room_of: Callable[[], Room], modalities: int, events: list[tuple[str, int, Modality]]
) -> None:
    is_one_line = room_of is StoreRoom or modalities == 1

    async def play() -> None:
        room = room_of()
        sizes, ahead = dict[str, int](), dict[str, int]()
        passed = Counter[str]()  # by younger ones; where modalities take turns, by anybody
        waiting: dict[str, asyncio.Task[None]] = {}  # oldest first
        inside: list[str] = []

        async def settle() -> None:
            for _ in range(3):
                await asyncio.sleep(0)
            entered = [name for name, task in waiting.items() if task.done()]
            for name in entered:
                others = list(waiting)[: list(waiting).index(name)] if is_one_line else list(waiting)
                passed.update(one for one in others if not waiting[one].done())
            for name in entered:
                del waiting[name]
                inside.append(name)

        def check() -> None:
            free = BUDGET - sum(sizes[name] for name in inside)
            assert free >= 0
            fitting = [name for name in waiting if sizes[name] <= free]
            unfit = [name for name in waiting if sizes[name] > free]
            if fitting:  # then somebody before them has been passed as often as it may be
                assert any(passed[name] >= MAX_OVERTAKEN for name in unfit), (fitting, unfit)
            if is_one_line:
                assert all(passed[name] <= MAX_OVERTAKEN * (ahead[name] + 1) for name in waiting)

        for number, (kind, value, modality) in enumerate(events):
            if kind == "enter":
                name = f"r{number}"
                sizes[name], ahead[name] = value, len(waiting)
                modality = modality if modalities > 1 else "image"
                waiting[name] = asyncio.create_task(room.enter(name, value, modality))
            elif kind == "leave" and inside:
                room.leave(inside.pop(value % len(inside)))
            elif kind == "give up" and waiting:
                task = waiting.pop(list(waiting)[value % len(waiting)])
                task.cancel()
                await asyncio.wait([task])
            await settle()
            check()
        while waiting:  # all get their turn
            assert inside, "somebody waits although nobody is inside"
            room.leave(inside.pop(0))
            await settle()
            check()

    asyncio.run(play())
