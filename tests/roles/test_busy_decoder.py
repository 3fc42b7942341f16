"""A decoder whose engine is in a long step: handovers wait for it, whatever the deadline of a chunk on the link."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from itertools import pairwise
from types import SimpleNamespace
from typing import Any, TypeVar, cast

import pytest
import torch

from mmd_api.contract.errors import (
    CountMismatchError,
    DeadlineError,
    MmdError,
    OverloadedError,
    PeerLostError,
)
from mmd_workers.basics.clock import SYSTEM_CLOCK, Clock
from mmd_workers.decode import decode_service as service
from mmd_workers.decode.decode_service import DecodeService
from mmd_workers.kv.leases import Lease, LeaseTable
from mmd_workers.kv.links import LinkManager
from mmd_workers.model.prompt import KvLayout
from mmd_workers.observe.metrics import Metrics
from mmd_workers.observe.tracing import Tracing
from mmd_workers.prefill import kv_sender
from mmd_workers.prefill.kv_sender import Finished, KvSender, Ranges, prefix_of
from mmd_workers.sequences.token_publisher import SequenceBook
from mmd_workers.wire.bus import Bus
from mmd_workers.wire.messages.decode import KvChunk, KvCommit, KvOffer
from mmd_workers.wire.messages.gateway import PhaseReport
from mmd_workers.wire.messages.message_parts import Acknowledged, Sampling
from mmd_workers.wire.messages.prefill import GenerateRequest
from support.harness.clock import FakeClock
from support.harness.waiting import DEADLINE_SECONDS, until
from support.serving.memory_bus import MemoryNet

pytestmark = pytest.mark.promise

Connect = Callable[[str], Awaitable[Bus]]
LAYOUT = KvLayout(num_layers=1, num_kv_heads=[1], head_dim=[16], dtype="float32")
BLOCK_TOKENS = 4
CHUNK_SECONDS = 0.4
CPU = torch.device("cpu")
T = TypeVar("T")


class BusyEngine:
    """An engine that runs a command after a step of so many seconds; `asked` and `log` have the commands in order, before and after."""

    kv_layout = LAYOUT

    def __init__(self, step_seconds: float, clock: Clock = SYSTEM_CLOCK) -> None:
        self._clock = clock
        self.asked: list[str] = []
        self.log: list[str] = []
        self.cached_tokens = 0
        self.offered: list[bytes] = []
        self.step_seconds = {"": step_seconds}  # by the first word of the command; others

    async def identities(self, sequence: str, request: GenerateRequest) -> list[bytes]:
        return prefix_of(request, BLOCK_TOKENS)

    async def reserve(
        self, sequence: str, prompt_tokens: int, max_tokens: int, prefix: list[bytes], _: int
    ) -> int:
        self.offered = prefix
        await self._run("reserve")
        return self.cached_tokens

    async def read_kv(self, sequence: str, start: int, end: int) -> list[torch.Tensor]:
        return [torch.full((2, end - start, 1, 16), float(start))]

    async def write_kv(self, sequence: str, start: int, tensors: list[torch.Tensor]) -> None:
        assert torch.equal(tensors[0], torch.full_like(tensors[0], float(start)))
        await self._run(f"write {start}")

    async def attach(self, *_: object) -> None:
        await self._run("attach")

    def abort(self, *sequences: str) -> None:
        self.log.append("abort")

    async def _run(self, command: str) -> None:
        self.asked.append(command)
        await self._clock.sleep(self.step_seconds.get(command.split(maxsplit=1)[0], self.step_seconds[""]))
        self.log.append(command)


@asynccontextmanager
async def pair(
    connect: Connect,
    engine: BusyEngine,
    chunk_seconds: float = DEADLINE_SECONDS,
    max_links: int = 64,
    others: dict[str, str] | None = None,
    lease_seconds: float = 60.0,
    clock: Clock = SYSTEM_CLOCK,
) -> AsyncIterator[tuple[KvSender, list[LinkManager]]]:
    """The sender of prefill-0, on this clock, the only peer of decode-0, which has this engine; and the links of both."""
    decode, prefill = await connect("decode-0"), await connect("prefill-0")
    links = [
        LinkManager("Gloo", pod, "i1", "127.0.0.1", CPU, chunk_seconds, max_links=max_links)
        for pod in ("decode-0", "prefill-0")
    ]
    book = SequenceBook(decode, "decode-0", Metrics(), Tracing("test", "test", "test", None))
    parts: tuple[Any, ...] = (decode, "decode-0", engine, links[0], book, Metrics())
    service = cast(Any, DecodeService)(*parts, clock=clock)
    await service.start()
    expiring = asyncio.create_task(service.run())
    await decode.flush()
    reader = cast(Any, BusyEngine(0.0))
    sender = KvSender(
        *(
            prefill,
            "prefill-0",
            "i1",
            reader,
            links[1],
            lease_seconds,
            lambda: {"decode-0": "i1", **(others or {})},
            Metrics(),
        ),
        clock=clock,
    )
    try:
        yield sender, links
    finally:
        expiring.cancel()
        for manager in links:
            manager.close()


def request(seconds: float = 60.0) -> GenerateRequest:
    now = time.time()
    return GenerateRequest("r", 0, "gateway-0", [1] * 12, [], Sampling(4), ["decode-0"], now + seconds, now)


class Memory:
    """A clock that stands still unless the test moves it, and buses in memory on which requests time out by it. The links are real."""

    def __init__(self) -> None:
        self.clock = FakeClock()
        self.net = MemoryNet(self.clock)

    async def connect(self, name: str) -> Bus:
        return self.net.bus(name)

    async def until(self, condition: Callable[[], object]) -> None:
        """Let the clock run along with the links until the condition holds."""
        while not condition():
            await asyncio.sleep(0.01)
            await self.clock.let_pass(0.01)


def three_ranges() -> Ranges:
    return Ranges(ready=[(0, 4), (4, 8), (8, 12)], finished=Finished([1], 12))


HANDED_OVER = ["reserve", "write 0", "write 4", "write 8", "attach"]


@pytest.mark.parametrize(
    "step_seconds", [CHUNK_SECONDS - 0.1, CHUNK_SECONDS, CHUNK_SECONDS + 0.1, 3 * CHUNK_SECONDS]
)
async def test_a_step_longer_than_a_chunks_deadline_breaks_no_link(
    connect: Connect, step_seconds: float
) -> None:
    engine = BusyEngine(step_seconds)
    async with pair(connect, engine, CHUNK_SECONDS) as (sender, links):
        wanted = request()
        await sender.hand_over(wanted, "r#0", await sender.reserve(wanted), three_ranges())
        assert engine.log == HANDED_OVER
        assert [manager.live_links for manager in links] == [1, 1]


async def note(memory: Memory, subject: str, kind: type[T], messages: list[T]) -> None:
    """List the messages for decode-0."""

    async def receive(message: T) -> None:
        messages.append(message)

    bus = await memory.connect("spy")
    await bus.subscribe(getattr(bus.subjects, subject)("decode-0"), kind, receive)


async def test_a_transfer_is_reported_before_its_answer_ends(connect: Connect) -> None:
    gateway, reports = await connect("gateway-0"), asyncio.Queue[PhaseReport]()
    await gateway.subscribe(gateway.subjects.phases("gateway-0"), PhaseReport, reports.put)
    await gateway.flush()
    async with pair(connect, BusyEngine(0.0)) as (sender, _):
        wanted = request()
        await sender.hand_over(wanted, "r#0", await sender.reserve(wanted), three_ranges())
        report = await asyncio.wait_for(reports.get(), DEADLINE_SECONDS)
        (phase,) = report.phases
        assert (report.pod, phase.name, phase.detail["tokens"]) == ("decode-0", "kv_transfer", 12)
        assert phase.detail["wire_seconds"] > 0


async def test_a_step_longer_than_the_offer_wait_takes_one_reservation() -> None:
    memory, offers = Memory(), list[KvOffer]()
    engine = BusyEngine(2.5 * kv_sender.OFFER_SECONDS, memory.clock)
    async with pair(memory.connect, engine, clock=memory.clock) as (sender, _):
        await note(memory, "kv_offer", KvOffer, offers)
        reserving = asyncio.create_task(sender.reserve(request(seconds=600.0)))
        await until(lambda: engine.asked)
        await memory.clock.let_pass(2.5 * kv_sender.OFFER_SECONDS)
        reservation = await reserving
        assert reservation.grant.granted
        assert (engine.log, len(offers)) == (["reserve"], 3)
        await reservation.link


async def test_a_silent_decoder_holds_no_request_while_another_has_room() -> None:
    memory = Memory()
    engine, idle = BusyEngine(3600.0, memory.clock), BusyEngine(0.0)
    async with pair(memory.connect, engine, others={"decode-1": "i1"}, clock=memory.clock) as (sender, _):
        bus = await memory.connect("decode-1")
        links = LinkManager("Gloo", "decode-1", "i1", "127.0.0.1", CPU, DEADLINE_SECONDS)
        book = SequenceBook(bus, "decode-1", Metrics(), Tracing("test", "test", "test", None))
        parts: tuple[Any, ...] = (bus, "decode-1", idle, links, book, Metrics())
        await cast(Any, DecodeService)(*parts).start()
        reserving = asyncio.create_task(sender.reserve(request(seconds=600.0)))
        await until(lambda: engine.asked)
        await memory.clock.let_pass(kv_sender.OFFER_SECONDS)
        reservation = await reserving
        assert (reservation.pod, engine.log, idle.log) == ("decode-1", [], ["reserve"])
        await reservation.link
        links.close()


async def test_a_step_longer_than_the_reply_waits_only_delays_a_commit() -> None:
    memory, commits = Memory(), list[KvCommit]()
    engine = BusyEngine(0.0, memory.clock)
    async with pair(memory.connect, engine, 60.0, clock=memory.clock) as (sender, _):
        await note(memory, "kv_commit", KvCommit, commits)
        wanted = request(seconds=600.0)
        reservation = await sender.reserve(wanted)
        engine.step_seconds["attach"] = 30.0
        handing = asyncio.create_task(sender.hand_over(wanted, "r#0", reservation, three_ranges()))
        await memory.until(lambda: engine.asked[-1] == "attach")
        await memory.clock.let_pass(30.0)
        await memory.until(handing.done)  # the sender may pause just now before it asks again
        await handing
        assert engine.log == HANDED_OVER
        most = 30.0 / kv_sender.REPLY_SECONDS
        assert most * 0.8 < len(commits) <= most


@pytest.mark.parametrize(
    ("cached_tokens", "written"), [(0, [0, 4, 8]), (3, [3, 4, 8]), (4, [4, 8]), (9, [9]), (12, [])]
)
async def test_kv_that_the_decoder_has_cached_is_not_sent(
    connect: Connect, cached_tokens: int, written: list[int]
) -> None:
    engine = BusyEngine(0.0)
    engine.cached_tokens = cached_tokens
    async with pair(connect, engine) as (sender, _):
        wanted = request()
        await sender.hand_over(wanted, "r#0", await sender.reserve(wanted), three_ranges())
        assert engine.offered == prefix_of(wanted, BLOCK_TOKENS)
        assert len(engine.offered) == 3
        assert engine.log == ["reserve", *(f"write {start}" for start in written), "attach"]


async def test_a_lease_is_renewed_while_prefill_computes_what_the_decoder_has_cached(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    memory = Memory()
    leases_clock = SimpleNamespace(monotonic=memory.clock.now, time=memory.clock.unix)
    monkeypatch.setattr(service, "time", leases_clock)
    renew, renewed = LeaseTable.renew, list[float]()

    def note_renewal(table: LeaseTable, lease_id: str, now: float, seconds: float) -> Lease:
        renewed.append(now)
        return renew(table, lease_id, now, seconds)

    monkeypatch.setattr(LeaseTable, "renew", note_renewal)
    engine = BusyEngine(0.0, memory.clock)
    engine.cached_tokens = 12
    async with pair(memory.connect, engine, lease_seconds=60.0, clock=memory.clock) as (sender, _):
        wanted, ranges = request(seconds=600.0), Ranges()
        reservation = await sender.reserve(wanted)
        await reservation.link
        handing_over = asyncio.create_task(sender.hand_over(wanted, "r#0", reservation, ranges))
        for end in (2, 4, 6, 8, 10, 12):
            await memory.clock.let_pass(30.0)
            ranges.ready.append((end - 2, end))
            ranges.changed.set()
            await until(lambda end=end: len(renewed) == end // 2)
        ranges.finished = Finished([1], 12)
        ranges.changed.set()
        await memory.until(handing_over.done)
        await handing_over
        assert engine.log == ["reserve", "attach"]


async def test_waiting_handovers_to_a_silent_decoder_copy_no_more_kv_than_fits_on_the_way(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Copies lie beside the KV pool, in memory that nobody left for them."""
    memory, engine = Memory(), BusyEngine(0.0)
    copied = sent = most = 0
    waiting, may_send = list[KvChunk](), asyncio.Event()
    read, send, announce = BusyEngine.read_kv, KvSender._send, KvSender._announce

    async def counted_read(self: BusyEngine, *arguments: Any) -> list[torch.Tensor]:
        nonlocal copied, most
        copied += 1
        most = max(most, copied - sent)
        return await read(self, *arguments)

    begun = list[Any]()

    async def counted_send(self: KvSender, *arguments: Any) -> None:
        nonlocal sent
        begun.append(arguments)
        await send(self, *arguments)
        sent += 1

    async def held_announce(self: KvSender, link: Any, pod: str, chunk: KvChunk) -> None:
        waiting.append(chunk)
        await may_send.wait()
        await announce(self, link, pod, chunk)

    monkeypatch.setattr(BusyEngine, "read_kv", counted_read)
    monkeypatch.setattr(KvSender, "_send", counted_send)
    monkeypatch.setattr(KvSender, "_announce", held_announce)
    async with pair(memory.connect, engine, clock=memory.clock) as (sender, _):
        handing = []
        for number in range(6):
            wanted = replace(request(seconds=600.0), request_id=f"r-{number}")
            reservation = await sender.reserve(wanted)
            ranges = Ranges(ready=[(0, 4), (4, 8)], finished=Finished([1], 8))
            handing.append(
                asyncio.create_task(sender.hand_over(wanted, f"r-{number}#0", reservation, ranges))
            )
        await memory.until(lambda: len(begun) == len(handing) and waiting)
        may_send.set()
        await memory.until(lambda: all(task.done() for task in handing))
        await asyncio.gather(*handing)
        assert (copied, sent) == (12, 12)
        assert most == kv_sender.COPIES_PER_POD


