"""Offers of KV that come side by side, as after a prefill pod has hung for a while."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import asdict, dataclass
from types import SimpleNamespace
from typing import Any, cast

import pytest_asyncio

from mmd_workers.decode.service import DecodeService
from mmd_workers.decode.tokens import SequenceBook
from mmd_workers.model.types import KvLayout
from mmd_workers.observe.metrics import Metrics
from mmd_workers.observe.tracing import Tracing
from mmd_workers.wire.bus import Bus
from mmd_workers.wire.messages import KvGrant, KvOffer, KvRelease

pytest_plugins = ["nats_fixture"]
Connect = Callable[[str], Awaitable[Bus]]
LAYOUT = KvLayout(num_layers=1, num_kv_heads=[1], head_dim=[16], dtype="float32")


class BusyRunner:
    """An engine that is never free at once, and has room for everything, though for each sequence only once."""

    def __init__(self) -> None:
        self.reserved: list[str] = []
        self.asked = asyncio.Event()

    async def call(self, work: Callable[[Any], object]) -> None:
        self.asked.set()
        await asyncio.sleep(0.05)
        work(self)

    def reserve(self, sequence: str, *_: int) -> None:
        if sequence in self.reserved:
            raise ValueError(f"sequence {sequence} exists already")
        self.reserved.append(sequence)

    def abort(self, sequence: str) -> None:
        self.reserved = [name for name in self.reserved if name != sequence]


class LinksToBe:
    """Links that are being made until the test is over."""

    endpoint = "127.0.0.1:1"

    def __init__(self) -> None:
        self.over = threading.Event()

    def epoch_for(self, pod: str, incarnation: str, failed_epoch: int) -> int:
        return failed_epoch + 1

    def connect(self, *_: object) -> Any:
        self.over.wait(10)
        return SimpleNamespace(dead="")


@dataclass
class Offering:
    """A decode service, and a prefill pod that offers it sequences."""

    service: Any
    runner: BusyRunner
    decode: Bus
    prefill: Bus

    async def offer(self, request: str, failed_epoch: int = -1) -> KvGrant:
        facts: dict[str, Any] = {"pod": "prefill-0", "incarnation": "i1", "prompt_tokens": 8, "max_tokens": 4}
        link = {"link_endpoint": "127.0.0.1:2", "lease_seconds": 60.0, "failed_epoch": failed_epoch}
        offered = KvOffer(request_id=request, attempt=0, layout=asdict(LAYOUT), **facts, **link)
        return await self.prefill.request(
            self.prefill.subjects.kv_offer("decode-0"), offered, KvGrant, timeout=5
        )


@pytest_asyncio.fixture
async def offering(connect: Connect) -> AsyncIterator[Offering]:
    bus, links, runner = await connect("decode-0"), LinksToBe(), BusyRunner()
    model = SimpleNamespace(kv_layout=LAYOUT)
    book = SequenceBook(bus, "decode-0", Metrics(), Tracing("test", "test", "test", None))
    parts: tuple[Any, ...] = (bus, "decode-0", runner, model, links, book, Metrics())
    service = cast(Any, DecodeService)(*parts)
    await service.start()
    yield Offering(service, runner, bus, await connect("prefill-0"))
    links.over.set()


async def test_a_pod_has_one_reader_of_its_link_though_it_offers_twice_at_once(offering: Offering) -> None:
    assert (await offering.offer("first")).epoch == 0
    grants = await asyncio.gather(*(offering.offer(f"r{number}", 0) for number in range(4)))
    assert [grant.epoch for grant in grants] == [1] * 4
    end = time.monotonic() + 5
    while len(readers := readers_of("prefill-0")) != 1 and time.monotonic() < end:
        await asyncio.sleep(0.05)  # the one before is being cancelled
    assert readers == ["kv-from-prefill-0@1"]


async def test_an_offer_that_is_repeated_before_it_was_answered_replaces_the_first(
    offering: Offering,
) -> None:
    grants = await asyncio.gather(offering.offer("again"), offering.offer("again"))
    assert [grant.granted for grant in grants] == [True, True]
    assert len(offering.runner.reserved) == offering.service.inbound == 1
    assert offering.decode.handler_errors == 0


async def test_an_offer_that_is_given_back_before_it_was_answered_keeps_no_blocks(offering: Offering) -> None:
    offered = asyncio.create_task(offering.offer("unwanted"))
    await offering.runner.asked.wait()
    subject = offering.prefill.subjects.kv_release("decode-0")
    await offering.prefill.publish(subject, KvRelease("unwanted", 0, ""))
    await offered
    end = time.monotonic() + 5
    while offering.runner.reserved and time.monotonic() < end:
        await asyncio.sleep(0.01)
    assert (offering.runner.reserved, offering.service.inbound) == ([], 0)


def readers_of(pod: str) -> list[str]:
    return [name for task in asyncio.all_tasks() if (name := task.get_name()).startswith(f"kv-from-{pod}@")]
