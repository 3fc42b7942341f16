"""The gateway as the process that its container runs: starts from its environment, drains on SIGTERM, survives its NATS server."""

from __future__ import annotations

import asyncio
import json
import signal
import socket
import time
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest

from mmd_api.contract.load import PodLoad
from mmd_api.contract.subjects import Subjects
from mmd_api.pipeline import PipelineConfig
from mmd_api.resource import API_VERSION, KIND, MultimodalDeployment
from mmd_cli.local.pods import free_port, local_pods
from mmd_cli.local.supervisor import Supervisor
from mmd_cli.local.up import objects_of
from mmd_workers.gateway.process import gateway_process
from mmd_workers.model.frontend import HfFrontend
from mmd_workers.process.identity import of_model
from mmd_workers.process.settings import WorkerSettings
from mmd_workers.wire.bus import Bus
from mmd_workers.wire.messages.every_pod import Heartbeat
from mmd_workers.wire.messages.prefill import GenerateRequest
from mmd_workers.wire.server import NatsServer
from support.harness.waiting import until
from tests.gateway.running import pipeline_config
from tests.gateway.scripted import HalfFirst, ScriptedWorker, answer_well, say_nothing
from tests.gateway.spawned import BODY, MESH, TEXT, running, until_ready

pytestmark = pytest.mark.processes


@pytest.fixture
async def process(
    own_nats_server: NatsServer, tmp_path: Path
) -> AsyncIterator[tuple[asyncio.subprocess.Process, httpx.AsyncClient]]:
    async with running(own_nats_server, tmp_path) as started:
        yield started


async def test_it_finishes_what_it_has_on_sigterm_and_exits_well(
    process, own_nats_server: NatsServer, frontend: HfFrontend
) -> None:
    child, client = process
    go = asyncio.Event()

    async def wait_then_answer(worker: ScriptedWorker, request: GenerateRequest) -> None:
        await go.wait()
        await answer_well(worker, request)

    ids = frontend.tokenizer.encode(TEXT, add_special_tokens=False)
    worker = await ScriptedWorker.start(
        own_nats_server.url, Subjects("test", "own", MESH), "decode-0", ids, wait_then_answer
    )
    asking = asyncio.create_task(client.post("/v1/chat/completions", json=BODY))
    await worker.until(lambda: bool(worker.requests))
    child.send_signal(signal.SIGTERM)
    await until_ready(client, False, "/ready")
    go.set()
    assert (await asking).json()["choices"][0]["message"]["content"] == TEXT
    assert await asyncio.wait_for(child.wait(), 90) == 0
    await worker.close()


async def test_a_stream_outlasting_the_templates_grace_period_survives_its_gateways_end(
    nats_server: NatsServer, tmp_path: Path, frontend: HfFrontend
) -> None:
    """The pod is the planned one, and ends as the plan says: SIGTERM, and SIGKILL after the planned grace period."""
    body = {
        "model": {"id": "builtin/demo"},
        "gateway": {"requestTimeoutSeconds": 30, "template": {"terminationGracePeriodSeconds": 5}},
        "decode": {"replicas": 1, "gpus": 0},
    }
    deployment = MultimodalDeployment.parse(
        {"apiVersion": API_VERSION, "kind": KIND, "metadata": {"name": "long"}, "spec": body}
    )
    pods = local_pods(objects_of(deployment), tmp_path, nats_server.url, free_port(), 1, 0.1)
    (pod,) = [pod for pod in pods if pod.component == "gateway"]
    pipeline = PipelineConfig.load(pod.environment["MMD_PIPELINE_CONFIG"])
    revision = f"{pipeline.revision}-{of_model(deployment.spec.model)}"
    subjects = Subjects(pipeline.namespace, pipeline.name, revision)
    ids = frontend.tokenizer.encode("the red circle " * 12, add_special_tokens=False)
    seconds_per_token = 8.0 / len(ids)

    async def answer_slowly(worker: ScriptedWorker, request: GenerateRequest) -> None:
        for index in range(len(worker.answer)):
            await asyncio.sleep(seconds_per_token)
            await worker.tokens(request, [index])

    supervisor = Supervisor(lambda *_: None)
    worker = await ScriptedWorker.start(
        nats_server.url, subjects, "decode-0", ids, answer_slowly, revision=pipeline.revision
    )
    try:
        supervisor.start(pod)
        async with httpx.AsyncClient(base_url=pod.http_url, timeout=30) as client:
            await until_ready(client, True)
            stopping, text, finish = None, "", None
            async with client.stream("POST", "/v1/chat/completions", json={**BODY, "stream": True}) as answer:
                async for line in answer.aiter_lines():
                    if not line.startswith("data: {"):
                        continue
                    stopping = stopping or asyncio.create_task(supervisor.stop([pod.name]))
                    choice = json.loads(line.removeprefix("data: "))["choices"][0]
                    text += choice["delta"].get("content") or ""
                    finish = choice["finish_reason"] or finish
            assert text == frontend.tokenizer.decode(ids)
            assert finish == "stop"
            assert stopping is not None
            await stopping
    finally:
        await supervisor.close()
        await worker.close()


