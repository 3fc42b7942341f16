"""A hand-over that is called off ends at once, whatever comes at the same moment."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from contextlib import contextmanager
from typing import Any, cast

import pytest

from mmd_workers.errors import OverloadedError
from mmd_workers.kv.links import LinkManager, PairLink
from mmd_workers.model.types import KvLayout
from mmd_workers.observe.metrics import Metrics
from mmd_workers.prefill.handoff import KvSender, Ranges, Reservation
from mmd_workers.wire.bus import Bus, Subscription
from mmd_workers.wire.messages import GenerateRequest, KvGrant, KvOffer, KvRelease, Sampling

pytest_plugins = ["nats_fixture"]
Connect = Callable[[str], Awaitable[Bus]]


class HeldLink:
    """A link that is there and is asked for nothing."""

    @contextmanager
    def held(self) -> Any:
        yield


class NoLinks:
    """The manager of links that nobody asks for."""

    endpoint = "127.0.0.1:1"

    def failed_epoch(self, pod: str, incarnation: str) -> int:
        return -1


def sender_of(bus: Bus) -> KvSender:
    layout = KvLayout(num_layers=1, num_kv_heads=[1], head_dim=[16], dtype="float32")
    links, incarnations = cast(LinkManager, NoLinks()), lambda: {"decode-0": "i1"}
    return KvSender(*(bus, "prefill-0", "i1", cast(Any, None), links, layout, 5.0, incarnations, Metrics()))


def request(seconds: float) -> GenerateRequest:
    now = time.time()
    return GenerateRequest("r", 0, "gateway-0", [1] * 8, [], Sampling(4), ["decode-0"], now + seconds, now)


async def released(bus: Bus) -> tuple[asyncio.Queue[KvRelease], Subscription]:
    heard: asyncio.Queue[KvRelease] = asyncio.Queue()
    subscription = await bus.subscribe(bus.subjects.kv_release("decode-0"), KvRelease, heard.put)
    await bus.flush()
    return heard, subscription


async def test_a_cancellation_that_meets_a_range_is_not_lost(connect: Connect) -> None:
    bus = await connect("prefill-0")
    heard, _ = await released(bus)
    sender = sender_of(bus)
    link = asyncio.create_task(asyncio.sleep(0, cast(PairLink, HeldLink())))
    grant = KvGrant("r", granted=True, lease_id="lease-1")
    ranges = Ranges()
    handing = asyncio.create_task(
        sender.hand_over(request(600), "r#0", Reservation("decode-0", grant, link), ranges)
    )
    await asyncio.sleep(0.05)
    ranges.changed.set()
    await asyncio.sleep(0)  # the waiter has its result, and nobody has looked at it yet
    handing.cancel()
    done, _ = await asyncio.wait([handing], timeout=3)
    assert done, "it waits for the rest of a prompt that nobody runs"
    assert handing.cancelled()
    async with asyncio.timeout(3):
        assert (await heard.get()).lease_id == "lease-1"


async def test_blocks_of_an_offer_whose_answer_was_lost_are_given_back(
    connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mmd_workers.prefill.handoff.OFFER_TIMEOUT_SECONDS", 0.2)
    bus = await connect("prefill-0")
    heard, _ = await released(bus)
    offers: asyncio.Queue[KvOffer] = asyncio.Queue()
    await bus.subscribe(bus.subjects.kv_offer("decode-0"), KvOffer, offers.put)  # takes it and never answers
    await bus.flush()
    with pytest.raises(OverloadedError, match="no decode pod took the sequence"):
        await sender_of(bus).reserve(request(0.3))
    async with asyncio.timeout(3):
        assert await heard.get() == KvRelease("r", 0)
    assert (await offers.get()).request_id == "r"
