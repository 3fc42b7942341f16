"""What a gateway retains of answers is bounded in bytes and in number, for each tenant and for all together."""

from __future__ import annotations

import asyncio
import contextlib
import tracemalloc

import pytest
from hypothesis import given
from hypothesis import strategies as st
from openai._streaming import SSEDecoder

from mmd_api.contract.errors import AnswerGoneError, IdempotencyKeyReusedError, TooManyRequestsError
from mmd_workers.gateway.idempotency import retained
from mmd_workers.gateway.idempotency.retained import RequestName, RetainedAnswer, RetainedAnswers
from support.harness.waiting import DEADLINE_SECONDS

HEAD = {
    "type": "http.response.start",
    "status": 200,
    "headers": [(b"content-type", b"text/event-stream"), (b"x-request-id", b"chatcmpl-98765432deadbeef")],
}
BODY = b"digest of a body"


async def streamed(
    answers: RetainedAnswers, name: RequestName, events: int, size: int = 100
) -> RetainedAnswer:
    answer = answers.begin(name, BODY)
    await answer.put(dict(HEAD))
    for _ in range(events):
        await answer.put({"type": "http.response.body", "body": b"data: %b\n\n" % (b"x" * size)})
    return answer


async def ended(answers: RetainedAnswers, name: RequestName, events: int, size: int = 100) -> RetainedAnswer:
    answer = await streamed(answers, name, events, size)
    answers.finish(answer, "complete", keep=True)
    return answer


def found(answers: RetainedAnswers, names: list[RequestName]) -> list[int]:
    return [n for n, name in enumerate(names) if answers.find(name.digest, BODY) is not None]


def names(count: int, tenant: str = "") -> list[RequestName]:
    return [RequestName.of(tenant, "chatcmpl-", str(n)) for n in range(count)]


