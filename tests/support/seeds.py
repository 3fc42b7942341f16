"""Seeds of random tests: the same for the same commit, so that a run that failed can be repeated, and another for the next commit."""

from __future__ import annotations

import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def seed_of_commit() -> int:
    """Below a million; 0 where there is no git."""
    command = ["git", "rev-parse", "HEAD"]
    commit = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False).stdout
    return int(commit[:8] or "0", 16) % 10**6
