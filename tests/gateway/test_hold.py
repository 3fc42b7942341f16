"""Media memory is granted first come first served, never exceeded, and always given back."""

from __future__ import annotations

import asyncio

import pytest

from mmd_workers.gateway.api import ApiError
from mmd_workers.gateway.hold import MediaHold


async def test_a_request_waits_for_room_and_gets_it_when_another_ends() -> None:
    hold = MediaHold(100)
    first, second = hold.reservation(), hold.reservation()
    await first.grow(80)
    waiting = asyncio.create_task(second.grow(50))
    await asyncio.sleep(0)
    assert (hold.used_bytes, hold.waiting) == (80, 1)
    first.release()
    await waiting
    assert (hold.used_bytes, hold.waiting) == (50, 0)


async def test_a_small_request_does_not_overtake_a_large_one() -> None:
    hold = MediaHold(100)
    first, large, small = (hold.reservation() for _ in range(3))
    await first.grow(80)
    waiting = asyncio.create_task(large.grow(90))
    await asyncio.sleep(0)
    after = asyncio.create_task(small.grow(10))
    await asyncio.sleep(0)
    assert not after.done()
    first.release()
    await asyncio.gather(waiting, after)
    assert hold.used_bytes == 100


async def test_who_waits_too_long_is_told_when_to_come_back_and_those_behind_move_up() -> None:
    hold = MediaHold(100, wait_seconds=0.05)
    first, large, small = (hold.reservation() for _ in range(3))
    await first.grow(80)
    waiting = asyncio.create_task(large.grow(90))
    await asyncio.sleep(0.02)
    after = asyncio.create_task(small.grow(10))
    with pytest.raises(ApiError) as caught:
        await waiting
    assert caught.value.status == 503
    assert caught.value.retry_after_seconds
    await after
    assert hold.used_bytes == 90


async def test_what_can_never_fit_is_refused_at_once() -> None:
    with pytest.raises(ApiError) as caught:
        await MediaHold(100).reservation().grow(101)
    assert caught.value.status == 413


@pytest.mark.parametrize("granted", [True, False])
async def test_a_waiter_that_is_cancelled_leaves_nothing(granted: bool) -> None:
    hold = MediaHold(100)
    first, second = hold.reservation(), hold.reservation()
    await first.grow(80)
    waiting = asyncio.create_task(second.grow(50))
    await asyncio.sleep(0)
    if granted:
        first.release()  # the grant and the cancellation meet
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    second.release()
    first.release()
    assert (hold.used_bytes, hold.waiting) == (0, 0)


async def test_a_medium_of_two_requests_stays_until_both_have_ended() -> None:
    hold = MediaHold(100)
    first, second = hold.reservation(), hold.reservation()
    first.put("d", b"x")
    second.put("d", b"x")
    first.release()
    assert hold.get("d") == b"x"
    second.release()
    second.release()
    assert hold.get("d") is None
    assert hold.held_media == 0