async def test_a_request_during_a_drain_is_answered_within_the_grace_period(
    own_nats_server: NatsServer, tmp_path: Path, frontend: HfFrontend
) -> None:
    async def answer_the_first(worker: ScriptedWorker, request: GenerateRequest) -> None:
        await (answer_well if len(worker.requests) == 1 else say_nothing)(worker, request)

    async with running(own_nats_server, tmp_path, MMD_GRACE_SECONDS="9") as (child, client):
        ids = frontend.tokenizer.encode(TEXT, add_special_tokens=False)
        worker = await ScriptedWorker.start(
            own_nats_server.url, Subjects("test", "own", MESH), "decode-0", ids, answer_the_first
        )
        assert (await client.post("/v1/chat/completions", json=BODY)).status_code == 200
        in_flight = asyncio.create_task(client.post("/v1/chat/completions", json=BODY))
        await worker.until(lambda: len(worker.requests) == 2)  # so that it does not end at once
        child.send_signal(signal.SIGTERM)
        await until_ready(client, False, "/ready")
        response = await client.post("/v1/chat/completions", json=BODY)
        assert response.status_code == 504
        assert response.json()["error"]["code"] == "deadline_exceeded"
        in_flight.cancel()
        await asyncio.gather(in_flight, return_exceptions=True)
        assert await asyncio.wait_for(child.wait(), 90) == 0
        await worker.close()


async def test_it_continues_after_its_nats_server_was_restarted(
    process, own_nats_server: NatsServer, frontend: HfFrontend
) -> None:
    child, client = process
    ids = frontend.tokenizer.encode(TEXT, add_special_tokens=False)

    answer = HalfFirst(2)
    subjects = Subjects("test", "own", MESH)
    worker = await ScriptedWorker.start(own_nats_server.url, subjects, "decode-0", ids, answer)
    asking = asyncio.create_task(client.post("/v1/chat/completions", json=BODY))
    await worker.until(lambda: bool(worker.requests))
    await asyncio.to_thread(own_nats_server.kill)
    await until_ready(client, False)
    await asyncio.to_thread(own_nats_server.start)
    await until_ready(client, True)
    answer.seen.set()
    response = await asking
    assert response.json()["choices"][0]["message"]["content"] == TEXT
    assert child.returncode is None
    await worker.close()


@pytest.mark.parametrize(
    ("pod_ip", "failed", "is_replaced"),
    [("127.0.0.1", "", False), ("10.0.0.9", "", True), ("10.0.0.9", "x", False)],
)
async def test_a_leaving_gateway_knows_its_clients_and_other_gateways(
    own_nats_server: NatsServer, frontend: HfFrontend, pod_ip: str, failed: str, is_replaced: bool
) -> None:
    """In a cluster another gateway takes its place, unless a part of it has failed: then its container is started again."""
    settings = WorkerSettings(
        pipeline_config("leaves", {}), "gateway-0", pod_ip, free_port(), own_nats_server.url, 1
    )
    bus = await Bus.connect(own_nats_server.url, "gateway-0", Subjects("test", "leaves", "r1"))
    gateway = gateway_process.GatewayProcess(settings, frontend, bus, asyncio.Event())
    gateway._gateway.failed = failed
    leave = gateway._leave()
    assert leave._is_replaced == is_replaced
    await gateway._gateway.directory.start()
    beat = Heartbeat("gateway-1", "gateway", [], "i", "r1", "ready", "127.0.0.1:1", time.time(), PodLoad())
    await bus.publish(bus.subjects.heartbeat("gateway-1"), beat)
    await until(lambda: leave._others._since)
    with socket.create_server(("127.0.0.1", settings.http_port)) as listener, socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.connect(listener.getsockname())
        accepted, _ = listener.accept()
        accepted.sendall(b"x" * 200_000)
        assert leave._undelivered_bytes() > 100_000
        accepted.close()
    await gateway._gateway.directory.close()
    await bus.close()