async def test_kv_is_not_sent_once_its_lease_has_ended() -> None:
    memory, ranges, lease_seconds = Memory(), Ranges(ready=[(0, 4)]), 60.0
    engine, chunks = BusyEngine(0.0, memory.clock), list[KvChunk]()
    connected = pair(memory.connect, engine, lease_seconds=lease_seconds, clock=memory.clock)
    async with connected as (sender, links):
        await note(memory, "kv_chunk", KvChunk, chunks)
        wanted = request(seconds=1200.0)
        handing = asyncio.create_task(sender.hand_over(wanted, "r#0", await sender.reserve(wanted), ranges))
        await memory.until(lambda: "write 0" in engine.log)
        await memory.clock.let_pass(lease_seconds + 1.0)
        assert engine.log == ["reserve", "write 0", "abort"]
        for start in (4, 8):
            ranges.ready.append((start, start + 4))
            await noticed(memory, ranges, handing)
            await memory.clock.let_pass(lease_seconds + 1.0)
        assert {chunk.start for chunk in chunks} == {0, 4}, "the second one is refused"
        assert sent_tokens(sender) == 4
        ranges.finished = Finished([1], 12)
        ranges.changed.set()
        await memory.until(handing.done)
        await handing
        assert engine.log == ["reserve", "write 0", "abort", *HANDED_OVER]
        assert sent_tokens(sender) == 4 + 12
        assert [manager.live_links for manager in links] == [1, 1]


