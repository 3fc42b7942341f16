"""Workers die, repeat, reorder, go silent and refuse: the client's stream has every token once, or a clear error in time."""

from __future__ import annotations

import asyncio
import contextlib
import json
from dataclasses import asdict, replace

import anthropic
import httpx
import openai
import pytest

from mmd_api.contract.load import PodLoad
from mmd_workers.gateway.api import choices
from mmd_workers.gateway.placement import dispatcher
from mmd_workers.gateway.process import gateway_process, leave
from mmd_workers.wire import bus, parts
from mmd_workers.wire.codec import MAX_REQUEST_BYTES, pack
from mmd_workers.wire.messages.decode import KvCommit
from mmd_workers.wire.messages.gateway import HeldSequence
from mmd_workers.wire.messages.message_parts import Sampling
from mmd_workers.wire.messages.prefill import GenerateRequest, Placed
from mmd_workers.wire.server import NatsServer
from support.harness.waiting import DEADLINE_SECONDS
from tests.gateway.running import HASTY_MILLISECONDS, Launch, Running, assert_nothing_is_left, until_status
from tests.gateway.scripted import ScriptedWorker, answer_well, half_then, say_nothing

HELLO = [{"role": "user", "content": "hello"}]
MODEL = "builtin/demo"
TEXT = "the red circle is left of the blue square"


async def ask(gateway: Running, **options) -> str:
    answer = await gateway.openai.chat.completions.create(
        model=MODEL, messages=HELLO, **{"temperature": 0, **options}
    )
    return answer.choices[0].message.content


