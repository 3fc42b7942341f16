"""Pytest's side of `ci`: marks tests by where they run, and writes the outcome of every test.

Random tests draw from the commit's seed, without a limit of time.
`MMD_TEST_OUTCOMES` names the file for outcomes. Use: `pytest_plugins = ["support.harness.legs"]`.
"""

from __future__ import annotations

import json
import os
import re
import resource
import signal
import subprocess
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, settings

from ci.drills import drill_of, stale
from support.harness.seeds import seed_of_commit
from support.harness.waiting import reports_of_waits

OUTCOMES = "MMD_TEST_OUTCOMES"

#: Fixtures that start a program: a test with one depends on more than the code.
PROGRAMS = frozenset(
    {"nats_server", "own_nats_server", "connect", "launch", "control_plane", "api", "shared_api", "namespace"}
)

CPU = "cpu seconds"
LATE = "something came too late"
BROKEN = "a promise was broken"

#: Suffix that pytest-xdist appends to the node id of a test in a group.
GROUP = re.compile(r"(?<=[\]\w])@[\w-]+$")


def is_deployment(item: pytest.Item) -> bool:
    """Whether the test needs a whole deployment, and with it both cores."""
    _, folder, *_ = (*item.nodeid.split("/"), "", "")
    grouped = folder == "observe" and item.get_closest_marker("xdist_group") is not None
    return folder in ("pipeline", "page") or grouped


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    whole_modules = not any("::" in argument for argument in config.args)
    if whole_modules and (names := stale([item.nodeid for item in items])):
        raise pytest.UsageError(f"ci/drills.toml names tests that do not exist: {', '.join(names)}")
    for item in items:
        if drill := drill_of(item.nodeid):
            item.add_marker(pytest.mark.drill(name=drill))
        elif item.get_closest_marker("alone"):
            raise pytest.UsageError(
                f"{item.nodeid} is marked alone, so no leg runs it; add it to ci/drills.toml"
            )
        if is_deployment(item):
            item.add_marker(pytest.mark.deployment)
        if PROGRAMS.intersection(getattr(item, "fixturenames", ())) or item.get_closest_marker("processes"):
            item.add_marker(pytest.mark.system)


def cpu_seconds() -> float:
    """CPU time of this process, and of the programs that it has seen end."""
    usages = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


TIMEOUT_AGAIN_SECONDS = 60.0
"""Time after which a timeout that did not end its test is raised again."""

TIMEOUT_MESSAGE = "Timeout (>"
"""How the messages of pytest-timeout begin."""


@pytest.hookimpl(wrapper=True)
def pytest_timeout_set_timer() -> Generator[None, object, object]:
    """Repeat the timer of pytest-timeout.

    It raises in whatever the main thread runs. A callback of an event loop, or a task that is not the test,
    takes the exception for its own: the test went on, and waited for ever if that callback was to wake it.
    """
    timer = yield
    seconds, _ = signal.getitimer(signal.ITIMER_REAL)
    if seconds > 0:
        signal.setitimer(signal.ITIMER_REAL, seconds, TIMEOUT_AGAIN_SECONDS)
    return timer


BEFORE: pytest.StashKey[float] = pytest.StashKey()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    item.stash[BEFORE] = cpu_seconds()
    return (yield)


