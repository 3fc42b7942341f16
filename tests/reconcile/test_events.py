"""Events are correlated in memory, within bounds, and written by a task that nothing waits for."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from prometheus_client.parser import text_string_to_metric_families

from mmd_operator.kube import events
from mmd_operator.kube.cluster import Cluster
from mmd_operator.kube.events import COMBINED, OBJECT_BURST, SIMILAR_EVENTS, EventRecorder
from mmd_operator.kube.metrics import OperatorMetrics
from mmd_operator.kube.pauses import PRODUCTION
from mmd_operator.serve import api_client
from support.cluster.control_plane import write_kubeconfig


class EventServer:
    """The Events API over real HTTP, so that it can refuse, forget and stall, which a real API server does not do on request."""

    def __init__(self) -> None:
        self.objects: dict[str, dict[str, Any]] = {}
        self.refusals: list[web.Response] = []
        self.calls: Counter[str] = Counter()
        self.open = asyncio.Event()
        self.open.set()

    async def handle(self, request: web.Request) -> web.Response:
        self.calls[request.method] += 1
        await self.open.wait()
        if self.refusals:
            return self.refusals.pop(0)
        body = await request.json()
        if request.method == "POST":
            self.objects[body["metadata"]["name"]] = body
            return web.json_response(body, status=201)
        name = request.path.rpartition("/")[2]
        if name not in self.objects:
            return refused(404, "not found")
        self.objects[name] |= body
        return web.json_response(self.objects[name])

    def messages(self) -> dict[str, int]:
        return {item["message"]: item["count"] for item in self.objects.values()}


def refused(status: int, message: str, **headers: str) -> web.Response:
    return web.json_response({"kind": "Status", "message": message}, status=status, headers=headers)


@asynccontextmanager
async def recording(
    server: EventServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[Any]:
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", server.handle)
    runner = web.AppRunner(app, shutdown_timeout=0.2)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    monkeypatch.setenv("KUBECONFIG", str(write_kubeconfig(tmp_path / "kubeconfig.yaml", url, "none")))
    metrics = OperatorMetrics()
    async with asyncio.timeout(30), api_client() as api:
        recorder = EventRecorder(Cluster(api, metrics), metrics, PRODUCTION)
        writer = asyncio.create_task(recorder.run())
        yield recorder, metrics
        writer.cancel()
        await asyncio.gather(writer, return_exceptions=True)
    server.open.set()
    await runner.cleanup()


def about(name: str = "demo") -> dict[str, Any]:
    return {"metadata": {"name": name, "namespace": "n", "uid": f"uid-{name}"}}


def counted(metrics: OperatorMetrics) -> dict[str, float]:
    families = text_string_to_metric_families(metrics.expose()[0].decode())
    found = next(f for f in families if f.name == "mmd_operator_events")
    return {s.labels["outcome"]: s.value for s in found.samples if s.name.endswith("_total")}


async def test_a_repeated_event_is_one_object_with_a_count(tmp_path, monkeypatch) -> None:
    server = EventServer()
    async with recording(server, tmp_path, monkeypatch) as (recorder, _):
        for _ in range(5):
            recorder.report(about(), "Scaled", "from 1 to 2")
            await recorder.flush()
        recorder.report(about("other"), "Scaled", "from 1 to 2")
        await recorder.flush()
    first, second = server.objects.values()
    assert (first["count"], second["count"]) == (5, 1)
    assert first["firstTimestamp"] <= first["lastTimestamp"]
    assert first["involvedObject"]["uid"] == "uid-demo"
    assert server.calls == {"POST": 2, "PATCH": 4}


async def test_repetitions_that_come_while_the_api_server_is_slow_are_one_write(
    tmp_path, monkeypatch
) -> None:
    server = EventServer()
    async with recording(server, tmp_path, monkeypatch) as (recorder, _):
        server.open.clear()
        for _ in range(30):
            recorder.report(about(), "Scaled", "from 1 to 2")
            await asyncio.sleep(0)
        server.open.set()
        await recorder.flush()
    assert server.messages() == {"from 1 to 2": 30}
    assert server.calls.total() <= 2


async def test_many_messages_of_one_reason_end_in_one_combined_event(tmp_path, monkeypatch) -> None:
    server = EventServer()
    async with recording(server, tmp_path, monkeypatch) as (recorder, _):
        for number in range(SIMILAR_EVENTS + 7):
            recorder.report(about(), "Scaled", f"to {number}")
            await recorder.flush()
        recorder.report(about(), "Scaled", "to 0")
        await recorder.flush()
    messages = server.messages()
    assert len(messages) == SIMILAR_EVENTS + 1
    assert messages[f"{COMBINED}to {SIMILAR_EVENTS + 6}"] == 7
    assert messages["to 0"] == 2


async def test_an_event_that_the_api_server_forgot_is_created_again(tmp_path, monkeypatch) -> None:
    server = EventServer()
    async with recording(server, tmp_path, monkeypatch) as (recorder, _):
        recorder.report(about(), "Scaled", "to 2")
        await recorder.flush()
        server.objects.clear()
        recorder.report(about(), "Scaled", "to 2")
        await recorder.flush()
    assert server.messages() == {"to 2": 2}


async def test_refused_events_are_dropped_and_counted_and_later_ones_written(tmp_path, monkeypatch) -> None:
    server = EventServer()
    async with recording(server, tmp_path, monkeypatch) as (recorder, metrics):
        server.refusals = [
            refused(403, "namespace n is being terminated"),
            refused(429, "wait", **{"Retry-After": "1"}),
        ]
        recorder.report(about(), "Draining", "first")
        recorder.report(about(), "Removed", "second")
        await recorder.flush()
        assert counted(metrics) == {"written": 1, "dropped": 1}
    assert list(server.messages()) == ["second"]


async def test_reporting_without_an_api_server_does_not_block_and_is_bounded(tmp_path, monkeypatch) -> None:
    server = EventServer()
    monkeypatch.setattr(events, "MAX_PENDING", 20)
    async with recording(server, tmp_path, monkeypatch) as (recorder, metrics):
        server.open.clear()
        for number in range(300):
            recorder.report(about(f"d{number}"), "Ready", "serving")
        assert counted(metrics)["dropped"] == 280
        assert len(recorder._pending) == 20
        server.open.set()
        await recorder.flush()
    assert len(server.objects) == 20


async def test_one_deployment_cannot_flood_the_api_server(tmp_path, monkeypatch) -> None:
    server = EventServer()
    async with recording(server, tmp_path, monkeypatch) as (recorder, metrics):
        for number in range(1000):
            recorder.report(about(), f"Reason{number}", "text")
        recorder.report(about("quiet"), "Ready", "serving")
        await recorder.flush()
        assert counted(metrics)["dropped"] >= 1000 - OBJECT_BURST - 1
    assert "serving" in server.messages()
    assert len(server.objects) <= OBJECT_BURST + 2


async def test_what_is_remembered_is_bounded(tmp_path, monkeypatch) -> None:
    server = EventServer()
    monkeypatch.setattr(events, "MAX_REMEMBERED", 50)
    async with recording(server, tmp_path, monkeypatch) as (recorder, _):
        for number in range(200):
            recorder.report(about(f"d{number}"), "Ready", "serving")
        await recorder.flush()
        assert max(len(recorder._events), len(recorder._similar), len(recorder._buckets)) == 50
