"""The supervisor of `mmd up` as a kubelet: it restarts what hangs, backs off from what crashes, and gives up what does not stay."""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any

import pytest

from mmd_cli.local.forkserver import ForkedProcess
from mmd_cli.local.pods import LocalPod, free_port
from mmd_cli.local.supervisor import NATS, GaveUpError, PodProcess, Supervisor
from support.harness.clock import FakeClock
from support.harness.waiting import until

NEVER = float("inf")
WORKER = """
from http.server import BaseHTTPRequestHandler, HTTPServer

class Probed(BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
    def log_message(self, *_):
        pass

print("serving", flush=True)
HTTPServer(("127.0.0.1", {port}), Probed).serve_forever()
"""


@dataclass
class Program:
    """What each process of a pod does, in seconds after its start."""

    ready_after: float = 1.0
    ends_after: float = NEVER
    hangs_after: float = NEVER
    stalls_after: float = NEVER


@dataclass(slots=True)
class Simulated(Supervisor):
    """A supervisor whose processes are not real: they follow a program, on the clock of the test."""

    program: Program = field(default_factory=Program)
    ended: dict[int, asyncio.Future[int]] = field(default_factory=dict)
    tasks: list[asyncio.Task[None]] = field(default_factory=list)
    births: dict[int, float] = field(default_factory=dict)
    pids: Any = field(default_factory=lambda: itertools.count(1))

    def _server_for(self, pod: LocalPod) -> Any:
        return self.Server(self)

    @dataclass
    class Server:
        """Starts processes that follow the program."""

        simulated: Simulated

        async def start(self, *_: object) -> ForkedProcess:
            it = self.simulated
            process = ForkedProcess(
                next(it.pids), asyncio.StreamReader(), asyncio.get_running_loop().create_future()
            )
            it.births[process.pid] = it.clock.now()
            if it.program.ends_after < NEVER:
                it.tasks.append(asyncio.create_task(it.end_later(process)))
            return process

    async def end_later(self, process: ForkedProcess) -> None:
        await self.clock.sleep(self.program.ends_after)
        self.end(process, 7)

    @staticmethod
    def end(process: ForkedProcess, code: int) -> None:
        if not process.ended.done():
            process.ended.set_result(code)
            process.output.feed_eof()

    def _signal(self, child: PodProcess, number: signal.Signals) -> None:  # type: ignore[override]
        if child.process is not None:
            self.end(child.process, -number)

    async def _probed(self, client: object, url: str) -> tuple[bool, str]:  # type: ignore[override]
        (child,) = self.children.values()
        if child.pid is None:
            return True, "ConnectError"
        age = self.clock.now() - self.births[child.pid]
        if age >= self.program.hangs_after or age < self.program.ready_after:
            return True, "ReadTimeout"
        return (False, "status 503") if age >= self.program.stalls_after else (False, "")


