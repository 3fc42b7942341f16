"""`mmd top`, `mmd report` and `mmd trace` beside two gateways, each of which knows its own requests alone."""

from __future__ import annotations

import asyncio
import json
import os
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from mmd_cli import gateways, top
from mmd_cli.local import state
from mmd_cli.program import build
from support.harness.waiting import DEADLINE_SECONDS, until
from tests.gateway.running import Launch, Running
from tests.gateway.scripted import ScriptedWorker, answer_well


async def mmd(*arguments: str) -> Result:
    """The command on a thread, since the gateways are on this one."""
    return await asyncio.to_thread(CliRunner().invoke, build().app, list(arguments))


async def shown(*arguments: str) -> dict:
    ran = await mmd(*arguments, "--json")
    assert ran.exit_code == 0, ran.output
    return json.loads(ran.stdout)


async def ask(gateway: Running, count: int) -> list[str]:
    asked = [
        gateway.openai.chat.completions.create(
            model="builtin/demo", messages=[{"role": "user", "content": f"What is {number}?"}]
        )
        for number in range(count)
    ]
    return [answer.id for answer in await asyncio.gather(*asked)]


def admin(*gateways: Running) -> list[str]:
    return [word for one in gateways for word in ("--url", str(one.admin.base_url).rstrip("/"))]


async def knows_both(one: Running) -> None:
    async def are_known() -> bool:
        return len((await one.admin.get("/debug/targets")).json()) >= 3  # with the worker

    await until(are_known)


async def two(launch: Launch) -> tuple[Running, Running]:
    one = await launch(pod="gateway-0")
    other = await launch(pod="gateway-1", beside=one)
    await one.worker()
    for gateway in (one, other):
        await knows_both(gateway)
    return one, other


async def test_top_sums_what_the_gateways_of_the_running_deployment_count(
    launch: Launch, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, other = await two(launch)
    go, asked = asyncio.Event(), asyncio.Semaphore(0)

    async def hold(worker: ScriptedWorker, request) -> None:
        asked.release()
        await go.wait()
        await answer_well(worker, request)

    one.workers[0].script = hold
    asking = [asyncio.create_task(ask(gateway, count)) for gateway, count in ((one, 2), (other, 3))]
    async with asyncio.timeout(DEADLINE_SECONDS):
        for _ in range(5):
            await asked.acquire()
    monkeypatch.setenv("MMD_STATE_DIR", str(tmp_path))
    urls = [word for word in admin(one, other) if word != "--url"]
    pods = [state.RunningPod(f"gateway-{n}", "gateway", url) for n, url in enumerate(urls)]
    state.write(state.Running("demo", os.getpid(), one.url, urls[0], pods))
    seen = await shown("top", "--seconds", "0.2")
    assert seen["requests"]["running"] == 5
    assert (seen["gateways"], seen["missing"]) == (["gateway-0", "gateway-1"], [])
    assert [pod["pod"] for pod in seen["pods"]] == ["decode-0"]

    async def in_prefill() -> list[dict]:
        going = (await one.admin.get("/debug/requests")).json()["requests"]
        assert [request["phase"] for request in going] == ["prefill"] * 2
        return going

    going = await until(in_prefill)
    assert "in prefill" in (await mmd("trace", going[0]["request_id"], *admin(one))).output
    before = await asyncio.to_thread(gateways.look, urls)
    go.set()
    await asyncio.gather(*asking)
    await one.until_metric("mmd_requests_total", 2)
    await other.until_metric("mmd_requests_total", 3)
    now = await asyncio.to_thread(gateways.look, urls)
    requests = top.facts(now, before, {})["requests"]
    zero, first = (now.gateways[pod].taken - before.gateways[pod].taken for pod in ("gateway-0", "gateway-1"))
    assert requests["per_second"] == pytest.approx(2 / zero + 3 / first)
    assert requests["ttft_seconds"]["p50"] > 0
    report = await shown("report", "-o", str(tmp_path / "report.html"))
    assert report["figures"]["requests"] == "5"
    for request in [name for names in asking for name in names.result()]:
        assert (await shown("trace", request))["request_id"] == request


async def test_gateways_that_are_not_counted_are_named(launch: Launch, tmp_path: Path) -> None:
    one, other = await two(launch)
    await ask(one, 1)
    seen = await shown("top", "--seconds", "0.2", *admin(one))
    (missing,) = seen["missing"]
    assert missing.startswith("not counted: gateway gateway-1, which was not asked")
    assert str(other.admin.base_url.port) in missing
    screen = (await mmd("top", "--once", "--seconds", "0.2", *admin(one))).output
    assert "not counted: gateway gateway-1" in screen
    seen = await shown("top", "--seconds", "0.2", *admin(one, one))
    assert seen["gateways"] == ["gateway-0"], "asked twice, counted once"
    other.stop.set()
    await asyncio.wait_for(other.task, DEADLINE_SECONDS)
    other.end_awaited = True
    for command in (["top", "--seconds", "0.2"], ["report", "-o", str(tmp_path / "report.html")]):
        seen = await shown(*command, *admin(one, other))
        (missing,) = seen.get("missing") or [note for note in seen["notes"] if "not counted" in note]
        assert missing.startswith("not counted: no gateway responded at")
        assert str(other.admin.base_url.port) in missing
    ran = await mmd("top", *admin(other))
    assert ran.exit_code == 1
    assert "no gateway responded at" in ran.output
