"""A program that several processes use and none of them owns.

It starts with the first user and ends with the last, however users end. Each user holds a shared lock on a
file, which the kernel releases with the process; the program waits for the exclusive lock.
"""

from __future__ import annotations

import fcntl
import json
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

from support.harness.waiting import eventually

USERS, STARTING, STARTED, LOG = "users.lock", "starting.lock", "started.json", "program.log"
END_SECONDS = 600.0
"""A user in another process may be in the middle of its longest test."""

Facts = dict[str, Any]
"""What a program reports to its users once it has started."""


class Kept:
    """One process's view of a program. `folder`: the same for all users; `command`: a program that calls `keep` with that folder."""

    def __init__(self, folder: Path, command: Sequence[str], start_seconds: float) -> None:
        self._folder, self._command, self._start_seconds = folder, command, start_seconds
        self._process: subprocess.Popen[bytes] | None = None

    @contextmanager
    def use(self) -> Iterator[Facts]:
        """Yield the facts of the program, and start it unless it runs."""
        self._folder.mkdir(exist_ok=True)
        with (self._folder / STARTING).open("w") as starting, (self._folder / USERS).open("w") as users:
            fcntl.flock(starting, fcntl.LOCK_EX)
            fcntl.flock(users, fcntl.LOCK_SH)  # waits for a program that is ending
            if not (self._folder / STARTED).exists():
                self._start()
            fcntl.flock(starting, fcntl.LOCK_UN)
            yield json.loads((self._folder / STARTED).read_text())

    def _start(self) -> None:
        log = self._folder / LOG
        with log.open("ab") as output:
            process = self._process = subprocess.Popen(
                self._command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT
            )

        def has_started() -> None:
            if process.poll() is not None:
                raise RuntimeError(
                    f"{self._command} ended with {process.returncode}:\n{log.read_text()[-4000:]}"
                )
            assert (self._folder / STARTED).exists(), log.read_text()[-4000:]

        eventually(has_started, self._start_seconds)

    def join(self) -> None:
        """Wait until the program has ended, if this process started it. It ends with its last user.

        Raises:
            subprocess.TimeoutExpired: it has not, within `END_SECONDS`.
        """
        if self._process is not None:
            self._process.wait(END_SECONDS)


def keep(folder: Path, program: AbstractContextManager[Facts]) -> None:
    """Run a program until no process uses it."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    started = folder / STARTED
    with (folder / USERS).open() as users, program as facts:
        partial = started.with_suffix(".partial")
        partial.write_text(json.dumps(facts))
        partial.rename(started)
        try:
            fcntl.flock(users, fcntl.LOCK_EX)
        finally:
            started.unlink()
