"""Requests with an idempotency key: a repeat joins the request or gets its answer again, whole or after an event that it has, at any gateway."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import anthropic
import httpx
import pytest
from anthropic import AsyncAnthropic

from mmd_workers.gateway.api import choices
from mmd_workers.gateway.basics.media_hold import ALLOWANCE_BYTES
from mmd_workers.gateway.idempotency import answer_claims, repeats, retained
from mmd_workers.gateway.process import leave
from mmd_workers.wire import bus
from support.harness.waiting import DEADLINE_SECONDS, until
from tests.gateway.running import Launch, Running, assert_nothing_is_left
from tests.gateway.scripted import ScriptedWorker, answer_well

MODEL = "builtin/demo"
TEXT = "the red circle is left of the blue square"
HELLO = [{"role": "user", "content": "hello"}]
PATHS: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": HELLO},
    "/v1/completions": {"prompt": "hello", "max_tokens": 64},
    "/v1/responses": {"input": HELLO},
    "/v1/messages": {"messages": HELLO, "max_tokens": 64},
}
CHAT = "/v1/chat/completions"


@pytest.fixture(params=PATHS)
def path(request: pytest.FixtureRequest) -> str:
    return request.param


def asked(path: str, **more: Any) -> dict[str, Any]:
    return {"model": MODEL, **PATHS[path], **more}


def key(value: str = "one", after: str | None = None) -> dict[str, str]:
    return {"idempotency-key": value} | ({} if after is None else {"last-event-id": after})


def without_repeated(response: httpx.Response) -> list[tuple[str, str]]:
    return [pair for pair in response.headers.items() if pair[0] not in (repeats.REPEATED_HEADER, "date")]


@dataclass
class Gate:
    """A script that sends tokens only as far as a test lets it."""

    allowed: int = 0
    changed: asyncio.Event = field(default_factory=asyncio.Event)

    def allow(self, tokens: int) -> None:
        self.allowed = tokens
        self.changed.set()

    async def script(self, worker: ScriptedWorker, request: Any) -> None:
        for index in range(len(request.output_token_ids), len(worker.answer)):
            while index >= self.allowed:
                self.changed.clear()
                await self.changed.wait()
            await worker.tokens(request, [index])


@pytest.fixture(autouse=True)
def patient_claims(monkeypatch: pytest.MonkeyPatch) -> None:
    """A busy gateway replies late, and an answer would be made twice."""
    monkeypatch.setattr(answer_claims, "CLAIM_SECONDS", DEADLINE_SECONDS)


@pytest.fixture
async def gated(launch: Launch) -> tuple[Running, ScriptedWorker, Gate]:
    gateway, gate = await launch(), Gate()
    return gateway, await gateway.worker(TEXT, gate.script), gate


Post = Callable[..., Awaitable[httpx.Response]]


Events = list[tuple[str | None, str]]


def events(text: str) -> Events:
    """Ids and the rest of the events and comments of a stream."""
    found = []
    for block in text.split("\n\n")[:-1]:
        first, _, rest = block.partition("\n")
        found.append((first[4:], rest) if first.startswith("id: ") else (None, block))
    return found


def number_of(event: str) -> int:
    return int(event.rpartition("-")[2])


def last_of(begun: Events) -> str:
    """The id of the last event."""
    return max((event for event, _ in begun if event is not None), key=number_of)


@asynccontextmanager
async def reading(gateway: Running, path: str, headers: dict[str, str]) -> AsyncIterator[Events]:
    """The first events of a stream, whose connection is then open."""
    text = ""
    async with (
        asyncio.timeout(DEADLINE_SECONDS),
        gateway.http.stream("POST", path, json=asked(path, stream=True), headers=headers) as response,
    ):
        assert response.status_code == 200
        async for part in response.aiter_text():
            text += part
            if events(text):
                break
        yield events(text)


@pytest.mark.parametrize("stream", [False, True])
async def test_a_repeat_gets_the_answer_again_and_no_worker_works_again(
    launch: Launch, path: str, stream: bool
) -> None:
    gateway = await launch()
    worker = await gateway.worker(TEXT)
    body = asked(path, stream=stream)
    first = await gateway.http.post(path, json=body, headers=key())
    again = await gateway.http.post(path, json=body, headers=key())
    assert (first.status_code, first.text) == (200, again.text)
    assert without_repeated(first) == without_repeated(again)
    assert repeats.REPEATED_HEADER not in first.headers
    assert again.headers[repeats.REPEATED_HEADER] == "true"
    other = await gateway.http.post(path, json=body, headers=key("two"))
    assert repeats.REPEATED_HEADER not in other.headers
    assert len(worker.requests) == 2
    await assert_nothing_is_left(gateway)


async def test_keys_of_two_paths_are_two_keys(launch: Launch) -> None:
    gateway = await launch()
    worker = await gateway.worker(TEXT)
    for path in PATHS:
        response = await gateway.http.post(path, json=asked(path), headers=key())
        assert response.status_code == 200
        assert repeats.REPEATED_HEADER not in response.headers
    assert len(worker.requests) == len(PATHS)


@pytest.mark.parametrize("stream", [False, True])
async def test_a_repeat_joins_the_running_request(
    gated: tuple[Running, ScriptedWorker, Gate], path: str, stream: bool
) -> None:
    gateway, worker, gate = gated
    body = asked(path, stream=stream)
    posts = [asyncio.create_task(gateway.http.post(path, json=body, headers=key())) for _ in range(3)]
    await worker.until(lambda: bool(worker.requests))
    await until_running(gateway, 3)
    gate.allow(len(worker.answer))
    responses = await asyncio.gather(*posts)
    assert {response.status_code for response in responses} == {200}
    assert len({response.text for response in responses}) == 1
    assert sorted(repeats.REPEATED_HEADER in response.headers for response in responses) == [
        False,
        True,
        True,
    ]
    assert len(worker.requests) == 1
    await assert_nothing_is_left(gateway)


async def until_running(gateway: Running, count: int) -> None:
    await gateway.until_metric("mmd_requests_running", count)


async def test_a_key_with_another_body_is_refused(launch: Launch, path: str) -> None:
    gateway = await launch()
    worker = await gateway.worker(TEXT)
    await gateway.http.post(path, json=asked(path), headers=key())
    response = await gateway.http.post(path, json=asked(path, temperature=0), headers=key())
    assert response.status_code == 422
    assert "another key" in response.json()["error"]["message"]
    assert len(worker.requests) == 1


async def test_a_failure_is_not_repeated(launch: Launch, path: str) -> None:
    gateway = await launch()

    async def fail_first(worker: ScriptedWorker, request: Any) -> None:
        if len(worker.requests) == 1:
            await worker.fail(request, "bad_logits", "no finite logit", retryable=False)
        else:
            await answer_well(worker, request)

    await gateway.worker(TEXT, fail_first)
    first = await gateway.http.post(path, json=asked(path), headers=key())
    assert first.status_code == 500
    again = await gateway.http.post(path, json=asked(path), headers=key())
    assert again.status_code == 200
    assert repeats.REPEATED_HEADER not in again.headers


@pytest.mark.parametrize("stream", [False, True])
async def test_generation_goes_on_for_the_repeat_of_a_client_that_hangs_up(
    gated: tuple[Running, ScriptedWorker, Gate], path: str, stream: bool
) -> None:
    gateway, worker, gate = gated
    body = asked(path, stream=stream)
    first = asyncio.create_task(gateway.http.post(path, json=body, headers=key()))
    await worker.until(lambda: bool(worker.requests))
    second = asyncio.create_task(gateway.http.post(path, json=body, headers=key()))
    await until_running(gateway, 2)
    gate.allow(2)
    first.cancel()
    await asyncio.wait({first})
    gate.allow(len(worker.answer))
    response = await second
    assert response.status_code == 200
    assert TEXT in response.text or stream
    assert not worker.cancels
    assert len(worker.requests) == 1
    await assert_nothing_is_left(gateway)


async def test_a_client_that_comes_back_finds_its_request_running(
    gated: tuple[Running, ScriptedWorker, Gate], path: str
) -> None:
    gateway, worker, gate = gated
    gate.allow(1)
    first = asyncio.create_task(gateway.http.post(path, json=asked(path), headers=key()))
    await worker.until(lambda: bool(worker.requests))
    first.cancel()
    await asyncio.wait({first})
    second = asyncio.create_task(gateway.http.post(path, json=asked(path), headers=key()))
    await until_running(gateway, 2)
    gate.allow(len(worker.answer))
    assert TEXT in (await second).text
    assert len(worker.requests) == 1


async def test_a_request_that_nobody_comes_back_for_is_cancelled(
    gated: tuple[Running, ScriptedWorker, Gate], path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(retained, "ABANDONED_SECONDS", 0.3)
    gateway, worker, gate = gated
    gate.allow(1)
    first = asyncio.create_task(gateway.http.post(path, json=asked(path), headers=key()))
    await worker.until(lambda: bool(worker.requests))
    first.cancel()
    await asyncio.wait({first})
    await worker.until(lambda: bool(worker.cancels) and not worker.running)
    await assert_nothing_is_left(gateway)
    gate.allow(len(worker.answer))
    again = await gateway.http.post(path, json=asked(path), headers=key())
    assert again.status_code == 200
    assert repeats.REPEATED_HEADER not in again.headers


async def test_a_stream_goes_on_after_any_event_that_the_client_has(
    gated: tuple[Running, ScriptedWorker, Gate], path: str
) -> None:
    gateway, worker, gate = gated
    gate.allow(3)
    async with reading(gateway, path, key()) as begun:
        last = last_of(begun)
    gate.allow(len(worker.answer))
    rest = await gateway.http.post(path, json=asked(path, stream=True), headers=key(after=last))
    assert rest.status_code == 200
    whole = events((await gateway.http.post(path, json=asked(path, stream=True), headers=key())).text)
    ids = [event for event, _ in whole if event is not None]
    assert list(map(number_of, ids)) == list(range(len(whole)))
    assert whole == [*begun[: number_of(last) + 1], *events(rest.text)]
    for n, event in enumerate(ids):
        assert events((await resumed(gateway, path, event)).text) == whole[n + 1 :]
    assert len(worker.requests) == 1
    await assert_nothing_is_left(gateway)


async def resumed(gateway: Running, path: str, after: str) -> httpx.Response:
    return await gateway.http.post(path, json=asked(path, stream=True), headers=key(after=after))


async def test_events_of_a_request_without_a_key_have_no_ids(launch: Launch, path: str) -> None:
    gateway = await launch()
    await gateway.worker(TEXT)
    response = await gateway.http.post(path, json=asked(path, stream=True))
    assert "id: " not in response.text


async def test_a_stream_that_is_not_retained_is_gone_and_not_begun_again(launch: Launch, path: str) -> None:
    gateway = await launch()
    worker = await gateway.worker(TEXT)
    response = await resumed(gateway, path, "0123abcd-3")
    assert response.status_code == 410
    assert "without last-event-id" in response.json()["error"]["message"]
    assert not worker.requests
    assert (await gateway.http.post(path, json=asked(path), headers=key())).status_code == 200


async def test_no_stream_goes_on_with_what_another_run_made(launch: Launch, path: str) -> None:
    """The first run fails, and one with the same key is made: whoever has the beginning of the first gets nothing of it."""
    gateway = await launch()

    async def fail_first(worker: ScriptedWorker, request: Any) -> None:
        if len(worker.requests) == 1:
            await worker.tokens(request, [0, 1])
            await worker.fail(request, "bad_logits", "no finite logit", retryable=False)
        else:
            await answer_well(worker, request)

    worker = await gateway.worker(TEXT, fail_first)
    body = asked(path, stream=True)
    begun = await gateway.http.post(path, json=body, headers=key())
    old = events(begun.text)[0][0]
    assert old is not None
    assert (await resumed(gateway, path, old)).status_code == 410
    whole = await gateway.http.post(path, json=body, headers=key())
    assert repeats.REPEATED_HEADER not in whole.headers
    response = await resumed(gateway, path, old)
    assert response.status_code == 410
    assert "another has its idempotency-key" in response.json()["error"]["message"]
    new = events(whole.text)[0][0]
    assert new is not None
    assert events((await resumed(gateway, path, new)).text) == events(whole.text)[1:]
    assert len(worker.requests) == 2
    await assert_nothing_is_left(gateway)


async def test_what_is_wrong_with_the_headers_is_named(launch: Launch) -> None:
    gateway = await launch()
    worker = await gateway.worker(TEXT)
    wrong: list[tuple[str, list[tuple[str, str]]]] = [
        ("idempotency-key", [("idempotency-key", "")]),
        ("idempotency-key", [("idempotency-key", "x" * 256)]),
        ("idempotency-key", [("idempotency-key", "a b")]),
        ("idempotency-key", [("idempotency-key", "a"), ("idempotency-key", "b")]),
        ("last-event-id", [("last-event-id", "0123abcd-3")]),
        ("last-event-id", [("idempotency-key", "a"), ("last-event-id", "3")]),
        ("last-event-id", [("idempotency-key", "a"), ("last-event-id", "0123abcd--1")]),
        ("last-event-id", [("idempotency-key", "a"), ("last-event-id", "0123abcd-" + "9" * 10)]),
        ("last-event-id", [("idempotency-key", "a"), *[("last-event-id", "0123abcd-3")] * 2]),
        ("x-request-timeout", [("x-request-timeout", "0")]),
        ("x-request-timeout", [("x-request-timeout", "-1")]),
        ("x-request-timeout", [("x-request-timeout", "soon")]),
        ("x-request-timeout", [("x-request-timeout", "nan")]),
    ]
    for param, headers in wrong:
        response = await gateway.http.post(CHAT, json=asked(CHAT), headers=headers)
        assert response.status_code == 400, headers
        assert response.json()["error"]["param"] == param
        assert response.json()["error"]["message"].startswith(param)
    assert not worker.requests
    await gateway.http.post(CHAT, json=asked(CHAT), headers=key("whole"))
    response = await gateway.http.post(CHAT, json=asked(CHAT), headers=key("whole", after="0123abcd-0"))
    assert response.status_code == 400
    assert "no stream" in response.json()["error"]["message"]
    response = await gateway.http.post(CHAT, json=asked(CHAT, stream=True), headers=key("stream"))
    run = last_of(events(response.text)).partition("-")[0]
    beyond = f"{run}-{len(events(response.text))}"
    response = await gateway.http.post(
        CHAT, json=asked(CHAT, stream=True), headers=key("stream", after=beyond)
    )
    assert response.status_code == 400
    assert "no such event" in response.json()["error"]["message"]


async def test_an_answer_is_forgotten_after_its_window(
    launch: Launch, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(retained, "WINDOW_SECONDS", 0.0)
    gateway = await launch()
    worker = await gateway.worker(TEXT)
    for _ in range(2):
        response = await gateway.http.post(CHAT, json=asked(CHAT), headers=key())
        assert repeats.REPEATED_HEADER not in response.headers
    assert len(worker.requests) == 2


async def test_a_stream_that_was_long_can_be_resumed_near_its_end_alone(
    launch: Launch, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(retained, "MAX_ANSWER_BYTES", 500)
    monkeypatch.setattr(retained, "AHEAD_BYTES", 200)
    gateway = await launch()
    worker = await gateway.worker(TEXT * 8)
    whole = events((await gateway.http.post(CHAT, json=asked(CHAT, stream=True), headers=key())).text)
    first, near = whole[0][0], whole[-2][0]
    assert first is not None
    assert near is not None
    assert events((await resumed(gateway, CHAT, near)).text) == whole[-1:]
    for response in (
        await resumed(gateway, CHAT, first),
        await gateway.http.post(CHAT, json=asked(CHAT, stream=True), headers=key()),
    ):
        assert response.status_code == 410
    assert len(worker.requests) == 1


async def test_an_answer_too_long_to_be_retained_reaches_its_client_whole(
    launch: Launch, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(retained, "MAX_ANSWER_BYTES", 500)
    monkeypatch.setattr(retained, "AHEAD_BYTES", 200)
    monkeypatch.setattr(retained, "PIECE_BYTES", 100)
    gateway = await launch()
    worker = await gateway.worker(TEXT * 8)
    limit = "max_output_tokens" if path == "/v1/responses" else "max_tokens"
    body = asked(path, **{limit: 200})
    response = await gateway.http.post(path, json=body, headers=key())
    assert response.status_code == 200
    assert TEXT * 4 in json.dumps(response.json())
    again = await gateway.http.post(path, json=body, headers=key())
    assert again.status_code == 410
    assert len(worker.requests) == 1


async def test_a_slow_client_holds_up_its_stream_but_no_repeat(
    launch: Launch, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody reads the first stream: what is made for it stops when it is far ahead, and goes on when a repeat reads."""
    monkeypatch.setattr(retained, "AHEAD_BYTES", 1000)
    gateway = await launch()
    worker = await gateway.worker(TEXT * 40)
    body = asked(CHAT, stream=True, max_tokens=4096)
    async with gateway.http.stream("POST", CHAT, json=body, headers=key()) as first:
        assert first.status_code == 200
        response = await gateway.http.post(CHAT, json=body, headers=key())
        assert response.text.endswith("data: [DONE]\n\n")
    assert len(worker.requests) == 1
    await assert_nothing_is_left(gateway)


