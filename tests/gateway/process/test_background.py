"""What runs besides the requests: a part that fails ends the gateway and is logged; a message bus that is away cuts no request off."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Awaitable, Callable
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from mmd_api.contract.load import PodLoad
from mmd_api.pipeline import PipelineConfig
from mmd_api.resource import MultimodalDeployment
from mmd_cli.local.pods import free_port
from mmd_workers.gateway.process import gateway_process, leave
from mmd_workers.observe import bus as bus_watch
from mmd_workers.observe.metrics import Metrics
from mmd_workers.process.live import LiveConfig
from mmd_workers.process.settings import WorkerSettings
from mmd_workers.wire.bus import Bus
from mmd_workers.wire.messages.every_pod import Heartbeat
from mmd_workers.wire.peers import Heartbeater
from mmd_workers.wire.server import NatsServer


@pytest.mark.parametrize(
    ("part", "owner", "function"),
    [
        ("watch-bus", gateway_process.bus_watch, "watch"),
        ("live-config", LiveConfig, "run"),
        ("watch-queue", gateway_process, "_watch_queue"),
    ],
)
async def test_a_failed_part_ends_the_gateway_with_its_error_logged(
    nats_server: NatsServer,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    part: str,
    owner: object,
    function: str,
) -> None:
    async def fails(*_: object) -> None:
        raise LookupError("no such thing")

    monkeypatch.setattr(owner, function, fails)
    monkeypatch.setattr(leave, "QUIET_SECONDS", 0.0)
    body = {
        "apiVersion": "serving.multimodal.dev/v1alpha1",
        "kind": "MultimodalDeployment",
        "metadata": {"name": "parts"},
        "spec": {
            "model": {"id": "builtin/demo"},
            "transfer": {"kv": {"backend": "Gloo"}},
            **{pool: {"gpus": 0} for pool in ("encoder", "prefill", "decode")},
        },
    }
    file = tmp_path / "gateway.json"
    file.write_text(
        PipelineConfig.text_for(MultimodalDeployment.parse(body).spec, "test", "parts", "gateway")
    )
    settings = WorkerSettings(
        PipelineConfig.load(file),
        "gateway-0",
        "127.0.0.1",
        free_port(),
        nats_server.url,
        1,
        config_file=str(file),
    )
    stop = asyncio.Event()
    level = logging.getLogger().level
    serving = asyncio.create_task(gateway_process.serve(settings, stop))
    done, _ = await asyncio.wait({serving}, timeout=60)
    stop.set()
    await asyncio.wait({serving})
    logging.getLogger().setLevel(level)
    assert done, f"the gateway goes on without {part}"
    with pytest.raises(LookupError, match="no such thing"):
        serving.result()
    assert f"{part} failed permanently; draining and exiting: no such thing" in caplog.text


async def test_a_fault_in_a_measurement_is_logged_and_the_measuring_continues(
    connect: Callable[[str], Awaitable[Bus]],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    bus, metrics, again = await connect("gateway-0"), Metrics(("gateway",)), asyncio.Event()
    calls = count()

    async def fails(_seconds: float) -> None:
        if next(calls) == 2:
            again.set()
        raise LookupError("no such thing")

    monkeypatch.setattr(bus, "flush", fails)
    monkeypatch.setattr(bus_watch, "PERIOD_SECONDS", 0.01)
    watching = asyncio.create_task(bus_watch.watch(bus, metrics))
    async with asyncio.timeout(30):
        await again.wait()
    watching.cancel()
    await asyncio.wait({watching})
    assert watching.cancelled()
    assert "failed to measure the round trip to NATS: LookupError: no such thing" in caplog.text


async def test_requests_in_flight_end_while_nats_is_disconnected_and_its_buffer_full(
    own_nats_server: NatsServer,
    connect: Callable[[str], Awaitable[Bus]],
    cut_off: Callable[[Bus], Awaitable[None]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bus = await connect("gateway-0")
    beat = Heartbeat("gateway-0", "gateway", [], "i", "r1", "draining", "127.0.0.1:1", time.time(), PodLoad())
    heartbeater = Heartbeater(bus, lambda: beat, 1.0)
    await cut_off(bus)
    gateway = SimpleNamespace(
        pod="gateway-0",
        directory=SimpleNamespace(pods=lambda: []),
        running=1,
        last_request=-math.inf,
        drained_at=math.inf,
        draining=False,
        picker=None,
    )
    others = leave.OtherGateways("gateway-0", 1)
    leaving = leave.Leave(cast(Any, gateway), others, lambda: 0, is_replaced=False)
    draining = asyncio.create_task(gateway_process._drain(cast(Any, gateway), heartbeater, leaving, 600))
    done, _ = await asyncio.wait({draining}, timeout=5 * gateway_process.DRAIN_CHECK_SECONDS)
    assert not done, draining.result()
    assert gateway.draining
    gateway.running = 0
    async with asyncio.timeout(30):
        await draining
