"""Commands with deadlines, and long-running processes that are stopped by the ids they were started with."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path


class FailedError(Exception):
    """A step of the run failed; the message contains the fault and the remedy."""


class AlreadyEndedError(FailedError):
    """What should be killed had ended before."""


def run(
    *command: str | Path, seconds: float = 60, stdin: str | None = None, env: Mapping[str, str] | None = None
) -> str:
    """Run a command and return its standard output.

    Raises:
        FailedError: it failed or took longer; the message ends with its last words.
    """
    try:
        child = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL if stdin is None else subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=None if env is None else {**os.environ, **env},
            start_new_session=True,
        )
    except FileNotFoundError as error:
        raise FailedError(f"{command[0]} is not installed") from error
    try:
        output, errors = child.communicate(stdin, timeout=seconds)
    except subprocess.TimeoutExpired as error:
        raise FailedError(f"{shown(command)} was not done after {seconds:.0f} s") from error
    finally:
        if child.poll() is None:  # also when this program is being stopped
            _end_session(child)
    if child.returncode != 0:
        raise FailedError(f"{shown(command)} ended with {child.returncode}:\n{tail(errors + output)}")
    return output


def _end_session(child: subprocess.Popen[str]) -> None:
    """End a command and what it started; it gets some seconds to clear up."""
    for sign, seconds in ((signal.SIGTERM, 20), (signal.SIGKILL, 5)):
        os.killpg(child.pid, sign)
        try:
            child.wait(seconds)
        except subprocess.TimeoutExpired:
            continue
        return


def pipe(
    source: Sequence[str | Path], sink: Sequence[str | Path], seconds: float, env: Mapping[str, str]
) -> None:
    """`source | sink`.

    Raises:
        FailedError: one of them failed.
    """
    whole = {**os.environ, **env}
    giving = subprocess.Popen(source, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=whole)
    taking = subprocess.Popen(
        sink, stdin=giving.stdout, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=whole
    )
    assert giving.stdout is not None
    giving.stdout.close()
    try:
        words, _ = taking.communicate(timeout=seconds)
        codes = (giving.wait(timeout=10), taking.returncode)
    except subprocess.TimeoutExpired as error:
        raise FailedError(f"{shown(source)} | {shown(sink)} was not done after {seconds:.0f} s") from error
    finally:
        for process in (giving, taking):
            process.kill()
            process.wait()
    if codes != (0, 0):
        raise FailedError(f"{shown(source)} | {shown(sink)} ended with {codes}:\n{tail(words)}")


def shown(command: Sequence[str | Path]) -> str:
    words = " ".join(str(word) for word in command)
    return words if len(words) < 160 else f"{words[:157]}..."


def tail(text: str, lines: int = 15) -> str:
    """The last lines; a long one loses its middle, because causes stand at the end."""
    last = text.strip().splitlines()[-lines:]
    return "\n".join(line if len(line) < 600 else f"{line[:200]} [...] {line[-400:]}" for line in last)


def until(what: str, seconds: float, test: Callable[[], bool], pause_seconds: float = 0.3) -> None:
    """Repeat `test` until it holds.

    Raises:
        FailedError: it did not hold in time; the message ends with the last failure of `test`.
    """
    end = time.monotonic() + seconds
    trouble = ""
    while time.monotonic() < end:
        try:
            if test():
                return
            trouble = ""
        except FailedError as error:
            trouble = f": {error}"
        time.sleep(pause_seconds)
    raise FailedError(f"after {seconds:.0f} s still not so: {what}{trouble}")


@contextmanager
def in_background(name: str, look: Callable[[], None], pause_seconds: float) -> Iterator[None]:
    """Call `look` repeatedly on a dedicated thread, with pauses, until the block ends."""
    over = threading.Event()

    def again() -> None:
        while not over.wait(pause_seconds):
            look()

    thread = threading.Thread(target=again, name=name, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join(60)


class Processes:
    """Servers, each with a log file and a file with its id, so that a later run can stop what a killed one left."""

    def __init__(self, ids: Path, logs: Path) -> None:
        self.ids, self.logs = ids, logs
        self._children: dict[str, subprocess.Popen[bytes]] = {}

    def start(self, name: str, *command: str | Path) -> None:
        with (self.logs / f"{name}.log").open("ab") as log:
            child = subprocess.Popen(
                command,
                stdout=log,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )
        self._children[name] = child
        (self.ids / f"{name}.pid").write_text(str(child.pid))

    def revive(self, name: str, last_words: str) -> None:
        """Start a server again that ended with these words, as an init system would."""
        child = self._children[name]
        if child.poll() is not None and last_words in tail(
            (self.logs / f"{name}.log").read_text(errors="replace")
        ):
            self.start(name, *child.args)

    def must_run(self) -> None:
        """Raises:
        FailedError: one has ended; the message ends with its last words.
        """
        for name, child in self._children.items():
            if child.poll() is not None:
                words = (self.logs / f"{name}.log").read_text(errors="replace")
                raise FailedError(f"{name} ended with {child.returncode}:\n{tail(words)}")

    def stop(self, name: str, mark: str, seconds: float = 20) -> None:
        """Stop the process of this name, of this run or of an earlier one. `mark`: what is in its command line."""
        file = self.ids / f"{name}.pid"
        if not file.exists():
            return
        pid = int(file.read_text())
        child = self._children.pop(name, None)
        for sign in (signal.SIGTERM, signal.SIGKILL):
            if mark in command_line(pid):
                os.kill(pid, sign)
                until(f"{name} has ended", seconds, lambda: _ended(child, pid, mark))
        file.unlink()


def _ended(child: subprocess.Popen[bytes] | None, pid: int, mark: str) -> bool:
    if child is not None:
        child.poll()
    return mark not in command_line(pid)


def command_line(pid: int) -> str:
    """Empty for a process that is gone, or dead and not yet waited for."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    except OSError:
        return ""
