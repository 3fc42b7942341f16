"""Offers of KV that come side by side, as after a prefill pod has hung for a while."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from types import SimpleNamespace
from typing import Any, cast

import pytest
import pytest_asyncio

from mmd_api.contract.errors import (
    CapacityError,
    DeadlineError,
    LeaseError,
    LinkError,
    MmdError,
    OverloadedError,
)
from mmd_workers.basics.overtaking import MAX_OVERTAKEN
from mmd_workers.decode.decode_service import DecodeService
from mmd_workers.kv.quantize import KvWire
from mmd_workers.model.prompt import KvLayout
from mmd_workers.observe.metrics import Metrics
from mmd_workers.observe.tracing import Tracing
from mmd_workers.sequences.token_publisher import SequenceBook
from mmd_workers.wire.bus import Bus
from mmd_workers.wire.messages.decode import KvChunk, KvCommit, KvCommitted, KvGrant, KvOffer, KvRelease
from mmd_workers.wire.messages.message_parts import Acknowledged, Sampling
from mmd_workers.wire.messages.prefill import GenerateRequest
from support.harness.waiting import DEADLINE_SECONDS, until

pytest_plugins = ["support.servers.nats_fixture"]
Connect = Callable[[str], Awaitable[Bus]]
LAYOUT = KvLayout(num_layers=1, num_kv_heads=[1], head_dim=[16], dtype="float32")


class BusyEngine:
    """An engine that is never free at once, and has room for everything, though for each sequence only once."""

    kv_layout = LAYOUT

    def __init__(self) -> None:
        self.reserved: list[str] = []
        self.attached: list[str] = []
        self.asked = asyncio.Event()
        self.error: MmdError | None = None

    async def reserve(self, sequence: str, *_: object) -> int:
        await self._step()
        if self.error is not None:
            raise self.error
        if sequence in self.reserved:
            raise ValueError(f"sequence {sequence} already exists")
        self.reserved.append(sequence)
        return 0

    async def attach(self, sequence: str, *_: object) -> None:
        await self._step()
        self.attached.append(sequence)

    def abort(self, *sequences: str) -> None:
        self.reserved = [name for name in self.reserved if name not in sequences]

    async def _step(self) -> None:
        self.asked.set()
        await asyncio.sleep(0.05)


class LinksToBe:
    """Links that are being made until the test is over."""

    endpoint = "127.0.0.1:1"
    backend = "Gloo"

    def __init__(self) -> None:
        self.over = threading.Event()

    def epoch_for(self, pod: str, incarnation: str, failed_epoch: int) -> int:
        return failed_epoch + 1

    def connect(self, *_: object) -> Any:
        self.over.wait(DEADLINE_SECONDS)
        return SimpleNamespace(dead="", held=nullcontext)

    def drop(self, pod: str) -> None:
        self.dropped = pod


@dataclass
class Offering:
    """A decode service, and a prefill pod that offers it sequences."""

    service: Any
    engine: BusyEngine
    decode: Bus
    prefill: Bus

    async def offer(
        self,
        request: str,
        failed_epoch: int = -1,
        arrived: float = 0.0,
        backend: str = "Gloo",
        prompt_tokens: int = 8,
    ) -> KvGrant:
        facts: dict[str, Any] = {"pod": "prefill-0", "incarnation": "i1", "max_tokens": 4}
        facts |= {"backend": backend, "prompt_tokens": prompt_tokens}
        link = {"link_endpoint": "127.0.0.1:2", "lease_seconds": 60.0, "failed_epoch": failed_epoch}
        link["arrived"] = arrived
        offered = KvOffer(request_id=request, attempt=0, layout=KvWire(LAYOUT).terms, **facts, **link)
        return await self.prefill.request(
            self.prefill.subjects.kv_offer("decode-0"), offered, KvGrant, timeout=DEADLINE_SECONDS
        )


@pytest_asyncio.fixture
async def offering(connect: Connect) -> AsyncIterator[Offering]:
    bus, links, engine = await connect("decode-0"), LinksToBe(), BusyEngine()
    book = SequenceBook(bus, "decode-0", Metrics(), Tracing("test", "test", "test", None))
    parts: tuple[Any, ...] = (bus, "decode-0", engine, links, book, Metrics())
    service = cast(Any, DecodeService)(*parts)
    await service.start()
    yield Offering(service, engine, bus, await connect("prefill-0"))
    links.over.set()


@pytest.mark.parametrize("prompt_tokens", [8, 0], ids=["a sequence", "the link alone"])
async def test_an_offer_over_another_backend_is_refused_at_once(
    offering: Offering, prompt_tokens: int
) -> None:
    grant = await offering.offer("r", backend="Nixl", prompt_tokens=prompt_tokens)
    assert (grant.granted, grant.code) == (False, "layout")
    assert grant.reason == (
        "prefill-0 sends KV over Nixl, and decode-0 receives it over Gloo; set spec.transfer.kv.backend once for both pools"
    )


async def test_a_pods_link_has_one_reader_despite_simultaneous_offers(offering: Offering) -> None:
    assert (await offering.offer("first")).epoch == 0
    grants = await asyncio.gather(*(offering.offer(f"r{number}", 0) for number in range(4)))
    assert [grant.epoch for grant in grants] == [1] * 4
    # The one before is being cancelled.
    await until(lambda: readers_of("prefill-0") == ["kv-from-prefill-0@1"])


async def test_an_offer_repeated_before_its_answer_gets_the_pending_grant(
    offering: Offering,
) -> None:
    first, second = await asyncio.gather(offering.offer("again"), offering.offer("again"))
    assert first.granted
    assert first == second
    assert len(offering.engine.reserved) == offering.service.inbound == 1
    assert offering.decode.handler_errors == 0


async def test_an_offer_that_is_repeated_after_its_grant_replaces_it(offering: Offering) -> None:
    first = await offering.offer("again")
    second = await offering.offer("again")
    assert second.granted
    assert first.lease_id != second.lease_id
    assert len(offering.engine.reserved) == offering.service.inbound == 1


async def test_an_offer_repeated_over_another_link_gets_a_new_grant(
    offering: Offering,
) -> None:
    first, second = await asyncio.gather(offering.offer("again"), offering.offer("again", failed_epoch=4))
    assert (first.epoch, second.epoch) == (0, 5)
    assert len(offering.engine.reserved) == offering.service.inbound == 1


async def test_an_offer_given_back_before_its_answer_keeps_no_blocks(offering: Offering) -> None:
    offered = asyncio.create_task(offering.offer("unwanted"))
    await offering.engine.asked.wait()
    subject = offering.prefill.subjects.kv_release("decode-0")
    await offering.prefill.request(subject, KvRelease("unwanted", 0, ""), Acknowledged, timeout=30)
    await offered
    await until(lambda: not offering.engine.reserved)
    assert offering.service.inbound == 0


async def test_a_chunk_that_is_announced_again_is_expected_once(offering: Offering) -> None:
    grant = await offering.offer("r")
    chunk = KvChunk("prefill-0", grant.epoch, grant.lease_id, 0, 0, 4, 0)
    subject = offering.prefill.subjects.kv_chunk("decode-0")
    for announced in (chunk, chunk, replace(chunk, sequence=1, start=4, first_tag=1)):
        with pytest.raises(DeadlineError):  # the link is not there yet, so nothing is received
            await offering.prefill.request(subject, announced, Acknowledged, timeout=0.3)
    assert offering.service._pumps["prefill-0"].chunks.qsize() == 2
    with pytest.raises(LinkError, match="offer again"):
        await offering.prefill.request(subject, replace(chunk, epoch=7), Acknowledged, timeout=30)


async def test_waiting_announcements_are_answered_in_time_and_do_not_pile_up(
    offering: Offering,
) -> None:
    grant = await offering.offer("r")
    chunk = KvChunk("prefill-0", grant.epoch, grant.lease_id, 0, 0, 4, 0)
    subject = offering.prefill.subjects.kv_chunk("decode-0")
    for _ in range(2):  # the link is not there yet, so nothing is received
        with pytest.raises(OverloadedError, match="announce it again"):
            await offering.prefill.request(subject, chunk, Acknowledged, timeout=8)
    assert offering.service._pumps["prefill-0"].chunks.qsize() == 1


async def test_a_waiting_chunk_is_refused_once_its_lease_has_ended(
    offering: Offering,
) -> None:
    grant = await offering.offer("r")
    chunk = KvChunk("prefill-0", grant.epoch, grant.lease_id, 0, 0, 4, 0)
    subject = offering.prefill.subjects.kv_chunk("decode-0")
    with pytest.raises(OverloadedError, match="announce it again"):  # the link is not there yet
        await offering.prefill.request(subject, chunk, Acknowledged, timeout=DEADLINE_SECONDS)
    released, subject_of_releases = KvRelease("r", 0, grant.lease_id), offering.prefill.subjects.kv_release
    await offering.prefill.request(subject_of_releases("decode-0"), released, Acknowledged, timeout=30)
    offering.service._links.over.set()

    async def is_refused(announced: KvChunk) -> bool:
        with pytest.raises(LeaseError, match="offer the request again"):
            await offering.prefill.request(subject, announced, Acknowledged, timeout=DEADLINE_SECONDS)
        return True

    for announced in (chunk, chunk, replace(chunk, sequence=1, start=4, first_tag=1)):
        await until(partial(is_refused, announced), retried=(OverloadedError,))
    assert readers_of("prefill-0") == ["kv-from-prefill-0@0"], "the link is in order"
    assert offering.service._unwritten == 0


async def test_a_repeated_commit_gets_the_answer_of_the_first(offering: Offering) -> None:
    grant = await offering.offer("r")
    now = time.time()
    request = GenerateRequest("r", 0, "gateway-0", [1] * 8, [], Sampling(4), [], now + 60, now)
    commit = KvCommit(grant.lease_id, request, [1], 8, num_chunks=0)
    subject = offering.prefill.subjects.kv_commit("decode-0")
    answers = await asyncio.gather(
        *(offering.prefill.request(subject, commit, KvCommitted, timeout=30) for _ in range(2))
    )
    answers.append(await offering.prefill.request(subject, commit, KvCommitted, timeout=30))
    assert answers == [KvCommitted(grant.lease_id, ok=True)] * 3
    assert offering.engine.attached == ["r#0"]


async def test_the_code_of_a_refusal_shows_whether_the_sequence_can_ever_fit(offering: Offering) -> None:
    offering.engine.error = CapacityError("64 blocks, the pool has 8")
    never = await offering.offer("huge")
    assert (never.granted, never.code, never.reason) == (False, "too_large", "64 blocks, the pool has 8")
    offering.engine.error = OverloadedError("no block is free")
    assert (await offering.offer("later")).code == "overloaded"


async def test_small_offers_pass_a_large_one_that_waits_but_only_so_many(
    offering: Offering, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mmd_workers.decode.offer_queue.REPEAT_SECONDS", DEADLINE_SECONDS)
    offering.engine.error = OverloadedError("no block is free")
    assert not (await offering.offer("large", arrived=1.0)).granted
    assert not (await offering.offer("small-0", arrived=2.0)).granted, "it passes nobody"
    offering.engine.error = None
    for number in range(MAX_OVERTAKEN):
        assert (await offering.offer(f"small-{number}", arrived=2.0)).granted
    late = await offering.offer("late", arrived=3.0)
    assert (late.granted, late.code) == (False, "overloaded")
    assert (await offering.offer("large", arrived=1.0)).granted
    assert (await offering.offer("late", arrived=3.0)).granted


async def test_a_crashed_reader_frees_pending_room_and_logs_the_cause(
    offering: Offering, caplog: pytest.LogCaptureFixture
) -> None:
    grant = await offering.offer("r")
    offering.service._links.over.set()  # with a link that lacks what the reader needs
    chunk = KvChunk("prefill-0", grant.epoch, grant.lease_id, 0, 0, 4, 0)
    subject = offering.prefill.subjects.kv_chunk("decode-0")
    await offering.prefill.request(subject, chunk, Acknowledged, timeout=30)
    await until(lambda: (offering.service.inbound, offering.engine.reserved) == (0, []))
    with pytest.raises(LinkError, match="offer again"):
        await offering.prefill.request(
            subject, replace(chunk, sequence=1, start=4, first_tag=1), Acknowledged, timeout=30
        )
    assert "AttributeError" in caplog.text
    assert offering.service._links.dropped == "prefill-0"


def readers_of(pod: str) -> list[str]:
    return [name for task in asyncio.all_tasks() if (name := task.get_name()).startswith(f"kv-from-{pod}@")]