@contextmanager
def no_timeout() -> Iterator[None]:
    """Stop the timer of pytest-timeout: in code of pytest its exception ends the whole run."""
    left, again = signal.setitimer(signal.ITIMER_REAL, 0)
    try:
        yield
    finally:
        if left > 0:
            signal.setitimer(signal.ITIMER_REAL, left, again)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Add facts to the reports of a test, and let no timeout come while they are made.

    That of a failed phase gets the waits that it interrupted, and whether a slow machine explains it. That of
    the last phase gets the CPU time of the whole test.
    """
    with no_timeout():
        report = yield
    if report.failed:
        report.sections.extend(("Unfinished wait", text) for text in reports_of_waits())
    if report.when == "teardown":
        report.user_properties.append((CPU, round(cpu_seconds() - item.stash[BEFORE], 2)))
    if call.excinfo is not None:
        report.user_properties.append((LATE, came_too_late(call.excinfo.value, call.when)))
        is_promise = item.get_closest_marker("promise") is not None
        report.user_properties.append((BROKEN, is_promise or breaks_a_promise(call.excinfo.value)))
    return report


def came_too_late(error: BaseException, phase: str) -> bool:
    """Whether a slow machine explains an error: time was up, or a program that starts took no connection yet.

    A wait that ran out while a failed check was handled explains nothing.
    """
    if isinstance(error, BaseExceptionGroup):
        return all(came_too_late(one, phase) for one in error.exceptions)
    if isinstance(error, pytest.fail.Exception):
        return str(error).startswith(TIMEOUT_MESSAGE)
    before = error.__cause__ or error.__context__
    if isinstance(before, AssertionError | BaseExceptionGroup) and not came_too_late(before, phase):
        return False
    starting = phase == "setup" and isinstance(error, ConnectionRefusedError | httpx.ConnectError)
    return starting or isinstance(error, TimeoutError | subprocess.TimeoutExpired)


def breaks_a_promise(error: BaseException | None) -> bool:
    """Whether an error is a broken promise, or was raised because of one, alone or among others."""
    if error is None:
        return False
    if type(error).__name__ == "BrokenPromiseError":
        return True
    among = error.exceptions if isinstance(error, BaseExceptionGroup) else ()
    return any(map(breaks_a_promise, (*among, error.__cause__, error.__context__)))


class Outcomes:
    """Writes lines of JSON: each test's beginning, failed phases, end and CPU time, and the end of the
    session.
    """

    def __init__(self, path: Path) -> None:
        self._file = path.open("a", buffering=1)

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self._line(test=GROUP.sub("", nodeid), outcome="begun", seconds=0.0, system=False, output="")

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "teardown":
            seconds = dict(report.user_properties)[CPU]
            self._line(
                test=GROUP.sub("", report.nodeid), outcome="cpu", seconds=seconds, system=False, output=""
            )
        if report.when != "call" and report.passed:
            if report.when == "setup" and report.duration > 1:
                self._write(report, "set up")
            return
        self._write(report, "failed" if report.failed else report.outcome)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self._line(
                test=report.nodeid, outcome="failed", seconds=0.0, system=False, output=report.longreprtext
            )

    def pytest_sessionfinish(self, exitstatus: int) -> None:
        self._line(
            test="", outcome="session", seconds=0.0, system=False, output=f"exit status {int(exitstatus)}"
        )

    def _write(self, report: pytest.TestReport, outcome: str) -> None:
        output = ""
        if report.failed:
            sections = (f"--- {title}\n{text}" for title, text in report.sections)
            output = "\n".join((report.longreprtext, *sections))
        elif isinstance(report.longrepr, tuple):  # place and reason of a skip
            output = report.longrepr[2]
        self._line(
            test=GROUP.sub("", report.nodeid),
            outcome=outcome,
            seconds=round(report.duration, 2),
            system="system" in report.keywords,
            output=output,
            late=dict(report.user_properties).get(LATE, False),
            broken=dict(report.user_properties).get(BROKEN, False),
        )

    def _line(self, **facts: Any) -> None:
        self._file.write(json.dumps(facts) + "\n")


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    # What a test's thread raises is a failure of the test.
    config.addinivalue_line("filterwarnings", "error::pytest.PytestUnhandledThreadExceptionWarning")
    if config.option.hypothesis_seed is None:
        config.option.hypothesis_seed = seed_of_commit()
    settings.register_profile(
        "commit",
        deadline=None,
        derandomize=False,
        database=None,
        suppress_health_check=[HealthCheck.too_slow],
    )
    settings.load_profile("commit")
    path = os.environ.pop(OUTCOMES, "")  # a pytest that a test starts writes none
    if path and not hasattr(config, "workerinput"):  # with pytest-xdist the controller sees all reports
        config.pluginmanager.register(Outcomes(Path(path)), "outcomes of tests")