async def test_a_prompt_whose_lease_has_ended_waits_no_longer_than_its_deadline() -> None:
    memory, ranges = Memory(), Ranges(ready=[(0, 4)])
    engine = BusyEngine(0.0, memory.clock)
    async with pair(memory.connect, engine, clock=memory.clock) as (sender, _):
        wanted = request(seconds=180.0)
        handing = asyncio.create_task(sender.hand_over(wanted, "r#0", await sender.reserve(wanted), ranges))
        await memory.until(lambda: "write 0" in engine.log)
        await memory.clock.let_pass(90.0)
        ranges.ready.append((4, 8))
        await noticed(memory, ranges, handing)
        await memory.clock.let_pass(100.0)
        await memory.until(handing.done)
        with pytest.raises(DeadlineError, match="request deadline exceeded"):
            await handing


async def noticed(memory: Memory, ranges: Ranges, handing: asyncio.Task[None]) -> None:
    """Report a change, and wait until the handover waits for the next one, or has ended."""
    ranges.changed.set()
    await memory.until(lambda: handing.done() or not ranges.changed.is_set())


def sent_tokens(sender: KvSender) -> float:
    num_bytes = sender._metrics.transfer_bytes.labels("kv", "sent")._value.get()
    return float(num_bytes / LAYOUT.bytes_per_token())


