"""Seeds of random tests.

They are the same for the same commit, so that a failed run can be repeated, and different for the next
commit.
"""

from __future__ import annotations

from ci.drills import head


def seed_of_commit() -> int:
    """The seed of the present commit, below a million; 0 without git."""
    return int(head()[:8] or "0", 16) % 10**6
