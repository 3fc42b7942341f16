"""What Linux knows about processes, and does to them."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from support.harness.waiting import wait_until


def children(pid: int) -> list[int]:
    """Processes that a process has started, from any of its threads."""
    pids: list[int] = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        pids += map(int, (task / "children").read_text().split())
    return pids


@contextmanager
def frozen(pid: int | None) -> Iterator[None]:
    """Stop all threads of a process; at the end it goes on, if it still runs."""
    assert pid is not None, "the process does not run"
    os.kill(pid, signal.SIGSTOP)
    wait_until(lambda: all(state == "T" for state in _states(pid)), pause_seconds=0.001)
    try:
        yield
    finally:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)


def _states(pid: int) -> list[str]:
    """The state of each thread of a process, as a letter."""
    stats = [(task / "stat").read_text() for task in Path(f"/proc/{pid}/task").iterdir()]
    return [stat.rpartition(")")[2].split()[0] for stat in stats]
