"""The endpoint picker of real gateways: asked over gRPC, with NATS, HTTP and repeats as they are."""

from __future__ import annotations

import asyncio
import json
import os
import signal

import httpx
import psutil

from mmd_api.contract.load import PodLoad
from mmd_workers.wire.server import NatsServer
from support.harness.waiting import DEADLINE_SECONDS
from tests.gateway.proxies import (
    asking,
    body,
    channel_to,
    endpoints,
    has_no_choice,
    headers,
    returned,
    stream,
    until_picked,
)
from tests.gateway.running import Launch, Running
from tests.gateway.scripted import say_nothing

PLAIN = {"inferencePool": {"pickerTls": False}}
CHAT = {"messages": [{"role": "user", "content": "hi"}]}


def address(gateway: Running) -> str:
    return gateway.url.removeprefix("http://")


async def chat(gateway: Running) -> bytes:
    return json.dumps({**CHAT, "model": (await gateway.openai.models.list()).data[0].id}).encode()


async def picked(gateway: Running, **more: str) -> list[str]:
    async with asking(gateway.picker_port) as proxy:
        return endpoints(await proxy.ask(headers(**more)))


async def post(endpoint: str, content: bytes, **more: str) -> httpx.Response:
    sent = {"content-type": "application/json", **{k.replace("_", "-"): v for k, v in more.items()}}
    async with httpx.AsyncClient(timeout=30) as client:
        return await client.post(f"http://{endpoint}/v1/chat/completions", content=content, headers=sent)


async def test_a_request_reaches_the_picked_endpoint_with_its_body_unchanged(launch: Launch):
    gateway = await launch(**PLAIN)
    await gateway.worker()
    await until_picked(gateway.picker_port, [address(gateway)])
    content = await chat(gateway)
    async with asking(gateway.picker_port) as proxy:
        (endpoint,) = endpoints(await proxy.ask(headers(content_length=str(len(content)))))
        passed = b""
        for piece in (content[:10], content[10:], b""):
            passed += returned(await proxy.ask(body(piece, ends=not piece)))[0]
        assert (await post(endpoint, passed)).status_code == 200
    await gateway.until_metric("mmd_gateway_picks_total", lambda picks: picks >= 2)
    await gateway.until_metric("mmd_gateway_picker_requests", 0)


async def test_a_gateway_is_ready_only_when_its_picker_answers(launch: Launch):
    gateway = await launch(**PLAIN)
    assert (await gateway.http.get("/health")).status_code == 200
    async with asking(gateway.picker_port) as proxy:
        assert await proxy.ask(headers())


async def test_requests_are_spread_over_gateways_and_a_key_goes_to_one(launch: Launch):
    first = await launch(**PLAIN)
    second = await launch(beside=first, pod="gateway-1", **PLAIN)
    both = [address(first), address(second)]
    for gateway in (first, second):
        await until_picked(gateway.picker_port, both)
        seen: set[str] = set()
        async with asyncio.timeout(DEADLINE_SECONDS):  # which comes first is drawn
            while seen != set(both):
                seen.add((await picked(gateway))[0])
    for number in range(8):
        key = f"order-{number}"
        one, other = await picked(first, idempotency_key=key)
        assert await picked(second, idempotency_key=key) == [one, other]
    first.stop.set()  # it drains: no request runs
    await asyncio.wait_for(first.task, 60)
    first.end_awaited = True
    await until_picked(second.picker_port, [address(second)])
    assert await picked(second, idempotency_key="order-0") == [address(second)]


async def test_a_repeat_has_its_answer_while_the_pools_are_full(launch: Launch):
    first = await launch(**PLAIN)
    second = await launch(beside=first, pod="gateway-1", **PLAIN)
    worker = await first.worker()
    for gateway in (first, second):
        await until_picked(gateway.picker_port, [address(first), address(second)])
    content = await chat(first)
    home, other = await picked(first, idempotency_key="order-1")
    made = await post(home, content, idempotency_key="order-1")
    assert made.status_code == 200
    worker.load = PodLoad(prefill_waiting_requests=10_000, decode_running=8, decode_max_sequences=8)
    for gateway in (first, second):
        await gateway.until_pod(worker.pod, lambda pod: pod["load"]["prefill_waiting_requests"] > 0)
        (again, _) = await picked(gateway, idempotency_key="order-1")
        assert again == home
        repeated = await post(again, content, idempotency_key="order-1")
        assert (repeated.status_code, repeated.content) == (200, made.content)
        assert repeated.headers["idempotent-replayed"] == "true"
    assert (await post(other, content, idempotency_key="order-1")).content == made.content


async def test_a_picker_that_is_killed_is_started_again_while_the_gateway_serves(launch: Launch):
    gateway = await launch(**PLAIN)
    await gateway.worker()
    await until_picked(gateway.picker_port, [address(gateway)])
    (process,) = [
        child
        for child in psutil.Process().children(recursive=True)
        if "mmd_workers.gateway.picker.pick_process" in child.cmdline()
    ]
    async with asking(gateway.picker_port) as proxy:
        endpoints(await proxy.ask(headers()))
        os.kill(process.pid, signal.SIGKILL)
        assert (await post(address(gateway), await chat(gateway))).status_code == 200
    await until_picked(gateway.picker_port, [address(gateway)])
    assert await gateway.metric("mmd_gateway_picker_restarts_total") == 1
    report = (await gateway.admin.get("/demand")).json()
    assert "exit status -9" in report["picker_fault"]


async def test_a_gateway_without_nats_does_not_choose_until_it_is_back(
    launch: Launch, own_nats_server: NatsServer
):
    gateway = await launch(nats=own_nats_server, **PLAIN)
    await until_picked(gateway.picker_port, [address(gateway)])
    await asyncio.to_thread(own_nats_server.kill)
    async with asyncio.timeout(DEADLINE_SECONDS):
        has_chosen = True
        while has_chosen:
            async with asking(gateway.picker_port) as proxy:
                has_chosen = not has_no_choice(await proxy.ask(headers(ends=True)))
    await asyncio.to_thread(own_nats_server.start)
    await until_picked(gateway.picker_port, [address(gateway)])


async def test_a_gateway_that_drains_waits_for_the_streams_of_its_picker(launch: Launch):
    gateway = await launch(**PLAIN)
    worker = await gateway.worker(script=say_nothing)
    await until_picked(gateway.picker_port, [address(gateway)])
    async with channel_to(gateway.picker_port) as channel:
        held = stream(channel)
        endpoints(await held.ask(headers()))
        await gateway.until_metric("mmd_gateway_picker_requests", 1)
        asking_for_ever = asyncio.create_task(post(address(gateway), await chat(gateway)))
        await worker.until(lambda: bool(worker.requests))
        gateway.stop.set()
        asking_for_ever.cancel()
        await asyncio.gather(asking_for_ever, return_exceptions=True)
        assert returned(await held.ask(body(b"more"))) == (b"more", False)
        await gateway.until_metric("mmd_gateway_picker_requests", 1)
        assert not gateway.task.done()
        assert returned(await held.ask(body(b"rest", ends=True))) == (b"rest", True)
    await asyncio.wait_for(gateway.task, 60)
    gateway.end_awaited = True