@pytest.mark.parametrize("stream", [False, True])
async def test_the_deadline_of_a_client_ends_its_request_everywhere(
    gated: tuple[Running, ScriptedWorker, Gate], path: str, stream: bool
) -> None:
    gateway, worker, _ = gated
    response = await gateway.http.post(
        path, json=asked(path, stream=stream), headers={"x-request-timeout": "3"}
    )
    assert response.status_code == 504
    assert "x-request-timeout" in response.json()["error"]["message"]
    assert worker.requests[0].deadline - worker.requests[0].arrived == pytest.approx(3)
    await worker.until(lambda: bool(worker.cancels) and not worker.running)
    await assert_nothing_is_left(gateway)


async def test_a_client_gets_no_more_time_than_the_deployment_allows(launch: Launch) -> None:
    gateway = await launch(requestTimeoutSeconds=7)
    worker = await gateway.worker(TEXT)
    for value, seconds in (("3", 3), ("2.5", 2.5), ("999999999", 7)):
        await gateway.http.post(CHAT, json=asked(CHAT), headers={"x-request-timeout": value})
        assert worker.requests[-1].deadline - worker.requests[-1].arrived == pytest.approx(seconds)


async def test_a_repeat_has_a_deadline_of_its_own(gated: tuple[Running, ScriptedWorker, Gate]) -> None:
    gateway, worker, gate = gated
    first = asyncio.create_task(gateway.http.post(CHAT, json=asked(CHAT), headers=key()))
    await worker.until(lambda: bool(worker.requests))
    headers = {**key(), "x-request-timeout": "0.3"}
    assert (await gateway.http.post(CHAT, json=asked(CHAT), headers=headers)).status_code == 504
    gate.allow(len(worker.answer))
    assert (await first).status_code == 200