@pytest.mark.parametrize("chunk_seconds", [0.05, 0.4, 2.0, 60.0])
async def test_between_two_announcements_of_a_chunk_its_deadline_cannot_pass(
    connect: Connect, monkeypatch: pytest.MonkeyPatch, chunk_seconds: float
) -> None:
    """The decoder may start to receive, and so the deadline may start, at any moment in between."""
    clock, announced = FakeClock(), list[float]()
    refused: list[MmdError] = [DeadlineError("lost"), OverloadedError("full"), PeerLostError("not there yet")]

    async def refuse(*_: object, timeout: float) -> Acknowledged:
        announced.append(clock.now())
        if not refused:
            return Acknowledged()
        if isinstance(error := refused.pop(0), DeadlineError):
            await clock.sleep(timeout)
        raise error

    async with pair(connect, BusyEngine(0.0), chunk_seconds, clock=clock) as (sender, links):
        wanted = request()
        link = await (await sender.reserve(wanted)).link
        chunk = KvChunk("prefill-0", link.epoch, "lease", 0, 0, 4, 0)
        monkeypatch.setattr(sender._bus, "request", refuse)
        announcing = asyncio.create_task(sender._announce(link, "decode-0", chunk))
        await clock.until(announcing.done)
        await announcing
        monkeypatch.undo()
    waits = [later - earlier for earlier, later in pairwise(announced)]
    assert len(waits) == 3
    assert 0 < max(waits) <= links[0].chunk_timeout_seconds / 2


