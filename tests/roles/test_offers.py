"""Offers of KV that come side by side, as after a prefill pod has hung for a while."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Awaitable, Callable
from dataclasses import asdict
from types import SimpleNamespace
from typing import Any, cast

from mmd_workers.decode.service import DecodeService
from mmd_workers.decode.tokens import SequenceBook
from mmd_workers.model.types import KvLayout
from mmd_workers.observe.metrics import Metrics
from mmd_workers.observe.tracing import Tracing
from mmd_workers.wire.bus import Bus
from mmd_workers.wire.messages import KvGrant, KvOffer

pytest_plugins = ["nats_fixture"]
Connect = Callable[[str], Awaitable[Bus]]
LAYOUT = KvLayout(num_layers=1, num_kv_heads=[1], head_dim=[16], dtype="float32")


class BusyRunner:
    """An engine that is never free at once, and has room for everything."""

    async def call(self, work: Callable[[Any], object]) -> None:
        await asyncio.sleep(0.05)


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


async def test_a_pod_has_one_reader_of_its_link_though_it_offers_twice_at_once(connect: Connect) -> None:
    bus, links = await connect("decode-0"), LinksToBe()
    model = SimpleNamespace(kv_layout=LAYOUT)
    book = SequenceBook(bus, "decode-0", Metrics(), Tracing("test", "test", "test", None))
    parts: tuple[Any, ...] = (bus, "decode-0", BusyRunner(), model, links, book, Metrics())
    await cast(Any, DecodeService)(*parts).start()
    prefill = await connect("prefill-0")

    async def offer(request: str, failed_epoch: int) -> KvGrant:
        facts: dict[str, Any] = {"pod": "prefill-0", "incarnation": "i1", "prompt_tokens": 8, "max_tokens": 4}
        link = {"link_endpoint": "127.0.0.1:2", "lease_seconds": 60.0, "failed_epoch": failed_epoch}
        offered = KvOffer(request_id=request, attempt=0, layout=asdict(LAYOUT), **facts, **link)
        return await prefill.request(prefill.subjects.kv_offer("decode-0"), offered, KvGrant, timeout=5)

    try:
        assert (await offer("first", -1)).epoch == 0
        grants = await asyncio.gather(*(offer(f"r{number}", 0) for number in range(4)))
        assert [grant.epoch for grant in grants] == [1] * 4
        end = time.monotonic() + 5
        while len(readers := readers_of("prefill-0")) != 1 and time.monotonic() < end:
            await asyncio.sleep(0.05)  # the one before is being cancelled
        assert readers == ["kv-from-prefill-0@1"]
    finally:
        links.over.set()


def readers_of(pod: str) -> list[str]:
    return [name for task in asyncio.all_tasks() if (name := task.get_name()).startswith(f"kv-from-{pod}@")]
