"""Pods that are deleted while they still start."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from support.harness.waiting import wait_until

pytestmark = pytest.mark.processes
WORKER = ["worker", "--pool", "decode", "--roles", "decode"]


@pytest.mark.parametrize("command", [WORKER, ["gateway"]], ids=["worker", "gateway"])
def test_a_pod_that_is_still_importing_exits_on_sigterm(command: list[str]) -> None:
    """By a handler: the first process of a container never sees a signal that it has no handler for."""
    process = subprocess.Popen([sys.executable, "-m", "mmd_cli", *command], stderr=subprocess.DEVNULL)

    def may_be_asked() -> bool:
        if process.poll() is not None:
            raise RuntimeError("it ended, or had all it needs, before it could be asked")
        return catches(process.pid, signal.SIGTERM)

    try:
        wait_until(may_be_asked, "it has a handler")
        process.terminate()
        assert process.wait(60) == 128 + signal.SIGTERM
    finally:
        process.kill()
        process.wait()


def catches(pid: int, number: signal.Signals) -> bool:
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except FileNotFoundError:
        return False
    caught = next(line.split()[1] for line in status.splitlines() if line.startswith("SigCgt:"))
    return bool(int(caught, 16) >> (number - 1) & 1)
