"""A handover that is called off ends at once, whatever comes at the same moment."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from itertools import pairwise
from typing import Any, TypeVar, cast

import pytest

from mmd_api.contract.errors import DeadlineError, OverloadedError
from mmd_workers.kv.links import PairLink
from mmd_workers.prefill.kv_sender import (
    LONGEST_STEP_SECONDS,
    OFFER_SECONDS,
    REPLY_SECONDS,
    RETRY_SECONDS,
    Finished,
    KvReservation,
    Ranges,
)
from mmd_workers.wire.messages.decode import KvCommit, KvCommitted, KvGrant, KvOffer, KvRelease
from mmd_workers.wire.messages.message_parts import Acknowledged
from mmd_workers.wire.messages.prefill import GenerateRequest
from support.harness.clock import FakeClock
from support.serving.memory_bus import MemoryNet

from .kv_sender import LEASE_SECONDS, HeldLink, request, sender_of

T = TypeVar("T")


class Prefill:
    """The sender of prefill-0 and the bus of decode-0, on one clock and in memory."""

    def __init__(self, there: dict[str, str] | None = None) -> None:
        self.clock = FakeClock()
        net = MemoryNet(self.clock)
        self.decode = net.bus("decode-0")
        self.sender = sender_of(net.bus("prefill-0"), there, self.clock)

    def request(self, seconds: float = 600.0) -> GenerateRequest:
        return request(seconds, self.clock)

    async def end(self, work: Coroutine[Any, Any, T]) -> T:
        """Let time pass until it has ended; what it returns."""
        task = asyncio.create_task(work)
        await self.clock.until(task.done)
        return await task


class Deaf:
    """Answers no message before the last one of `count`; `heard` has each with its moment."""

    def __init__(self, prefill: Prefill, count: int, answer: object) -> None:
        self.heard: list[tuple[object, float]] = []
        self._prefill, self._count, self._answer = prefill, count, answer

    async def __call__(self, message: object) -> object:
        self.heard.append((message, self._prefill.clock.now()))
        if len(self.heard) < self._count:
            await asyncio.Event().wait()
        return self._answer

    def pauses(self) -> list[float]:
        return [later - earlier for (_, earlier), (_, later) in pairwise(self.heard)]


async def test_a_lease_is_given_back_until_the_decoder_confirms_it() -> None:
    prefill = Prefill()
    subject, decoder = prefill.decode.subjects.kv_release("decode-0"), Deaf(prefill, 3, Acknowledged())
    await prefill.decode.serve(subject, KvRelease, decoder)
    prefill.sender._release(prefill.request(), "decode-0", "lease-1")
    await prefill.clock.until(lambda: not prefill.sender._releases)
    assert [release for release, _ in decoder.heard] == [KvRelease("r", 0, "lease-1")] * 3
    assert all(REPLY_SECONDS < pause <= REPLY_SECONDS + RETRY_SECONDS[1] for pause in decoder.pauses())


async def test_a_lease_that_has_ended_is_not_given_back_any_more() -> None:
    prefill = Prefill()
    subject, decoder = prefill.decode.subjects.kv_release("decode-0"), Deaf(prefill, 100, Acknowledged())
    await prefill.decode.serve(subject, KvRelease, decoder)
    begin = prefill.clock.now()
    prefill.sender._release(prefill.request(), "decode-0", "lease-1")
    await prefill.clock.until(lambda: not prefill.sender._releases)
    assert LEASE_SECONDS <= prefill.clock.now() - begin < LEASE_SECONDS + REPLY_SECONDS + RETRY_SECONDS[1]


async def test_a_commit_whose_answer_is_lost_is_repeated() -> None:
    prefill = Prefill()
    subject = prefill.decode.subjects.kv_commit("decode-0")
    decoder = Deaf(prefill, 2, KvCommitted("lease-1", ok=True))
    await prefill.decode.serve(subject, KvCommit, decoder)
    reservation = KvReservation("decode-0", KvGrant("r", granted=True, lease_id="lease-1"), cast(Any, None))
    await prefill.end(prefill.sender._commit(prefill.request(), reservation, Finished([1], 8), 0))
    (pause,) = decoder.pauses()
    assert REPLY_SECONDS < pause <= REPLY_SECONDS + RETRY_SECONDS[0]


async def test_a_commit_is_repeated_for_the_longest_step_of_an_engine() -> None:
    prefill = Prefill()
    subject, decoder = prefill.decode.subjects.kv_commit("decode-0"), Deaf(prefill, 10_000, Acknowledged())
    await prefill.decode.serve(subject, KvCommit, decoder)
    reservation = KvReservation("decode-0", KvGrant("r", granted=True, lease_id="lease-1"), cast(Any, None))
    begin = prefill.clock.now()
    with pytest.raises(DeadlineError, match="no reply on "):
        await prefill.end(prefill.sender._commit(prefill.request(), reservation, Finished([1], 8), 0))
    assert 0 < prefill.clock.now() - begin - LONGEST_STEP_SECONDS < REPLY_SECONDS + RETRY_SECONDS[1]


async def test_a_cancellation_that_meets_a_range_is_not_lost() -> None:
    prefill, ranges = Prefill(), Ranges()
    subject, decoder = prefill.decode.subjects.kv_release("decode-0"), Deaf(prefill, 1, Acknowledged())
    await prefill.decode.serve(subject, KvRelease, decoder)
    link = asyncio.create_task(asyncio.sleep(0, cast(PairLink, HeldLink())))
    reservation = KvReservation("decode-0", KvGrant("r", granted=True, lease_id="lease-1"), link)
    handing = asyncio.create_task(prefill.sender.hand_over(prefill.request(), "r#0", reservation, ranges))
    await prefill.clock.let_pass(1.0)
    ranges.changed.set()
    await asyncio.sleep(0)  # the waiter has its result, and nobody has looked at it yet
    handing.cancel()
    await prefill.clock.let_pass(0.0)
    assert handing.done(), "it waits for the rest of a prompt that nobody runs"
    assert handing.cancelled()
    assert [release for release, _ in decoder.heard] == [KvRelease("r", 0, "lease-1")]


async def test_blocks_of_an_offer_whose_answer_was_lost_are_given_back() -> None:
    prefill = Prefill()
    subjects, offered = prefill.decode.subjects, Deaf(prefill, 10_000, Acknowledged())
    released = Deaf(prefill, 1, Acknowledged())
    await prefill.decode.serve(subjects.kv_offer("decode-0"), KvOffer, offered)
    await prefill.decode.serve(subjects.kv_release("decode-0"), KvRelease, released)
    with pytest.raises(OverloadedError, match="no decode pod accepted the sequence"):
        await prefill.end(prefill.sender.reserve(prefill.request(seconds=12.0)))
    await prefill.clock.until(lambda: not prefill.sender._releases)
    assert [release for release, _ in released.heard] == [KvRelease("r", 0)]
    assert offered.pauses() == [OFFER_SECONDS] * 2


@pytest.mark.parametrize("named", ["is full", "is gone"])
async def test_a_waiting_prefill_takes_a_decoder_that_appears(named: str) -> None:
    there = {"decode-0": "i1"}
    prefill = Prefill(there)
    subjects, asked = prefill.decode.subjects, 0

    async def refuse(offer: KvOffer) -> KvGrant:
        nonlocal asked
        asked += 1
        return KvGrant(offer.request_id, granted=False, reason="no room", code="overloaded")

    async def grant(offer: KvOffer) -> KvGrant:
        return KvGrant(offer.request_id, granted=True, lease_id="lease-1")

    await prefill.decode.serve(subjects.kv_offer("decode-0"), KvOffer, refuse)
    await prefill.decode.serve(subjects.kv_offer("decode-1"), KvOffer, grant)
    reserving = asyncio.create_task(prefill.sender.reserve(prefill.request(seconds=30.0)))
    await prefill.clock.until(lambda: asked == 10)
    there["decode-1"] = "i1"
    if named == "is gone":
        del there["decode-0"]
    await prefill.clock.until(reserving.done, RETRY_SECONDS[1])
    assert (await reserving).pod == "decode-1"


async def test_a_prefill_without_any_decoder_gives_up_at_once() -> None:
    prefill = Prefill({})
    begin = prefill.clock.now()
    with pytest.raises(OverloadedError, match="decode-0 lost and no other pod is ready"):
        await prefill.end(prefill.sender.reserve(prefill.request()))
    assert prefill.clock.now() == begin
