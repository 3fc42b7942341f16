"""What goes wrong on its way goes wrong alike on every surface that answers conversations, each in its own shape."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import httpx
import pytest

from mmd_workers.gateway.api import choices
from support.harness.waiting import DEADLINE_SECONDS
from tests.gateway.running import Launch, Running, assert_nothing_is_left
from tests.gateway.scripted import ScriptedWorker, answer_well, half_then, say_nothing

MODEL = "builtin/demo"
TEXT = "the red circle is left of the blue square"
HELLO = [{"role": "user", "content": "hello"}]
Event = dict[str, Any]


@dataclass(frozen=True)
class Surface:
    """A path with a body that it takes. `piece`: the text of an event. `fault`: the message of the event that ends a failed stream.
    `begins`: with this type of event.
    """

    path: str
    body: dict[str, Any]
    piece: Callable[[Event], str]
    fault: Callable[[Event], str | None]
    overloaded: int = 503
    begins: str | None = None


SURFACES = {
    "chat": Surface(
        "/v1/chat/completions",
        {"messages": HELLO},
        lambda event: "".join(c["delta"].get("content") or "" for c in event.get("choices", ())),
        lambda event: event.get("error", {}).get("message"),
    ),
    "messages": Surface(
        "/v1/messages",
        {"messages": HELLO, "max_tokens": 64},
        lambda event: event["delta"]["text"] if event["type"] == "content_block_delta" else "",
        lambda event: event["error"]["message"] if event["type"] == "error" else None,
        overloaded=529,
        begins="message_start",
    ),
    "responses": Surface(
        "/v1/responses",
        {"input": HELLO},
        lambda event: event["delta"] if event["type"] == "response.output_text.delta" else "",
        lambda event: event["response"]["error"]["message"] if event["type"] == "response.failed" else None,
        begins="response.created",
    ),
}


@pytest.fixture(params=SURFACES)
def surface(request: pytest.FixtureRequest) -> Surface:
    return SURFACES[request.param]


def asked(surface: Surface, **more: Any) -> dict[str, Any]:
    return {"model": MODEL, **surface.body, **more}


async def events_of(gateway: Running, surface: Surface, seen: asyncio.Event | None = None) -> list[Event]:
    """The events of a stream. `seen` is set when the first piece of its text is there."""
    events: list[Event] = []
    async with gateway.http.stream("POST", surface.path, json=asked(surface, stream=True)) as response:
        assert response.status_code == 200, await response.aread()
        assert response.headers["content-type"].startswith("text/event-stream")
        async for line in response.aiter_lines():
            if line.startswith("data: {"):
                events.append(json.loads(line[6:]))
                if seen is not None and surface.piece(events[-1]):
                    seen.set()
    return events


async def test_a_pod_that_gives_up_in_mid_stream_costs_the_client_nothing(
    launch: Launch, surface: Surface
) -> None:
    gateway = await launch()
    seen = asyncio.Event()

    async def give_up(worker: ScriptedWorker, request: Any) -> None:
        async with asyncio.timeout(DEADLINE_SECONDS):
            await seen.wait()
        await worker.fail(request, "link_failed", "the KV link broke", retryable=True)

    worker = await gateway.worker(TEXT, half_then(give_up))
    events = await events_of(gateway, surface, seen)
    assert "".join(map(surface.piece, events)) == TEXT
    assert len([event for event in events if surface.piece(event)]) > 1
    if surface.begins:
        assert [n for n, event in enumerate(events) if event["type"] == surface.begins] == [0]
    assert [surface.fault(event) for event in events if surface.fault(event)] == []
    assert [request.attempt for request in worker.requests] == [0, 1]
    await assert_nothing_is_left(gateway)


async def test_a_failure_in_mid_stream_is_its_last_event(launch: Launch, surface: Surface) -> None:
    gateway = await launch()
    seen = asyncio.Event()

    async def fail(worker: ScriptedWorker, request: Any) -> None:
        async with asyncio.timeout(DEADLINE_SECONDS):
            await seen.wait()
        await worker.fail(request, "count_mismatch", "another number of tokens", retryable=False)

    await gateway.worker(TEXT, half_then(fail))
    events = await events_of(gateway, surface, seen)
    pieces = "".join(map(surface.piece, events[:-1]))
    assert pieces
    assert pieces != TEXT
    assert TEXT.startswith(pieces)
    assert "another number of tokens" in (surface.fault(events[-1]) or "")
    await assert_nothing_is_left(gateway)


TOO_LONG = (
    r"prompt is too long[^0-9]*(\d+)\s*tokens?\s*>\s*(\d+)",  # as agents on Anthropic's API read it
    r"maximum context length is (\d+) tokens",  # as those on OpenAI's do
)


@pytest.mark.parametrize("stream", [True, False])
async def test_an_overflow_has_the_words_that_agents_look_for(
    launch: Launch, surface: Surface, stream: bool
) -> None:
    gateway = await launch()
    worker = await gateway.worker(TEXT, max_model_len=64)
    path = "input" if surface.path == "/v1/responses" else "messages"
    for text, least in (("red circle " * 50, 64), ("red circle " * 500, 64)):
        messages = [{"role": "user", "content": text}]
        body = asked(surface, stream=stream, **{path: messages})
        response = await gateway.http.post(surface.path, json=body)
        error = response.json()["error"]
        assert (response.status_code, error["type"]) == (400, "invalid_request_error")
        by_tokens, by_context = (re.search(pattern, error["message"]) for pattern in TOO_LONG)
        assert by_tokens is not None
        assert by_context is not None
        assert int(by_tokens[1]) >= least
        assert (by_tokens[2], by_context[1]) == ("63", "64")
        assert error.get("code", "context_length_exceeded") == "context_length_exceeded"
    assert worker.requests == []


@pytest.mark.parametrize("stream", [True, False])
async def test_a_failure_before_the_stream_has_its_status(
    launch: Launch, surface: Surface, stream: bool
) -> None:
    gateway = await launch(requestTimeoutSeconds=5)
    worker = await gateway.worker(TEXT, say_nothing)
    response = await gateway.http.post(surface.path, json=asked(surface, stream=stream))
    assert response.status_code == 504
    assert "deadline" in response.json()["error"]["message"]
    await worker.until(lambda: bool(worker.cancels) and not worker.running)
    await assert_nothing_is_left(gateway)


async def test_a_stream_that_waits_opens_and_ends_at_the_deadline(
    launch: Launch, surface: Surface, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(choices, "STREAM_OPENS_AFTER_SECONDS", 0.05)
    monkeypatch.setattr(choices, "KEEPALIVE_SECONDS", 0.05)
    gateway = await launch(requestTimeoutSeconds=1)
    events = await events_of(gateway, surface)
    assert "no Ready prefill pod" in (surface.fault(events[-1]) or "")
    assert '"retry_after_seconds": 2' in json.dumps(events[-1])
    await assert_nothing_is_left(gateway)


async def test_a_wait_in_the_middle_of_a_stream_is_no_silence(
    launch: Launch, surface: Surface, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(choices, "STREAM_OPENS_AFTER_SECONDS", 0.05)
    monkeypatch.setattr(choices, "KEEPALIVE_SECONDS", 0.05)
    gateway = await launch()
    go_on = asyncio.Event()

    async def later(worker: ScriptedWorker, request: Any) -> None:
        await go_on.wait()
        await answer_well(worker, request)

    await gateway.worker(TEXT, later)
    waits = 0
    text = ""
    async with (
        asyncio.timeout(DEADLINE_SECONDS),
        gateway.http.stream("POST", surface.path, json=asked(surface, stream=True)) as response,
    ):
        async for line in response.aiter_lines():
            waits += line in (": waiting", "event: ping")
            if waits == 2:
                go_on.set()
            if line.startswith("data: {"):
                text += surface.piece(json.loads(line[6:]))
    assert waits >= 2
    assert text == TEXT


@pytest.mark.parametrize("stream", [True, False])
async def test_a_client_that_hangs_up_frees_its_request_everywhere(
    launch: Launch, surface: Surface, stream: bool
) -> None:
    gateway = await launch()
    worker = await gateway.worker(TEXT, half_then(say_nothing))
    asking = asyncio.create_task(gateway.http.post(surface.path, json=asked(surface, stream=stream)))
    await worker.until(lambda: len(worker.requests) == 1)
    asking.cancel()
    with contextlib.suppress(asyncio.CancelledError, httpx.HTTPError):
        await asking
    await worker.until(lambda: not worker.running)
    assert [cancel.request_id for cancel in worker.cancels] == [worker.requests[0].request_id]
    await assert_nothing_is_left(gateway)


async def test_a_request_beyond_the_limit_is_refused_with_its_retry_time(
    launch: Launch, surface: Surface
) -> None:
    gateway = await launch(maxConcurrentRequests=1)
    worker = await gateway.worker(TEXT, say_nothing)
    asking = asyncio.create_task(gateway.http.post(surface.path, json=asked(surface)))
    await worker.until(lambda: bool(worker.requests))
    response = await gateway.http.post(surface.path, json=asked(surface))
    assert (response.status_code, response.headers["retry-after"]) == (429, "1")
    assert response.json()["error"]["type"] == "rate_limit_error"
    asking.cancel()
    with contextlib.suppress(asyncio.CancelledError, httpx.HTTPError):
        await asking


async def test_a_request_without_pods_is_refused_as_overload(launch: Launch, surface: Surface) -> None:
    gateway = await launch(requestTimeoutSeconds=1)
    response = await gateway.http.post(surface.path, json=asked(surface))
    assert response.status_code == surface.overloaded
    assert int(response.headers["retry-after"]) >= 1
    recent = (await gateway.admin.get("/debug/requests")).json()
    assert [entry["status"] for entry in recent["requests"]] == [surface.overloaded]


async def test_requests_are_counted_with_their_tokens(launch: Launch, surface: Surface) -> None:
    gateway = await launch()
    worker = await gateway.worker(TEXT)
    await gateway.http.post(surface.path, json=asked(surface))
    await events_of(gateway, surface)
    tokens = 2 * (len(worker.answer) + len(worker.requests[0].token_ids))
    await gateway.until_metric("mmd_tokens_total", tokens)
    assert await gateway.metric("mmd_requests_total") == 2