class Watched:
    """A supervisor on a clock of its own, what it prints, and why it gave up."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.given_up: list[GaveUpError] = []
        self.clock = FakeClock()
        self.supervisor = Simulated(
            lambda _, line: self.lines.append(line), self.given_up.append, clock=self.clock
        )

    def start(self, **program: float) -> PodProcess:
        self.supervisor.program = Program(**program)
        return self.supervisor.start(LocalPod("encoder-0", "encoder", ["worker"], {}, 1, grace_seconds=5.0))

    def restarts(self) -> list[str]:
        return [line for line in self.lines if "restarting in" in line]

    def liveness_failure(self) -> str:
        (line,) = [line for line in self.lines if "liveness" in line]
        return line

    async def reason(self) -> str:
        """Why it gave up, once it has."""
        await self.clock.until(lambda: self.given_up)
        (error,) = self.given_up
        return error.message


@pytest.fixture
async def watched() -> AsyncIterator[Watched]:
    one = Watched()
    yield one
    for task in one.supervisor.tasks:
        task.cancel()
    one.supervisor.kill()
    for child in one.supervisor.children.values():
        assert child.task is not None
        child.task.cancel()


async def test_a_process_that_hangs_is_killed_after_three_probes_and_started_again(watched: Watched) -> None:
    child = watched.start(hangs_after=100.0)
    await watched.clock.until(lambda: child.ready)
    first, begun = child.pid, watched.clock.now()
    await watched.clock.until(lambda: child.restarts == 1 and child.ready)
    assert child.pid != first
    assert watched.liveness_failure().startswith(
        "liveness probe failed 3 times in a row, last with ReadTimeout"
    )
    assert 100 <= watched.clock.now() - begun <= 150


async def test_a_process_that_answers_that_it_makes_no_progress_gets_more_time(watched: Watched) -> None:
    child = watched.start(stalls_after=100.0)
    begun = watched.clock.now()
    await watched.clock.until(lambda: child.restarts == 1)
    assert watched.liveness_failure().startswith(
        "liveness probe failed 60 times in a row, last with status 503"
    )
    assert watched.clock.now() - begun >= 600


async def test_a_probe_that_is_answered_again_forgives_the_silences_before(watched: Watched) -> None:
    child = watched.start()
    await watched.clock.until(lambda: child.ready)
    for _ in range(10):
        watched.supervisor.program.hangs_after = 0.0
        await watched.clock.let_pass(15)
        watched.supervisor.program.hangs_after = NEVER
        await watched.clock.let_pass(15)
    assert child.restarts == 0


async def test_a_process_that_crashes_soon_after_each_start_is_given_up(watched: Watched) -> None:
    watched.start(ends_after=20.0)
    assert (
        "encoder-0 exited 10 times in a row, each time before it had been Ready for 60 s, last with code 7"
        in await watched.reason()
    )
    pauses = [float(line.split()[-2]) for line in watched.restarts()]
    assert pauses == [0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0, 30.0]


async def test_a_process_that_never_becomes_ready_is_killed(watched: Watched) -> None:
    watched.start(ready_after=NEVER)
    assert "encoder-0 exited 5 times in a row before it became Ready" in await watched.reason()
    assert any("not Ready within 3600 s of its start; killing" in line for line in watched.lines)


async def test_loading_for_long_does_not_make_a_crash_a_stable_run(watched: Watched) -> None:
    watched.start(ready_after=600.0, ends_after=630.0)
    assert "encoder-0 exited 10 times in a row" in await watched.reason()


async def test_a_process_that_stayed_up_between_its_crashes_is_never_given_up(watched: Watched) -> None:
    watched.start(ends_after=120.0)
    await watched.clock.until(lambda: len(watched.restarts()) == 25)
    assert watched.given_up == []
    assert {line.split()[-2] for line in watched.restarts()} == {"0.5"}


@pytest.mark.processes
async def test_a_killed_real_process_is_restarted_and_finally_stopped() -> None:
    port = free_port()
    command = [sys.executable, "-c", WORKER.format(port=port)]
    lines: list[str] = []
    supervisor = Supervisor(lambda _, line: lines.append(line))
    try:
        child = supervisor.start(LocalPod("encoder-0", "encoder", command, {}, port, grace_seconds=5.0))
        await until(lambda: child.ready and child.pid is not None)
        first = child.pid
        assert first is not None
        os.kill(first, signal.SIGKILL)
        await until(lambda: child.restarts == 1 and child.ready and child.pid is not None)
        assert child.pid != first
        await until(lambda: lines.count("serving") == 2)
        await supervisor.stop()
        assert child.pid is None
    finally:
        supervisor.kill()
        await supervisor.close()


class Server:
    """A nats-server that starts well, and ends at once."""

    crashed = True
    url = "nats://127.0.0.1:1"

    def __init__(self, spawn: Callable[[], None] = lambda: None) -> None:
        self.spawn = spawn
        self.until_ready = lambda: None


async def test_a_message_server_that_crashes_soon_after_each_start_is_given_up(watched: Watched) -> None:
    keeping = asyncio.create_task(watched.supervisor.keep_nats(Server()))  # type: ignore[arg-type]
    assert (
        "nats-server exited 10 times in a row, each time within 60 s of its start" in await watched.reason()
    )
    await keeping


async def test_an_error_of_the_supervision_itself_ends_the_run_and_is_named(watched: Watched) -> None:
    def broken() -> None:
        raise KeyError("port")

    watched.supervisor.supervise(NATS, watched.supervisor.keep_nats(Server(broken)))  # type: ignore[arg-type]
    assert "the supervision of nats-server failed with KeyError: 'port'" in await watched.reason()