async def test_the_answers_that_ended_first_make_room(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = RetainedAnswers(20_000)
    four = names(4)
    for name in four:
        await ended(answers, name, 30)
        assert answers.used_bytes <= 20_000
    assert found(answers, four) == [2, 3]


async def test_a_tenant_takes_no_room_from_another(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = RetainedAnswers(32_000)
    (quiet,) = names(1, "quiet")
    await ended(answers, quiet, 30)
    loud = names(20, "loud")
    for name in loud:
        await ended(answers, name, 30)
    assert found(answers, loud) == [19]
    assert found(answers, [quiet]) == [0]


async def test_keys_are_bounded_for_a_tenant_and_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retained, "MAX_KEYS", 8)
    monkeypatch.setattr(retained, "MAX_KEYS_OF_TENANT", 3)
    answers = RetainedAnswers(1 << 20)
    a, b = names(5, "a"), names(20)
    for name in a:
        await ended(answers, name, 1)
    assert found(answers, a) == [2, 3, 4]
    for name in b:
        await ended(answers, name, 1)
    assert len(answers) == 8
    assert found(answers, a) == [2, 3, 4]
    assert found(answers, b) == list(range(15, 20))
    running = names(9, "c")[:3]
    for name in running:
        answers.begin(name, BODY)
    with pytest.raises(TooManyRequestsError):
        answers.begin(RequestName.of("c", "chatcmpl-", "more"), BODY)


async def test_an_answer_that_is_being_made_loses_its_beginning_alone() -> None:
    answers = RetainedAnswers(2 * retained.AHEAD_BYTES)
    first, second = names(2)
    await ended(answers, first, 30)
    answer = await streamed(answers, second, 100, 10_000)
    assert found(answers, [first, second]) == [1]
    assert answers.used_bytes == answer.kept_bytes <= 2 * retained.AHEAD_BYTES
    with answer.reader(0) as reader, pytest.raises(AnswerGoneError):
        await answer.read(reader)
    with answer.reader(99) as reader:
        assert (await answer.read(reader)).blocks == [b"id: deadbeef-99\ndata: " + b"x" * 10_000 + b"\n\n"]


async def test_a_key_is_free_again_when_its_answer_is_not_kept() -> None:
    answers = RetainedAnswers(1 << 20)
    (name,) = names(1)
    answer = await streamed(answers, name, 3)
    with pytest.raises(IdempotencyKeyReusedError):
        answers.find(name.digest, b"another body")
    answers.finish(answer, "failed", keep=False)
    answers.finish(answer, "failed", keep=False)
    assert answers.find(name.digest, b"another body") is None
    assert (answers.used_bytes, len(answers)) == (0, 0)


async def test_what_a_client_still_reads_counts_until_it_is_gone() -> None:
    """Slow clients of many answers, which were dropped to make room for others, hold no more than the budget."""
    answers = RetainedAnswers(20_000)
    first, *more = names(9)
    answer = await ended(answers, first, 30)
    with answer.reader(0):
        for name in more[:4]:
            await ended(answers, name, 60)
        assert found(answers, [first]) == []
        assert found(answers, more) == [3]
        used = answers.used_bytes
        assert answer.kept_bytes > 3000
    assert answers.used_bytes == used - answer.kept_bytes
    for name in more:
        await ended(answers, name, 30)
    assert found(answers, more) == [6, 7]


async def test_what_another_gateway_reads_is_undelivered_until_it_has_the_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    answers = RetainedAnswers(1 << 20)
    (name,) = names(1)
    answer = await ended(answers, name, 3)
    assert answers.unread_elsewhere_bytes() == 0
    answer.remote_reader("gateway-1", 0, 0)
    assert answers.unread_elsewhere_bytes() == answer.kept_bytes + 1
    answer.remote_reader("gateway-1", 3, 0)
    assert answers.unread_elsewhere_bytes() == 1
    answer.remote_has_all("gateway-1")
    assert answers.unread_elsewhere_bytes() == 0
    answer.remote_reader("gateway-1", 1, 0)
    monkeypatch.setattr(retained, "REMOTE_SECONDS", -1.0)
    assert answers.unread_elsewhere_bytes() == 0


async def test_slow_clients_of_one_tenant_evict_no_answers_of_others() -> None:
    """Neither those of answers that are being made, nor of those that have ended and go to make room."""
    answers = RetainedAnswers(200_000)
    quiet = [RequestName.of(f"quiet-{n}", "chatcmpl-", "one") for n in range(5)]
    for name in quiet:
        await ended(answers, name, 10)
    with contextlib.ExitStack() as clients:
        running = []
        for n, name in enumerate(names(40, "loud")):
            answer = await streamed(answers, name, 1, 5000)
            clients.enter_context(answer.reader(0))
            running.append(answer)
            if n % 2:
                answers.finish(answer, "complete", keep=True)
        assert answers.used_bytes > answers.budget_bytes
        more = RequestName.of("more", "chatcmpl-", "one")
        await ended(answers, more, 1)
        assert found(answers, [*quiet, more]) == list(range(6))
    for answer in running:
        answers.finish(answer, "broken", keep=False)
    assert answers.used_bytes < 50_000


async def test_answers_of_a_tenant_at_its_limit_wait_for_their_readers() -> None:
    """None is refused or lost: each client gets its whole answer, and what is held stays within the part and a block for each."""
    answers = RetainedAnswers(400_000)
    most = 0

    async def make(answer: RetainedAnswer) -> None:
        await answer.put(dict(HEAD))
        for _ in range(40):
            await answer.put({"type": "http.response.body", "body": b"data: %b\n\n" % (b"x" * 5000)})
        answers.finish(answer, "complete", keep=True)

    async def read(answer: RetainedAnswer) -> int:
        with answer.reader(0) as reader:
            await goes_on.wait()
            size, end = 0, ""
            while not end:
                piece = await answer.read(reader)
                size, end = size + sum(map(len, piece.blocks)), piece.end
            return size

    goes_on = asyncio.Event()
    mine = [answers.begin(name, BODY) for name in names(40, "loud")]
    readers = [asyncio.create_task(read(answer)) for answer in mine]
    await asyncio.sleep(0)
    makers = [asyncio.create_task(make(answer)) for answer in mine]
    for _ in range(1000):
        await asyncio.sleep(0)
        most = max(most, answers.used_bytes)
    assert most <= 100_000 + 40 * 5200
    assert not all(task.done() for task in makers)
    goes_on.set()
    async with asyncio.timeout(DEADLINE_SECONDS):
        sizes = set(await asyncio.gather(*readers))
        await asyncio.gather(*makers)
    assert len(sizes) == 1
    assert sizes.pop() > 40 * 5000


async def test_a_reading_gateway_gets_a_whole_answer_that_others_cannot_find() -> None:
    answers = RetainedAnswers(1 << 20)
    (name,) = names(1)
    answer = await streamed(answers, name, 3)
    answer.remote_reader("reader", 1, 0)
    answers.finish(answer, "failed", keep=False)
    assert answers.find(name.digest, BODY) is None
    assert answers.find_for("another", name.digest, BODY) is None
    assert answers.unread_elsewhere_bytes() > 1
    again = answers.begin(name, BODY)
    assert answers.find_for("reader", name.digest, BODY) is answer
    assert answers.find_for("another", name.digest, BODY) is again
    reader = answer.remote_reader("reader", 1, 0)
    piece = await answer.read(reader)
    assert (len(piece.blocks), piece.end) == (2, "failed")
    answer.remote_has_all("reader")
    assert (answers.unread_elsewhere_bytes(), answers.used_bytes) == (0, 0)
    assert answers.find_for("reader", name.digest, BODY) is again


async def test_a_gateway_that_reads_no_more_frees_the_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = RetainedAnswers(1 << 20)
    (name,) = names(1)
    answer = await streamed(answers, name, 3)
    answer.remote_reader("reader", 1, 0)
    answers.finish(answer, "failed", keep=False)
    assert not answers.forget_one()
    monkeypatch.setattr(retained, "REMOTE_SECONDS", -1.0)
    assert answers.forget_one()
    assert answers.used_bytes == 0


async def test_answers_whose_time_is_over_are_forgotten_one_after_the_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    answers = RetainedAnswers(1 << 20)
    for name in (*names(2, "a"), *names(1, "b")):
        await ended(answers, name, 3)
    running = await streamed(answers, names(1, "c")[0], 3)
    assert not answers.forget_one()
    monkeypatch.setattr(retained, "WINDOW_SECONDS", 0.0)
    assert [answers.forget_one() for _ in range(4)] == [True, True, True, False]
    assert (len(answers), answers.used_bytes) == (1, running.kept_bytes)


async def test_small_blocks_count_with_what_they_take_beside_their_data() -> None:
    """Their memory, as Python reports it, is what they count at least."""
    answers = RetainedAnswers(64 << 20)
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        await ended(answers, names(1)[0], 10_000, 60)
        held = tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
    assert answers.used_bytes == pytest.approx(held, rel=0.15)


async def test_a_tenant_at_its_limit_is_told_its_own_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retained, "MAX_KEYS_OF_TENANT", 2)
    answers = RetainedAnswers(1 << 20)
    for name in (*names(3, "a")[:2], *names(1, "b")):
        answers.begin(name, BODY)
    with pytest.raises(TooManyRequestsError, match="2 requests of this tenant"):
        answers.begin(names(3, "a")[2], BODY)


