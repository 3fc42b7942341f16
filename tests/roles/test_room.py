"""Room for KV at decode pods: what never fits is refused at once, and one that waits is passed only so often."""

from __future__ import annotations

import asyncio
import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mmd_api.contract.errors import CapacityError, LayoutMismatchError, MmdError
from mmd_workers.basics.overtaking import MAX_OVERTAKEN
from mmd_workers.decode import offer_queue
from mmd_workers.decode.offer_queue import FORGET_SECONDS, REPEAT_SECONDS, OfferQueue
from mmd_workers.wire.messages.decode import KvGrant, KvOffer, KvRelease
from support.harness.waiting import DEADLINE_SECONDS

from .kv_sender import Connect, released, request, sender_of


@pytest.mark.parametrize("error", [CapacityError, LayoutMismatchError])
async def test_an_offer_that_can_never_be_granted_ends_at_once(
    connect: Connect, error: type[MmdError]
) -> None:
    bus, decode = await connect("prefill-0"), await connect("decode-0")
    offers: list[KvOffer] = []

    async def refuse(offer: KvOffer) -> KvGrant:
        offers.append(offer)
        return KvGrant(offer.request_id, granted=False, code=error.code, reason="900 blocks, the pool has 64")

    await decode.serve(bus.subjects.kv_offer("decode-0"), KvOffer, refuse)
    await decode.flush()
    with pytest.raises(error, match="decode-0: 900 blocks, the pool has 64"):
        await sender_of(bus).reserve(request(600))
    assert len(offers) == 1


async def test_a_request_placed_elsewhere_or_ended_leaves_a_busy_pods_queue(
    connect: Connect,
) -> None:
    bus, decode = await connect("prefill-0"), await connect("decode-0")

    asked = asyncio.Event()

    async def busy(offer: KvOffer) -> KvGrant:
        asked.set()
        return KvGrant(offer.request_id, granted=False, code="overloaded", reason="full")

    await decode.serve(bus.subjects.kv_offer("decode-0"), KvOffer, busy)
    heard, _ = await released(decode)
    offering = asyncio.create_task(sender_of(bus).reserve(request(600)))
    await asked.wait()
    offering.cancel()
    async with asyncio.timeout(DEADLINE_SECONDS):
        assert await heard.get() == KvRelease("r", 0, "")


async def test_an_offer_asks_for_remaining_tokens_and_carries_the_requests_age(
    connect: Connect,
) -> None:
    bus, decode = await connect("prefill-0"), await connect("decode-0")
    offers: list[KvOffer] = []

    async def note(offer: KvOffer) -> KvGrant:
        offers.append(offer)
        return KvGrant(offer.request_id, granted=False, code="too_large", reason="")

    await decode.serve(bus.subjects.kv_offer("decode-0"), KvOffer, note)
    await decode.flush()
    moved = replace(
        request(600), output_token_ids=[5, 6, 7], arrived=123.0
    )  # 8 prompt tokens, 4 outputs wanted
    with pytest.raises(CapacityError):
        await sender_of(bus).reserve(moved)
    assert (offers[0].prompt_tokens, offers[0].max_tokens, offers[0].arrived) == (11, 1, 123.0)


def test_small_offers_pass_a_large_one_that_waits_until_it_was_passed_often_enough() -> None:
    queue = OfferQueue()
    queue.join("large", 1.0, 0.0)
    turns = [queue.turn(f"small{n}", 2.0 + n, 0.5) for n in range(MAX_OVERTAKEN)]
    assert None not in turns
    assert queue.turn("late", 99.0, 0.5) is None
    assert queue.turn("large", 1.0, 0.5) is not None
    queue.leave("large")
    assert queue.turn("late", 99.0, 0.5) is not None


def test_a_turn_that_got_no_room_overtook_nobody() -> None:
    queue = OfferQueue()
    queue.join("large", 1.0, 0.0)
    for number in range(3 * MAX_OVERTAKEN):
        turn = queue.turn(f"r{number}", 2.0, 0.5)
        assert turn is not None
        turn.unused()


@given(st.lists(st.tuples(st.integers(0, 7), st.booleans()), max_size=300))
def test_no_order_of_offers_passes_a_waiter_more_often_than_the_bound(asks: list[tuple[int, bool]]) -> None:
    queue, passed = OfferQueue(), dict.fromkeys(range(4), 0)
    for number in passed:
        queue.join(f"r{number}", float(number), 0.0)
    for number, fits in asks:
        if (number in passed and fits) or (turn := queue.turn(f"r{number}", float(number), 0.5)) is None:
            continue
        if not fits:
            turn.unused()
        elif number not in passed:
            for waiter in passed:
                passed[waiter] += 1
    assert all(count <= MAX_OVERTAKEN for count in passed.values())


def test_a_request_that_does_not_ask_again_is_not_waited_for() -> None:
    queue = OfferQueue()
    queue.join("old", 1.0, 0.0)
    for number in range(MAX_OVERTAKEN):
        assert queue.turn(f"young{number}", 2.0, 0.0) is not None
    assert queue.turn("young", 2.0, REPEAT_SECONDS - 0.01) is None
    assert queue.turn("young", 2.0, REPEAT_SECONDS) is not None
    assert queue.waiting(REPEAT_SECONDS) == 0


@pytest.mark.parametrize("round_seconds", [0.3, 0.9, 1.1, 2.0, 5.0])
def test_a_request_that_asks_many_pods_in_turn_is_passed_no_more_often(round_seconds: float) -> None:
    """While it asks elsewhere nobody waits for it, and what it has suffered is known when it is back."""
    queue, asked, passed_while_waiting = OfferQueue(), -math.inf, 0
    for tick in range(3000):
        now = tick / 100
        if now - asked >= round_seconds:
            assert queue.turn("large", 1.0, now) is not None
            queue.join("large", 1.0, now)
            asked = now
        waits = queue.waiting(now) > 0
        if queue.turn(f"small-{tick}", 2.0 + tick, now) is not None:
            passed_while_waiting += waits
    assert passed_while_waiting == MAX_OVERTAKEN


def test_what_is_known_of_requests_that_went_elsewhere_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(offer_queue, "MAX_WAITING", 4)
    queue = OfferQueue()
    for number in range(6):
        queue.join(f"r{number}", float(number), 0.0)
    assert queue.waiting(0.5) == len(queue._known) == 4
    queue.join("new", 9.0, REPEAT_SECONDS)
    assert list(queue._known) == ["new"]
    assert queue.waiting(REPEAT_SECONDS + FORGET_SECONDS) == len(queue._known) == 0
