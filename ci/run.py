"""Runs test legs side by side as far as the cores allow, and ends with a summary that names every failure.

A failed leg stops no other. Use: `python -m ci.run gate`, `python -m ci.run test`,
`python -m ci.run unit apiserver`, `python -m ci.run drills`, `python -m ci.run drill-NAME`. Each leg writes a
log and the outcomes of its tests to `.cache/ci`. The exit status is 1 if anything failed.

Tests that start programs of their own and failed because something came too late run once more, alone. A test
that then passes is reported as FLAKY. `gate` ends with the drills that `ci.drills` chooses for the commit.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
import tomllib
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ci.drills import DRILLS, ROTATION, chosen
from ci.legs import CORES, PYTEST, PYTHON, SUITES, VLLM_PYTHON, Leg, pytest_leg

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / ".cache" / "ci"
KNOWN_FLAKY = frozenset(tomllib.loads((ROOT / "ci" / "flaky.toml").read_text()))
"""Tests known to fail by chance until they are repaired.

Their second run does not count against `MAX_FLAKY`.
"""

MOST_MINUTES = 80.0
"""Time limit for all legs of a gate together.

Legs that still run then are ended, so that the summary appears before CI's own limit of 90 minutes, part of
which goes to packages.
"""

TEST_MINUTES = 16.0
"""Time of one test that hangs: a leg has that beyond its budget, so that the test ends and not the leg."""

MAX_AGAIN = 5
"""If more tests than this fail, that is no accident, and none runs again."""

MAX_FLAKY = 2
AGAIN_MINUTES = 6
PRINTED_PROMISE = re.compile(r"BrokenPromiseError: \S")
"""A broken promise as a thread or another process prints it; no line of source looks like this."""

OUTPUT_LINES = 30
ERROR_LINES = 8
PR_SET_PDEATHSIG = 1
LIBC = ctypes.CDLL(None) if sys.platform == "linux" else None
NO_PROGRAM = 127
"""Exit status of a leg whose program is missing."""


@dataclass
class Run:
    """A leg in progress, and its result."""

    leg: Leg
    begun: float = 0.0
    seconds: float = 0.0
    cpu_seconds: float = 0.0
    stall_seconds: float = 0.0
    status: int | None = None
    ended_late: str = ""
    """The limit that it had exceeded when it was ended; empty if it was not."""

    ended_at: float = 0.0
    outcomes: list[dict[str, Any]] = field(default_factory=list)
    again: Run | None = None
    """The second run of its failed tests."""

    @property
    def log(self) -> Path:
        return FOLDER / f"{self.leg.name}.log"

    @property
    def outcome_file(self) -> Path:
        return FOLDER / f"{self.leg.name}.jsonl"

    def tests(self, outcome: str) -> list[dict[str, Any]]:
        return [line for line in self.outcomes if line["outcome"] == outcome]

    @property
    def passed(self) -> bool:
        """Whether everything ran and nothing failed.

        A pytest whose session did not finish has run only some tests.
        """
        return self.status == 0 and (not self.leg.is_pytest or bool(self.tests("session")))

    @property
    def failed_names(self) -> set[str]:
        return {line["test"] for line in self.tests("failed")}

    @property
    def cut_off(self) -> list[str]:
        """The tests in progress when the leg ended before its session finished."""
        ended = {line["test"] for line in self.tests("cpu")}
        unfinished = [line["test"] for line in self.tests("begun") if line["test"] not in ended]
        return [] if self.tests("session") and self.status in (0, 1) else unfinished

    @property
    def passed_names(self) -> set[str]:
        return {line["test"] for line in self.tests("passed")} - self.failed_names


def drill_leg(name: str) -> Leg:
    row = DRILLS[name]
    if command := row.get("command"):
        return Leg(f"drill-{name}", tuple(shlex.split(command)), row["minutes"])
    files = sorted({test.split("::")[0] for test in row["tests"]})
    python = VLLM_PYTHON if row.get("vllm") else PYTHON
    return pytest_leg(f"drill-{name}", row["minutes"], "-m", f"drill(name='{name}')", *files, python=python)


def drill_leg_of_gate(name: str) -> Leg:
    """The leg of a drill in a gate. Drills of the rotation are steady enough to run beside other legs."""
    return replace(drill_leg(name), cores=1 if name in ROTATION else CORES)


def legs_of(words: Iterable[str]) -> Iterator[Leg]:
    """Yield the legs that the words of the command line name."""
    by_name = {leg.name: leg for legs in SUITES.values() for leg in legs}
    for word in words:
        if word in SUITES:
            yield from SUITES[word]
            if word == "gate":
                yield from map(drill_leg_of_gate, chosen().run)
        elif word == "drills":
            yield from map(drill_leg, DRILLS)
        elif word.startswith("drill-") and word.removeprefix("drill-") in DRILLS:
            yield drill_leg(word.removeprefix("drill-"))
        elif word in by_name:
            yield by_name[word]
        else:
            choice = [*SUITES, *by_name, "drills", *(f"drill-{name}" for name in DRILLS)]
            raise SystemExit(f"ci.run: there is no leg {word!r}; use one of {', '.join(choice)}")


def start(run: Run) -> subprocess.Popen[bytes] | None:
    """Start the leg's process in its own session. Returns None if the program is missing."""
    run.log.parent.mkdir(parents=True, exist_ok=True)
    run.outcome_file.unlink(missing_ok=True)
    environment = os.environ.copy()
    environment.pop("PYTEST_ADDOPTS", None)  # a leg runs all of its tests, whatever a developer's shell adds
    # Otherwise each of thousands of processes compiles its imports.
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    if run.leg.is_pytest:
        environment["MMD_TEST_OUTCOMES"] = str(run.outcome_file)
    with run.log.open("wb") as log:
        try:
            return subprocess.Popen(
                run.leg.command,
                cwd=ROOT,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=lambda: die_with_parent(run.leg.end_signal),
            )
        except OSError as error:
            log.write(f"{run.leg.command[0]} cannot be run: {error.strerror}\n".encode())
            return None


