"""The error that ends a repeated or resumed stream of responses has the number which its client gets next."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import MutableMapping
from typing import Any

import pytest
from starlette.datastructures import Headers

from mmd_api.contract.errors import MmdError
from mmd_workers.gateway.answers.block_shape import named_event
from mmd_workers.gateway.answers.exchange import Exchange
from mmd_workers.gateway.api.responses.responses_shape import ResponsesErrors
from mmd_workers.gateway.basics.api_errors import api_error
from mmd_workers.gateway.idempotency import retained
from mmd_workers.gateway.idempotency.answer_claims import AnswerClaims
from mmd_workers.gateway.idempotency.repeats import KeyedRequest, Repeats
from mmd_workers.gateway.idempotency.retained import RequestName, RetainedAnswer, RetainedAnswers
from mmd_workers.gateway.placement.timeline import Timeline

FIRST_ID = "resp_" + "a" * 32
RUN = FIRST_ID[-retained.RUN_CHARACTERS :]
NAME = RequestName.of("", "/v1/responses", "one")
WAITING = ": waiting\n\n"
HEAD = {
    "type": "http.response.start",
    "status": 200,
    "headers": [(b"content-type", b"text/event-stream"), (b"x-request-id", FIRST_ID.encode())],
}


def delta(number: int, **more: Any) -> str:
    return named_event({"type": "response.output_text.delta", "sequence_number": number, **more})


async def never() -> MutableMapping[str, Any]:
    await asyncio.Event().wait()
    raise AssertionError


class Client:
    """One that sends a request again."""

    def __init__(self) -> None:
        self.got = b""
        self.exchange = Exchange(
            *("resp_" + "b" * 32, never, self.send, Headers({}), Timeline("x", arrived=time.time()), {}),
            ResponsesErrors(),
        )

    async def send(self, message: MutableMapping[str, Any]) -> None:
        self.got += message.get("body", b"")

    @property
    def numbers(self) -> list[int]:
        lines = (line for line in self.got.decode().splitlines() if line.startswith("data: "))
        return [json.loads(line.removeprefix("data: "))["sequence_number"] for line in lines]


class Answers:
    """What a gateway has of the stream."""

    def __init__(self) -> None:
        self.answers = RetainedAnswers(1 << 20)
        self.answer: RetainedAnswer = self.answers.begin(NAME, b"digest")
        self.repeats = Repeats(
            self.answers, AnswerClaims.__new__(AnswerClaims)
        )  # a repeat asks no other gateway

    async def put(self, body: str) -> None:
        await self.answer.put({"type": "http.response.body", "body": body.encode(), "more_body": True})

    async def repeat(self, client: Client, seconds: float, *, at: int = 0) -> None:
        """As a gateway does it, with the error."""
        request = KeyedRequest(NAME, RUN if at else "", at)
        try:
            await self.repeats.repeat(client.exchange, request, self.answer, time.time() + seconds)
        except MmdError as error:
            await client.exchange.fail(api_error(error))


@pytest.fixture
async def kept() -> Answers:
    found = Answers()
    await found.answer.put(dict(HEAD))
    return found


async def test_an_error_that_comes_with_the_last_events_is_numbered_behind_them(kept: Answers) -> None:
    client = Client()
    repeating = asyncio.create_task(kept.repeat(client, 30))
    while not client.got and not kept.answer.has_readers:
        await asyncio.sleep(0)
    await kept.put("".join(map(delta, range(5))))
    kept.answers.finish(kept.answer, "broken", keep=False)  # before the reader had its turn
    await repeating
    assert client.numbers == [0, 1, 2, 3, 4, 5]


@pytest.mark.parametrize("comment_last", [False, True])
async def test_comments_in_a_stream_have_no_number(kept: Answers, comment_last: bool) -> None:
    client = Client()
    await kept.put(delta(0) + 3 * WAITING + delta(1) + comment_last * WAITING)
    await kept.repeat(client, 0)
    assert client.numbers == [0, 1, 2]


@pytest.mark.parametrize("more", ["", WAITING, delta(2)])
async def test_a_resumed_stream_continues_after_the_last_events_number(kept: Answers, more: str) -> None:
    client = Client()
    await kept.put(delta(0) + WAITING + delta(1))
    last = kept.answer.next_block - 1
    await kept.put(more)
    await kept.repeat(client, 0, at=last + 1)
    assert client.numbers == ([2, 3] if more == delta(2) else [2])


async def test_sequence_numbers_in_text_or_metadata_are_no_event_numbers(kept: Answers) -> None:
    client = Client()
    text = 'data: {"type":"x","sequence_number":77'
    await kept.put(delta(0) + delta(1, delta=f"\n{text}", metadata={"sequence_number": 99}))
    await kept.repeat(client, 0)
    assert client.numbers == [0, 1, 2]


async def test_an_event_that_is_sent_in_pieces_counts_once(
    kept: Answers, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = Client()
    await kept.put(delta(0) + delta(1, delta='data: {"type":"x","sequence_number":77}' * 50))
    original = kept.answer.read

    async def read(reader: Any, seconds: float) -> Any:
        return await original(reader, seconds, 150)

    monkeypatch.setattr(kept.answer, "read", read)
    await kept.repeat(client, 0)
    assert client.numbers == [0, 1, 2]
