"""The gateway as the process that its container runs: starts from its environment, drains on SIGTERM, survives its NATS server."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest

from mmd_api.subjects import Subjects
from mmd_workers.model.frontend import HfFrontend
from mmd_workers.wire.messages import GenerateRequest
from mmd_workers.wire.server import NatsServer

from .conftest import free_port, pipeline_config
from .scripted import ScriptedWorker, answer_well

pytestmark = pytest.mark.processes
BODY = {"model": "builtin/demo", "messages": [{"role": "user", "content": "hello"}], "temperature": 0}
TEXT = "the red circle"


@pytest.fixture
async def process(
    own_nats_server: NatsServer, tmp_path: Path
) -> AsyncIterator[tuple[asyncio.subprocess.Process, httpx.AsyncClient]]:
    port = free_port()
    config = tmp_path / "pipeline.json"
    config.write_text(pipeline_config("own", {}).dump())
    child = await asyncio.create_subprocess_exec(
        str(Path(sys.executable).with_name("mmd")),
        "gateway",
        env={
            **os.environ,
            "MMD_PIPELINE_CONFIG": str(config),
            "MMD_POD_NAME": "gateway-0",
            "MMD_POD_IP": "127.0.0.1",
            "MMD_HTTP_PORT": str(port),
            "MMD_NATS_URL": own_nats_server.url,
            "MMD_THREADS": "1",
        },
    )
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=30) as client:
        await until_ready(client, True)
        yield child, client
    if child.returncode is None:
        child.kill()
        await child.wait()


async def until_ready(client: httpx.AsyncClient, ready: bool) -> None:
    async with asyncio.timeout(60):
        while True:
            try:
                if ((await client.get("/readyz")).status_code == 200) == ready:
                    assert (await client.get("/livez")).status_code == 200
                    return
            except httpx.HTTPError:
                pass
            await asyncio.sleep(0.05)


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
        own_nats_server.url, Subjects("test", "own", "r1"), "decode-0", ids, wait_then_answer
    )
    asking = asyncio.create_task(client.post("/v1/chat/completions", json=BODY))
    await worker.until(lambda: bool(worker.requests), 30)
    child.send_signal(signal.SIGTERM)
    await until_ready(client, False)
    go.set()
    assert (await asking).json()["choices"][0]["message"]["content"] == TEXT
    assert await asyncio.wait_for(child.wait(), 90) == 0
    await worker.close()


async def test_it_goes_on_when_its_nats_server_was_restarted(
    process, own_nats_server: NatsServer, frontend: HfFrontend
) -> None:
    child, client = process
    ids = frontend.tokenizer.encode(TEXT, add_special_tokens=False)

    async def half_then_wait(worker: ScriptedWorker, request: GenerateRequest) -> None:
        if request.attempt == 0:
            await worker.tokens(request, [0, 1])
            await asyncio.sleep(3600)
        await answer_well(worker, request)

    subjects = Subjects("test", "own", "r1")
    worker = await ScriptedWorker.start(own_nats_server.url, subjects, "decode-0", ids, half_then_wait)
    asking = asyncio.create_task(client.post("/v1/chat/completions", json=BODY))
    await worker.until(lambda: bool(worker.requests), 30)
    await asyncio.to_thread(own_nats_server.kill)
    await until_ready(client, False)
    await asyncio.to_thread(own_nats_server.start)
    await until_ready(client, True)
    response = await asking
    assert response.json()["choices"][0]["message"]["content"] == TEXT
    assert child.returncode is None
    await worker.close()
