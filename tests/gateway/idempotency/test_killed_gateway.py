"""A gateway is killed that makes an answer which another one reads for its client: both as the processes that their containers run."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest

from mmd_api.contract.subjects import Subjects
from mmd_workers.gateway.idempotency.repeats import EVENT_HEADER, KEY_HEADER, REPEATED_HEADER
from mmd_workers.model.frontend import HfFrontend
from mmd_workers.wire.messages.prefill import GenerateRequest
from mmd_workers.wire.server import NatsServer
from tests.gateway.scripted import ScriptedWorker, answer_well
from tests.gateway.spawned import BODY, MESH, TEXT, running, until_ready

pytestmark = pytest.mark.processes
KEY = {KEY_HEADER: "one"}
PATH = "/v1/chat/completions"
KNOWN_SECONDS = 3.0  # several heartbeats: gateways know each other by these, and show it nowhere


@dataclass
class Two:
    """The gateway that is killed, and the one that lives. Until `kill`, the worker sends half of an answer."""

    child: asyncio.subprocess.Process
    first: httpx.AsyncClient
    second: httpx.AsyncClient
    worker: ScriptedWorker
    killed: asyncio.Event

    async def kill(self) -> None:
        self.child.kill()
        await self.child.wait()
        self.killed.set()


@pytest.fixture
async def two(own_nats_server: NatsServer, tmp_path: Path, frontend: HfFrontend) -> AsyncIterator[Two]:
    killed = asyncio.Event()

    async def half_until_killed(worker: ScriptedWorker, request: GenerateRequest) -> None:
        if len(worker.requests) == 1:
            await worker.tokens(request, [0, 1])
            await killed.wait()
        await answer_well(worker, request)

    worker = await ScriptedWorker.start(
        own_nats_server.url,
        Subjects("test", "own", MESH),
        "decode-0",
        frontend.tokenizer.encode(TEXT, add_special_tokens=False),
        half_until_killed,
    )
    folders = [tmp_path / name for name in ("first", "second")]
    for folder in folders:
        folder.mkdir()
    async with (
        running(own_nats_server, folders[0], MMD_POD_NAME="gateway-0") as (child, first),
        running(own_nats_server, folders[1], MMD_POD_NAME="gateway-1") as (_, second),
    ):
        for client in (first, second):
            await until_ready(client, True, "/ready")
        await asyncio.sleep(KNOWN_SECONDS)
        yield Two(child, first, second, worker, killed)
    await worker.close()


async def test_a_request_that_joined_it_at_another_gateway_is_made_there(two: Two) -> None:
    lost = asyncio.create_task(two.first.post(PATH, json=BODY, headers=KEY))
    await two.worker.until(lambda: bool(two.worker.requests))
    joined = asyncio.create_task(two.second.post(PATH, json=BODY, headers=KEY))
    done, _ = await asyncio.wait({joined}, timeout=1.0)
    assert not done
    assert len(two.worker.requests) == 1
    await two.kill()
    with pytest.raises(httpx.HTTPError):
        await lost
    answer = await joined
    assert answer.status_code == 200
    assert answer.json()["choices"][0]["message"]["content"] == TEXT
    assert answer.headers["x-mmd-gateway"] == "gateway-1"
    assert len(two.worker.requests) == 2


async def test_a_killed_gateways_joined_stream_fails_and_can_be_repeated(
    two: Two,
) -> None:
    body = BODY | {"stream": True}
    lost = asyncio.create_task(two.first.post(PATH, json=body, headers=KEY))
    await two.worker.until(lambda: bool(two.worker.requests))
    async with two.second.stream("POST", PATH, json=body, headers=KEY) as joined:
        parts = joined.aiter_text()
        begun = await anext(parts)
        assert joined.headers[REPEATED_HEADER] == "true"
        await two.kill()
        rest = "".join([part async for part in parts])
    with pytest.raises(httpx.HTTPError):
        await lost
    (error,) = [event for event in rest.split("\n\n") if "peer_lost" in event]
    assert error.startswith("data: "), "an error is no event of the stream, and has no id"
    event = begun.partition("\n")[0].removeprefix("id: ")
    resumed = await two.second.post(PATH, json=body, headers=KEY | {EVENT_HEADER: event})
    assert resumed.status_code == 410
    again = await two.second.post(PATH, json=body, headers=KEY)
    assert again.text.endswith("data: [DONE]\n\n")
    assert (await two.second.post(PATH, json=body, headers=KEY)).text == again.text
    assert len(two.worker.requests) == 2
