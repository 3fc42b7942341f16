"""The book of sequences: who is told of tokens and failures, and what is remembered of cancelled requests."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable

import pytest

from mmd_workers.decode.tokens import MAX_CANCELLED, SequenceBook, sequence_id
from mmd_workers.engine.types import SampledToken, StepOutput
from mmd_workers.errors import DeadlineError, MmdError, OverloadedError, PeerLostError
from mmd_workers.observe.metrics import Metrics
from mmd_workers.observe.tracing import Tracing
from mmd_workers.wire.bus import Bus
from mmd_workers.wire.messages import GenerateRequest, RequestFailed, Sampling, TokenBatch

NO_TRACING = Tracing("test", "test", "test", None)

Connect = Callable[[str], Awaitable[Bus]]


def request(deadline_seconds: float, request_id: str = "r", gateway: str = "gateway-0") -> GenerateRequest:
    now = time.time()
    return GenerateRequest(request_id, 0, gateway, [1], [], Sampling(4), [], now + deadline_seconds, now)


@pytest.mark.parametrize(
    ("error", "deadline_seconds", "retryable"),
    [
        (DeadlineError("a transfer was late"), 60, True),
        (DeadlineError("the request is too late"), -1, False),
        (PeerLostError("gone"), 60, True),
        (MmdError("broken"), 60, False),
    ],
)
async def test_a_deadline_that_is_not_the_requests_own_lets_it_be_placed_again(
    connect: Connect, error: MmdError, deadline_seconds: float, retryable: bool
) -> None:
    bus = await connect("decode-0")
    heard: asyncio.Queue[RequestFailed] = asyncio.Queue()
    await bus.subscribe(bus.subjects.failures("gateway-0"), RequestFailed, heard.put)
    book = SequenceBook(bus, "decode-0", Metrics(), NO_TRACING)
    book.open(request(deadline_seconds))
    await book.fail(sequence_id("r", 0), error)
    failure = await asyncio.wait_for(heard.get(), 5)
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


async def test_tokens_wait_while_the_send_buffer_is_full_and_are_not_dropped(
    connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    bus = await connect("decode-0")
    heard: asyncio.Queue[TokenBatch] = asyncio.Queue()
    await bus.subscribe(bus.subjects.tokens("gateway-0"), TokenBatch, heard.put)
    publish, refusals = bus.publish, iter([True, True])

    async def full_twice(subject: str, message: object, reply: str = "") -> None:
        if next(refusals, False):
            raise OverloadedError("full")
        await publish(subject, message, reply)

    monkeypatch.setattr(bus, "publish", full_twice)
    book = SequenceBook(bus, "decode-0", Metrics(), NO_TRACING)
    book.open(request(60))
    await book.publish(StepOutput(tokens=[SampledToken(sequence_id("r", 0), 0, 5)]))
    batch = await asyncio.wait_for(heard.get(), 5)
    assert [item.token_id for item in batch.items] == [5]


async def test_sequences_are_found_by_the_gateway_that_asked(connect: Connect) -> None:
    book = SequenceBook(await connect("decode-0"), "decode-0", Metrics(), NO_TRACING)
    book.open(request(60, "a", "gateway-0"))
    book.open(request(60, "b", "gateway-1"))
    assert book.of_gateway("gateway-1") == [sequence_id("b", 0)]