def die_with_parent(number: signal.Signals) -> None:
    """Have this process, the first of a leg, signalled when its parent is killed.

    Linux only; elsewhere it does nothing.
    """
    if LIBC is not None:
        LIBC.prctl(PR_SET_PDEATHSIG, number)


@contextlib.contextmanager
def only_run() -> Iterator[None]:
    """Be the only run in this checkout: two would write the same logs and outcomes.

    Raises:
        SystemExit: another runs.
    """
    FOLDER.mkdir(parents=True, exist_ok=True)
    with (FOLDER / "lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise SystemExit(f"ci.run: another run uses {FOLDER}; wait until it has ended") from None
        yield


def signal_group(process: subprocess.Popen[bytes], number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, number)


def has_ended(run: Run, process: subprocess.Popen[bytes]) -> bool:
    """Whether the leg's process has ended.

    If so, its status is recorded, and the CPU time of it and of the processes it waited for.
    """
    with contextlib.suppress(ChildProcessError):
        if process.returncode is None and (waited := os.wait4(process.pid, os.WNOHANG))[0]:
            _, status, usage = waited
            process.returncode = run.status = os.waitstatus_to_exitcode(status)
            run.cpu_seconds = usage.ru_utime + usage.ru_stime
    return process.returncode is not None


def too_late(run: Run, gate_begun: float | None) -> str:
    """Return the limit that a leg has exceeded and must end for, or an empty string."""
    minutes = run.leg.budget_minutes + max(run.leg.budget_minutes, TEST_MINUTES)
    if run.seconds > 60 * minutes:
        return f"{minutes:g} min, with a budget of {run.leg.budget_minutes:g} min"
    if gate_begun is not None and time.monotonic() - gate_begun > 60 * MOST_MINUTES:
        return f"{MOST_MINUTES:g} min of all legs together"
    return ""


def run_legs(legs: Iterable[Leg], gate_begun: float | None = None) -> list[Run]:
    """Run legs in order until each has ended, and return their results.

    A leg starts as soon as the running legs leave enough cores. It is ended long after its budget, or when
    the legs of a gate, which began at `gate_begun`, have taken too long. Python processes then print their
    stacks; processes that remain after `Leg.end_seconds` are killed.
    """
    runs = [Run(leg) for leg in legs]
    waiting = list(runs)
    under_way: list[tuple[Run, subprocess.Popen[bytes]]] = []
    try:
        while waiting or under_way:
            while waiting and sum(run.leg.cores for run, _ in under_way) + waiting[0].leg.cores <= CORES:
                run = waiting.pop(0)
                run.begun = time.monotonic()
                if (process := start(run)) is not None:
                    under_way.append((run, process))
                else:
                    run.status = NO_PROGRAM
                    finish(run)
            before = time.monotonic()
            time.sleep(0.1)
            late = time.monotonic() - before - 0.1
            for run, process in list(under_way):
                run.stall_seconds = max(run.stall_seconds, late)
                run.seconds = time.monotonic() - run.begun
                if has_ended(run, process):
                    under_way.remove((run, process))
                    # Processes it leaves behind must not disturb later legs.
                    signal_group(process, signal.SIGKILL)
                    finish(run)
                elif not run.ended_late and (why := too_late(run, gate_begun)):
                    run.ended_late, run.ended_at = why, run.seconds
                    signal_group(process, run.leg.end_signal)
                elif run.ended_late and run.seconds > run.ended_at + run.leg.end_seconds:
                    signal_group(process, signal.SIGKILL)
    finally:
        for run, process in under_way:  # interrupted
            signal_group(process, run.leg.end_signal)
        deadline = time.monotonic() + max((run.leg.end_seconds for run, _ in under_way), default=0.0)
        for run, process in under_way:
            while not has_ended(run, process) and time.monotonic() < deadline:
                time.sleep(0.1)
            signal_group(process, signal.SIGKILL)
    return runs


def finish(run: Run) -> None:
    """Read the outcomes that the leg's tests reported.

    Truncated lines, such as those of a killed process, are ignored.
    """
    if run.outcome_file.exists():
        for text in run.outcome_file.read_text(errors="replace").splitlines():
            with contextlib.suppress(ValueError):
                run.outcomes.append(json.loads(text))
    print(headline(run), flush=True)


def headline(run: Run) -> str:
    minutes, seconds = divmod(round(run.seconds), 60)
    facts = [f"{run.leg.name:<16}{'ok' if run.passed else 'FAILED':<8}{minutes:>3}:{seconds:02}"]
    facts.append(f"CPU {run.cpu_seconds:.0f} s  longest stall {run.stall_seconds:.1f} s")
    if run.outcomes:
        facts.append(f"{len(run.passed_names)} passed, {len(run.failed_names)} failed")
    if run.ended_late:
        facts.append(f"ended after {run.ended_late}: see {run.log}")
    elif run.seconds > 60 * run.leg.budget_minutes:
        facts.append(f"over its budget of {run.leg.budget_minutes:g} min")
    if not run.passed and not run.ended_late:
        facts.append(f"exit status {run.status}")
    return "  ".join(facts)


def may_have_failed_by_chance(failed: dict[str, Any]) -> bool:
    """Whether chance may have made a test fail.

    It must have started programs and broken no promise, and its error must be one that a slow machine
    explains: a timeout, or a program that took no connections yet. Every other error, such as a check that
    did not hold or an answer that a client could not read, is a finding.
    """
    broken = failed.get("broken") or PRINTED_PROMISE.search(failed["output"])
    return bool(failed["system"] and failed.get("late") and not broken)


def may_run_again(run: Run) -> list[str]:
    """Return the failed tests of a leg, if chance may have made all of them fail."""
    failed = run.tests("failed")
    complete = run.status == 1 and bool(run.tests("session"))
    names = sorted(run.failed_names)
    excused = complete and len(names) <= MAX_AGAIN and all(map(may_have_failed_by_chance, failed))
    return names if excused else []


def run_again(run: Run, gate_begun: float | None = None) -> list[str]:
    """Run failed tests once more, alone, and return those that passed, which are flaky.

    If all of them pass, so does the leg.
    """
    names = may_run_again(run)
    if not names:
        return []
    leg = Leg(f"{run.leg.name}-again", (run.leg.command[0], *PYTEST, *names), AGAIN_MINUTES)
    (again,) = run_legs([leg], gate_begun)
    run.again = again
    flaky = [name for name in names if name in again.passed_names]
    if again.passed and flaky == names:
        run.status = 0
    return flaky


def unknown(flaky: Iterable[str]) -> list[str]:
    return [name for name in flaky if name not in KNOWN_FLAKY]


def too_flaky(flaky: Iterable[str]) -> bool:
    return len(unknown(flaky)) > MAX_FLAKY


def indented_end(text: str) -> str:
    """The last lines, and before them those with what did not hold: logs may follow it."""
    lines = text.rstrip().splitlines()
    last = lines[-OUTPUT_LINES:]
    errors = [line for line in lines[:-OUTPUT_LINES] if line.startswith("E  ")][-ERROR_LINES:]
    return "\n".join(f"   | {line[:300]}" for line in (*errors, *last))


def outputs_alone(run: Run, test: str) -> list[str]:
    """What a failed test printed when it failed once more, alone."""
    failures = run.again.tests("failed") if run.again else []
    return [line["output"] for line in failures if line["test"] == test]


def summary(runs: Sequence[Run], flaky: Sequence[str], notes: Sequence[str] = ()) -> str:
    parts = ["== summary ".ljust(100, "="), *map(headline, runs)]
    slowest = sorted(
        (line["seconds"], line["test"])
        for run in runs
        for line in run.outcomes
        if line["outcome"] not in ("cpu", "begun")
    )[-10:]
    parts += ["-- slowest", *(f"   {seconds:6.1f} s  {test}" for seconds, test in reversed(slowest))]
    reasons = Counter(
        line["output"].removeprefix("Skipped: ") for run in runs for line in run.tests("skipped")
    )
    parts += ["-- skipped", *(f"   {number:6}    {reason[:200]}" for reason, number in reasons.most_common())]
    for run in runs:
        for line in run.tests("failed"):
            label = "FAILED" if line["test"] not in flaky else "FLAKY (passed alone)"
            label += " (known)" * (line["test"] in KNOWN_FLAKY)
            parts.append(f"-- {label} {line['test']}  ({line['seconds']} s)\n{indented_end(line['output'])}")
            parts += [f"   alone:\n{indented_end(output)}" for output in outputs_alone(run, line["test"])]
        parts += [f"-- FAILED {name}: it had begun when {run.leg.name} ended" for name in run.cut_off]
        if not run.passed and (run.status != 1 or not run.tests("failed")):
            log = run.log.read_text(errors="replace")
            parts.append(f"-- FAILED {run.leg.name}: the end of {run.log}\n{indented_end(log)}")
    parts += [f"-- {note}" for note in notes]
    if too_flaky(flaky):
        parts.append(
            f"-- FAILED: {len(unknown(flaky))} flaky tests that ci/flaky.toml does not name, {MAX_FLAKY} are allowed"
        )
    num_failed = sum(len(run.failed_names - set(flaky)) or not run.passed for run in runs)
    num_failed += too_flaky(flaky)
    num_passed = sum(len(run.passed_names) or (run.passed and not run.leg.is_pytest) for run in runs)
    num_passed += len(flaky)
    num_skipped = sum(len({line["test"] for line in run.tests("skipped")}) for run in runs)
    parts.append(f"{num_passed} passed, {num_failed} failed, {num_skipped} skipped")
    return "\n".join(parts)


def without_vllm(legs: Sequence[Leg], words: Sequence[str]) -> tuple[list[Leg], list[str]]:
    """Drop the legs that need vLLM, if it is not installed and no word names them.

    Returns the remaining legs, and notes about the dropped ones. In CI, or if a word names such a leg, exits
    instead.
    """
    installed = (ROOT / VLLM_PYTHON).parents[1] / ".installed"
    if installed.exists() or "vllm" in {leg.name for leg in legs}:
        return list(legs), []
    needs_vllm = {leg.name for leg in legs if leg.command[0] == VLLM_PYTHON}
    if needs_vllm and (os.environ.get("CI") or needs_vllm & set(words)):
        raise SystemExit("ci.run: vLLM is not installed; run 'make vllm'")
    notes = [f"NOT RUN: {name}, for vLLM is not installed; run 'make vllm'" for name in sorted(needs_vllm)]
    return [leg for leg in legs if leg.name not in needs_vllm], notes


def main(words: Sequence[str]) -> int:
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda *_: sys.exit(143))  # `run_legs` then ends the legs
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]  # tests may print anything
    words = words or ["test"]
    by_name = {leg.name: leg for leg in legs_of(words)}
    legs, notes = without_vllm(list(by_name.values()), words)
    if "gate" in words:
        notes += chosen().notes
    with only_run():
        return run_and_sum_up(legs, notes, is_gate="gate" in words)


def run_and_sum_up(legs: Sequence[Leg], notes: Sequence[str], *, is_gate: bool) -> int:
    """Run legs, and failed tests once more where chance may explain them. Returns the exit status."""
    print(
        "\n".join((f"logs: {FOLDER}; {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}", *notes)),
        flush=True,
    )
    gate_begun = time.monotonic() if is_gate else None
    runs = run_legs(legs, gate_begun)
    flaky = [name for run in runs if not run.passed for name in run_again(run, gate_begun)]
    print(summary(runs, flaky, notes), flush=True)
    return int(too_flaky(flaky) or not all(run.passed for run in runs))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