async def test_a_stream_continues_on_another_pod_when_its_pod_dies(launch: Launch) -> None:
    gateway = await launch(heartbeat_timeout_milliseconds=HASTY_MILLISECONDS)
    reached = asyncio.Event()

    async def stop_there(worker: ScriptedWorker, request: GenerateRequest) -> None:
        reached.set()
        await say_nothing(worker, request)

    first = await gateway.worker(TEXT, half_then(stop_there))
    stream = await gateway.openai.chat.completions.create(model=MODEL, messages=HELLO, stream=True)
    text = ""
    second = None
    async for chunk in stream:
        text += chunk.choices[0].delta.content or ""
        if second is None:
            await reached.wait()
            await first.die()
            second = await ScriptedWorker.start(
                gateway.nats.url, gateway.subjects, "decode-9", first.answer, answer_well
            )
            gateway.workers.append(second)
    assert text == TEXT
    assert second.requests[0].output_token_ids == first.answer[: len(first.answer) // 2]
    assert second.requests[0].attempt == 1
    assert second.requests[0].sampling == first.requests[0].sampling
    await assert_nothing_is_left(gateway)


async def test_a_reborn_pod_has_forgotten_its_requests(launch: Launch) -> None:
    gateway = await launch()
    first = await gateway.worker(TEXT, half_then(say_nothing))
    asking = asyncio.create_task(ask(gateway))
    await first.until(lambda: bool(first.requests))
    await first.die()
    second = await gateway.worker(TEXT, answer_well, pod=first.pod, incarnation="two")
    assert await asking == TEXT
    assert [r.attempt for r in second.requests][-1] >= 1


async def test_repeated_and_unordered_tokens_come_out_once_and_in_order(launch: Launch) -> None:
    gateway = await launch()

    async def muddled(worker: ScriptedWorker, request: GenerateRequest) -> None:
        count = len(worker.answer)
        await worker.tokens(request, [2, 1])
        await worker.tokens(request, [1, 0])
        await worker.tokens(request, [0, 3], attempt=7)
        await worker.tokens(request, list(reversed(range(count))))
        await worker.tokens(request, list(range(count)))

    await gateway.worker(TEXT, muddled)
    assert await ask(gateway) == TEXT
    assert await gateway.metric("mmd_gateway_duplicate_tokens_total") > 0
    await assert_nothing_is_left(gateway)


async def test_the_receipt_of_a_report_lists_received_tokens_and_unwanted_sequences(launch: Launch) -> None:
    gateway = await launch()
    worker = await gateway.worker(TEXT, half_then(say_nothing))
    asking = asyncio.create_task(ask(gateway))
    await worker.until(lambda: bool(worker.requests))
    request = worker.requests[0]
    await worker.until(lambda: worker.receipts.get((request.request_id, 0), 0) > 0)
    lines = [
        HeldSequence(request.request_id, 0, tokens=99, open=False),
        HeldSequence(request.request_id, 1, tokens=0, open=True),
        HeldSequence("unknown", 0, tokens=0, open=True),
    ]
    await worker.report("gateway-0", lines)
    assert [worker.receipts[(line.request_id, line.attempt)] for line in lines] == [
        len(worker.answer) // 2,
        -1,
        -1,
    ]
    asking.cancel()
    await asyncio.gather(asking, return_exceptions=True)
    await assert_nothing_is_left(gateway)
    await worker.report("gateway-0", lines[:1])
    assert worker.receipts[(request.request_id, 0)] == -1


async def test_a_pod_that_gives_up_leaves_the_rest_to_another(launch: Launch) -> None:
    gateway = await launch()

    async def give_up(worker: ScriptedWorker, request: GenerateRequest) -> None:
        await worker.fail(request, "link_failed", "the KV link broke", retryable=True)

    first = await gateway.worker(TEXT, half_then(give_up))
    second = await gateway.worker(TEXT, half_then(give_up))
    assert await ask(gateway) == TEXT
    assert {r.attempt for r in first.requests + second.requests} == {0, 1}
    assert first.requests
    assert second.requests, "the pod that failed is avoided"


async def test_a_permanent_error_reaches_the_client_unchanged(launch: Launch) -> None:
    gateway = await launch()

    async def poison(worker: ScriptedWorker, request: GenerateRequest) -> None:
        await worker.fail(
            request, "bad_media", "messages[0].content[1]: the video ends early", retryable=False
        )

    worker = await gateway.worker(TEXT, poison)
    with pytest.raises(openai.BadRequestError, match="the video ends early") as caught:
        await ask(gateway)
    assert caught.value.code == "bad_media"
    assert len(worker.requests) == 1
    await assert_nothing_is_left(gateway)


async def test_a_midstream_error_ends_the_stream_with_an_error_event(launch: Launch) -> None:
    gateway = await launch()
    seen = asyncio.Event()

    async def fail(worker: ScriptedWorker, request: GenerateRequest) -> None:
        async with asyncio.timeout(DEADLINE_SECONDS):
            await seen.wait()
        await worker.fail(request, "count_mismatch", "another number of tokens", retryable=False)

    await gateway.worker(TEXT, half_then(fail))
    stream = await gateway.openai.chat.completions.create(model=MODEL, messages=HELLO, stream=True)
    pieces: list[str] = []

    async def read() -> None:
        async for chunk in stream:
            pieces.append(chunk.choices[0].delta.content or "")
            if pieces[-1]:
                seen.set()

    with pytest.raises(openai.APIError, match="another number of tokens"):
        await read()
    assert pieces
    assert TEXT.startswith("".join(pieces))


async def test_retries_end_with_the_last_reason(launch: Launch) -> None:
    gateway = await launch(maxRetries=2)

    async def give_up(worker: ScriptedWorker, request: GenerateRequest) -> None:
        await worker.fail(request, "link_failed", "the KV link broke", retryable=True)

    worker = await gateway.worker(TEXT, give_up)
    with pytest.raises(openai.InternalServerError, match=r"gave up after 3 placements.*gave_up") as caught:
        await ask(gateway)
    assert "the KV link broke" not in str(caught.value)  # it may name addresses; the log has it
    assert [r.attempt for r in worker.requests] == [0, 1, 2]
    await assert_nothing_is_left(gateway)


async def test_a_request_without_room_is_placed_until_there_is_some(launch: Launch) -> None:
    """As while the only decode pod starts again: a pod that finds none says so at once, and more often than failures may happen."""
    gateway = await launch(maxRetries=2)

    async def no_room_at_first(worker: ScriptedWorker, request: GenerateRequest) -> None:
        if request.attempt < 6:
            await worker.fail(request, "overloaded", "no decode pod accepted the sequence", retryable=True)
        else:
            await answer_well(worker, request)

    worker = await gateway.worker(TEXT, no_room_at_first)
    assert await ask(gateway) == TEXT
    assert [r.attempt for r in worker.requests] == list(range(7))
    await assert_nothing_is_left(gateway)


async def test_a_request_that_found_no_room_by_its_deadline_says_so(launch: Launch) -> None:
    gateway = await launch(requestTimeoutSeconds=5)

    async def no_room(worker: ScriptedWorker, request: GenerateRequest) -> None:
        await worker.fail(request, "overloaded", "no decode pod accepted the sequence", retryable=True)

    await gateway.worker(TEXT, no_room)
    with pytest.raises(openai.InternalServerError, match="no pod had room for the request") as caught:
        await ask(gateway)
    assert caught.value.code == "overloaded"
    await assert_nothing_is_left(gateway)


async def test_the_client_must_retry_only_when_every_pod_is_full(
    launch: Launch,
) -> None:
    gateway = await launch()
    full = Placed("", False, "overloaded", "512 requests are already waiting on this pod")
    first = await gateway.worker(TEXT, refuse=full)
    second = await gateway.worker(TEXT)
    assert [await ask(gateway) for _ in range(3)] == [TEXT] * 3
    assert second.requests
    second.refuse = full
    response = await gateway.http.post("/v1/chat/completions", json={"model": MODEL, "messages": HELLO})
    assert response.status_code == 503
    assert int(response.headers["retry-after"]) >= 1
    assert "512 requests are already waiting on this pod" in response.json()["error"]["message"]
    assert first.requests
    await assert_nothing_is_left(gateway)


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_comes_back_when_the_shortest_queue_is_done(launch: Launch, stream: bool) -> None:
    """Whether the gateway knows that the queue is full, or the pod refuses."""
    gateway = await launch()
    refusing = Placed("", False, "overloaded", "512 requests are already waiting on this pod")
    busy = PodLoad(prefill_waiting_tokens=8500, prefill_tokens_per_second=1000.0)
    body = {"model": MODEL, "messages": HELLO, "stream": stream}
    worker = await gateway.worker(TEXT, load=busy, refuse=refusing)
    for load in (busy, replace(busy, prefill_waiting_requests=512)):
        worker.load = load
        await gateway.until_pod(worker.pod, lambda seen, load=load: seen["load"] == asdict(load))
        response = await gateway.http.post("/v1/chat/completions", json=body)
        assert response.status_code == 503
        assert response.headers["retry-after"] == "9"
        error = response.json()["error"]
        assert (error["code"], error["retry_after_seconds"]) == ("overloaded", 9)
    await assert_nothing_is_left(gateway)


async def test_a_stream_that_has_begun_ends_with_when_to_come_back(
    launch: Launch, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(choices, "STREAM_OPENS_AFTER_SECONDS", 0.05)
    gateway = await launch(requestTimeoutSeconds=2)
    body = {"model": MODEL, "messages": HELLO, "stream": True}
    response = await gateway.http.post("/v1/chat/completions", json=body)
    assert response.status_code == 200
    events = [json.loads(line[6:]) for line in response.text.splitlines() if line.startswith("data: {")]
    assert [event["error"]["retry_after_seconds"] for event in events] == [2]
    await assert_nothing_is_left(gateway)


async def test_an_encoders_verdict_on_a_medium_reaches_the_client(launch: Launch) -> None:
    gateway = await launch()

    async def give_up(worker: ScriptedWorker, request: GenerateRequest) -> None:
        await worker.fail(request, "unprocessable_medium", "two encoders ran out of memory", retryable=False)

    await gateway.worker(TEXT, give_up)
    response = await gateway.http.post("/v1/chat/completions", json={"model": MODEL, "messages": HELLO})
    assert (response.status_code, response.json()["error"]["code"]) == (422, "unprocessable_medium")


async def test_a_gateway_with_a_failed_part_drains_and_takes_no_requests(
    launch: Launch, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken, go = asyncio.Event(), asyncio.Event()

    async def break_when_told(*_: object) -> None:
        await broken.wait()
        raise RuntimeError("no more of this")

    async def wait_then_answer(worker: ScriptedWorker, request: GenerateRequest) -> None:
        await go.wait()
        await answer_well(worker, request)

    monkeypatch.setattr(gateway_process.bus_watch, "watch", break_when_told)
    gateway = await launch()
    worker = await gateway.worker(TEXT, wait_then_answer)
    asking = asyncio.create_task(ask(gateway))
    await worker.until(lambda: bool(worker.requests))
    broken.set()
    seen = await until_status(gateway.http, "/readyz", 503)
    assert seen.json()["reason"] == "watch-bus has failed"
    go.set()
    assert await asking == TEXT
    monkeypatch.setattr(leave, "QUIET_SECONDS", 0.0)
    gateway.end_awaited = True
    with pytest.raises(RuntimeError, match="no more of this"):
        await asyncio.wait_for(gateway.task, DEADLINE_SECONDS)


async def test_ready_needs_pods_of_every_role_but_readyz_does_not(launch: Launch) -> None:
    gateway = await launch()
    assert (await gateway.http.get("/readyz")).status_code == 200
    seen = await gateway.http.get("/ready")
    assert seen.status_code == 503
    assert (
        seen.json()["reason"]
        == "no ready pod for encode and prefill and decode: requests are waiting for one"
    )
    await gateway.worker(TEXT, roles=["encode", "prefill"])
    seen = await gateway.http.get("/ready")
    assert seen.status_code == 503
    assert "decode" in seen.json()["reason"]
    await gateway.worker(TEXT, roles=["decode"])
    seen = await gateway.http.get("/ready")
    assert seen.status_code == 200
    assert seen.json() == {
        "ready": True,
        "reason": "",
        "ready_pods": {"encode": 1, "prefill": 1, "decode": 1},
    }


async def test_requests_refused_by_a_draining_pod_wait_for_the_next(
    launch: Launch,
) -> None:
    gateway = await launch()
    leaving = await gateway.worker(TEXT, refuse=Placed("", False, "draining", "this pod is draining"))
    asking = asyncio.create_task(ask(gateway))
    await leaving.until(lambda: len(leaving.requests) > 1)
    await gateway.worker(TEXT)
    assert await asking == TEXT
    await assert_nothing_is_left(gateway)


async def test_a_request_held_without_pods_is_woken_by_the_first(launch: Launch) -> None:
    gateway = await launch()
    asking = asyncio.create_task(ask(gateway))
    await gateway.until_metric("mmd_gateway_held_sequences", 1)
    await gateway.worker(TEXT)
    async with asyncio.timeout(DEADLINE_SECONDS):
        assert await asking == TEXT
    await gateway.until_metric("mmd_gateway_held_sequences", 0)


async def test_a_request_that_no_pod_ever_takes_ends_at_its_deadline(launch: Launch) -> None:
    gateway = await launch(requestTimeoutSeconds=1)
    with pytest.raises(openai.InternalServerError, match="no Ready prefill pod") as caught:
        await ask(gateway)
    assert caught.value.status_code == 503
    assert caught.value.response.headers["retry-after"]


async def test_a_silent_worker_costs_no_more_than_the_deadline(launch: Launch) -> None:
    gateway = await launch(requestTimeoutSeconds=5)
    worker = await gateway.worker(TEXT, say_nothing)
    with pytest.raises(openai.InternalServerError, match="deadline") as caught:
        await ask(gateway)
    assert caught.value.status_code == 504
    await worker.until(lambda: bool(worker.cancels) and not worker.running)
    await assert_nothing_is_left(gateway)


@pytest.mark.parametrize("stream", [True, False])
async def test_a_client_that_hangs_up_frees_its_request_everywhere(launch: Launch, stream: bool) -> None:
    gateway = await launch()
    worker = await gateway.worker(TEXT, half_then(say_nothing))
    body = {"model": MODEL, "messages": HELLO, "stream": stream, "n": 2}
    asking = asyncio.create_task(gateway.http.post("/v1/chat/completions", json=body))
    await worker.until(lambda: len(worker.requests) == 2)
    asking.cancel()
    with contextlib.suppress(asyncio.CancelledError, httpx.HTTPError):
        await asking
    await worker.until(lambda: not worker.running)
    assert {c.request_id for c in worker.cancels} == {r.request_id for r in worker.requests}
    await assert_nothing_is_left(gateway)


async def test_a_client_that_hangs_up_while_its_request_is_held_leaves_nothing(launch: Launch) -> None:
    gateway = await launch()
    asking = asyncio.create_task(ask(gateway))
    await gateway.until_metric("mmd_gateway_held_sequences", 1)
    asking.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await asking
    await assert_nothing_is_left(gateway)


async def test_requests_beyond_the_limit_get_a_retry_after(launch: Launch) -> None:
    gateway = await launch(maxConcurrentRequests=1)
    worker = await gateway.worker(TEXT, say_nothing)
    asking = asyncio.create_task(ask(gateway))
    await worker.until(lambda: bool(worker.requests))
    with pytest.raises(openai.RateLimitError) as caught:
        await ask(gateway)
    assert caught.value.response.headers["retry-after"] == "1"
    asking.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await asking


async def test_a_gateway_cut_off_from_nats_is_unready_until_reconnected(
    own_nats_server: NatsServer, launch: Launch
) -> None:
    gateway = await launch(nats=own_nats_server)
    await gateway.worker(TEXT)
    assert (await gateway.http.get("/ready")).status_code == 200
    await asyncio.to_thread(own_nats_server.kill)
    for path in ("/ready", "/readyz"):
        seen = await until_status(gateway.http, path, 503)
        assert (seen.json()["ready"], seen.json()["reason"]) == (False, "no connection to NATS")
    await asyncio.to_thread(own_nats_server.start)
    await until_status(gateway.http, "/ready", 200)


async def test_a_draining_gateway_rejects_no_request_and_closes_connections(launch: Launch) -> None:
    gateway = await launch()
    go = asyncio.Event()

    async def wait_then_answer(worker: ScriptedWorker, request: GenerateRequest) -> None:
        await go.wait()
        await answer_well(worker, request)

    worker = await gateway.worker(TEXT, wait_then_answer)
    asking = asyncio.create_task(ask(gateway))
    await worker.until(lambda: bool(worker.requests))
    gateway.stop.set()
    assert (await until_status(gateway.http, "/ready", 503)).json()["reason"] == "draining"
    assert (
        await gateway.http.get("/readyz")
    ).status_code == 200  # else nobody could come where no other is Ready
    body = {"model": MODEL, "messages": HELLO}
    coming = asyncio.create_task(gateway.http.post("/v1/chat/completions", json=body))
    await worker.until(lambda: len(worker.requests) == 2)  # while one is in flight, the gateway stays
    go.set()
    assert await asking == TEXT
    late = await coming
    assert late.json()["choices"][0]["message"]["content"] == TEXT
    assert late.headers["connection"] == "close"
    await asyncio.wait_for(gateway.task, DEADLINE_SECONDS)


@pytest.mark.parametrize("code", ["bad_logits", "step_failed"])
async def test_a_request_the_model_cannot_compute_is_tried_only_once(launch: Launch, code: str) -> None:
    gateway = await launch()

    async def fail(worker: ScriptedWorker, request: GenerateRequest) -> None:
        await worker.fail(request, code, "the logits are not finite", retryable=False)

    worker = await gateway.worker(TEXT, fail)
    with pytest.raises(openai.InternalServerError) as caught:
        await ask(gateway)
    assert caught.value.code == code
    assert "not finite" in caught.value.message
    assert [request.attempt for request in worker.requests] == [0]
    await assert_nothing_is_left(gateway)


@pytest.mark.parametrize("code", ["bad_logits", "step_failed", "deadline_exceeded", "internal"])
async def test_official_clients_do_not_send_a_failed_request_again(launch: Launch, code: str) -> None:
    gateway = await launch()

    async def fail(worker: ScriptedWorker, request: GenerateRequest) -> None:
        await worker.fail(request, code, "it failed", retryable=False)

    worker = await gateway.worker(TEXT, fail)
    with pytest.raises(openai.APIStatusError):
        await gateway.openai.with_options(max_retries=2).chat.completions.create(model=MODEL, messages=HELLO)
    async with anthropic.AsyncAnthropic(base_url=gateway.url, api_key="none") as client:
        with pytest.raises(anthropic.APIStatusError):
            await client.messages.create(model=MODEL, messages=HELLO, max_tokens=4)
    assert len(worker.requests) == 2, "one for each client"


async def test_official_clients_are_not_kept_from_sending_a_request_again_that_may_succeed(
    launch: Launch,
) -> None:
    gateway = await launch(maxRetries=0)

    async def fail(worker: ScriptedWorker, request: GenerateRequest) -> None:
        await worker.fail(request, "link_failed", "the link broke", retryable=True)

    await gateway.worker(TEXT, fail)
    body = {"model": MODEL, "messages": HELLO}
    answer = await gateway.http.post("/v1/chat/completions", json=body)
    assert (answer.status_code, "retry-after" in answer.headers) == (503, True)
    assert "x-should-retry" not in answer.headers


async def test_a_preempted_sequence_continues_without_using_up_its_retries(launch: Launch) -> None:
    gateway = await launch(maxRetries=0)

    async def yield_then_answer(worker: ScriptedWorker, request: GenerateRequest) -> None:
        done = len(request.output_token_ids)
        if request.attempt < 3:
            await worker.tokens(request, [done, done + 1])
            await worker.fail(request, "preempted", "no KV block left", retryable=True)
        else:
            await worker.tokens(request, list(range(done, len(worker.answer))))

    worker = await gateway.worker(TEXT, yield_then_answer)
    assert await ask(gateway) == TEXT
    assert [len(request.output_token_ids) for request in worker.requests] == [0, 2, 4, 6]
    await assert_nothing_is_left(gateway)


async def test_a_prompt_larger_than_one_message_reaches_its_worker(
    launch: Launch, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the demo model's context fills no real message, messages are small here."""
    monkeypatch.setattr(bus, "MAX_MESSAGE_BYTES", 1000)
    monkeypatch.setattr(parts, "PART_BYTES", 500)
    gateway = await launch()
    worker = await gateway.worker(TEXT)
    long = [{"role": "user", "content": "the red circle is left of it " * 200}]
    answer = await gateway.openai.chat.completions.create(model=MODEL, messages=long)
    assert answer.choices[0].message.content == TEXT
    assert len(pack(worker.requests[0])) > 2000
    assert answer.usage.prompt_tokens == len(worker.requests[0].token_ids)


@pytest.mark.parametrize(("spare", "served"), [(-1, False), (0, True), (1, True)])
async def test_a_prompt_too_large_to_send_to_a_worker_is_refused(
    launch: Launch, monkeypatch: pytest.MonkeyPatch, spare: int, served: bool
) -> None:
    gateway = await launch()
    await gateway.worker(TEXT)
    monkeypatch.setattr(dispatcher, "_largest_placement", lambda request: len(pack(request)) + spare)
    if served:
        assert await ask(gateway) == TEXT
    else:
        with pytest.raises(
            openai.BadRequestError, match=r"32 MiB, about 6710886 tokens\); shorten it"
        ) as refused:
            await ask(gateway)
        assert refused.value.code == "too_large"
    await assert_nothing_is_left(gateway)


def test_a_placement_leaves_room_for_its_hand_over() -> None:
    sampling = Sampling(max_tokens=1000)
    request = GenerateRequest("r", 0, "gateway-0", [2**31] * 1000, [], sampling, [], 0.0, 0.0)
    commit = KvCommit("lease", replace(request, output_token_ids=[2**31] * 1000), [2**31] * 1000, 5, 7)
    grown = len(pack(commit)) - len(pack(request))
    assert dispatcher._largest_placement(request) + grown <= MAX_REQUEST_BYTES