@pytest.mark.parametrize(
    ("body", "blocks", "events"),
    [
        (
            b"data: 1\n\n: waiting\n\ndata: 2\n\n",
            [b"id: deadbeef-0\ndata: 1\n\n", b": waiting\n", b"id: deadbeef-2\ndata: 2\n\n"],
            ["1", "2"],
        ),
        (
            b": waiting\n\nevent: a\ndata: 1\n\ndata: 2\n\n",
            [b": waiting\n", b"id: deadbeef-1\nevent: a\ndata: 1\n\n", b"id: deadbeef-2\ndata: 2\n\n"],
            ["1", "2"],
        ),
    ],
    ids=["between events", "before them"],
)
async def test_comments_have_numbers_but_no_ids_and_are_no_events_for_openais_client(
    body: bytes, blocks: list[bytes], events: list[str]
) -> None:
    answer = RetainedAnswers(1 << 20).begin(names(1)[0], BODY)
    await answer.put(dict(HEAD))
    await answer.put({"type": "http.response.body", "body": body})
    with answer.reader(0) as reader:
        read = (await answer.read(reader)).blocks
    assert read == blocks
    assert [event.data for event in SSEDecoder().iter_bytes(iter(read))] == events


@given(
    sizes=st.lists(st.integers(1, 50), max_size=20),
    most=st.integers(1, 40),
    data=st.data(),
)
async def test_pieces_of_any_size_make_up_the_answer(
    sizes: list[int], most: int, data: st.DataObject
) -> None:
    answer = RetainedAnswers(1 << 20).begin(names(1)[0], BODY)
    blocks = [bytes([n]) * size for n, size in enumerate(sizes)]
    answer.begin(200, [])
    answer.extend(blocks)
    answer.end("complete")
    at = data.draw(st.integers(0, len(blocks)))
    with answer.reader(at) as reader:
        seen = []
        while True:
            piece = await answer.read(reader, most_bytes=most)
            assert sum(map(len, piece.blocks)) <= most
            seen += piece.blocks
            if piece.end:
                break
    assert b"".join(seen) == b"".join(blocks[at:])
