"""Room for KV at decode pods: what never fits is refused at once, and the oldest request gets the next room."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mmd_api.contract.errors import CapacityError, LayoutMismatchError, MmdError
from mmd_workers.decode.offer_queue import REPEAT_SECONDS, OfferQueue
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


@given(st.permutations(range(6)), st.integers(0, 5))
def test_of_all_that_wait_only_the_oldest_passes(order: list[int], leaver: int) -> None:
    queue = OfferQueue()
    for number in order:
        queue.join(f"r{number}", float(number), 0.0)
    assert [queue.ahead_of(f"r{n}", float(n), 0.5) for n in range(6)] == list(range(6))
    queue.leave(f"r{leaver}")
    assert [queue.ahead_of(f"r{n}", float(n), 0.5) for n in range(6)] == [n - (leaver < n) for n in range(6)]


def test_a_request_that_does_not_ask_again_is_not_waited_for() -> None:
    queue = OfferQueue()
    queue.join("old", 1.0, 0.0)
    assert queue.ahead_of("young", 2.0, REPEAT_SECONDS - 0.01) == 1
    assert queue.ahead_of("young", 2.0, REPEAT_SECONDS) == 0
    assert len(queue) == 0
