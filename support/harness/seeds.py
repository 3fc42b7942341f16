"""Seeds of random tests: the same for the same commit, so that a run that failed can be repeated, and another for the next commit."""

from __future__ import annotations

from ci.drills import head


def seed_of_commit() -> int:
    """Below a million; 0 where there is no git."""
    return int(head()[:8] or "0", 16) % 10**6
