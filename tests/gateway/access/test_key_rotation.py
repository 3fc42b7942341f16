"""Keys change while a gateway runs: the process that its container runs, its Secret as the kubelet mounts it, and clients that keep asking."""

from __future__ import annotations

import asyncio
from pathlib import Path

import httpx
import pytest
import yaml

from mmd_api.contract.subjects import Subjects
from mmd_api.tenants import hash_of, new_key
from mmd_workers.model.frontend import HfFrontend
from mmd_workers.wire.server import NatsServer
from support.harness.waiting import until
from tests.gateway.mounted import MountedSecret
from tests.gateway.scripted import ScriptedWorker, answer_well
from tests.gateway.spawned import BODY, MESH, TEXT, running

pytestmark = pytest.mark.processes


def listing(*keys: str) -> dict[str, str]:
    tenant = {"name": "search", "keys": [{"hash": hash_of(key)} for key in keys]}
    return {"keys.yaml": yaml.safe_dump({"tenants": [tenant]})}


async def test_a_key_is_rotated_without_a_restart_and_without_a_refused_request(
    own_nats_server: NatsServer, tmp_path: Path, frontend: HfFrontend
) -> None:
    old, new = new_key(), new_key()
    secret = MountedSecret(tmp_path / "keys")
    secret.update(listing(old))
    ids = frontend.tokenizer.encode(TEXT, add_special_tokens=False)
    auth = {"auth": {"keysSecret": "demo-keys"}}
    async with running(own_nats_server, tmp_path, auth, MMD_KEYS_FILE=str(secret.folder / "keys.yaml")) as (
        child,
        client,
    ):
        worker = await ScriptedWorker.start(
            own_nats_server.url, Subjects("test", "own", MESH), "decode-0", ids, answer_well
        )
        present, asked, stop = old, 0, asyncio.Event()

        async def ask(key: str) -> httpx.Response:
            return await client.post("/v1/chat/completions", json=BODY, headers={"x-api-key": key})

        async def keep_asking() -> None:
            nonlocal asked
            while not stop.is_set():
                try:
                    answer = await ask(present)
                except (httpx.RemoteProtocolError, httpx.ReadError):
                    continue  # on a busy machine the gateway may have closed a connection that was idle
                if answer.status_code == 503:  # they were, on a busy machine
                    await asyncio.sleep(0.1)
                    continue
                assert answer.status_code == 200, answer.text
                assert answer.json()["choices"][0]["message"]["content"] == TEXT
                asked += 1
                await asyncio.sleep(0.05)  # not as many as fill the worker's queue before its next heartbeat

        async def until_status(key: str, status: int) -> None:
            async def is_given() -> bool:
                return (await ask(key)).status_code == status

            await until(is_given, f"a request is answered with {status}", pause_seconds=0.1)

        async def until_asked(number: int) -> None:
            await until(lambda: asked >= number or asking.done())
            if asking.done():
                asking.result()

        asking = asyncio.create_task(keep_asking())
        try:
            assert (await ask(new)).status_code == 401
            secret.update(listing(old, new))
            await until_status(new, 200)
            assert (await ask(old)).status_code == 200, "the old key works until it is removed"
            present = new
            before = asked
            await until_asked(before + 2)  # the last request with the old key has been answered
            secret.update(listing(new))
            await until_status(old, 401)
            secret.update({"keys.yaml": "tenants: ["})
            before = asked
            await until_asked(before + 10)
        finally:
            stop.set()
        await asking
        assert (await ask(old)).status_code == 401
        assert (await ask(new)).status_code == 200
        assert child.returncode is None
        await worker.close()
