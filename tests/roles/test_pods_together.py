"""Whole pods in one process: the same tokens wherever the roles are, and nothing in hand is lost in a drain."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from mmd_api.pipeline import PipelineConfig, roles_of
from mmd_workers.settings import WorkerSettings
from mmd_workers.wire.server import NatsServer
from mmd_workers.worker import Worker
from tests.support.placing import SECONDS, Client

POOL = {"replicas": 1, "gpus": 0, "kvCacheMebibytes": 16}
APART = {"encoder": {"replicas": 1, "gpus": 0}, "prefill": POOL, "decode": POOL}


@asynccontextmanager
async def running(server: NatsServer, *pools: Any, **spec: Any) -> AsyncIterator[list[Worker]]:
    """A ready pod of each pool. Where they have not ended yet they are asked to."""
    spec |= {"model": {"id": "builtin/demo"}, "transfer": {"kv": {"backend": "Gloo"}}}
    config = {"namespace": "test", "name": "-".join(pools), "revision": "r1", "spec": spec}
    pipeline = PipelineConfig.model_validate(config)
    pods: list[Worker] = []
    serving: list[asyncio.Task[None]] = []
    try:
        for pool in pools:  # one after the other: two threads of a process cannot load models at once
            settings = WorkerSettings(pipeline, f"{pool}-0", "127.0.0.1", 0, server.url, threads=1)
            pods.append(Worker(settings, pool, roles_of(pipeline.spec, pool)))
            serving.append(asyncio.create_task(pods[-1].serve()))
            while pods[-1].state != "ready":
                assert not serving[-1].done(), serving[-1].result()
                await asyncio.sleep(0.05)
        yield pods
        for pod in pods:
            pod.stopping.set()
        await asyncio.gather(*serving)
    finally:
        for task in serving:
            task.cancel()
        await asyncio.wait(serving)
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().remove_signal_handler(number)


async def test_a_sequence_is_the_same_in_one_pod_and_handed_over_and_a_drain_loses_none_of_it(
    own_nats_server: NatsServer,
) -> None:
    async with asyncio.timeout(SECONDS):
        async with running(own_nats_server, "decode", decode=POOL) as (alone,):
            client = Client(alone.pod.bus)
            await client.start()
            await client.place("decode-0", "here", 40, [])
            expected = await client.until_tokens("here", 40)
        async with running(own_nats_server, "prefill", "decode", **APART) as (prefill, decode):
            client = Client(prefill.pod.bus)
            await client.start()
            await client.place("prefill-0", "handed-over", 40, ["decode-0"])
            await client.until_tokens("handed-over", 3)
            decode.stopping.set()
            assert await client.until_tokens("handed-over", 40) == expected
            while decode.state != "drained":
                await asyncio.sleep(0.02)
            assert not client.failures
            assert decode.heartbeat().load.decode_running == 0
            assert prefill.heartbeat().load.kv_blocks_total > 0
