"""What `mmd up` does when a process that it started is killed, and when one cannot come back."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from queue import Empty, Queue
from threading import Thread

import httpx
import psutil
import pytest

from mmd_cli.local.pods import free_port
from support.harness.waiting import wait_until
from support.serving.local_deployment import ROOT

SECONDS = 240


class Up:
    """`mmd up` as a user runs it."""

    def __init__(self, folder: Path) -> None:
        self.port = free_port()
        command = [
            "up",
            "-f",
            str(ROOT / "examples/monolithic.yaml"),
            "--port",
            str(self.port),
            "--threads",
            "1",
        ]
        environment = {**os.environ, "COLUMNS": "300", "TMPDIR": str(folder)}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "mmd_cli", *command],
            env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )  # fmt: skip
        self.printed = ""
        self._lines: Queue[str] = Queue()
        Thread(target=self._read, daemon=True).start()
        wait_until(lambda: self.ready, "the gateway is Ready")

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._lines.put(line)

    def output(self) -> str:
        with contextlib.suppress(Empty):
            while True:
                self.printed += self._lines.get_nowait()
        return self.printed

    @property
    def ready(self) -> bool:
        if self.process.poll() is not None:
            raise RuntimeError(f"mmd up ended:\n{self.output()}")
        with contextlib.suppress(httpx.HTTPError):
            return httpx.get(f"http://127.0.0.1:{self.port}/ready", timeout=2).status_code == 200
        return False

    def ask(self) -> str:
        body = {
            "model": "builtin/demo",
            "messages": [{"role": "user", "content": "Hello"}],
            "max_tokens": 8,
            "temperature": 0,
        }
        answer = httpx.post(f"http://127.0.0.1:{self.port}/v1/chat/completions", json=body, timeout=60)
        assert answer.status_code == 200, answer.text
        return str(answer.json()["choices"][0]["message"]["content"])

    def nats(self) -> psutil.Process | None:
        children = psutil.Process(self.process.pid).children(recursive=True)
        for child in children:
            with contextlib.suppress(psutil.NoSuchProcess):  # it has just ended
                if child.name() == "nats-server":
                    return child
        return None

    def gateway(self) -> psutil.Process:
        for child in psutil.Process(self.process.pid).children(recursive=True):
            with contextlib.suppress(psutil.Error):
                if any(
                    c.status == "LISTEN" and c.laddr.port == self.port for c in child.net_connections("inet")
                ):
                    return child
        raise AssertionError(f"nobody listens on {self.port}")

    def exit_status(self) -> int:
        return self.process.wait(SECONDS)

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.terminate()
            self.process.wait(60)


@pytest.fixture
def up(tmp_path: Path) -> Iterator[Up]:
    running = Up(tmp_path)
    yield running
    running.close()


def test_a_killed_nats_server_returns_on_its_port_and_serves_again(up: Up) -> None:
    answer = up.ask()
    before = up.nats()
    assert before is not None
    (port,) = {c.laddr.port for c in before.net_connections("inet") if c.status == "LISTEN"}
    before.send_signal(signal.SIGKILL)
    wait_until(lambda: (now := up.nats()) is not None and now.pid != before.pid, "nats-server runs again")
    wait_until(lambda: up.ready, "the gateway is Ready again")
    after = up.nats()
    assert after is not None
    assert {c.laddr.port for c in after.net_connections("inet") if c.status == "LISTEN"} == {port}
    assert up.ask() == answer
    assert re.search(r"nats-server.*exited; restarting", up.output())


def test_mmd_up_exits_and_names_nats_server_when_it_cannot_come_back(up: Up) -> None:
    server = up.nats()
    assert server is not None
    (port,) = {c.laddr.port for c in server.net_connections("inet") if c.status == "LISTEN"}
    server.send_signal(signal.SIGKILL)
    server.wait(30)
    with socket.create_server(("127.0.0.1", port)):  # somebody else takes its port
        status = up.exit_status()
    assert status == 1
    wait_until(lambda: "did not recover within 5 starts" in up.output(), "the reason is printed")
    assert "address already in use" in up.output()
    assert not psutil.pid_exists(server.pid)


def test_mmd_up_exits_and_names_the_pod_that_cannot_come_back(up: Up, tmp_path: Path) -> None:
    gateway = up.gateway()
    for config in tmp_path.glob("mmd-*/config"):
        shutil.rmtree(config)
    gateway.send_signal(signal.SIGKILL)
    assert up.exit_status() == 1
    wait_until(lambda: re.search(r"gateway\S* exited 5 times in a row before it became Ready", up.output()) is not None, "the pod and the reason are printed")  # fmt: skip
