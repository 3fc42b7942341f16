"""Lets engines on one machine step one after the other, each with all cores.

Two pods that compute at once, with a thread per core, put two threads on each core, and a parallel loop ends
with its slowest thread. Worse, a decoder that steps beside a prefill has few sequences in each step, and
reads all weights for it. POSIX record locks on two files form a queue: the holder of the second is next. A
lock ends with the process that holds it.
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
POLL_SECONDS = 0.001  # equal for all waiting processes: polling more often would be an advantage


class Turns:
    """Turns of one process among the engines of a machine. Used by one thread.

    If no turn begins or ends for `PATIENCE_SECONDS`, the current turn is long or its process is frozen. This
    process then steps beside it, and keeps its place in the queue.
    """

    def __init__(self, file: Path) -> None:
        """`file`: counts starts and ends of turns; a second file is created beside it. Pods that take turns
        use the same path."""
        self._running = _Lock(file)
        self._next = _Lock(file.with_name(f"{file.name}.next"))
        self._waiting_since: float | None = None
        self._count, self._counted_at = -1, 0.0  # newest number in the file, and when it was first read here
        self._holds = False

    def take(self) -> bool:
        """Return whether to step now; otherwise ask again in `POLL_SECONDS`.

        Call `give` after each step, and `leave` when there is nothing to do.
        """
        now = time.monotonic()
        if self._waiting_since is None:
            self._waiting_since = now
        if self._next.take() and self._running.take():
            self._next.give()
            self._holds = True
            self._note_count(self._running.add_one(), now)
        else:
            self._note_count(self._running.number(), now)
            waited_seconds = now - self._waiting_since
            if now - self._counted_at <= PATIENCE_SECONDS and waited_seconds <= LONGEST_SECONDS:
                return False
        self._waiting_since = None
        return True

    def _note_count(self, count: int, now: float) -> None:
        if count != self._count:
            self._count, self._counted_at = count, now

    def give(self) -> None:
        """End the turn after a step."""
        if self._holds:
            self._holds = False
            self._note_count(self._running.add_one(), time.monotonic())
            self._running.give()

    def leave(self) -> None:
        """Leave the queue too, because there is nothing to do."""
        self.give()
        self._next.give()
        self._waiting_since = None

    def close(self) -> None:
        """End the turn and leave the queue permanently."""
        self._running.close()
        self._next.close()


class _Lock:
    """An exclusive lock among processes, with a counter in its file."""

    def __init__(self, file: Path) -> None:
        self._file = os.open(file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        self._works = True

    def take(self) -> bool:
        """Try to take the lock; return whether this process holds it. Where files cannot be locked, every process does."""
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
        """Release the lock, if it is held."""
        if self._works:
            fcntl.lockf(self._file, fcntl.LOCK_UN)

    def number(self) -> int:
        """Return the counter."""
        return int.from_bytes(os.pread(self._file, 8, 0), "little")

    def add_one(self) -> int:
        """Increment the counter and return it. The caller holds the lock."""
        number = self.number() + 1
        with suppress(OSError):  # the disk is full: others wait for `LONGEST_SECONDS` at most
            os.pwrite(self._file, number.to_bytes(8, "little"), 0)
        return number

    def close(self) -> None:
        os.close(self._file)
