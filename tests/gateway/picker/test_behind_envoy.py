"""Gateways behind a real Envoy that asks their endpoint picker about each request."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import psutil

from tests.gateway.envoy_proxy import SERVED_BY, in_front_of
from tests.gateway.proxies import until_picked
from tests.gateway.running import Launch, Running
from tests.gateway.scripted import ScriptedWorker

PLAIN = {"inferencePool": {"pickerTls": False}}
TLS = {"inferencePool": {}}


JSON = {"content-type": "application/json"}


def address(gateway: Running) -> str:
    return gateway.url.removeprefix("http://")


async def chat(gateway: Running, **more) -> dict:
    model = (await gateway.openai.models.list()).data[0].id
    return {"model": model, "messages": [{"role": "user", "content": "hi"}], **more}


async def in_pieces(asked: dict, num_bytes: int) -> AsyncIterator[bytes]:
    """A body of this length, which takes a while to arrive."""
    content = json.dumps(asked).encode()
    content = content[:-1] + b" " * (num_bytes - len(content)) + content[-1:]
    for begin in range(0, num_bytes, 100_000):
        yield content[begin : begin + 100_000]
        await asyncio.sleep(0.005)


async def content_of(answer: httpx.Response) -> str:
    """Of a stream."""
    found = ""
    async for line in answer.aiter_lines():
        if line.startswith("data: {"):
            for choice in json.loads(line[6:])["choices"]:
                found += choice["delta"].get("content") or ""
    return found


async def test_over_tls_requests_reach_their_picked_pod_and_keys_keep_it(launch: Launch, tmp_path: Path):
    first = await launch(**TLS)
    second = await launch(beside=first, pod="gateway-1", **TLS)
    worker = await first.worker()
    both = {address(first), address(second)}
    async with in_front_of(sorted(both), first.picker_port, tmp_path, tls=True) as envoy:
        asked = await chat(first)
        for number in range(8):
            key = {"idempotency-key": f"order-{number}"}
            answers = [
                await envoy.http.post("/v1/chat/completions", json=asked, headers=key) for _ in range(4)
            ]
            assert {a.status_code for a in answers} == {200}
            assert len({a.headers[SERVED_BY] for a in answers}) == 1
            assert [a.headers.get("idempotent-replayed") for a in answers] == [None, *["true"] * 3]
        seen = {
            (await envoy.http.get("/v1/models", headers={"idempotency-key": f"{n}"})).headers[SERVED_BY]
            for n in range(20)
        }
        assert seen == both
        assert await envoy.stat("streams_started") == 52
        assert await envoy.stat("streams_failed") == await envoy.stat("failure_mode_allowed") == 0
    assert len(worker.requests) == 8


async def test_an_answer_streams_on_after_its_picker_is_killed(launch: Launch, tmp_path: Path):
    gateway = await launch(**PLAIN)
    go = asyncio.Event()

    async def in_halves(worker: ScriptedWorker, request) -> None:
        half = len(worker.answer) // 2
        await worker.tokens(request, list(range(half)))
        await go.wait()
        await worker.tokens(request, list(range(half, len(worker.answer))))

    await gateway.worker(answer="the red circle is left of the blue square", script=in_halves)
    await until_picked(gateway.picker_port, [address(gateway)])
    async with in_front_of([address(gateway)], gateway.picker_port, tmp_path) as envoy:
        asked = await chat(gateway, stream=True)
        async with envoy.http.stream("POST", "/v1/chat/completions", json=asked) as answer:
            assert answer.status_code == 200
            await gateway.until_metric("mmd_gateway_picker_requests", 0)
            (process,) = [
                child
                for child in psutil.Process().children(recursive=True)
                if "mmd_workers.gateway.picker.pick_process" in child.cmdline()
            ]
            os.kill(process.pid, signal.SIGKILL)
            go.set()
            assert await content_of(answer) == "the red circle is left of the blue square"


async def test_a_body_in_pieces_passes_up_to_the_size_limit(launch: Launch, tmp_path: Path):
    gateway = await launch(maxBodyMebibytes=4, **PLAIN)
    worker = await gateway.worker()
    await until_picked(gateway.picker_port, [address(gateway)])

    asked = await chat(gateway)
    async with in_front_of([address(gateway)], gateway.picker_port, tmp_path) as envoy:
        path = "/v1/chat/completions"
        answer = await envoy.http.post(path, content=in_pieces(asked, 3 << 20), headers=JSON)
        assert (answer.status_code, len(worker.requests)) == (200, 1), answer.text
        answer = await envoy.http.post(path, content=in_pieces(asked, (4 << 20) + 1), headers=JSON)
        assert (answer.status_code, answer.json()["error"]["code"]) == (413, "request_too_large")
        assert len(worker.requests) == 1


async def test_no_request_fails_while_the_proxy_misses_a_gateways_departure(launch: Launch, tmp_path: Path):
    first = await launch(**PLAIN)
    second = await launch(beside=first, pod="gateway-1", **PLAIN)
    await first.worker()
    both = [address(first), address(second)]
    for gateway in (first, second):
        await until_picked(gateway.picker_port, both)
    asked = await chat(first)
    async with in_front_of(both, second.picker_port, tmp_path) as envoy:
        envoy.ask(first.picker_port, second.picker_port)
        goes_on = True

        async def ask() -> None:
            while goes_on:
                for num_bytes in (200, 50_000, 1 << 20):
                    content = in_pieces(asked, num_bytes)
                    answer = await envoy.http.post("/v1/chat/completions", content=content, headers=JSON)
                    assert answer.status_code == 200, answer.text

        asking = [asyncio.create_task(ask()) for _ in range(6)]
        before = await first.metric("mmd_gateway_picks_total")
        await first.until_metric("mmd_gateway_picks_total", lambda picks: picks >= before + 10)
        first.stop.set()
        await asyncio.sleep(1.0)
        assert not first.task.done()
        envoy.ask(second.picker_port)
        await asyncio.wait_for(first.task, 60)
        first.end_awaited = True
        goes_on = False
        await asyncio.gather(*asking)
        assert await envoy.stat("streams_failed") == await envoy.stat("failure_mode_allowed") == 0


async def test_an_error_that_needs_the_headers_alone_reaches_the_client_whole(launch: Launch, tmp_path: Path):
    gateway = await launch(**PLAIN)
    await until_picked(gateway.picker_port, [address(gateway)])
    async with in_front_of([address(gateway)], gateway.picker_port, tmp_path) as envoy:
        for num_bytes in (100, 2 << 20):
            answers = await asyncio.gather(
                *(envoy.http.post("/v1/unknown", content=bytes(num_bytes)) for _ in range(20))
            )
            assert {(a.status_code, a.json()["error"]["code"]) for a in answers} == {(404, "not_found")}


async def test_a_client_that_pauses_its_upload_is_waited_for(launch: Launch, tmp_path: Path):
    gateway = await launch(**PLAIN)
    await gateway.worker()
    await until_picked(gateway.picker_port, [address(gateway)])
    content = json.dumps(await chat(gateway)).encode()

    async def paused() -> AsyncIterator[bytes]:
        yield content[:20]
        await gateway.until_metric("mmd_gateway_picker_requests", 1)
        yield content[20:]

    async with in_front_of([address(gateway)], gateway.picker_port, tmp_path) as envoy:
        answer = await envoy.http.post(
            "/v1/chat/completions", content=paused(), headers={"content-type": "application/json"}
        )
        assert answer.status_code == 200, answer.text
        assert await envoy.stat("streams_failed") == 0
