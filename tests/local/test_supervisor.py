"""The supervisor of `mmd up` as a kubelet: it restarts what hangs, backs off from what crashes, and gives up what does not stay."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable

import pytest

from mmd_cli.local import supervisor as module
from mmd_cli.local.pods import LocalPod, free_port
from mmd_cli.local.supervisor import NATS, GaveUpError, PodProcess, Supervisor
from tests.support.waiting import until

pytestmark = pytest.mark.processes

WORKER = """
import sys, threading, time
from http.server import BaseHTTPRequestHandler, HTTPServer

class Probed(BaseHTTPRequestHandler):
    def do_GET(self):
        failing = "{unready}" if self.path == "/readyz" else "{stalled}"
        self.send_response(503 if failing else 200)
        self.end_headers()
        if "{end}":
            threading.Timer(0.2, lambda: __import__("os")._exit(7)).start()
    def log_message(self, *_):
        pass

print("serving", flush=True)
time.sleep({load_seconds})
HTTPServer(("127.0.0.1", {port}), Probed).serve_forever()
"""


def pod(end: str = "", stalled: str = "", unready: str = "", load_seconds: float = 0.0) -> LocalPod:
    port = free_port()
    facts = {"port": port, "end": end, "stalled": stalled, "unready": unready, "load_seconds": load_seconds}
    command = [sys.executable, "-c", WORKER.format(**facts)]
    return LocalPod("encoder-0", "encoder", command, {}, port, grace_seconds=5.0)


class Watched:
    """A supervisor, what it prints, and why it gave up."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.given_up: list[GaveUpError] = []
        self.supervisor = Supervisor(lambda _, line: self.lines.append(line), self.given_up.append)

    def restarts(self) -> list[str]:
        return [line for line in self.lines if "restarting in" in line]

    def liveness_failure(self) -> str:
        (line,) = [line for line in self.lines if "liveness" in line]
        return line

    async def reason(self) -> str:
        """Why it gave up, once it has."""
        await until(lambda: self.given_up)
        (error,) = self.given_up
        return error.message


@pytest.fixture
async def watched() -> AsyncIterator[Watched]:
    one = Watched()
    yield one
    one.supervisor.kill()
    await one.supervisor.close()


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {
        "READY_POLL_SECONDS": 0.05,
        "LIVENESS_PERIOD_SECONDS": 0.2,
        "LIVENESS_TIMEOUT_SECONDS": 1.0,
        "BACKOFF_SECONDS": (0.01, 0.05),
    }.items():
        monkeypatch.setattr(module, name, value)


async def running_again(child: PodProcess, restarts: int) -> None:
    await until(lambda: child.restarts == restarts and child.ready and child.pid is not None)


async def test_a_process_that_hangs_is_killed_and_started_again(quick: None, watched: Watched) -> None:
    child = watched.supervisor.start(pod())
    await running_again(child, 0)
    hung = child.pid
    assert hung is not None
    os.kill(hung, signal.SIGSTOP)
    await running_again(child, 1)
    assert child.pid != hung
    why = watched.liveness_failure()
    assert why.startswith("liveness probe failed 3 times in a row, last with ReadTimeout")


async def test_a_process_that_answers_that_it_makes_no_progress_gets_more_time(
    quick: None, watched: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "STALLED_FAILURES", 8)
    await running_again(watched.supervisor.start(pod(stalled="yes")), 1)
    why = watched.liveness_failure()
    assert why.startswith("liveness probe failed 8 times in a row, last with status 503")


async def test_a_process_that_crashes_soon_after_each_start_is_given_up(
    quick: None, watched: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MAX_CRASHES", 4)
    watched.supervisor.start(pod(end="soon"))
    assert (
        "encoder-0 exited 4 times in a row, each time before it had been Ready for 60 s, last with code 7"
        in await watched.reason()
    )
    assert [line.split()[-2] for line in watched.restarts()] == ["0.0", "0.0", "0.0"]


async def test_a_process_that_never_becomes_ready_is_killed(
    quick: None, watched: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "START_SECONDS", 0.3)
    watched.supervisor.start(pod(unready="yes"))
    assert "encoder-0 exited 5 times in a row before it became Ready" in await watched.reason()
    assert any("not Ready within 0 s of its start; killing" in line for line in watched.lines)


async def test_loading_for_long_does_not_make_a_crash_a_stable_run(
    quick: None, watched: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MAX_CRASHES", 3)
    monkeypatch.setattr(module, "STABLE_SECONDS", 2.0)
    watched.supervisor.start(pod(end="soon", load_seconds=2.5))
    assert "encoder-0 exited 3 times in a row" in await watched.reason()


async def test_a_process_that_stayed_up_between_its_crashes_is_never_given_up(
    quick: None, watched: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MAX_CRASHES", 3)
    monkeypatch.setattr(module, "STABLE_SECONDS", 0.1)
    watched.supervisor.start(pod(end="soon"))
    await until(lambda: len(watched.restarts()) == 5)
    assert watched.given_up == []


class Server:
    """A nats-server that starts well, and ends at once."""

    crashed = True
    url = "nats://127.0.0.1:1"

    def __init__(self, spawn: Callable[[], None] = lambda: None) -> None:
        self.spawn = spawn
        self.until_ready = lambda: None


async def test_a_message_server_that_crashes_soon_after_each_start_is_given_up(
    quick: None, watched: Watched
) -> None:
    async with asyncio.timeout(30):
        await watched.supervisor.keep_nats(Server())  # type: ignore[arg-type]
    assert (
        "nats-server exited 10 times in a row, each time within 60 s of its start" in await watched.reason()
    )


async def test_an_error_of_the_supervision_itself_ends_the_run_and_is_named(
    quick: None, watched: Watched
) -> None:
    def broken() -> None:
        raise KeyError("port")

    keeping = watched.supervisor.supervise(NATS, watched.supervisor.keep_nats(Server(broken)))  # type: ignore[arg-type]
    await asyncio.wait([keeping])
    assert "the supervision of nats-server failed with KeyError: 'port'" in await watched.reason()
