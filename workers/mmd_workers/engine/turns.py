"""Engines of one machine that step one after the other, each with all cores.

Two pods that compute at once with a thread for each core have two threads on each, and parallel loops end with their slowest thread.
Worse, a decoder that steps beside prefill steps with few sequences, and reads all weights for each step. POSIX record locks of two
files, which end with the process that holds them, make a queue: who holds the second one is next.
"""

from __future__ import annotations

import fcntl
import os
import time
from pathlib import Path

PATIENCE_SECONDS = 0.5  # longer than most steps; then pods share the cores
SHORTEST_POLL_SECONDS, LONGEST_POLL_SECONDS = 0.0005, 0.002


class Turns:
    """One process's part in them. Used by one thread.

    A step that others have waited for in vain may run for long, or its process may be frozen: this one steps beside it, and waits
    again once there has been a turn.
    """

    def __init__(self, file: Path) -> None:
        """`file`: beside it another is made; the pods that take turns name the same."""
        self._running = _Lock(file)
        self._next = _Lock(file.with_name(f"{file.name}.next"))
        self._wanted_at: float | None = None
        self._in_vain = False

    def take(self) -> bool:
        """Whether to step now; else ask again in `poll_seconds`. After each step `give` is due."""
        now = time.monotonic()
        if self._wanted_at is None:
            self._wanted_at = now
        if self._next.take() and self._running.take():
            self._in_vain = False
        elif self._in_vain or now - self._wanted_at > PATIENCE_SECONDS:
            self._in_vain = True
        else:
            return False
        self._next.give()
        self._wanted_at = None
        return True

    @property
    def poll_seconds(self) -> float:
        """When to ask again: asking takes time of the cores that the step of another uses."""
        waited = time.monotonic() - (self._wanted_at or 0.0)
        return min(LONGEST_POLL_SECONDS, max(SHORTEST_POLL_SECONDS, waited / 4))

    def give(self) -> None:
        """The step has ended, or there is nothing to step for any more."""
        self._running.give()
        self._next.give()
        self._wanted_at = None

    def close(self) -> None:
        """Give up the turn and the place in the queue."""
        self._running.close()
        self._next.close()


class _Lock:
    """An exclusive lock among processes."""

    def __init__(self, file: Path) -> None:
        self._file = os.open(file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)

    def take(self) -> bool:
        """Whether this process holds it now."""
        try:
            fcntl.lockf(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError):
            return False
        return True

    def give(self) -> None:
        """Release it, if it is held."""
        fcntl.lockf(self._file, fcntl.LOCK_UN)

    def close(self) -> None:
        os.close(self._file)