async def test_responses_streams_give_a_repeats_own_error_as_an_event(
    gated: tuple[Running, ScriptedWorker, Gate], monkeypatch: pytest.MonkeyPatch
) -> None:
    # The client takes a comment after an event with an id for an event without data, and fails.
    monkeypatch.setattr(choices, "STREAM_OPENS_AFTER_SECONDS", DEADLINE_SECONDS)
    gateway, worker, gate = gated
    gate.allow(3)
    body = {"model": MODEL, "input": "hello", "stream": True}
    first = await gateway.openai.responses.create(**body, extra_headers=key())
    begun = await anext(aiter(first))
    assert begun.type == "response.created"
    hurried = {**key(), "x-request-timeout": "5"}
    seen = [event async for event in await gateway.openai.responses.create(**body, extra_headers=hurried)]
    *whole, error = seen
    assert [event.sequence_number for event in whole] == list(range(len(whole)))
    assert (error.type, error.code, error.param) == ("error", "deadline_exceeded", None)
    assert "deadline of this one" in error.message
    assert error.sequence_number == len(whole)
    gate.allow(len(worker.answer))
    rest = [event async for event in first]
    assert rest[-1].type == "response.completed"
    assert len(worker.requests) == 1


async def test_messages_streams_give_a_repeats_own_error_as_an_api_error(
    gated: tuple[Running, ScriptedWorker, Gate],
) -> None:
    gateway, worker, gate = gated
    gate.allow(3)
    body: dict[str, Any] = {"model": MODEL, "messages": HELLO, "max_tokens": 64, "stream": True}
    async with AsyncAnthropic(base_url=gateway.url, api_key="none", max_retries=0, timeout=30) as client:
        first = await client.messages.create(**body, extra_headers=key())
        assert (await anext(aiter(first))).type == "message_start"
        hurried = {**key(), "x-request-timeout": "5"}
        events_of = aiter(await client.messages.create(**body, extra_headers=hurried))
        assert (await anext(events_of)).type == "message_start"
        with pytest.raises(anthropic.APIStatusError, match="deadline of this one") as raised:
            _ = [event async for event in events_of]
        assert raised.value.body["error"]["type"] == "timeout_error"
        gate.allow(len(worker.answer))
        assert [event.type async for event in first][-1] == "message_stop"
    assert len(worker.requests) == 1


