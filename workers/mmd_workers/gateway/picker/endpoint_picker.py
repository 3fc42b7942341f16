"""The gateway's side of the endpoint picker process: starts and restarts it, sends it the state of the gateways, counts what it reports.

No byte from the picker's peers reaches this process.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

from mmd_workers.basics.backoff import Backoff
from mmd_workers.gateway.picker.pick_messages import MAX_OUTPUT_BYTES, Report, Setup, View, line_of
from mmd_workers.gateway.picker.picks import GatewayLoad
from mmd_workers.observe.metrics import Metrics
from mmd_workers.observe.server import is_host_and_port
from mmd_workers.wire.messages.every_pod import Heartbeat

PROGRAM = ("-P", "-B", "-m", "mmd_workers.gateway.picker.pick_process")
VIEW_SECONDS = 0.25
START_SECONDS = 30.0
SILENT_SECONDS = 10.0
"""The process counts as hung after this time without a report, or with a view that it does not read."""
EXIT_SECONDS = 2.0
FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS = 0.25, 30.0
PROVEN_SECONDS = 60.0
"""A process that has run this long is healthy: whatever ended the previous one is over."""
MAX_LINE_BYTES = 64 << 10
MAX_GATEWAYS, MAX_NAME_CHARACTERS = 1000, 253
"""The limits of a view, which is one line: the number of gateways, and the length of a pod name."""
MAX_TAIL_BYTES = 500

_log = logging.getLogger(__name__)


class _EndedError(Exception):
    """The process can no longer be used; the message says why."""


class EndpointPicker:
    """Keeps one picker process running.

    `view()`: returns the current state of the gateways. `port`: the port that the picker listens on, known from its first start. `streams`:
    number of open streams. `answers`: True while the process answers. `fault`: why the previous process ended, until this one has proven
    healthy. `last_pick`: time of its last reported pick (time.monotonic).
    """

    def __init__(self, setup: Setup, view: Callable[[], View], metrics: Metrics) -> None:
        self._setup, self._view, self._metrics = setup, view, metrics
        self._drain_until: float | None = None
        self._drains = asyncio.Event()
        self._has_answered = asyncio.Event()
        self._process: asyncio.subprocess.Process | None = None
        self._task: asyncio.Task[None] | None = None
        self.port = setup.port
        self.streams = 0
        self.answers = False
        self.fault = ""
        self.last_pick = -math.inf
        metrics.picker_down.set(1)

    @property
    def pid(self) -> int:
        """The id of the process; 0 if none is running."""
        return self._process.pid if self._process is not None else 0

    async def start(self) -> None:
        """Keep a process running from now on."""
        self._task = asyncio.create_task(self._run(), name="endpoint-picker")

    async def until_it_answers(self) -> None:
        """Wait until a process has answered, or until that takes too long."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(START_SECONDS):
                await self._has_answered.wait()

    def drain(self, seconds: float) -> None:
        """Stop taking streams and give open ones this long; the process ends when none is left."""
        self._drain_until = time.monotonic() + seconds
        self._drains.set()

    async def stop(self) -> None:
        """End the process; open streams get a second."""
        self.drain(0.0)
        if self._process is not None and self._process.stdin is not None:
            self._process.stdin.close()
        if self._task is not None:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(EXIT_SECONDS):
                    await asyncio.wait([self._task])
            self._task.cancel()
            await asyncio.wait([self._task])

    async def _run(self) -> None:
        backoff = Backoff(FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS)
        while self._drain_until is None:
            began = time.monotonic()
            try:
                reason = await self._run_once()
            except Exception as error:  # noqa: BLE001 - the gateway goes on without it
                reason = f"{type(error).__name__}: {error}"
            finally:
                self._process, self.streams, self.answers = None, 0, False
                self._metrics.picker_down.set(1)
                self._metrics.picker_streams.set(0)
            if self._drain_until is not None:
                return
            if time.monotonic() - began > PROVEN_SECONDS:
                backoff = Backoff(FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS)
            pause = backoff.next()
            self.fault = reason
            self._metrics.picker_restarts.inc()
            _log.warning("the endpoint picker has ended, starting it again in %.1f s: %s", pause, reason)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(pause):
                    await self._drains.wait()

    async def _run_once(self) -> str:
        """Run a process until it ends; returns how it ended."""
        output = os.memfd_create("mmd-picker-stderr")
        try:
            process = await asyncio.create_subprocess_exec(
                sys.executable,
                *PROGRAM,
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=output,
                limit=MAX_LINE_BYTES,
                env=_environment(),
                start_new_session=True,  # Ctrl-C reaches only the gateway, which then ends the process
            )
            self._process = process
            try:
                words = await self._attend(process)
            finally:
                # Killing a process that is ending would hide how it ended.
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(1.0):
                        await process.wait()
                if process.returncode is None:
                    process.kill()
                    async with asyncio.timeout(EXIT_SECONDS):
                        await process.wait()
            tail = os.pread(output, MAX_OUTPUT_BYTES, 0)[-MAX_TAIL_BYTES:].decode(errors="replace").strip()
            return f"{words}, exit status {process.returncode}" + (f"; {tail!r}" if tail else "")
        finally:
            os.close(output)

    async def _attend(self, process: asyncio.subprocess.Process) -> str:
        """Write to the process and read from it until either fails; returns why."""
        assert process.stdin is not None
        assert process.stdout is not None
        writing = asyncio.create_task(self._write_messages(process.stdin))
        reading = asyncio.create_task(self._read_reports(process.stdout))
        tasks = (reading, writing)
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            await asyncio.wait([reading], timeout=EXIT_SECONDS)  # until it has read the last reports
            return "; ".join(str(e) for task in tasks if task.done() and (e := task.exception()))
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)

    async def _write_messages(self, pipe: asyncio.StreamWriter) -> None:
        message: Setup | View = self._setup
        while not pipe.is_closing():
            try:
                async with asyncio.timeout(SILENT_SECONDS):
                    pipe.write(line_of(message))
                    await pipe.drain()
            except TimeoutError as error:
                raise _EndedError(f"it has read nothing for {SILENT_SECONDS:g} s") from error
            except OSError:
                return  # it has ended
            if message is not self._setup:
                await asyncio.sleep(VIEW_SECONDS)
            message = self._view()
            if self._drain_until is not None:
                message = replace(message, drain_seconds=max(0.0, self._drain_until - time.monotonic()))

    async def _read_reports(self, pipe: asyncio.StreamReader) -> None:
        began, seconds = time.monotonic(), START_SECONDS
        while True:
            try:
                async with asyncio.timeout(seconds):
                    line = await pipe.readline()
                if not line:
                    raise _EndedError("it ended")
                report = Report.of(line)
            except TimeoutError as error:
                raise _EndedError(f"it has reported nothing for {seconds:g} s") from error
            except ValueError as error:
                raise _EndedError("it wrote what is no report") from error
            seconds = SILENT_SECONDS
            if time.monotonic() - began > PROVEN_SECONDS:
                self.fault = ""
            self._count(report)

    def _count(self, report: Report) -> None:
        if not self.answers:
            self.answers, self.port = True, report.port
            self._has_answered.set()
            self._metrics.picker_down.set(0)
            _log.info("endpoint picker on port %d", self.port)
        self.streams = report.streams
        self._metrics.picker_streams.set(report.streams)
        if report.outcomes:
            self.last_pick = time.monotonic()
        for outcome, count in report.outcomes.items():
            self._metrics.picks.labels(outcome).inc(count)
        for seconds in report.seconds:
            self._metrics.pick_seconds.observe(seconds)


def loads_of(beats: Sequence[Heartbeat]) -> list[GatewayLoad]:
    """The gateways among the pods. Other pods are ignored, and so is a gateway whose endpoint is not an address."""
    gateways: list[GatewayLoad] = []
    for beat in beats:
        if beat.pool == "gateway" and len(gateways) < MAX_GATEWAYS and is_host_and_port(beat.api_endpoint):
            load = beat.state == "ready", beat.requests, beat.max_requests, beat.sent
            gateways.append(GatewayLoad(beat.pod[:MAX_NAME_CHARACTERS], beat.api_endpoint, *load))
    return gateways


def _environment() -> dict[str, str]:
    """The environment of the process.

    Only the module path is passed on, because the gateway's environment has secrets. gRPC's own logging is off, because peers could trigger it.
    """
    module_path = {name: os.environ[name] for name in ("PYTHONPATH",) if name in os.environ}
    # The allocator returns freed memory at once.
    allocator = {"MALLOC_ARENA_MAX": "2", "MALLOC_MMAP_THRESHOLD_": "131072"}
    return {**module_path, **allocator, "GRPC_VERBOSITY": "NONE"}
