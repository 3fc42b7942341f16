"""A write that waited for its connection does not leave once another process may act."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio
from aiohttp import web

from mmd_operator.kube.cluster import BusyError, Cluster
from mmd_operator.kube.leadership import NotLeaderError
from mmd_operator.kube.metrics import OperatorMetrics
from mmd_operator.serve import api_client
from support.cluster.control_plane import write_kubeconfig


class Door:
    """An HTTP server in the place of the API server: counts writes, and keeps reads waiting until it is opened."""

    def __init__(self) -> None:
        self.open = asyncio.Event()
        self.reading = asyncio.Semaphore(0)
        self.writes: list[str] = []

    async def handle(self, request: web.Request) -> web.Response:
        if request.method == "GET":
            self.reading.release()
            await self.open.wait()
            return web.json_response({"items": []})
        self.writes.append(request.method)
        return web.json_response({"metadata": {"name": "x"}})


@pytest_asyncio.fixture
async def door(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Door]:
    door = Door()
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", door.handle)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    server = f"http://127.0.0.1:{runner.addresses[0][1]}"
    kubeconfig = write_kubeconfig(tmp_path / "kubeconfig.yaml", server, "none")
    monkeypatch.setenv("KUBECONFIG", str(kubeconfig))
    yield door
    door.open.set()
    await runner.cleanup()


SERVICE = {"apiVersion": "v1", "kind": "Service", "metadata": {"name": "x", "namespace": "n"}}
"""Something to write."""


class Lease:
    held = True

    def fence(self) -> None:
        if not self.held:
            raise NotLeaderError("lost")


@pytest.mark.parametrize("method", ["apply", "delete"])
async def test_a_write_waiting_for_a_connection_is_not_sent_without_the_lease(door: Door, method: str):
    lease = Lease()
    async with asyncio.timeout(20), api_client(lease.fence) as api:
        cluster = Cluster(api, OperatorMetrics())
        connections = api.rest_client.maxsize
        reads = [asyncio.create_task(cluster.get("Service", "n", "x")) for _ in range(connections)]
        for _ in range(connections):
            await door.reading.acquire()
        write = asyncio.create_task(
            cluster.apply(SERVICE, "n") if method == "apply" else cluster.delete("Service", "n", "x", "uid")
        )
        await asyncio.sleep(0)  # it waits for a connection from its first step on
        lease.held = False
        door.open.set()
        await asyncio.gather(*reads)
        with pytest.raises(NotLeaderError):
            await write
    assert door.writes == []


async def test_a_write_leaves_while_the_lease_is_held(door: Door):
    async with asyncio.timeout(20), api_client(Lease().fence) as api:
        await Cluster(api, OperatorMetrics()).apply(SERVICE, "n")
    assert door.writes == ["PATCH"]


async def test_the_fence_is_checked_again_when_the_body_follows_the_headers(door: Door):
    """aiohttp sends a body from a separate task: the lease may end between the two."""
    answers = iter([True, False])

    def fence() -> None:
        if not next(answers):
            raise NotLeaderError("lost")

    async with asyncio.timeout(20), api_client(fence) as api:
        with pytest.raises(BusyError, match="Failed to send"):
            await Cluster(api, OperatorMetrics()).apply(SERVICE, "n")
    assert door.writes == []