async def test_a_link_is_not_evicted_between_two_chunks_of_a_handover(
    connect: Connect,
) -> None:
    engine = BusyEngine(0.0)
    async with pair(connect, engine, max_links=1) as (sender, links):

        def other_link() -> None:
            links[0].connect("prefill-1", "i1", "127.0.0.1:1", 0)

        for state in ("granted before the link was made", "granted over a link that is there"):
            wanted, ranges = request(), Ranges(ready=[(0, 4)])
            engine.log.clear()
            reservation = await sender.reserve(wanted)
            handing = asyncio.create_task(sender.hand_over(wanted, "r#0", reservation, ranges))
            await until(lambda: "write 0" in engine.log)
            with pytest.raises(OverloadedError, match="all 1 KV links are in use"):
                other_link()
            rest = three_ranges()
            ranges.ready, ranges.finished = rest.ready, rest.finished
            ranges.changed.set()
            await handing
            assert engine.log == HANDED_OVER, state
        made = await asyncio.to_thread(links[0].connect, "prefill-0", "i1", links[1].endpoint, 0)
        assert not made.in_use


class WaitingEngine(BusyEngine):
    """An engine in a step that ends with `end_step`, where all commands that wait are run, in order."""

    def __init__(self) -> None:
        super().__init__(0.0)
        self.waiting: list[tuple[str, asyncio.Future[None]]] = []

    async def _run(self, command: str) -> None:
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.waiting.append((command, done))
        await done

    def commands(self) -> list[str]:
        return [command for command, _ in self.waiting]

    def end_step(self) -> None:
        waiting, self.waiting = self.waiting, []
        for command, done in waiting:
            self.log.append(command)
            done.set_result(None)