# --- several gateways -----------------------------------------------------------------------------------------


async def two(launch: Launch, script: Any = answer_well) -> tuple[Running, Running, ScriptedWorker]:
    """Two gateways that know each other, and one worker that both know."""
    first = await launch(pod="gateway-0")
    second = await launch(pod="gateway-1", beside=first)
    worker = await first.worker(TEXT, script)
    second.workers.append(worker)
    await second.until_known()
    second.workers.clear()
    await asyncio.gather(first.until_gateways(2), second.until_gateways(2))
    return first, second, worker


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("name", ["key-2", "key-3"])
async def test_a_repeat_at_another_gateway_gets_the_same_answer(
    launch: Launch, name: str, stream: bool
) -> None:
    """Whichever of the two keeps the claims of the key."""
    first, second, worker = await two(launch)
    body = asked(CHAT, stream=stream)
    answer = await first.http.post(CHAT, json=body, headers=key(name))
    again = await second.http.post(CHAT, json=body, headers=key(name))
    assert (again.status_code, again.text) == (200, answer.text)
    assert again.headers["x-mmd-gateway"] == "gateway-0"
    assert again.headers[repeats.REPEATED_HEADER] == "true"
    assert len(worker.requests) == 1
    if stream:
        begun = events(answer.text)[0][0]
        rest = await second.http.post(CHAT, json=body, headers=key(name, after=begun))
        assert events(rest.text) == events(answer.text)[1:]
    wrong = await second.http.post(CHAT, json={**body, "temperature": 0}, headers=key(name))
    assert wrong.status_code == 422
    assert repeats.REPEATED_HEADER not in wrong.headers
    assert await second.metric("mmd_errors_total") == 1


