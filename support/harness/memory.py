"""Measures the memory that one piece of code takes, whatever else this process does."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable

RUNS = 3


def peak_bytes(action: Callable[[], object]) -> int:
    """Most bytes that Python holds while this runs: the least of some runs, because other threads allocate
    too.
    """
    return min(_peak_of_one_run(action) for _ in range(RUNS))


def _peak_of_one_run(action: Callable[[], object]) -> int:
    tracemalloc.start()
    try:
        action()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
