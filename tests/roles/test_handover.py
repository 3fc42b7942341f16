"""A handover that is called off ends at once, whatever comes at the same moment."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import pytest

from mmd_api.contract.errors import OverloadedError
from mmd_workers.kv.links import PairLink
from mmd_workers.prefill import handover
from mmd_workers.prefill.handover import Finished, KvReservation, Ranges
from mmd_workers.wire.messages import (
    Acknowledged,
    KvCommit,
    KvCommitted,
    KvGrant,
    KvOffer,
    KvRelease,
)
from tests.support.waiting import DEADLINE_SECONDS

from .kv_sender import Connect, HeldLink, released, request, sender_of

pytest_plugins = ["tests.support.nats_fixture"]


async def test_a_lease_is_given_back_until_the_decoder_confirms_it(
    connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(handover, "REPLY_SECONDS", 0.2)
    bus = await connect("prefill-0")
    heard: list[KvRelease] = []
    confirmed = asyncio.Event()

    async def confirm_the_second(release: KvRelease) -> Acknowledged:
        heard.append(release)
        if len(heard) == 1:
            await asyncio.Event().wait()
        confirmed.set()
        return Acknowledged()

    await bus.serve(bus.subjects.kv_release("decode-0"), KvRelease, confirm_the_second)
    sender = sender_of(bus)
    sender._release(request(60), "decode-0", "lease-1")
    async with asyncio.timeout(DEADLINE_SECONDS):
        await confirmed.wait()
        await asyncio.gather(*sender._releases)
    assert heard == [KvRelease("r", 0, "lease-1")] * 2


async def test_a_commit_whose_answer_is_lost_is_repeated(
    connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(handover, "REPLY_SECONDS", 0.2)
    bus = await connect("prefill-0")
    heard: list[KvCommit] = []

    async def answer_the_second(commit: KvCommit) -> KvCommitted:
        heard.append(commit)
        if len(heard) == 1:
            await asyncio.Event().wait()
        return KvCommitted(commit.lease_id, ok=True)

    await bus.serve(bus.subjects.kv_commit("decode-0"), KvCommit, answer_the_second)
    reservation = KvReservation("decode-0", KvGrant("r", granted=True, lease_id="lease-1"), cast(Any, None))
    await sender_of(bus)._commit(request(60), reservation, Finished([1], 8), 0)
    assert len(heard) == 2


async def test_a_cancellation_that_meets_a_range_is_not_lost(connect: Connect) -> None:
    bus = await connect("prefill-0")
    heard, _ = await released(bus)
    sender = sender_of(bus)
    link = asyncio.create_task(asyncio.sleep(0, cast(PairLink, HeldLink())))
    grant = KvGrant("r", granted=True, lease_id="lease-1")
    ranges = Ranges()
    handing = asyncio.create_task(
        sender.hand_over(request(600), "r#0", KvReservation("decode-0", grant, link), ranges)
    )
    await asyncio.sleep(0.05)
    ranges.changed.set()
    await asyncio.sleep(0)  # the waiter has its result, and nobody has looked at it yet
    handing.cancel()
    done, _ = await asyncio.wait([handing], timeout=DEADLINE_SECONDS)
    assert done, "it waits for the rest of a prompt that nobody runs"
    assert handing.cancelled()
    async with asyncio.timeout(DEADLINE_SECONDS):
        assert (await heard.get()).lease_id == "lease-1"


async def test_blocks_of_an_offer_whose_answer_was_lost_are_given_back(
    connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mmd_workers.prefill.handover.OFFER_SECONDS", 0.2)
    bus = await connect("prefill-0")
    heard, _ = await released(bus)
    offers: asyncio.Queue[KvOffer] = asyncio.Queue()
    await bus.subscribe(bus.subjects.kv_offer("decode-0"), KvOffer, offers.put)  # takes it and never answers
    await bus.flush()
    with pytest.raises(OverloadedError, match="no decode pod accepted the sequence"):
        await sender_of(bus).reserve(request(0.3))
    async with asyncio.timeout(DEADLINE_SECONDS):
        assert await heard.get() == KvRelease("r", 0)
    assert (await offers.get()).request_id == "r"


@pytest.mark.parametrize("named", ["is full", "is gone"])
async def test_a_waiting_prefill_takes_a_decoder_that_appears(connect: Connect, named: str) -> None:
    bus = await connect("prefill-0")
    asked = asyncio.Event()

    async def refuse(offer: KvOffer) -> KvGrant:
        asked.set()
        return KvGrant(offer.request_id, granted=False, reason="no room", code="overloaded")

    async def grant(offer: KvOffer) -> KvGrant:
        return KvGrant(offer.request_id, granted=True, lease_id="lease-1")

    await bus.serve(bus.subjects.kv_offer("decode-0"), KvOffer, refuse)
    await bus.serve(bus.subjects.kv_offer("decode-1"), KvOffer, grant)
    there = {"decode-0": "i1"}
    reserving = asyncio.create_task(sender_of(bus, there).reserve(request(30)))
    async with asyncio.timeout(DEADLINE_SECONDS):
        await asked.wait()
        there["decode-1"] = "i1"
        if named == "is gone":
            del there["decode-0"]
        assert (await reserving).pod == "decode-1"


async def test_a_prefill_without_any_decoder_gives_up_at_once(connect: Connect) -> None:
    with pytest.raises(OverloadedError, match="decode-0 lost and no other pod is ready"):
        await sender_of(await connect("prefill-0"), {}).reserve(request(600))