@pytest.mark.parametrize("stream", [False, True])
async def test_requests_with_one_key_at_all_gateways_at_once_are_one_request(
    launch: Launch, path: str, stream: bool
) -> None:
    gate = Gate()
    first, second, worker = await two(launch, gate.script)
    body = asked(path, stream=stream)
    posts = [
        asyncio.create_task(gateway.http.post(path, json=body, headers=key()))
        for gateway in (first, second, first, second)
    ]
    await until_running(first, 2)
    await until_running(second, 2)
    await worker.until(lambda: bool(worker.requests))
    gate.allow(len(worker.answer))
    responses = await asyncio.gather(*posts)
    assert {response.status_code for response in responses} == {200}
    assert len({response.text for response in responses}) == 1
    assert len(worker.requests) == 1
    await assert_nothing_is_left(first)
    await assert_nothing_is_left(second)


async def test_a_stream_is_resumed_at_another_gateway(launch: Launch, path: str) -> None:
    gate = Gate()
    first, second, worker = await two(launch, gate.script)
    gate.allow(3)
    async with reading(first, path, key()) as begun:
        last = last_of(begun)
    rest = asyncio.create_task(resumed(second, path, last))
    await until_running(second, 1)
    gate.allow(len(worker.answer))
    assert (await rest).status_code == 200
    whole = await first.http.post(path, json=asked(path, stream=True), headers=key())
    assert [*begun[: number_of(last) + 1], *events((await rest).text)] == events(whole.text)
    assert len(worker.requests) == 1