async def granted(sender: KvSender, engine: WaitingEngine) -> asyncio.Task[None]:
    """A hand-over of three ranges, once it has its grant."""
    reserving = asyncio.create_task(sender.reserve(request()))
    await until(lambda: engine.commands() == ["reserve"])
    engine.end_step()
    return asyncio.create_task(sender.hand_over(request(), "r#0", await reserving, three_ranges()))


async def test_a_handover_of_many_chunks_waits_for_only_one_step(
    connect: Connect,
) -> None:
    engine = WaitingEngine()
    async with pair(connect, engine) as (sender, _):
        handing_over = await granted(sender, engine)
        await until(lambda: engine.commands() == HANDED_OVER[1:])
        engine.end_step()
        await handing_over
        assert engine.log == HANDED_OVER


async def test_a_decoder_in_a_long_step_receives_only_what_fits(
    connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    chunk_bytes = 4 * LAYOUT.bytes_per_token()
    monkeypatch.setattr(service, "UNWRITTEN_BYTES", 2 * chunk_bytes)
    engine = WaitingEngine()
    async with pair(connect, engine, CHUNK_SECONDS) as (sender, _):
        handing_over = await granted(sender, engine)
        await until(lambda: engine.commands() == ["write 0", "write 4"])
        await asyncio.sleep(3 * CHUNK_SECONDS)
        assert engine.commands() == ["write 0", "write 4"]
        engine.end_step()
        await until(lambda: engine.commands() == ["write 8", "attach"])
        engine.end_step()
        await handing_over


def failed(manager: LinkManager, epoch: int) -> bool:
    return manager.failed_epoch("prefill-0", "i1") == epoch


@pytest.mark.parametrize("noticed_first", [True, False], ids=["by its failure", "by the next offer"])
async def test_chunks_of_killed_links_give_their_room_back(
    connect: Connect, monkeypatch: pytest.MonkeyPatch, noticed_first: bool
) -> None:
    """The decoder ends a receive because its link fails, or because an offer over the next link comes first."""
    monkeypatch.setattr(service, "UNWRITTEN_BYTES", 2 * 4 * LAYOUT.bytes_per_token())
    engine = WaitingEngine()
    async with pair(connect, engine) as (sender, links):
        for _ in range(10):
            reserving = asyncio.create_task(sender.reserve(request()))
            await until(lambda: engine.commands() == ["reserve"])
            engine.end_step()
            reservation = await reserving
            link = await reservation.link
            lease_id = reservation.grant.lease_id
            chunk = KvChunk("prefill-0", link.epoch, lease_id, 0, 0, 4, link.reserve_tags(1))
            await sender._announce(link, "decode-0", chunk)
            link.close()
            if noticed_first:
                await until(partial(failed, links[0], link.epoch))
        handing_over = await granted(sender, engine)
        await until(lambda: engine.commands() == ["write 0", "write 4"])
        engine.end_step()
        await until(lambda: engine.commands() == ["write 8", "attach"])
        engine.end_step()
        await handing_over


async def test_kv_that_cannot_be_written_ends_its_handover_and_not_the_link(connect: Connect) -> None:
    class Failing(BusyEngine):
        async def write_kv(self, sequence: str, start: int, tensors: list[torch.Tensor]) -> None:
            if not self.log.count("write 0"):
                self.log.append("write 0")
                raise RuntimeError("out of memory")
            await super().write_kv(sequence, start, tensors)

        async def attach(self, *_: object) -> None:
            if self.log.count("reserve") == 1:
                raise CountMismatchError("KV of 0 tokens was written")
            await super().attach()

    engine = Failing(0.01)
    async with pair(connect, engine) as (sender, links):
        wanted = request()
        await sender.hand_over(wanted, "r#0", await sender.reserve(wanted), three_ranges())
        assert engine.log[-1] == "attach"
        assert engine.log.count("reserve") == 2
        assert [manager.live_links for manager in links] == [1, 1]
        assert links[0].failed_epoch("prefill-0", "i1") == links[1].failed_epoch("decode-0", "i1")
