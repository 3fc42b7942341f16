"""Facts that Linux knows about processes."""

from __future__ import annotations

from pathlib import Path


def children(pid: int) -> list[int]:
    """Processes that a process has started, from any of its threads."""
    pids: list[int] = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        pids += map(int, (task / "children").read_text().split())
    return pids
