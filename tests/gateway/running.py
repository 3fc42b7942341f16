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
from support.harness.waiting import until

from .scripted import Script, ScriptedWorker, answer_well

PATIENT_MILLISECONDS = 20_000
"""Heartbeat timeout of a gateway in tests: a busy machine must not make it lose a pod."""
HASTY_MILLISECONDS = 600
"""Heartbeat timeout of a gateway in a test that awaits the loss of a pod."""


def pipeline_config(
    name: str,
    gateway: dict,
    model: dict | None = None,
    encoder: dict | None = None,
    engine: dict | None = None,
    heartbeat_timeout_milliseconds: int = PATIENT_MILLISECONDS,
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

        async def are_known() -> bool:
            pods = (await self.http.get("/ready")).json()["ready_pods"]
            assert all(pods[role] >= count for role, count in wanted.items()), f"ready pods: {pods}"
            return True

        await until(are_known, f"the gateway knows of {wanted}")

    async def until_gateways(self, count: int) -> None:
        """The gateway knows of as many, itself among them."""

        async def are_known() -> bool:
            targets = (await self.admin.get("/debug/targets")).json()
            gateways = [target for target in targets if target["labels"]["component"] == "gateway"]
            assert len(gateways) >= count, f"gateways: {gateways}"
            return True

        await until(are_known, f"the gateway knows of {count} gateways")

    async def until_pod(self, name: str, predicate: Callable[[dict], bool]) -> None:
        """The gateway's view of a pod is as `predicate` wants it."""

        async def is_seen() -> bool:
            pods = (await self.admin.get("/debug/state")).json()["pods"]
            assert any(predicate(pod) for pod in pods if pod["pod"] == name), f"pods: {pods}"
            return True

        await until(is_seen, f"the gateway's view of {name}")

    async def _values(self, name: str) -> list[float]:
        text = (await self.admin.get("/metrics")).text
        return [
            float(line.split()[-1]) for line in text.splitlines() if line.split("{")[0].split(" ")[0] == name
        ]

    async def metric(self, name: str) -> float:
        values = await self._values(name)
        assert values, f"no metric {name}"
        return sum(values)

    async def until_metric(self, name: str, wanted: float | Callable[[float], bool]) -> None:
        """Wait for a value, or for one that meets a condition; a metric with labels has none before its first report."""

        async def is_reached() -> bool:
            value = await self.metric(name)
            assert wanted(value) if callable(wanted) else value == wanted, f"{name} is {value:g}"
            return True

        await until(is_reached, f"{name} {'meets a condition' if callable(wanted) else f'is {wanted:g}'}")


Launch = Callable[..., Awaitable[Running]]


async def until_status(client: httpx.AsyncClient, path: str, status: int) -> httpx.Response:
    """The first answer with this status."""

    async def answer() -> httpx.Response:
        answer = await client.get(path)
        assert answer.status_code == status, f"{path} answers {answer.status_code}: {answer.text}"
        return answer

    return await until(answer, f"{path} answers {status}")


async def assert_nothing_is_left(gateway: Running) -> None:
    for name in (
        "mmd_gateway_sequences",
        "mmd_requests_running",
        "mmd_media_held_bytes",
        "mmd_gateway_media_items",
    ):
        await gateway.until_metric(name, 0)
