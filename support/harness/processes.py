"""What Linux knows of processes."""

from __future__ import annotations

from pathlib import Path


def children(pid: int) -> list[int]:
    """Processes that a process has started, from any of its threads."""
    found: list[int] = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        found += map(int, (task / "children").read_text().split())
    return found