async def test_an_answer_longer_than_a_message_is_read_by_another_gateway(launch: Launch) -> None:
    """Also one whose last event alone has the whole text, and one without any line breaks."""
    first, second, worker = await two(launch)
    worker.answer = worker.answer * 400
    for stream in (False, True):
        body = {"model": MODEL, "input": HELLO, "stream": stream, "max_output_tokens": 4000}
        answer = await first.http.post("/v1/responses", json=body, headers=key(f"long-{stream}"))
        again = await second.http.post("/v1/responses", json=body, headers=key(f"long-{stream}"))
        assert answer.status_code == 200
        assert again.text == answer.text
    assert len(worker.requests) == 2


@pytest.mark.parametrize("name", ["key-2", "key-3"])
async def test_a_failure_at_one_gateway_is_not_repeated_at_another(launch: Launch, name: str) -> None:
    async def fail_first(worker: ScriptedWorker, request: Any) -> None:
        if len(worker.requests) == 1:
            await worker.fail(request, "bad_logits", "no finite logit", retryable=False)
        else:
            await answer_well(worker, request)

    first, second, worker = await two(launch, fail_first)
    assert (await first.http.post(CHAT, json=asked(CHAT), headers=key(name))).status_code == 500
    other = asked(CHAT, temperature=0)
    response = await second.http.post(CHAT, json=other, headers=key(name))
    assert response.status_code == 200
    assert response.headers["x-mmd-gateway"] == "gateway-1"
    assert len(worker.requests) == 2


async def test_a_gateway_that_is_gone_holds_no_key(launch: Launch) -> None:
    first, second, worker = await two(launch)
    for n in range(4):
        await first.http.post(CHAT, json=asked(CHAT), headers=key(str(n)))
    first.stop.set()
    await first.task
    first.end_awaited = True
    for n in range(4):
        response = await second.http.post(CHAT, json=asked(CHAT), headers=key(str(n)))
        assert response.status_code == 200
        assert json.loads(response.text)["choices"][0]["message"]["content"] == TEXT
    assert len(worker.requests) == 8


