"""Media memory is granted first come first served, never exceeded, and always given back."""

from __future__ import annotations

import asyncio

import pytest

from mmd_api.contract.errors import OverloadedError, RequestTooLargeError
from mmd_workers.gateway.basics import media_hold as hold_module
from mmd_workers.gateway.basics.media_hold import Budget, MediaHold, Share


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


async def test_a_waiter_that_times_out_lets_the_queue_move_up(monkeypatch) -> None:
    monkeypatch.setattr(hold_module, "WAIT_SECONDS", 0.05)
    hold = MediaHold(100)
    first, large, small = (hold.reservation() for _ in range(3))
    await first.grow(80)
    waiting = asyncio.create_task(large.grow(90))
    await asyncio.sleep(0.02)
    after = asyncio.create_task(small.grow(10))
    with pytest.raises(OverloadedError) as caught:
        await waiting
    assert caught.value.status == 503
    assert caught.value.retry_after_seconds
    await after
    assert hold.used_bytes == 90


async def test_what_can_never_fit_is_refused_at_once() -> None:
    for held in (0, 60):
        share = MediaHold(100).reservation()
        await share.grow(held)
        with pytest.raises(RequestTooLargeError) as caught:
            await share.grow(101 - held)
        assert caught.value.status == 413
        assert "need 101 bytes, but the gateway holds at most 100;" in caught.value.message
        assert share.num_bytes == held
        await share.grow(100 - held)


async def test_text_waits_for_media_only_beyond_its_allowance() -> None:
    hold = MediaHold(100, allowance_bytes=10)
    media, waits, text = (hold.reservation() for _ in range(3))
    await media.grow(110)
    waiting = asyncio.create_task(waits.grow(11))
    await asyncio.sleep(0)
    await text.grow(10)
    assert (hold.used_bytes, hold.waiting) == (100, 1)
    media.release()
    await waiting
    assert hold.used_bytes == 1
    for share in (text, waits):
        share.release()
    assert hold.used_bytes == 0


async def test_a_request_that_holds_some_already_goes_before_newcomers() -> None:
    hold = MediaHold(100)
    first, second, newcomer = (hold.reservation() for _ in range(3))
    await first.grow(60)
    await second.grow(20)
    new = asyncio.create_task(newcomer.grow(30))
    await asyncio.sleep(0)
    more = asyncio.create_task(second.grow(25))
    await asyncio.sleep(0)
    assert hold.waiting == 2
    first.shrink(55)
    await more
    assert (new.done(), hold.used_bytes) == (False, 100)
    first.release()
    await new
    assert hold.used_bytes == 75


async def test_a_share_is_resized_up_and_down_to_exactly_the_requested_size() -> None:
    hold = MediaHold(100, allowance_bytes=10)
    share = hold.reservation()
    used = []
    for num_bytes in (30, 50, 50, 20, 10, 5, 12, 0):
        await share.resize(num_bytes)
        assert share.num_bytes == num_bytes
        used.append(hold.used_bytes)
    assert used == [20, 40, 40, 10, 0, 0, 2, 0]
    share.shrink(7)
    assert share.num_bytes == 0, "shrinking never grows"


async def test_a_smaller_budget_admits_no_request_until_enough_is_returned() -> None:
    hold = MediaHold(100)
    first, second = hold.reservation(), hold.reservation()
    await first.grow(80)
    hold.resize(50)
    waiting = asyncio.create_task(second.grow(10))
    await asyncio.sleep(0)
    first.shrink(41)
    await asyncio.sleep(0)
    assert not waiting.done()
    first.shrink(40)
    await waiting
    hold.resize(200)
    await second.grow(150)
    assert hold.used_bytes == 200


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


async def test_a_fitting_answer_passes_a_larger_one_but_not_for_ever() -> None:
    budget = Budget(100, may_pass=True)
    first, large, small = Share(budget), Share(budget), Share(budget)
    await first.grow(60)
    waiting = asyncio.create_task(large.grow(50))
    await asyncio.sleep(0)
    for _ in range(5):  # 20 bytes each: then as much as the whole budget has passed
        async with asyncio.timeout(60):
            await small.grow(20)
        small.release()
    after = asyncio.create_task(small.grow(20))
    await asyncio.sleep(0)
    assert (after.done(), waiting.done(), budget.waiting) == (False, False, 2)
    first.release()
    await asyncio.gather(waiting, after)
    assert budget.used_bytes == 70


async def test_what_does_not_wait_gets_only_what_nobody_wants() -> None:
    hold = MediaHold(100)
    first, large, idle = hold.reservation(), hold.reservation(), hold.reservation(waits=False)
    await first.grow(80)
    with pytest.raises(OverloadedError):
        await idle.grow(30)
    await idle.grow(10)
    waiting = asyncio.create_task(large.grow(90))
    await asyncio.sleep(0)
    with pytest.raises(OverloadedError):
        await idle.grow(5)
    idle.release()
    first.release()
    await waiting
    assert (hold.used_bytes, hold.waiting) == (90, 0)
