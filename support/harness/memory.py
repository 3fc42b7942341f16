"""Memory that one piece of code takes, measured beside whatever else this process does."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable

RUNS = 3


def peak_bytes(action: Callable[[], object]) -> int:
    """Memory that Python holds at most while this runs, in bytes: the least of some runs, because other threads allocate too."""
    return min(_peak_of_one_run(action) for _ in range(RUNS))


def _peak_of_one_run(action: Callable[[], object]) -> int:
    tracemalloc.start()
    try:
        action()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
