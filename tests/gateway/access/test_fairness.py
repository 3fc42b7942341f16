"""Tenants that wait for one another, over HTTP: gateways that serve, beside a worker whose speed a test sets."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest

from mmd_api.contract.load import PodLoad
from mmd_api.tenants import new_key
from support.harness.waiting import until
from tests.gateway.running import Launch, Running, assert_nothing_is_left
from tests.gateway.tenancy import AUTH, LONG, SHORT, SLOW, Pods, bearer, tenant, write

FLOOD = 30


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr("mmd_workers.process.live.CHECK_SECONDS", 0.02)
    return tmp_path / "keys.yaml"


def asking(gateway: Running, body: dict, key: str, count: int = 1) -> list[asyncio.Task[httpx.Response]]:
    def ask() -> asyncio.Task[httpx.Response]:
        sent = gateway.http.post("/v1/chat/completions", json=body, headers=bearer(key))
        return asyncio.create_task(sent)

    return [ask() for _ in range(count)]


async def until_queued(gateway: Running, least: int) -> None:
    await gateway.until_metric("mmd_tenant_queued_requests", lambda queued: queued >= least)


async def fair(launch: Launch, file: Path, *, pods: Pods, **gateway) -> tuple[Running, str, str]:
    """A gateway with a slow worker, and the keys of a quiet tenant and of one that floods it."""
    quiet, flood = new_key(), new_key()
    write(file, tenant("quiet", quiet), tenant("flood", flood))
    running = await launch(keys_file=str(file), auth=AUTH, **gateway)
    await running.worker(script=pods.script, load=SLOW)
    return running, quiet, flood


async def test_a_quiet_tenant_starts_before_a_flood_that_waits(launch: Launch, file: Path) -> None:
    pods = Pods()
    gateway, quiet, flood = await fair(launch, file, pods=pods)
    flooding = asking(gateway, LONG, flood, FLOOD)
    await pods.until_taken("flood", 2)
    await until_queued(gateway, 10)
    (asked,) = asking(gateway, SHORT, quiet)
    await pods.until_taken("quiet", 1)
    assert Counter(pods.taken)["flood"] < FLOOD / 2
    demand = (await gateway.admin.get("/demand")).json()["waiting"]
    assert demand["prompt_tokens"] > 1000  # what the autoscaler has to see
    pods.go.set()
    assert (await asked).status_code == 200
    answers = await asyncio.gather(*flooding)
    assert {answer.status_code for answer in answers} <= {200, 503}
    assert sum(answer.status_code == 200 for answer in answers) >= 4
    await assert_nothing_is_left(gateway)


async def test_without_tenants_everything_starts_at_once(launch: Launch) -> None:
    pods = Pods()
    gateway = await launch()
    await gateway.worker(script=pods.script, load=SLOW)
    flooding = asking(gateway, LONG, "none", FLOOD)
    await pods.until_taken("flood", FLOOD)
    pods.go.set()
    assert {answer.status_code for answer in await asyncio.gather(*flooding)} == {200}


async def test_two_gateways_start_no_more_than_one_does(launch: Launch, file: Path) -> None:
    pods = Pods()
    first, quiet, flood = await fair(launch, file, pods=pods)
    second = await launch(keys_file=str(file), auth=AUTH, pod="gateway-1", beside=first)
    second.workers.append(first.workers[0])
    await second.until_known()
    second.workers.clear()
    await asyncio.gather(first.until_gateways(2), second.until_gateways(2))
    flooding = [*asking(first, LONG, flood, 12), *asking(second, LONG, flood, 12)]
    for gateway in (first, second):
        await until_queued(gateway, 8)
    assert len(pods.taken) <= 6  # one gateway alone starts four
    for gateway in (first, second):
        (asked,) = asking(gateway, SHORT, quiet)
        before = Counter(pods.taken)["quiet"]
        await pods.until_taken("quiet", before + 1)
        flooding.append(asked)
    pods.go.set()
    answers = await asyncio.gather(*flooding)
    assert {answer.status_code for answer in answers[-2:]} == {200}
    for gateway in (first, second):
        await assert_nothing_is_left(gateway)


async def test_a_client_that_hangs_up_while_it_waits_leaves_the_queue(launch: Launch, file: Path) -> None:
    pods = Pods()
    gateway, _, flood = await fair(launch, file, pods=pods)
    flooding = asking(gateway, LONG, flood, 12)
    await until_queued(gateway, 6)
    for one in flooding:
        one.cancel()
    await asyncio.gather(*flooding, return_exceptions=True)
    await assert_nothing_is_left(gateway)
    assert "mmd_tenant_queued_requests{" not in (await gateway.admin.get("/metrics")).text
    assert len(pods.taken) <= 5


async def test_a_gateway_filled_by_a_flood_admits_a_quiet_tenant(launch: Launch, file: Path) -> None:
    pods = Pods()
    gateway, quiet, flood = await fair(launch, file, pods=pods, maxConcurrentRequests=12)
    flooding = asking(gateway, LONG, flood, 12)
    await until_queued(gateway, 6)
    (asked,) = asking(gateway, SHORT, quiet)
    await pods.until_taken("quiet", 1)
    pods.go.set()
    assert (await asked).status_code == 200
    answers = await asyncio.gather(*flooding)
    refused = [answer for answer in answers if answer.status_code == 429]
    assert len(refused) == 1
    assert refused[0].json()["error"]["code"] == "too_many_requests"
    assert int(refused[0].headers["retry-after"]) >= 1


async def test_who_may_not_come_itself_takes_no_place_of_others(launch: Launch, file: Path) -> None:
    pods, spent, flood = Pods(), new_key(), new_key()
    write(file, tenant("spent", spent, limits={"requestsPerMinute": 1}), tenant("flood", flood))
    gateway = await launch(keys_file=str(file), auth=AUTH, maxConcurrentRequests=12)
    await gateway.worker(script=pods.script, load=SLOW)
    flooding = asking(gateway, LONG, flood, 11)
    await until_queued(gateway, 6)
    (first,) = asking(gateway, SHORT, spent)
    await pods.until_taken("quiet", 1)
    for answer in await asyncio.gather(*asking(gateway, SHORT, spent, 5)):
        assert answer.status_code == 429
        assert "requestsPerMinute is 1" in answer.json()["error"]["message"]
    pods.go.set()
    assert {answer.status_code for answer in await asyncio.gather(first, *flooding)} == {200}


async def test_a_body_that_has_not_come_takes_no_place_of_others(launch: Launch, file: Path) -> None:
    pods, come = Pods(), asyncio.Event()
    gateway, quiet, flood = await fair(launch, file, pods=pods, maxConcurrentRequests=12)
    flooding = asking(gateway, LONG, flood, 12)
    await until_queued(gateway, 6)

    async def body() -> AsyncIterator[bytes]:
        yield b"{"
        await come.wait()
        yield b"}"

    headers = {**bearer(quiet), "content-type": "application/json"}
    slow = asyncio.create_task(gateway.http.post("/v1/chat/completions", content=body(), headers=headers))

    async def is_running() -> bool:
        return 'requests_running{tenant="quiet"} 1.0' in (await gateway.admin.get("/metrics")).text

    await until(is_running)
    pods.go.set()
    assert {answer.status_code for answer in await asyncio.gather(*flooding)} == {200}
    come.set()
    assert (await slow).status_code == 400


async def test_work_that_overflows_the_queue_is_refused_with_a_retry_time(launch: Launch, file: Path) -> None:
    pods = Pods()
    gateway, _, flood = await fair(launch, file, pods=pods, requestTimeoutSeconds=2)
    answers = await asyncio.gather(*asking(gateway, LONG, flood, 8))
    refused = [answer for answer in answers if answer.status_code == 503]
    assert len(refused) >= 2
    for answer in refused:
        assert "s of work would wait, and the gateway's queue takes 1;" in answer.json()["error"]["message"]
        assert int(answer.headers["retry-after"]) >= 1
    await assert_nothing_is_left(gateway)


async def test_work_beyond_a_tenants_limit_is_refused_with_a_retry_time(launch: Launch, file: Path) -> None:
    key, pods = new_key(), Pods()
    write(file, tenant("search", key, limits={"workSecondsPerMinute": 5}))
    gateway = await launch(keys_file=str(file), auth=AUTH)
    await gateway.worker(script=pods.script, load=PodLoad(prefill_tokens_per_second=10.0))
    pods.go.set()
    (first,) = await asyncio.gather(*asking(gateway, LONG, key))
    assert first.status_code == 200
    (second,) = await asyncio.gather(*asking(gateway, LONG, key))
    assert second.status_code == 429
    assert "workSecondsPerMinute is 5" in second.json()["error"]["message"]
    assert 50 <= int(second.headers["retry-after"]) <= 61
