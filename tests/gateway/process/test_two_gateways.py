"""Two gateways as the processes that their containers run, which share nothing but NATS: tenants are the same at both."""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import Sequence
from pathlib import Path

import httpx
import pytest

from mmd_api.contract.subjects import Subjects
from mmd_api.tenants import new_key
from mmd_workers.model.frontend import HfFrontend
from mmd_workers.wire.server import NatsServer
from support.harness.waiting import DEADLINE_SECONDS, until
from tests.gateway.scripted import ScriptedWorker
from tests.gateway.spawned import BODY, MESH, TEXT, running, until_ready
from tests.gateway.tenancy import AUTH, LONG, SHORT, SLOW, Pods, bearer, tenant, write

pytestmark = pytest.mark.processes


async def until_refused(client: httpx.AsyncClient, key: str, words: str = "") -> str:
    """The message of the first refusal with these words."""

    async def refusal() -> str:
        answer = await client.post("/v1/chat/completions", json=BODY, headers=bearer(key))
        if answer.status_code == 200:
            return ""
        if answer.status_code != 429:
            raise RuntimeError(f"neither answered nor refused: {answer.status_code} {answer.text}")
        message = answer.json()["error"]["message"]
        assert words in message, message
        return message

    return await until(refusal, f"a refusal with {words!r}", pause_seconds=0.1)


async def slow_worker(nats_url: str, frontend: HfFrontend, pods: Pods) -> ScriptedWorker:
    """All roles, in one pod that answers `TEXT`."""
    tokens = frontend.tokenizer.encode(TEXT, add_special_tokens=False)
    subjects = Subjects("test", "own", MESH)
    return await ScriptedWorker.start(nats_url, subjects, "decode-0", tokens, pods.script, load=SLOW)


async def test_a_flood_delays_no_quiet_tenant_and_a_kill_forgets_no_tokens(
    own_nats_server: NatsServer, tmp_path: Path, frontend: HfFrontend
) -> None:
    """The gateways know each other first: one that appears halves the room of the other, also where a flood has it already."""
    quiet, flood, spent, probe = new_key(), new_key(), new_key(), new_key()
    keys = tmp_path / "keys.yaml"
    limits = {"limits": {"tokensPerDay": 30}}
    probed = tenant("probe", probe, limits={"requestsPerMinute": 1})
    write(keys, tenant("quiet", quiet), tenant("flood", flood), tenant("spent", spent, **limits), probed)
    folders = [tmp_path / name for name in ("first", "second", "third")]
    for folder in folders:
        folder.mkdir()

    def gateway(folder: Path, pod: str):
        return running(own_nats_server, folder, {"auth": AUTH}, MMD_KEYS_FILE=str(keys), MMD_POD_NAME=pod)

    pods = Pods()
    worker = await slow_worker(own_nats_server.url, frontend, pods)
    async with gateway(folders[0], "gateway-0") as (_, first):
        async with gateway(folders[1], "gateway-1") as (child, second):
            pods.go.set()
            await until_they_know_each_other((first, second), probe)
            pods.go.clear()
            pods.taken.clear()

            def ask(client: httpx.AsyncClient, body: dict, key: str) -> asyncio.Task[httpx.Response]:
                return asyncio.create_task(
                    client.post("/v1/chat/completions", json=body, headers=bearer(key))
                )

            flooding = [ask(client, LONG, flood) for client in (first, second) for _ in range(10)]
            await pods.until_taken("flood", 2)
            asked = [ask(client, SHORT, quiet) for client in (first, second)]
            await pods.until_taken("quiet", 2)
            assert pods.taken.count("flood") <= 8
            pods.go.set()
            assert [(await one).status_code for one in asked] == [200, 200]
            assert {(await one).status_code for one in flooding} <= {200, 503}
            for client in (second, first):
                assert "tokensPerDay is 30" in await until_refused(client, spent)
            child.kill()
            await child.wait()
        async with gateway(folders[2], "gateway-1") as (_, again):
            await until_ready(again, True, "/ready")
            assert "tokensPerDay is 30" in await until_refused(again, spent)
    await worker.close()


async def until_they_know_each_other(clients: Sequence[httpx.AsyncClient], key: str) -> None:
    """`key`: of a tenant with one request a minute, of which each gateway's part is one."""
    for client in clients:
        await until_ready(client, True, "/ready")
        await until_refused(client, key, "of 2 gateways")


async def answered(client: httpx.AsyncClient, body: dict, key: str) -> tuple[int, str]:
    """How many requests a gateway answers, one after another, and why no more."""
    for count in range(100):
        answer = await client.post("/v1/chat/completions", json=body, headers=bearer(key))
        if answer.status_code == 429:
            return count, answer.json()["error"]["message"]
        assert answer.status_code == 200, answer.text
    raise AssertionError("nothing was refused")


async def test_two_gateways_share_a_tenants_limits(
    own_nats_server: NatsServer, tmp_path: Path, frontend: HfFrontend
) -> None:
    """Each allows its half, rounded up: together one more than an odd limit."""
    limits = {
        "probe": {"requestsPerMinute": 1},
        "requests": {"requestsPerMinute": 5},
        "in-flight": {"concurrentRequests": 5},
        "work": {"workSecondsPerMinute": 5},
    }
    secrets = {name: new_key() for name in limits}
    keys = tmp_path / "keys.yaml"
    write(keys, *(tenant(name, secrets[name], limits=of) for name, of in limits.items()))
    pods = Pods()
    worker = await slow_worker(own_nats_server.url, frontend, pods)
    pods.go.set()
    async with contextlib.AsyncExitStack() as stack:
        clients = []
        for number in range(2):
            folder = tmp_path / f"{number}"
            folder.mkdir()
            gateway = running(
                own_nats_server,
                folder,
                {"auth": AUTH},
                MMD_KEYS_FILE=str(keys),
                MMD_POD_NAME=f"gateway-{number}",
            )
            clients.append((await stack.enter_async_context(gateway))[1])
        await until_they_know_each_other(clients, secrets["probe"])

        for client in clients:
            count, message = await answered(client, SHORT, secrets["requests"])
            assert count == 3
            assert "its limit requestsPerMinute is 5, 3 at each of 2 gateways" in message

        total = 0.0
        for client in clients:
            count, message = await answered(client, LONG, secrets["work"])
            assert "its limit workSecondsPerMinute is 5, 3 at each of 2 gateways" in message
            seconds = float(re.search(r"had ([\d.]+) s of work", message)[1])
            assert count > 1
            assert seconds + 0.05 >= 3  # as it is rounded
            assert seconds * (count - 1) / count < 3.05, "the request that reaches the limit is the last"
            total += seconds
        assert total >= 5

        pods.go.clear()
        asked = []
        for client in clients:
            asking = [
                asyncio.create_task(
                    client.post("/v1/chat/completions", json=SHORT, headers=bearer(secrets["in-flight"]))
                )
                for _ in range(6)
            ]
            async with asyncio.timeout(DEADLINE_SECONDS):
                while sum(one.done() for one in asking) < 3:
                    await asyncio.wait(
                        [one for one in asking if not one.done()], return_when=asyncio.FIRST_COMPLETED
                    )
            refused = [one.result() for one in asking if one.done()]
            assert {answer.status_code for answer in refused} == {429}
            expected = "its limit concurrentRequests is 5, 3 at each of 2 gateways"
            assert all(expected in answer.json()["error"]["message"] for answer in refused)
            asked += [one for one in asking if not one.done()]
        pods.go.set()
        assert [(await one).status_code for one in asked] == 6 * [200]
    await worker.close()
