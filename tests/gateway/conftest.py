"""One nats-server and one demo tokenizer for the room; a gateway per test, on a dedicated loopback port."""

from __future__ import annotations

import asyncio
import itertools
import ssl
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest
from openai import AsyncOpenAI, DefaultAsyncHttpxClient

from mmd_api.contract.subjects import Subjects
from mmd_cli.local.pods import free_port
from mmd_workers.gateway.process import gateway_process, leave
from mmd_workers.media.sandbox import DecodePool
from mmd_workers.model.frontend import HfFrontend, load_frontend
from mmd_workers.process.settings import WorkerSettings
from mmd_workers.process.warmup import media_steps
from mmd_workers.wire.server import NatsServer
from support.harness.waiting import DEADLINE_SECONDS, until
from support.oracles import random_model

from .running import PATIENT_MILLISECONDS, Launch, Running, pipeline_config

_names = itertools.count()
START_POOL = DecodePool.start


async def start_at_first_use(_: DecodePool) -> None:
    """Nothing."""


@pytest.fixture(scope="session")
def frontend() -> HfFrontend:
    pipeline = pipeline_config("any", {})
    return load_frontend(pipeline.spec.model, pipeline.spec.gateway.media)


@pytest.fixture
async def launch(
    nats_server: NatsServer, frontend: HfFrontend, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[Launch]:
    running: list[Running] = []

    async def start(
        model: dict | None = None,
        nats: NatsServer = nats_server,
        encoder: dict | None = None,
        engine: dict | None = None,
        keys_file: str = "",
        tls_folder: str = "",
        trusted: ssl.SSLContext | None = None,
        pod: str = "gateway-0",
        beside: Running | None = None,
        heartbeat_timeout_milliseconds: int = PATIENT_MILLISECONDS,
        prefill: dict | None = None,
        with_decoders: bool = False,
        **gateway,
    ) -> Running:
        """`with_decoders`: decode processes start with the gateway, as they do in production, and not with the first medium. Their start takes
        longer than most tests, which have none.
        """
        monkeypatch.setattr(gateway_process, "media_steps", media_steps if with_decoders else lambda *_: {})
        monkeypatch.setattr(DecodePool, "start", START_POOL if with_decoders else start_at_first_use)
        name = beside.subjects.name if beside is not None else f"gateway{next(_names)}"
        pipeline = pipeline_config(
            name, gateway, model, encoder, engine, heartbeat_timeout_milliseconds, prefill
        )
        settings = WorkerSettings(
            pipeline=pipeline,
            pod=pod,
            pod_ip="127.0.0.1",
            http_port=free_port(),
            admin_port=free_port(),
            picker_port=free_port(),
            nats_url=nats.url,
            threads=1,
            keys_file=keys_file,
            tls_folder=tls_folder,
        )
        stop = asyncio.Event()
        task = asyncio.create_task(gateway_process.serve(settings, stop))
        # Without TLS nobody is trusted: to read the authorities for a client takes 30 ms.
        url = f"{'https' if trusted else 'http'}://127.0.0.1:{settings.http_port}"
        http = httpx.AsyncClient(base_url=url, timeout=DEADLINE_SECONDS, verify=trusted or False)

        async def is_ready(http: httpx.AsyncClient = http, task: asyncio.Task[None] = task) -> bool:
            if task.done():
                task.result()
            return (await http.get("/readyz")).status_code == 200

        await until(is_ready, "the gateway is ready", retried=(httpx.HTTPError,))
        one = Running(
            url=url,
            nats=nats,
            subjects=Subjects("test", pipeline.name, "r1"),
            tokenizer=frontend.tokenizer,
            stop=stop,
            task=task,
            picker_port=settings.picker_port,
            http=http,
            admin=httpx.AsyncClient(
                base_url=f"http://127.0.0.1:{settings.admin_port}", timeout=DEADLINE_SECONDS, verify=False
            ),
            openai=AsyncOpenAI(
                base_url=f"{url}/v1",
                api_key="none",
                max_retries=0,
                timeout=DEADLINE_SECONDS,
                http_client=DefaultAsyncHttpxClient(verify=trusted or False),
            ),
        )
        running.append(one)
        return one

    yield start
    monkeypatch.setattr(leave, "QUIET_SECONDS", 0.0)
    for one in running:
        one.stop.set()
        if not one.end_awaited:
            await asyncio.wait_for(one.task, DEADLINE_SECONDS)
        for worker in one.workers:
            await worker.close()
        await one.openai.close()
        await one.http.aclose()
        await one.admin.aclose()


@pytest.fixture(scope="session")
def text_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "llama"
    random_model.build("llama", folder, seed=1, size=random_model.Size())
    return folder
