"""Engines of one machine that step one after the other, each with all cores.

Two pods that compute at once with a thread for each core have two threads on each, and parallel loops end with their slowest thread.
Worse, a decoder that steps beside prefill steps with few sequences, and reads all weights for each step. POSIX record locks of two
files, which end with the process that holds them, make a queue: who holds the second one is next.
"""

from __future__ import annotations

import fcntl
import logging
import os
import time
from contextlib import suppress
from pathlib import Path

log = logging.getLogger(__name__)

PATIENCE_SECONDS = 0.5  # longer than most steps
LONGEST_SECONDS = 5.0  # more than a few turns of others
POLL_SECONDS = 0.001  # the same for all who wait, since asking more often would be an advantage


class Turns:
    """One process's place among them. Used by one thread.

    While no turn begins or ends for `PATIENCE_SECONDS`, one runs for long, or is frozen: then this process steps beside it, and
    keeps its place in the queue.
    """

    def __init__(self, file: Path) -> None:
        """`file`: counts beginnings and ends of turns; beside it another is made. The pods that take turns name the same."""
        self._running = _Lock(file)
        self._next = _Lock(file.with_name(f"{file.name}.next"))
        self._wanted_at: float | None = None
        self._seen, self._seen_at = -1, 0.0  # what the file counts, and when that number was new here
        self._holds = False

    def take(self) -> bool:
        """Whether to step now; else ask again in `POLL_SECONDS`. After each step `give` is due, and `leave` when there is nothing to do."""
        now = time.monotonic()
        if self._wanted_at is None:
            self._wanted_at = now
        if self._next.take() and self._running.take():
            self._next.give()
            self._holds = True
            self._see(self._running.add_one(), now)
        else:
            self._see(self._running.number(), now)
            waited = now - self._wanted_at
            if now - self._seen_at <= PATIENCE_SECONDS and waited <= LONGEST_SECONDS:
                return False
        self._wanted_at = None
        return True

    def _see(self, counted: int, now: float) -> None:
        if counted != self._seen:
            self._seen, self._seen_at = counted, now

    def give(self) -> None:
        """The step has ended."""
        if self._holds:
            self._holds = False
            self._see(self._running.add_one(), time.monotonic())
            self._running.give()

    def leave(self) -> None:
        """There is nothing to step for: give up the place in the queue too."""
        self.give()
        self._next.give()
        self._wanted_at = None

    def close(self) -> None:
        """End the turn and leave the queue, for good."""
        self._running.close()
        self._next.close()


class _Lock:
    """An exclusive lock among processes, and a number in its file."""

    def __init__(self, file: Path) -> None:
        self._file = os.open(file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        self._works = True

    def take(self) -> bool:
        """Whether this process holds it now. Where files cannot be locked everybody holds it."""
        if not self._works:
            return True
        try:
            fcntl.lockf(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError):
            return False
        except OSError as error:
            self._works = False
            log.warning("engines of this machine do not take turns: %s", error)
        return True

    def give(self) -> None:
        """Release it, if it is held."""
        if self._works:
            fcntl.lockf(self._file, fcntl.LOCK_UN)

    def number(self) -> int:
        """What its holders have counted."""
        return int.from_bytes(os.pread(self._file, 8, 0), "little")

    def add_one(self) -> int:
        """By the holder; returns the new number."""
        number = self.number() + 1
        with suppress(OSError):  # a full disk: others wait for `LONGEST_SECONDS` at most
            os.pwrite(self._file, number.to_bytes(8, "little"), 0)
        return number

    def close(self) -> None:
        os.close(self._file)
