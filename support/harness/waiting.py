"""Waits for conditions.

A wait may take as long as the test: pytest's timeout ends one whose condition never holds. The report names
the condition, its last complaint, how long it was awaited and how busy the machine was.
"""

from __future__ import annotations

import asyncio
import inspect
import linecache
import os
import signal
import sys
import time
import traceback
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any, TypeVar

from support.harness.promises import BrokenPromiseError

T = TypeVar("T")

DEADLINE_SECONDS = 60.0
"""A timeout for single calls and events. Only a test that fails waits this long."""

UNTIMED_SECONDS = 120.0
"""Longest wait while pytest's timer does not run: in a program, or once the timeout has ended the test and
fixtures end.
"""

RECHECK_SECONDS = 1.0
"""A condition is evaluated again after this time even if its event was not set."""

MAX_COMPLAINT_CHARACTERS = 3000

_in_progress: set[_Wait] = set()


async def until(
    condition: Callable[[], T | Awaitable[T]],
    what: str | Callable[[], object] = "",
    *,
    changed: asyncio.Event | None = None,
    retried: tuple[type[Exception], ...] = (),
    pause_seconds: float = 0.02,
) -> T:
    """Poll a condition on the event loop until it holds, and return its value.

    It holds once its value is true. An AssertionError is a complaint, like a false value. Any other exception
    is raised at once, and so is a broken promise.

    condition: a function or coroutine function.
    what: what the test waits for; a callable is called when the wait fails. Without it the report quotes the
    condition's source.
    changed: an event that is set whenever the condition may have changed; it replaces the pause.
    retried: further exceptions that are complaints, such as the connection error of a process that still
    starts.
    """
    __tracebackhide__ = True
    wait = _Wait(condition, what)
    try:
        while True:
            if changed is not None:
                changed.clear()
            try:
                value: Any = condition()
                if inspect.iscoroutine(value):
                    value = await value
                if value:
                    return value  # type: ignore[no-any-return]
                wait.complaint = _returned(value)
            except BrokenPromiseError:
                raise
            except (AssertionError, *retried) as error:
                wait.complaint = _raised(error)
            wait.check_deadline()
            await _pause(pause_seconds, changed)
    except (asyncio.CancelledError, GeneratorExit):  # pytest shows nothing of these
        if wait in _in_progress:
            sys.stderr.write(f"{wait.report()}\n")
        raise
    except BaseException as error:
        error.add_note(wait.report())
        raise
    finally:
        _in_progress.discard(wait)


def wait_until(
    condition: Callable[[], T],
    what: str | Callable[[], object] = "",
    *,
    seconds: float | None = None,
    retried: tuple[type[Exception], ...] = (),
    pause_seconds: float = 0.05,
) -> T:
    """Poll a condition in this thread until it holds, and return its value, as `until` does on an event loop.

    seconds: a deadline, for programs, which no timeout of pytest ends, and for tests of deadlines.
    """
    __tracebackhide__ = True
    wait = _Wait(condition, what, seconds)
    try:
        while True:
            try:
                if value := condition():
                    return value
                wait.complaint = _returned(value)
            except BrokenPromiseError:
                raise
            except (AssertionError, *retried) as error:
                wait.complaint = _raised(error)
            wait.check_deadline()
            time.sleep(pause_seconds)
    except BaseException as error:
        error.add_note(wait.report())
        raise
    finally:
        _in_progress.discard(wait)


def eventually(check: Callable[[], T], seconds: float | None = None) -> T:
    """Repeat a check until it raises neither an AssertionError nor a LookupError, and return its value, which may be false."""
    __tracebackhide__ = True
    (value,) = wait_until(
        lambda: (check(),),
        lambda: _source(check),
        seconds=seconds,
        retried=(LookupError,),
        pause_seconds=0.1,
    )
    return value


def reports_of_waits() -> list[str]:
    """Reports of all waits in progress. They are not repeated on stderr."""
    waits = list(_in_progress)
    _in_progress.difference_update(waits)
    return [wait.report() for wait in waits]


async def is_closed(host: str, port: int) -> bool:
    """Whether a new connection is closed without a byte."""
    reader, writer = await asyncio.open_connection(host, port)
    try:
        return await asyncio.wait_for(reader.read(), DEADLINE_SECONDS) == b""
    except ConnectionError:
        return True
    finally:
        writer.close()


class _Wait:
    """One wait: what it waits for, since when, and the last complaint."""

    def __init__(
        self,
        condition: Callable[[], object],
        what: str | Callable[[], object],
        seconds: float | None = None,
    ) -> None:
        self.complaint = "the condition has not been evaluated"
        self._condition, self._what, self._seconds = condition, what, seconds
        self._started_at = self._last_timed = time.monotonic()
        _in_progress.add(self)

    def check_deadline(self) -> None:
        """Raise an AssertionError after the deadline, or when nothing else would end this wait."""
        now = time.monotonic()
        if signal.getitimer(signal.ITIMER_REAL)[0] > 0:  # pytest's timeout is still running
            self._last_timed = now
        if self._seconds is not None and now - self._started_at > self._seconds:
            raise AssertionError(f"not within {self._seconds:g} s: {self._name()}")
        if self._seconds is None and now - self._last_timed > UNTIMED_SECONDS:
            raise AssertionError(
                f"not within {UNTIMED_SECONDS:g} s, without a timeout of pytest: {self._name()}"
            )

    def report(self) -> str:
        """The condition, how long it was awaited, the last complaint, and the load of the machine."""
        load = " ".join(f"{load:.1f}" for load in os.getloadavg())
        return (
            f"waited {time.monotonic() - self._started_at:.1f} s for: {self._name()}\n"
            f"last complaint: {self.complaint}\n"
            f"load average: {load} on {os.cpu_count()} cores"
        )

    def _name(self) -> str:
        if not callable(self._what):
            return self._what or _source(self._condition)
        try:
            return str(self._what())
        except Exception as error:  # noqa: BLE001 -- the failure of the wait matters more than that of its description
            return f"{_source(self._condition)} (its description failed: {error!r})"


def _source(condition: Callable[[], object]) -> str:
    """Where a function is, and its first line."""
    code = getattr(condition, "__code__", None)
    if code is None:
        return repr(condition)
    line = linecache.getline(code.co_filename, code.co_firstlineno).strip()
    return f"{code.co_filename}:{code.co_firstlineno}: {line}"


def _returned(value: object) -> str:
    return f"returned {value!r}"[:MAX_COMPLAINT_CHARACTERS]


def _raised(error: Exception) -> str:
    """The error and where it was raised: an assertion outside test modules has no message."""
    *_, last = traceback.extract_tb(error.__traceback__)
    return (
        f"{type(error).__name__}: {error}"[:MAX_COMPLAINT_CHARACTERS]
        + f"\n  at {last.filename}:{last.lineno}: {last.line}"
    )


async def _pause(seconds: float, changed: asyncio.Event | None) -> None:
    if changed is None:
        await asyncio.sleep(seconds)
        return
    with suppress(TimeoutError):
        async with asyncio.timeout(RECHECK_SECONDS):
            await changed.wait()
