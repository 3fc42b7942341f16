"""A worker finishes what it holds while the message bus is away, however long."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Awaitable, Callable

import pytest

from mmd_api.pipeline import PipelineConfig
from mmd_workers.process.settings import WorkerSettings
from mmd_workers.wire.bus import Bus
from mmd_workers.wire.server import NatsServer
from mmd_workers.worker import Worker

SPEC = {
    "model": {"id": "builtin/demo"},
    "transfer": {"kv": {"backend": "Gloo"}},
    **{pool: {"replicas": 1, "gpus": 0} for pool in ("encoder", "prefill", "decode")},
}


async def test_a_worker_drains_with_its_bus_away_and_buffer_full(
    own_nats_server: NatsServer,
    cut_off: Callable[[Bus], Awaitable[None]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config = {"namespace": "test", "name": "away", "revision": "r1", "spec": SPEC}
    settings = WorkerSettings(
        PipelineConfig.model_validate(config), "encoder-0", "127.0.0.1", 0, own_nats_server.url, threads=1
    )
    worker = Worker(settings, "encoder", ("encode",))
    drained: list[str] = []
    drain = worker._drain

    async def seen() -> None:
        await drain()
        drained.append(worker.state)

    monkeypatch.setattr(worker, "_drain", seen)
    serving = asyncio.create_task(worker.serve())
    try:
        async with asyncio.timeout(120):
            while worker.state != "ready":
                assert not serving.done(), serving.result()
                await asyncio.sleep(0.05)
            await cut_off(worker.pod.bus)
            worker.stopping.set()
            await serving
    finally:
        serving.cancel()
        await asyncio.wait({serving})
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().remove_signal_handler(number)
    assert drained
