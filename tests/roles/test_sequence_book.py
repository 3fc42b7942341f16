"""The book of sequences: who receives tokens and failures, and what is remembered of cancelled requests."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace

import pytest
import pytest_asyncio

from mmd_api.contract.errors import DeadlineError, MmdError, OverloadedError, PeerLostError
from mmd_api.contract.pools import Modality
from mmd_workers.engine.interface import SampledToken, StepOutput
from mmd_workers.observe.metrics import Metrics
from mmd_workers.observe.tracing import Tracing
from mmd_workers.sequences import token_publisher as module
from mmd_workers.sequences.token_publisher import MAX_CANCELLED, MAX_ENDED, SequenceBook, sequence_id
from mmd_workers.wire.bus import Bus
from mmd_workers.wire.codec import MAX_MESSAGE_BYTES, pack
from mmd_workers.wire.messages.gateway import (
    PhaseReport,
    RequestFailed,
    SequenceReceipt,
    SequenceReport,
    TokenBatch,
    TokenItem,
)
from mmd_workers.wire.messages.message_parts import FeatureRef, Phase, Sampling
from mmd_workers.wire.messages.prefill import GenerateRequest
from support.harness.waiting import DEADLINE_SECONDS, until

pytestmark = pytest.mark.promise

NO_TRACING = Tracing("test", "test", "test", None)

Connect = Callable[[str], Awaitable[Bus]]


def request(deadline_seconds: float, request_id: str = "r", gateway: str = "gateway-0") -> GenerateRequest:
    now = time.time()
    return GenerateRequest(request_id, 0, gateway, [1], [], Sampling(4), [], now + deadline_seconds, now)


def medium(modality: Modality, tokens: int) -> FeatureRef:
    return FeatureRef("f", "d", modality, 10, tokens, [[1, tokens]], {}, {}, 1)


async def test_tokens_of_open_sequences_are_counted_by_what_they_stand_for(connect: Connect) -> None:
    book = SequenceBook(await connect("decode-0"), "decode-0", Metrics(), NO_TRACING)
    nothing = {"text": 0, "image": 0, "video": 0, "audio": 0}
    assert book.tokens() == nothing
    media = [medium("image", 3), medium("video", 4), medium("image", 2)]
    book.open(replace(request(60, "a"), token_ids=[1] * 20, features=media, output_token_ids=[5, 5]))
    book.open(replace(request(60, "b"), token_ids=[1] * 7))
    assert book.tokens() == {"text": 20 - 9 + 2 + 7, "image": 5, "video": 4, "audio": 0}
    await book.publish(StepOutput(tokens=[SampledToken(sequence_id("b", 0), 0, 9)]))
    assert book.tokens()["text"] == 21
    for name in book.all():
        book.forget(name)
    assert book.tokens() == nothing


@pytest.mark.parametrize(
    ("error", "deadline_seconds", "retryable"),
    [
        (DeadlineError("a transfer was late"), 60, True),
        (DeadlineError("the request is too late"), -1, False),
        (PeerLostError("gone"), 60, True),
        (MmdError("broken"), 60, False),
    ],
)
async def test_a_deadline_other_than_the_requests_own_is_retryable(
    connect: Connect, error: MmdError, deadline_seconds: float, retryable: bool
) -> None:
    bus = await connect("decode-0")
    heard: asyncio.Queue[RequestFailed] = asyncio.Queue()
    await bus.subscribe(bus.subjects.failures("gateway-0"), RequestFailed, heard.put)
    book = SequenceBook(bus, "decode-0", Metrics(), NO_TRACING)
    book.open(request(deadline_seconds))
    await book.fail(sequence_id("r", 0), error)
    failure = await asyncio.wait_for(heard.get(), DEADLINE_SECONDS)
    assert (failure.code, failure.retryable) == (error.code, retryable)
    assert len(book) == 0


async def test_a_cancellation_is_remembered_for_placements_that_it_overtook(connect: Connect) -> None:
    book = SequenceBook(await connect("decode-0"), "decode-0", Metrics(), NO_TRACING)
    assert book.cancel("r", 1) == []
    assert book.was_cancelled("r", 1)
    assert not book.was_cancelled("r", 2)
    book.cancel("r", 0)
    assert book.was_cancelled("r", 1)
    for number in range(MAX_CANCELLED):
        book.cancel(f"other-{number}", 0)
    assert not book.was_cancelled("r", 1)


async def test_each_phase_is_reported_once_even_when_reported_before_the_end(
    connect: Connect,
) -> None:
    bus = await connect("decode-0")
    reports: asyncio.Queue[PhaseReport] = asyncio.Queue()
    await bus.subscribe(bus.subjects.phases("gateway-0"), PhaseReport, reports.put)
    book = SequenceBook(bus, "decode-0", Metrics(), NO_TRACING)
    name = sequence_id("r", 0)
    book.open(request(60)).phases.append(Phase("kv_transfer", 1.0, 2.0))
    await book.report_phases(name)
    await book.finish(name)
    await book.report_phases(name)  # too late: all have been reported
    await bus.flush()
    heard = [await asyncio.wait_for(reports.get(), DEADLINE_SECONDS) for _ in range(2)]
    assert [[phase.name for phase in report.phases] for report in heard] == [["kv_transfer"], ["decode"]]
    assert reports.empty()


async def test_of_too_many_unconfirmed_ends_the_oldest_are_forgotten(connect: Connect) -> None:
    book = SequenceBook(await connect("decode-0"), "decode-0", Metrics(), NO_TRACING)
    for number in range(MAX_ENDED + 2):
        book.open(request(60, request_id=f"r{number}"))
        await book.close(sequence_id(f"r{number}", 0))
    assert len(book._ended) == MAX_ENDED
    assert book.cancel("r1", 0) == []
    assert book.cancel("r2", 0) == [sequence_id("r2", 0)]


@dataclass
class Gateway:
    """What a gateway hears, and what it answers to reports: `received` by request, -1 for those it does not want."""

    received: dict[str, int] = field(default_factory=dict)
    reports: list[SequenceReport] = field(default_factory=list)
    tokens: asyncio.Queue[TokenBatch] = field(default_factory=asyncio.Queue)
    failures: asyncio.Queue[RequestFailed] = field(default_factory=asyncio.Queue)

    async def answer(self, report: SequenceReport) -> SequenceReceipt:
        self.reports.append(report)
        return SequenceReceipt([self.received.get(held.request_id, -1) for held in report.sequences])

    async def next_tokens(self) -> list[int]:
        async with asyncio.timeout(30):
            return [item.index for item in (await self.tokens.get()).items]


@pytest_asyncio.fixture
async def gateway(connect: Connect) -> Gateway:
    bus, gateway = await connect("gateway-0"), Gateway()
    await bus.subscribe(bus.subjects.tokens("gateway-0"), TokenBatch, gateway.tokens.put)
    await bus.subscribe(bus.subjects.failures("gateway-0"), RequestFailed, gateway.failures.put)
    await bus.serve(bus.subjects.sequences("gateway-0"), SequenceReport, gateway.answer)
    await bus.flush()
    return gateway


async def new_book(connect: Connect) -> SequenceBook:
    return SequenceBook(await connect("decode-0"), "decode-0", Metrics(), NO_TRACING)


def step(*indices: int, last: int | None = None, sequence: str = "r#0") -> StepOutput:
    return StepOutput(tokens=[SampledToken(sequence, i, 5, "stop" if i == last else None) for i in indices])


def alive(_: str) -> bool:
    return True


async def test_a_full_send_buffer_blocks_no_sequence_and_the_tokens_follow(
    connect: Connect, gateway: Gateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    book = await new_book(connect)
    book.open(request(60))

    async def full(subject: str, message: object, reply: str = "") -> None:
        raise OverloadedError("full")

    with monkeypatch.context() as patched:
        patched.setattr(book._bus, "publish", full)
        async with asyncio.timeout(30):
            await book.publish(step(0, 1))
    gateway.received["r"] = 0
    await book.report(alive)
    assert gateway.tokens.empty(), "they may be on their way still"
    await book.report(alive)
    assert await gateway.next_tokens() == [0, 1]


async def test_a_lost_last_token_is_sent_again_until_it_is_confirmed(
    connect: Connect, gateway: Gateway
) -> None:
    book = await new_book(connect)
    book.open(request(60))
    await book.publish(step(0, 1, 2, last=2))
    await book.finish("r#0")
    assert await gateway.next_tokens() == [0, 1, 2]
    assert (len(book), book.unconfirmed) == (0, 1)
    gateway.received["r"] = 2
    for _ in range(3):
        await book.report(alive)
    assert [await gateway.next_tokens() for _ in range(2)] == [[2], [2]]
    gateway.received["r"] = 3
    await book.report(alive)
    assert book.unconfirmed == 0
    assert [[(h.tokens, h.open) for h in report.sequences] for report in gateway.reports] == [
        [(3, False)]
    ] * 4


async def test_a_lost_middle_token_is_resent_with_all_that_follow(connect: Connect, gateway: Gateway) -> None:
    book = await new_book(connect)
    book.open(request(60))
    await book.publish(step(0, 1))
    gateway.received["r"] = 1
    await book.report(alive)
    await book.publish(step(2))
    await book.report(alive)
    assert [await gateway.next_tokens() for _ in range(3)] == [[0, 1], [2], [1, 2]]
    assert book._metrics.resent_tokens._value.get() == 2
    assert len(book) == 1


async def test_a_failure_is_reported_until_the_gateway_moves_on(connect: Connect, gateway: Gateway) -> None:
    book = await new_book(connect)
    book.open(request(60))
    await book.fail("r#0", PeerLostError("gone"))
    gateway.received["r"] = 0
    await book.report(alive)
    async with asyncio.timeout(30):
        assert [(await gateway.failures.get()).code for _ in range(2)] == ["peer_lost"] * 2
    gateway.received["r"] = -1
    await book.report(alive)
    assert book.unconfirmed == 0


async def test_a_sequence_whose_cancellation_was_lost_is_found_by_the_next_report(
    connect: Connect, gateway: Gateway
) -> None:
    book = await new_book(connect)
    book.open(request(60, "wanted"))
    book.open(request(60, "cancelled"))
    gateway.received["wanted"] = 0
    assert await book.report(alive) == ["cancelled#0"]
    assert book._metrics.freed_sequences.labels("unwanted")._value.get() == 1


async def test_sequences_of_a_permanently_lost_gateway_are_freed(
    connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "GATEWAY_GONE_SECONDS", 0.0)
    book = await new_book(connect)
    book.open(request(60))
    book.open(request(60, "ended"))
    await book.fail("ended#0", PeerLostError("gone"))
    assert await book.report(alive) == []
    assert (len(book), book.unconfirmed) == (1, 1)
    assert await book.report(lambda _: False) == ["r#0"]
    assert book.unconfirmed == 0


async def test_a_report_of_thousands_of_sequences_comes_in_parts(connect: Connect, gateway: Gateway) -> None:
    book = await new_book(connect)
    for number in range(2 * module.REPORT_LINES + 1):
        name = f"chatcmpl-{number:032}-0"
        book.open(request(60, name))
        gateway.received[name] = 0
    assert await book.report(alive) == []
    sizes = [len(report.sequences) for report in gateway.reports]
    assert sizes == [module.REPORT_LINES, module.REPORT_LINES, 1]


async def test_an_unconfirmed_end_is_forgotten_even_without_a_server(
    connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "KEEP_ENDED_SECONDS", 0.1)
    monkeypatch.setattr(module, "REPORT_SECONDS", 0.02)
    book = await new_book(connect)
    book.open(request(60))
    await book.close("r#0")
    await book._bus.client.close()

    def unwanted(_: list[str]) -> None:
        raise AssertionError

    reporting = asyncio.create_task(book.report_forever(alive, unwanted))
    await until(lambda: not book.unconfirmed)
    reporting.cancel()


async def test_sequences_past_their_deadline_are_named(connect: Connect) -> None:
    book = await new_book(connect)
    book.open(request(60, "early"))
    book.open(request(-1, "late"))
    assert book.late(time.time()) == ["late#0"]


@pytest.mark.parametrize(("beyond", "messages"), [(-1, 1), (0, 1), (1, 2)])
async def test_a_step_larger_than_one_message_is_sent_in_several(
    connect: Connect, gateway: Gateway, beyond: int, messages: int
) -> None:
    book = await new_book(connect)
    names = [f"{number:0480}" for number in range(1800)]
    many = step_of(names)
    spare = MAX_MESSAGE_BYTES - len(pack(TokenBatch("decode-0", 1, items_of(names)))) + beyond
    names[-1] += "x" * spare
    assert spare > 0
    many = step_of(names)
    for name in names:
        book.open(request(60, name))
    await book.publish(many)
    got: list[str] = []
    for _ in range(messages):
        async with asyncio.timeout(30):
            got += [item.request_id for item in (await gateway.tokens.get()).items]
    assert got == names
    assert gateway.tokens.empty()


def step_of(names: list[str]) -> StepOutput:
    return StepOutput(tokens=[SampledToken(f"{name}#0", 0, 5) for name in names])


def items_of(names: list[str]) -> list[TokenItem]:
    return [TokenItem(name, 0, 0, 5) for name in names]


async def test_sequences_are_found_by_their_gateway(connect: Connect) -> None:
    book = SequenceBook(await connect("decode-0"), "decode-0", Metrics(), NO_TRACING)
    book.open(request(60, "a", "gateway-0"))
    book.open(request(60, "b", "gateway-1"))
    assert book.of_gateway("gateway-1") == [sequence_id("b", 0)]