async def test_a_client_that_leaves_another_gateway_ends_the_request_there_too(
    launch: Launch, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(retained, "ABANDONED_SECONDS", 0.3)
    monkeypatch.setattr(retained, "REMOTE_SECONDS", 0.5)
    gate = Gate()
    first, second, worker = await two(launch, gate.script)
    one = asyncio.create_task(first.http.post(CHAT, json=asked(CHAT), headers=key()))
    await worker.until(lambda: bool(worker.requests))
    other = asyncio.create_task(second.http.post(CHAT, json=asked(CHAT), headers=key()))
    await until_running(second, 1)
    for task in (one, other):
        task.cancel()
    await asyncio.wait({one, other})
    await worker.until(lambda: bool(worker.cancels) and not worker.running)
    await assert_nothing_is_left(first)
    await assert_nothing_is_left(second)
    await until(lambda: not worker.running)


async def test_a_repeat_at_another_gateway_has_a_deadline_of_its_own(launch: Launch) -> None:
    gate = Gate()
    first, second, worker = await two(launch, gate.script)
    one = asyncio.create_task(first.http.post(CHAT, json=asked(CHAT), headers=key()))
    await worker.until(lambda: bool(worker.requests))
    headers = {**key(), "x-request-timeout": "0.5"}
    response = await second.http.post(CHAT, json=asked(CHAT), headers=headers)
    assert response.status_code == 504
    assert "deadline of this one" in response.json()["error"]["message"]
    await assert_nothing_is_left(second)
    gate.allow(len(worker.answer))
    assert (await one).status_code == 200
    assert not worker.cancels
    assert len(worker.requests) == 1


async def test_a_repeat_drops_its_body_once_another_gateways_answer_begins(launch: Launch) -> None:
    gate = Gate()
    first, second, worker = await two(launch, gate.script)
    content = json.dumps(asked(CHAT, stream=True)).encode() + b" " * ALLOWANCE_BYTES
    headers = {**key(), "content-type": "application/json"}
    one = asyncio.create_task(first.http.post(CHAT, content=content, headers=headers))
    await worker.until(lambda: bool(worker.requests))
    other = asyncio.create_task(second.http.post(CHAT, content=content, headers=headers))
    await second.until_metric("mmd_media_held_bytes", lambda held: held > 0)
    gate.allow(3)
    await second.until_metric("mmd_media_held_bytes", 0)
    await until_running(second, 1)
    gate.allow(len(worker.answer))
    assert (await other).text == (await one).text
    assert len(worker.requests) == 1


async def test_a_stream_that_is_resumed_holds_no_body(
    launch: Launch, monkeypatch: pytest.MonkeyPatch
) -> None:
    gateway = await launch()
    asked_for, goes_on = asyncio.Event(), asyncio.Event()

    async def holder(*_args: object, **_more: object) -> answer_claims.AnswerClaimed:
        asked_for.set()
        await goes_on.wait()
        return answer_claims.AnswerClaimed("", "")

    monkeypatch.setattr(answer_claims.AnswerClaims, "holder", holder)
    content = json.dumps(asked(CHAT, stream=True)).encode() + b" " * ALLOWANCE_BYTES
    headers = {**key(after="0123abcd-0"), "content-type": "application/json"}
    resumed = asyncio.create_task(gateway.http.post(CHAT, content=content, headers=headers))
    async with asyncio.timeout(DEADLINE_SECONDS):
        await asked_for.wait()
    assert await gateway.metric("mmd_media_held_bytes") == 0
    goes_on.set()
    assert (await resumed).status_code == 410


async def test_a_stream_resumed_at_another_gateway_gets_no_beginning_from_repeats(
    launch: Launch,
) -> None:
    gate = Gate()
    first, second, worker = await two(launch, gate.script)
    gate.allow(4)
    async with reading(first, CHAT, key()) as begun:
        last = last_of(begun)
    rest = asyncio.create_task(resumed(second, CHAT, last))
    await until_running(second, 1)
    repeat = asyncio.create_task(second.http.post(CHAT, json=asked(CHAT, stream=True), headers=key()))
    await until_running(second, 2)
    gate.allow(len(worker.answer))
    assert (await repeat).status_code == 200
    assert [*begun[: number_of(last) + 1], *events((await rest).text)] == events((await repeat).text)
    assert len(worker.requests) == 1


async def test_more_readers_than_a_gateway_takes_at_once_all_get_their_answers(
    launch: Launch, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = Gate()
    first, second, worker = await two(launch, gate.script)
    names = [f"key-{n}" for n in range(6)]
    posts = [
        asyncio.create_task(first.http.post(CHAT, json=asked(CHAT), headers=key(name))) for name in names
    ]
    await worker.until(lambda: len(worker.requests) == len(names))
    monkeypatch.setattr(bus, "CONCURRENT_REQUESTS", 2)  # the worker has all that it is to serve
    repeats_of = [
        asyncio.create_task(second.http.post(CHAT, json=asked(CHAT), headers=key(name))) for name in names
    ]
    await until_running(second, len(names))
    gate.allow(len(worker.answer))
    for one, again in zip(posts, repeats_of, strict=True):
        assert (await one).text == (await again).text
    assert len(worker.requests) == len(names)


async def test_a_gateway_that_leaves_waits_for_another_that_reads_an_answer(
    launch: Launch, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(leave, "QUIET_SECONDS", 0.0)
    monkeypatch.setattr(answer_claims, "PIECE_BYTES", 2000)
    first, second, worker = await two(launch)
    worker.answer = worker.answer * 10
    body = asked(CHAT, stream=True, max_tokens=4096)
    answer = await first.http.post(CHAT, json=body, headers=key())
    goes_on, waits = asyncio.Event(), asyncio.Event()

    async def held_up(_answer: retained.RetainedAnswer, _seconds: float = 0) -> None:
        waits.set()
        await goes_on.wait()

    monkeypatch.setattr(retained.RetainedAnswer, "room", held_up)
    again = asyncio.create_task(second.http.post(CHAT, json=body, headers=key()))
    async with asyncio.timeout(DEADLINE_SECONDS):
        await waits.wait()
    first.stop.set()
    done, _ = await asyncio.wait({first.task}, timeout=1.0)
    assert not done
    goes_on.set()
    assert (await again).text == answer.text
    await first.task
    first.end_awaited = True
    assert len(worker.requests) == 1


async def test_a_repeat_at_another_gateway_gets_a_failing_streams_end(
    launch: Launch, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the stream fails, and is no longer retained, between two readings of the other gateway."""
    fails, goes_on, waits = asyncio.Event(), asyncio.Event(), asyncio.Event()

    async def fail_late(worker: ScriptedWorker, request: Any) -> None:
        await worker.tokens(request, [0, 1, 2])
        await fails.wait()
        await worker.fail(request, "bad_logits", "no finite logit", retryable=False)

    room = retained.RetainedAnswer.room

    async def held_up(answer: retained.RetainedAnswer, seconds: float = 0) -> None:
        if answer.relayed and answer.next_block:
            waits.set()
            await goes_on.wait()
        elif not answer.relayed:
            await room(answer)

    monkeypatch.setattr(retained.RetainedAnswer, "room", held_up)
    first, second, worker = await two(launch, fail_late)
    body = asked(CHAT, stream=True)
    answer = asyncio.create_task(first.http.post(CHAT, json=body, headers=key()))
    await worker.until(lambda: bool(worker.requests))
    again = asyncio.create_task(second.http.post(CHAT, json=body, headers=key()))
    async with asyncio.timeout(DEADLINE_SECONDS):
        await waits.wait()
    fails.set()
    assert "bad_logits" in (await answer).text
    goes_on.set()
    assert (await again).text == (await answer).text
    assert len(worker.requests) == 1
    await assert_nothing_is_left(first)
    await assert_nothing_is_left(second)


async def test_an_event_missing_from_the_stream_is_refused_at_another_gateway(launch: Launch) -> None:
    first, second, worker = await two(launch)
    whole = events((await first.http.post(CHAT, json=asked(CHAT, stream=True), headers=key())).text)
    run = last_of(whole).partition("-")[0]
    response = await resumed(second, CHAT, f"{run}-{len(whole)}")
    assert response.status_code == 400
    assert "no such event" in response.json()["error"]["message"]
    assert response.json()["error"]["param"] == "last-event-id"
    assert (await resumed(second, CHAT, f"{run}-{len(whole) - 1}")).status_code == 200
    assert len(worker.requests) == 1


async def test_no_gateway_is_told_the_key_for_an_unknown_model(
    launch: Launch, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    async def told(*_args: object, **_more: object) -> None:
        pytest.fail("another gateway was told of the key")

    gateway = await launch()
    monkeypatch.setattr(answer_claims.AnswerClaims, "holder", told)
    response = await gateway.http.post(path, json=asked(path) | {"model": "none"}, headers=key())
    assert response.status_code == 404
