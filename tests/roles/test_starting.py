"""Pods that are deleted while they still start."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from support.harness.waiting import DEADLINE_SECONDS, wait_until

pytestmark = pytest.mark.processes
WORKER = ["worker", "--pool", "decode", "--roles", "decode"]


@pytest.mark.parametrize("command", [WORKER, ["gateway"]], ids=["worker", "gateway"])
def test_a_pod_that_is_still_importing_exits_on_sigterm(command: list[str], tmp_path: Path) -> None:
    """By a handler: the first process of a container never sees a signal that it has no handler for."""
    importing = tmp_path / "importing"
    (tmp_path / "nats.py").write_text(f"open({str(importing)!r}, 'w').close(); import time; time.sleep(600)")
    environment = os.environ | {"PYTHONPATH": str(tmp_path)}
    process = subprocess.Popen([sys.executable, "-m", "mmd_cli", *command], env=environment)

    def is_importing() -> bool:
        if process.poll() is not None:
            raise RuntimeError("it ended without the import that it was to wait in")
        return importing.exists()

    try:
        wait_until(is_importing, "it imports a slow module")
        assert catches(process.pid, signal.SIGTERM)
        process.terminate()
        assert process.wait(DEADLINE_SECONDS) == 128 + signal.SIGTERM
    finally:
        process.kill()
        process.wait(DEADLINE_SECONDS)


def catches(pid: int, number: signal.Signals) -> bool:
    status = Path(f"/proc/{pid}/status").read_text()
    caught = next(line.split()[1] for line in status.splitlines() if line.startswith("SigCgt:"))
    return bool(int(caught, 16) >> (number - 1) & 1)
