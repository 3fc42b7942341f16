"""kopf's workers wait together for the end of all first lists; what that costs grows with their number, not with its square."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable

import pytest
from kopf._cogs.aiokits import aiotoggles
from kopf._core.reactor import orchestration

from mmd_operator.kube.kopf_toggles import CalmToggleSet, calm_toggles

OBJECTS = 200


async def looks_of_waiters(make: Callable[[Callable[[Iterable[bool]], bool]], aiotoggles.ToggleSet]) -> int:
    """How often a set's state is computed while objects are listed one after the other and each one's worker waits for all others."""
    looks = 0

    def combine(states: Iterable[bool]) -> bool:
        nonlocal looks
        looks += 1
        return all(states)

    toggles = make(combine)
    blocker = await toggles.make_toggle(name="lists")
    workers = []
    for number in range(OBJECTS):
        toggle = await toggles.make_toggle(name=f"object {number}")

        async def work(toggle: aiotoggles.Toggle = toggle) -> None:
            await toggles.drop_toggle(toggle)
            await toggles.wait_for(True)

        workers.append(asyncio.create_task(work()))
        await asyncio.sleep(0)
    await toggles.drop_toggle(blocker)
    async with asyncio.timeout(60):
        await asyncio.gather(*workers)
    return looks


async def test_a_first_list_wakes_each_waiting_worker_once() -> None:
    assert await looks_of_waiters(CalmToggleSet) <= 8 * OBJECTS
    assert await looks_of_waiters(aiotoggles.ToggleSet) > OBJECTS**2 / 2, "kopf does so itself: remove ours"


@pytest.mark.parametrize("combine", [all, any])
async def test_waiters_of_both_states_are_woken_as_by_kopfs_own_set(
    combine: Callable[[Iterable[bool]], bool],
) -> None:
    toggles = CalmToggleSet(combine)
    first, second = await toggles.make_toggle(True), await toggles.make_toggle(True)
    off = asyncio.create_task(toggles.wait_for(False))
    await asyncio.sleep(0)
    for toggle in (first, second):
        await toggle.turn_to(False)
    async with asyncio.timeout(60):
        await off
    on = asyncio.create_task(toggles.wait_for(True))
    await asyncio.sleep(0)
    if combine is any:
        await toggles.make_toggle(True)
    else:
        await toggles.drop_toggles([first, second])
    async with asyncio.timeout(60):
        await on


def test_kopf_makes_such_sets_while_the_operator_runs_and_no_longer() -> None:
    original = aiotoggles.ToggleSet
    with calm_toggles():
        assert orchestration.aiotoggles.ToggleSet is CalmToggleSet
        assert orchestration.aiotoggles.ToggleSet(all).is_on()
    assert aiotoggles.ToggleSet is original
