"""The process of the endpoint picker, as its gateway keeps it: started, killed, hung, flooded, drained."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path

import grpc
import grpc.aio
import psutil
import pytest

from mmd_api.contract.load import PodLoad
from mmd_cli.local.pods import free_port
from mmd_workers.gateway.picker import endpoint_picker as picker_module
from mmd_workers.gateway.picker.endpoint_picker import EndpointPicker
from mmd_workers.gateway.picker.pick_messages import Report, Setup, View
from mmd_workers.gateway.picker.picks import GatewayLoad
from mmd_workers.observe.metrics import Metrics
from mmd_workers.wire.messages.every_pod import Heartbeat
from support.harness.waiting import DEADLINE_SECONDS, until
from tests.gateway.proxies import (
    asking,
    body,
    channel_to,
    endpoints,
    headers,
    returned,
    stream,
    until_closed,
    until_picked,
)

ONE = "10.0.0.1:8000"
VIEW = View([GatewayLoad("gateway-1", ONE, True, 0, 1000, 1.0)], 64 << 20)


class Kept(EndpointPicker):
    def __init__(self) -> None:
        self.metrics = Metrics(("gateway",))
        setup = Setup("127.0.0.1", free_port(), False, request_seconds=60.0)
        super().__init__(setup, lambda: VIEW, self.metrics)

    def metric(self, name: str, **labels: str) -> float:
        return self.metrics.registry.get_sample_value(name, labels) or 0.0

    async def signalled(self, number: signal.Signals) -> int:
        """Send the process a signal once it answers, and return the id of the process."""
        await until(lambda: self.answers)
        pid = self.pid
        assert pid > 0, "to signal process 0 is to signal the whole group of this one"
        os.kill(pid, number)
        return pid


@pytest.fixture
async def keep() -> AsyncIterator[Callable[[], Awaitable[Kept]]]:
    async with AsyncExitStack() as stack:

        async def started() -> Kept:
            kept = Kept()
            await kept.start()
            stack.push_async_callback(kept.stop)
            return kept

        yield started


async def running(keep: Callable[[], Awaitable[Kept]]) -> Kept:
    kept = await keep()
    await until(lambda: kept.answers)
    await until_picked(kept.port, [ONE])
    return kept


async def test_the_process_has_no_secret_of_its_gateway(keep, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("MMD_NATS_PASSWORD", "hidden")
    kept = await running(keep)
    assert b"hidden" not in Path(f"/proc/{kept.pid}/environ").read_bytes()
    opened = [os.readlink(f) for f in Path(f"/proc/{kept.pid}/fd").iterdir()]
    assert not [
        file for file in opened if file.startswith("/") and "memfd" not in file and "/dev/" not in file
    ]


async def test_picks_are_counted_and_timed(keep):
    kept = await running(keep)
    before = kept.metric("mmd_gateway_picks_total", outcome="picked")
    async with asking(kept.port) as proxy:
        endpoints(await proxy.ask(headers()))
        await until(lambda: kept.streams == 1)
        assert kept.metric("mmd_gateway_picker_requests") == 1
    await until(lambda: kept.metric("mmd_gateway_picks_total", outcome="picked") > before)
    await until(lambda: kept.metric("mmd_gateway_pick_seconds_count") > before)
    assert kept.metric("mmd_gateway_picker_down_state") == 0
    assert kept.fault == ""


async def test_a_process_that_is_killed_is_started_again_and_that_is_reported(
    keep, caplog: pytest.LogCaptureFixture
):
    kept = await running(keep)
    first = await kept.signalled(signal.SIGKILL)
    await until(lambda: kept.pid not in (0, first) and kept.answers)
    assert kept.metric("mmd_gateway_picker_restarts_total") == 1
    assert "exit status -9" in kept.fault
    assert "the endpoint picker has ended" in caplog.text
    await until_picked(kept.port, [ONE])


async def test_a_process_that_hangs_is_replaced(keep, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(picker_module, "SILENT_SECONDS", 1.0)
    kept = await running(keep)
    first = await kept.signalled(signal.SIGSTOP)
    await until(lambda: kept.pid not in (0, first) and kept.answers)
    assert "reported nothing for 1 s" in kept.fault


@pytest.mark.parametrize(
    "line",
    [
        "nonsense",
        "[]",
        '{"port": 1, "streams": -1, "outcomes": {}, "seconds": []}',
        "x" * 100_000,
    ],
    ids=["no-json", "no-object", "negative", "long"],
)
async def test_a_process_that_writes_no_reports_is_ended(keep, monkeypatch: pytest.MonkeyPatch, line: str):
    program = (
        f"import sys, time; print({line!r}, flush=True); print('words', file=sys.stderr); time.sleep(60)"
    )
    monkeypatch.setattr(picker_module, "PROGRAM", ("-c", program))
    kept = await keep()
    await until(lambda: bool(kept.fault))
    assert "no report" in kept.fault
    assert kept.metric("mmd_gateway_picker_down_state") == 1


@pytest.mark.parametrize("outcome", ["unknown", "picked"])
def test_a_report_with_anything_else_is_none(outcome: str):
    line = f'{{"port": 1, "streams": 0, "outcomes": {{"{outcome}": 1}}, "seconds": [0.5]}}'.encode()
    if outcome == "picked":
        assert Report.of(line).outcomes == {"picked": 1}
    else:
        with pytest.raises(ValueError, match="no report"):
            Report.of(line)


async def test_what_peers_cause_is_counted_and_not_logged(keep, caplog: pytest.LogCaptureFixture):
    kept = await running(keep)
    caplog.set_level(logging.DEBUG, logger="mmd_workers")
    caplog.clear()
    async with channel_to(kept.port) as channel:
        for _ in range(300):
            proxy = stream(channel)
            await proxy.send(b"\xff no message")
            assert await proxy.ends() == grpc.StatusCode.INVALID_ARGUMENT
    for _ in range(20):
        _, writer = await asyncio.open_connection("127.0.0.1", kept.port)
        writer.write(b"GET / HTTP/1.1\r\n\r\n" + os.urandom(1000))
        writer.close()
    await until(lambda: kept.metric("mmd_gateway_picks_total", outcome="invalid") == 300)
    assert [r for r in caplog.records if r.name.startswith("mmd_workers")] == []
    assert Path(f"/proc/{kept.pid}/fd/2").stat().st_size == 0
    assert kept.metric("mmd_gateway_picker_restarts_total") == 0


async def test_the_picker_survives_peers_that_flood_it_and_never_read(keep, monkeypatch: pytest.MonkeyPatch):
    program = "from mmd_workers.gateway.picker import pick_process as p; p.PEER_SECONDS = 2.0; p.main()"
    monkeypatch.setattr(picker_module, "PROGRAM", ("-c", program))
    kept = await running(keep)
    piece, pid = body(bytes(1 << 20)).SerializeToString(), kept.pid
    losses = [
        partial(kept.metric, "mmd_gateway_picks_total", outcome=outcome) for outcome in ("too_many", "unread")
    ]

    async def flood(channel: grpc.aio.Channel) -> None:
        with contextlib.suppress(grpc.aio.AioRpcError):  # it is ended by and by
            proxy = stream(channel)
            await proxy.send(headers())
            while True:
                await proxy.send(piece)

    async with AsyncExitStack() as stack:
        channels = [await stack.enter_async_context(channel_to(kept.port)) for _ in range(5)]
        flooding = [asyncio.create_task(flood(channel)) for channel in channels for _ in range(90)]
        await until(lambda: any(lost() for lost in losses))

        async def passes() -> bool:
            async with asking(kept.port) as honest:
                endpoints(await honest.ask(headers()))  # not while it is told to retry
                await honest.send(body(bytes(1 << 20), ends=True))
                return await honest.passed(1 << 20) == (bytes(1 << 20), True)

        await until(passes, "an honest request passes", retried=(grpc.aio.AioRpcError,))
        for task in flooding:
            task.cancel()
        await asyncio.gather(*flooding, return_exceptions=True)
    await until(lambda: kept.streams == 0)
    assert kept.pid == pid
    assert kept.metric("mmd_gateway_picker_restarts_total") == 0


@pytest.mark.processes
async def test_a_process_whose_gateway_is_killed_ends_even_while_it_is_stopped(tmp_path: Path):
    program = tmp_path / "gateway.py"
    program.write_text(
        "import asyncio\n"
        "from tests.gateway.picker.test_picker import Kept\n"
        "from support.harness.waiting import until\n"
        "async def main():\n"
        "    kept = Kept()\n"
        "    await kept.start()\n"
        "    await until(lambda: kept.answers)\n"
        "    print(kept.pid, flush=True)\n"
        "    await asyncio.sleep(600)\n"
        "asyncio.run(main())\n"
    )
    where = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[3])}
    gateway = await asyncio.create_subprocess_exec(
        sys.executable, program, stdout=asyncio.subprocess.PIPE, env=where
    )
    try:
        async with asyncio.timeout(DEADLINE_SECONDS):
            picker = psutil.Process(int(await gateway.stdout.readline()))
        picker.suspend()
    finally:
        gateway.kill()
        await gateway.wait()
    await until(lambda: not picker.is_running() or picker.status() == psutil.STATUS_ZOMBIE)


async def test_between_two_processes_it_stops_at_once(keep, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(picker_module, "FIRST_PAUSE_SECONDS", 600.0)
    monkeypatch.setattr(picker_module, "LONGEST_PAUSE_SECONDS", 600.0)
    monkeypatch.setattr(picker_module, "PROGRAM", ("-c", ""))
    monkeypatch.setattr(picker_module, "EXIT_SECONDS", 600.0)
    kept = await keep()
    await until(lambda: bool(kept.fault))
    async with asyncio.timeout(DEADLINE_SECONDS):
        await kept.stop()


@pytest.mark.parametrize(
    ("pool", "endpoint", "counts"),
    [
        ("gateway", ONE, True),
        ("gateway", "[fd00::1]:8000", True),
        ("encoder", ONE, False),
        ("gateway", "", False),
        ("gateway", "somewhere.else:8000", False),
        ("gateway", "10.0.0.1:0", False),
        ("gateway", "10.0.0.1:99999", False),
        ("gateway", "10.0.0.1:8000" + " " * 600_000, False),
    ],
)
def test_no_pod_but_a_gateway_is_picked_whatever_its_heartbeat_says(pool: str, endpoint: str, counts: bool):
    beat = Heartbeat("p" * 600_000, pool, [], "i", "r1", "ready", "10.0.0.1:1", 1.0, PodLoad())
    loads = picker_module.loads_of([replace(beat, api_endpoint=endpoint)])
    assert [load.endpoint for load in loads] == ([endpoint] if counts else [])
    assert all(len(load.pod) == 253 for load in loads)


async def test_a_drain_ends_when_no_stream_is_left(keep):
    kept = await running(keep)
    async with channel_to(kept.port) as channel:
        held = stream(channel)
        endpoints(await held.ask(headers()))
        await until(lambda: kept.streams == 1)
        kept.drain(60.0)
        await until_closed(kept.port)
        assert returned(await held.ask(body(b"more"))) == (b"more", False)
        await until(lambda: kept.streams == 1)
        assert returned(await held.ask(body(b"rest", ends=True))) == (b"rest", True)
        assert await held.ends() == grpc.StatusCode.OK
    await until(lambda: kept.pid == 0)
    assert kept.metric("mmd_gateway_picker_restarts_total") == 0


async def test_open_streams_do_not_keep_it_from_stopping(keep):
    kept = await running(keep)
    async with asking(kept.port) as proxy:
        endpoints(await proxy.ask(headers()))
        async with asyncio.timeout(DEADLINE_SECONDS):
            await kept.stop()
        assert await proxy.ends() != grpc.StatusCode.OK
    assert kept.pid == 0
