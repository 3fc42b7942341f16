"""A gateway that serves on loopback ports, and scripted workers next to it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

import httpx
from openai import AsyncOpenAI

from mmd_api.contract.subjects import Subjects
from mmd_api.pipeline import PipelineConfig
from mmd_workers.wire.server import NatsServer
from tests.support.waiting import DEADLINE_SECONDS

from .scripted import Script, ScriptedWorker, answer_well


def pipeline_config(
    name: str,
    gateway: dict,
    model: dict | None = None,
    encoder: dict | None = None,
    engine: dict | None = None,
    heartbeat_timeout_milliseconds: int = 600,
    prefill: dict | None = None,
) -> PipelineConfig:
    spec = {
        "model": {"id": "builtin/demo", **(model or {})},
        "gateway": gateway,
        "decode": {"replicas": 1, "gpus": 0},
        "observability": {
            "heartbeatMilliseconds": 100,
            "heartbeatTimeoutMilliseconds": heartbeat_timeout_milliseconds,
        },
    }
    if encoder is not None:
        spec["encoder"] = encoder
    if prefill is not None:
        spec |= {"prefill": prefill, "transfer": {"kv": {"backend": "Gloo"}}}
    if engine is not None:
        spec["engine"] = engine
    return PipelineConfig.model_validate({"namespace": "test", "name": name, "revision": "r1", "spec": spec})


@dataclass
class Running:
    """A gateway that serves, and the workers a test starts next to it."""

    url: str
    nats: NatsServer
    subjects: Subjects
    tokenizer: object
    stop: asyncio.Event
    task: asyncio.Task[None]
    picker_port: int
    http: httpx.AsyncClient
    admin: httpx.AsyncClient
    openai: AsyncOpenAI
    workers: list[ScriptedWorker] = field(default_factory=list)
    end_awaited: bool = False  # the test itself has awaited `task`

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
        async with asyncio.timeout(DEADLINE_SECONDS):
            while True:
                pods = (await self.http.get("/ready")).json()["ready_pods"]
                if all(pods[role] >= count for role, count in wanted.items()):
                    return
                await asyncio.sleep(0.02)

    async def until_pod(self, name: str, predicate: Callable[[dict], bool]) -> None:
        """The gateway's view of a pod is as `predicate` wants it."""
        async with asyncio.timeout(DEADLINE_SECONDS):
            while True:
                pods = (await self.admin.get("/debug/state")).json()["pods"]
                if any(predicate(pod) for pod in pods if pod["pod"] == name):
                    return
                await asyncio.sleep(0.02)

    async def _values(self, name: str) -> list[float]:
        text = (await self.admin.get("/metrics")).text
        return [
            float(line.split()[-1]) for line in text.splitlines() if line.split("{")[0].split(" ")[0] == name
        ]

    async def metric(self, name: str) -> float:
        values = await self._values(name)
        assert values, f"no metric {name}"
        return sum(values)

    async def until_metric(self, name: str, value: float) -> None:
        """Wait for a value; a metric with labels has none before its first report."""
        async with asyncio.timeout(DEADLINE_SECONDS):
            while not (values := await self._values(name)) or sum(values) != value:
                await asyncio.sleep(0.02)


Launch = Callable[..., Awaitable[Running]]


async def assert_nothing_is_left(gateway: Running) -> None:
    for name in (
        "mmd_gateway_sequences",
        "mmd_requests_running",
        "mmd_media_held_bytes",
        "mmd_gateway_media_items",
    ):
        await gateway.until_metric(name, 0)
