"""One nats-server and one demo tokenizer for the room; a gateway per test, on a loopback port of its own."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import pytest
from openai import AsyncOpenAI

from mmd_api.pipeline import PipelineConfig
from mmd_api.subjects import Subjects
from mmd_workers.gateway import service
from mmd_workers.model.frontend import HfFrontend, load_frontend
from mmd_workers.settings import WorkerSettings
from mmd_workers.wire.server import NatsServer

from .scripted import Script, ScriptedWorker, answer_well

_names = itertools.count()


@pytest.fixture(scope="session")
def frontend() -> HfFrontend:
    pipeline = pipeline_config("any", {})
    return load_frontend(pipeline.spec.model, pipeline.spec.gateway.media)


def pipeline_config(name: str, gateway: dict) -> PipelineConfig:
    spec = {
        "model": {"id": "builtin/demo"},
        "gateway": gateway,
        "decode": {"replicas": 1, "gpus": 0},
        "observability": {"heartbeatMilliseconds": 100, "heartbeatTimeoutMilliseconds": 600},
    }
    return PipelineConfig.model_validate({"namespace": "test", "name": name, "revision": "r1", "spec": spec})


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@dataclass
class Running:
    """A gateway that serves, and the workers a test starts beside it."""

    url: str
    nats: NatsServer
    subjects: Subjects
    tokenizer: object
    stop: asyncio.Event
    task: asyncio.Task[None]
    http: httpx.AsyncClient
    openai: AsyncOpenAI
    workers: list[ScriptedWorker] = field(default_factory=list)

    def ids(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=False)

    async def worker(
        self, answer: str | list[int] = "the red circle", script: Script = answer_well, **more
    ) -> ScriptedWorker:
        ids = self.ids(answer) if isinstance(answer, str) else answer
        pod = more.pop("pod", f"decode-{len(self.workers)}")
        worker = await ScriptedWorker.start(self.nats.url, self.subjects, pod, ids, script, **more)
        self.workers.append(worker)
        await self.until_known()
        return worker

    async def until_known(self) -> None:
        """The gateway has heard of every live worker that is ready."""
        live = [w for w in self.workers if w.state == "ready" and not w.bus.client.is_closed]
        wanted = {role: sum(role in w.roles for w in live) for role in ("encode", "prefill", "decode")}
        async with asyncio.timeout(10):
            while True:
                pods = (await self.http.get("/ready")).json()["ready_pods"]
                if all(pods[role] >= count for role, count in wanted.items()):
                    return
                await asyncio.sleep(0.02)

    async def metric(self, name: str) -> float:
        text = (await self.http.get("/metrics")).text
        values = [
            float(line.split()[-1]) for line in text.splitlines() if line.split("{")[0].split(" ")[0] == name
        ]
        assert values, f"no metric {name}"
        return sum(values)

    async def until_metric(self, name: str, value: float) -> None:
        async with asyncio.timeout(10):
            while await self.metric(name) != value:
                await asyncio.sleep(0.02)


Launch = Callable[..., Awaitable[Running]]


@pytest.fixture
async def launch(
    nats_server: NatsServer, frontend: HfFrontend, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[Launch]:
    running: list[Running] = []

    async def start(**gateway) -> Running:
        pipeline = pipeline_config(f"t{next(_names)}", gateway)
        settings = WorkerSettings(
            pipeline=pipeline,
            pod="gateway-0",
            pod_ip="127.0.0.1",
            http_port=free_port(),
            nats_url=nats_server.url,
            threads=1,
        )
        stop = asyncio.Event()
        task = asyncio.create_task(service.serve(settings, stop))
        url = f"http://127.0.0.1:{settings.http_port}"
        http = httpx.AsyncClient(base_url=url, timeout=30)
        async with asyncio.timeout(30):
            while True:
                with contextlib.suppress(httpx.HTTPError):
                    if (await http.get("/ready")).status_code == 200:
                        break
                if task.done():
                    task.result()
                await asyncio.sleep(0.02)
        one = Running(
            url=url,
            nats=nats_server,
            subjects=Subjects("test", pipeline.name, "r1"),
            tokenizer=frontend.tokenizer,
            stop=stop,
            task=task,
            http=http,
            openai=AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=30),
        )
        running.append(one)
        return one

    yield start
    monkeypatch.setattr(service, "QUIET_SECONDS", 0.0)
    for one in running:
        one.stop.set()
        await asyncio.wait_for(one.task, 20)
        for worker in one.workers:
            await worker.close()
        await one.openai.close()
        await one.http.aclose()
