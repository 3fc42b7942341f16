"""The streams and the clients of three real servers, configured as the operator does, while servers end and come back."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from urllib.parse import urlsplit

import pytest
from nats.aio.client import Server

from mmd_api.contract.errors import PeerLostError
from mmd_api.contract.subjects import GATEWAY_USER, Subjects, inbox_of
from mmd_api.resource import MultimodalDeployment
from mmd_operator.resources.nats import PASSWORD_KEYS
from mmd_workers.wire.bus import Bus
from mmd_workers.wire.connection import OTHER_SERVER_SECONDS, RECONNECT_SECONDS, next_server
from mmd_workers.wire.jobs import EncodeQueue
from mmd_workers.wire.login import Login
from mmd_workers.wire.stored_files import FileBytes, FileLog, StoredFile, StoreLimits
from mmd_workers.wire.tenant_tokens import RecordedTokens, TokenRecords
from support.harness.waiting import until
from support.servers.nats_cluster import NatsCluster, NatsMember

pytestmark = [pytest.mark.processes, pytest.mark.timeout(180)]

DEPLOYMENT = MultimodalDeployment.model_validate(
    {
        "apiVersion": "serving.multimodal.dev/v1alpha1",
        "kind": "MultimodalDeployment",
        "metadata": {"name": "chat", "namespace": "ai"},
        "spec": {
            "model": {"id": "builtin/demo"},
            "decode": {"replicas": 1, "gpus": 0},
            "nats": {"replicas": 3},
        },
    }
)
PASSWORDS = {key: f"p-{key}" for key in (*PASSWORD_KEYS, "routes")}
LIMITS = StoreLimits(entry_bytes=1 << 20, bytes_bytes=8 << 20, max_age_seconds=600)


@pytest.mark.parametrize(
    ("reconnects", "lost", "hosts", "pause"),
    [
        ((0,), "a", "a", RECONNECT_SECONDS),
        ((0, 0, 0), "a", "bc", OTHER_SERVER_SECONDS),
        ((0, 1, 0), "a", "c", OTHER_SERVER_SECONDS),
        ((0, 1, 1), "a", "a", RECONNECT_SECONDS),
        ((1, 1, 1), "a", "bc", RECONNECT_SECONDS),
        ((0, 0, 0), "", "abc", OTHER_SERVER_SECONDS),
    ],
    ids=str,
)
def test_a_client_avoids_the_lost_server_and_prefers_the_least_failed(
    reconnects: tuple[int, ...], lost: str, hosts: str, pause: tuple[float, float]
) -> None:
    servers = [Server(urlsplit(f"nats://{h}"), n) for h, n in zip("abc", reconnects, strict=False)]
    chosen = [next_server(servers, lost) for _ in range(100)]
    assert {server.uri.netloc for server, _ in chosen} == set(hosts)
    assert all(pause[0] <= seconds <= pause[1] for _, seconds in chosen)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NatsCluster]:
    servers = NatsCluster(tmp_path_factory.mktemp("cluster"), DEPLOYMENT, PASSWORDS)
    try:
        yield servers.start()
    finally:
        servers.kill()


@asynccontextmanager
async def connected(cluster: NatsCluster, name: str, replicas: int = 3) -> AsyncIterator[Bus]:
    bus = await Bus.connect(
        cluster.url,
        name,
        Subjects("ai", "chat", "r1"),
        inbox_of(GATEWAY_USER),
        login=Login(GATEWAY_USER, PASSWORDS[GATEWAY_USER]),
        stream_replicas=replicas,
    )
    try:
        yield bus
    finally:
        await bus.close(timeout=1.0)


async def ensure_all(bus: Bus) -> list[str]:
    await EncodeQueue(bus).ensure()
    await TokenRecords(bus).ensure()
    await FileLog(bus, LIMITS).ensure()
    subjects = bus.subjects
    streams = [subjects.encode_stream, subjects.tokens_stream, subjects.files_stream]
    return [*streams, subjects.file_bytes_stream]


async def replicas_of(bus: Bus, stream: str) -> int | None:
    manager = EncodeQueue(bus)._manager
    return (await manager.stream_info(stream)).config.num_replicas


async def test_streams_that_exist_get_as_many_copies_as_there_are_servers(cluster: NatsCluster) -> None:
    async with connected(cluster, "before", replicas=1) as bus:
        streams = await ensure_all(bus)
        assert {await replicas_of(bus, stream) for stream in streams} == {1}
    async with connected(cluster, "after") as bus:
        assert await ensure_all(bus) == streams
        assert {await replicas_of(bus, stream) for stream in streams} == {3}
    for server in cluster.servers:
        await asyncio.to_thread(server.until_healthy)  # the copies are complete


async def test_what_was_confirmed_survives_a_lost_server_and_can_be_written_again(
    cluster: NatsCluster,
) -> None:
    async with connected(cluster, "writer") as bus:
        await patiently(lambda: ensure_all(bus))
        records, files, log = TokenRecords(bus), FileBytes(bus, LIMITS), FileLog(bus, LIMITS)
        assert await records.write(7, "search", 5, RecordedTokens())
        await files.write("file-1", 0, b"one")
        lost = await leader_of(bus, cluster, bus.subjects.tokens_stream)
        await asyncio.to_thread(lost.kill)
        assert (await patiently(lambda: records.read(7, "search"))).total == 5
        assert await patiently(lambda: files.read("file-1", 0)) == b"one"
        await patiently(log.catch_up)
        assert await patiently(lambda: log.append(StoredFile("file-1", "search", "ready", 1.0, 2e9)))
        lost.spawn()
        await asyncio.to_thread(lost.until_healthy)


async def leader_of(bus: Bus, cluster: NatsCluster, stream: str) -> NatsMember:
    info = await EncodeQueue(bus)._manager.stream_info(stream)
    assert info.cluster is not None
    return cluster.servers[int(str(info.cluster.leader).rpartition("-")[2])]


async def test_a_cluster_without_a_majority_is_reported_and_serves_again_with_one(
    cluster: NatsCluster,
) -> None:
    lost = cluster.servers[1:]
    async with connected(cluster, "waits") as bus:
        queue = EncodeQueue(bus)
        for server in lost:
            await asyncio.to_thread(server.kill)
        with pytest.raises(PeerLostError, match=r"majority of its servers is Ready and spec\.nats\.replicas"):
            await queue.ensure()
        for server in lost:
            server.spawn()
        for server in lost:
            await asyncio.to_thread(server.until_healthy)
        await patiently(queue.ensure)
        assert all(depth.jobs == 0 for depth in (await patiently(queue.depth)).values())


async def patiently(call):  # type: ignore[no-untyped-def]
    """As gateways do: again while a leader is elected."""

    async def answer():  # type: ignore[no-untyped-def]
        return (await call(),)

    (value,) = await until(answer, retried=(PeerLostError,))
    return value
