"""Runs legs of the tests one after another, whatever fails, and ends with a summary that names every failure.

Use: `python -m ci.run gate`, `python -m ci.run test`, `python -m ci.run unit apiserver`, `python -m ci.run drills`,
`python -m ci.run drill-NAME`. Each leg has a log and the outcomes of its tests in `.cache/ci`. Exit status 1 if anything failed.

Tests that failed beside others and start programs of their own run once more, alone: one that then passes is reported as FLAKY.
"""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import signal
import subprocess
import sys
import time
import tomllib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ci.legs import PYTEST, PYTHON, SUITES, VLLM_PYTHON, Leg, pytest_leg

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / ".cache" / "ci"
DRILLS = tomllib.loads((ROOT / "ci" / "drills.toml").read_text())

MAX_AGAIN = 5
"""More failed tests than this are no accident: none runs again."""

MAX_FLAKY = 2
AGAIN_MINUTES = 6
OUTPUT_LINES = 30
NO_TESTS = 5
"""Pytest's exit status where nothing was selected."""


@dataclass
class Run:
    """A leg under way, and its result."""

    leg: Leg
    seconds: float = 0.0
    stall_seconds: float = 0.0
    status: int | None = None
    ended_late: bool = False
    outcomes: list[dict[str, Any]] = field(default_factory=list)

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
        return self.status == 0


def drill_leg(name: str) -> Leg:
    row = DRILLS[name]
    if command := row.get("command"):
        return Leg(f"drill-{name}", tuple(shlex.split(command)), row["minutes"])
    files = sorted({test.split("::")[0] for test in row["tests"]})
    python = VLLM_PYTHON if row.get("vllm") else PYTHON
    return pytest_leg(f"drill-{name}", row["minutes"], "-m", f"drill(name='{name}')", *files, python=python)


def legs_of(words: Iterable[str]) -> Iterator[Leg]:
    """The legs that the words of the command line stand for."""
    by_name = {leg.name: leg for leg in SUITES["gate"]}
    for word in words:
        if word in SUITES:
            yield from SUITES[word]
        elif word == "drills":
            yield from map(drill_leg, DRILLS)
        elif word.startswith("drill-") and word.removeprefix("drill-") in DRILLS:
            yield drill_leg(word.removeprefix("drill-"))
        elif word in by_name:
            yield by_name[word]
        else:
            choice = [*SUITES, *by_name, "drills", *(f"drill-{name}" for name in DRILLS)]
            raise SystemExit(f"ci.run: there is no leg {word!r}; use one of {', '.join(choice)}")


def start(run: Run) -> subprocess.Popen[bytes]:
    run.log.parent.mkdir(parents=True, exist_ok=True)
    run.outcome_file.unlink(missing_ok=True)
    environment = os.environ | {"MMD_TEST_OUTCOMES": str(run.outcome_file)} if run.leg.is_pytest else None
    with run.log.open("wb") as log:
        return subprocess.Popen(
            run.leg.command,
            cwd=ROOT,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )


def end(process: subprocess.Popen[bytes]) -> None:
    """End a leg and what it started; its Python processes print their stacks first."""
    os.killpg(process.pid, signal.SIGABRT)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(20)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def run_together(legs: Sequence[Leg]) -> list[Run]:
    """Run legs at the same time, until each has ended or has taken twice its budget."""
    runs = [Run(leg) for leg in legs]
    begun = time.monotonic()
    under_way = [(run, start(run)) for run in runs]
    while under_way:
        before = time.monotonic()
        time.sleep(0.1)
        late = time.monotonic() - before - 0.1
        for run, process in list(under_way):
            run.stall_seconds = max(run.stall_seconds, late)
            run.seconds = time.monotonic() - begun
            if process.poll() is None and run.seconds > 2 * 60 * run.leg.budget_minutes:
                run.ended_late = True
                end(process)
            if process.poll() is not None:
                run.status = process.returncode
                under_way.remove((run, process))
                finish(run)
    return runs


def finish(run: Run) -> None:
    if run.outcome_file.exists():
        run.outcomes = [json.loads(line) for line in run.outcome_file.read_text().splitlines()]
    print(headline(run), flush=True)


def headline(run: Run) -> str:
    minutes, seconds = divmod(round(run.seconds), 60)
    facts = [f"{run.leg.name:<16}{'ok' if run.passed else 'FAILED':<8}{minutes:>3}:{seconds:02}"]
    facts.append(f"longest stall {run.stall_seconds:.1f} s")
    if run.outcomes:
        facts.append(f"{len(run.tests('passed'))} passed, {len(run.tests('failed'))} failed")
    if run.ended_late:
        facts.append(
            f"ended after twice its budget of {run.leg.budget_minutes:g} min: the stacks are in {run.log}"
        )
    elif run.seconds > 60 * run.leg.budget_minutes:
        facts.append(f"over its budget of {run.leg.budget_minutes:g} min")
    if not run.passed and not run.ended_late:
        facts.append(f"exit status {run.status}")
    return "  ".join(facts)


def may_run_again(run: Run) -> list[str]:
    """The failed tests of a leg, if chance may have made all of them fail."""
    failed = run.tests("failed")
    excused = all(line["system"] and "BrokenPromise" not in line["output"] for line in failed)
    names = sorted({line["test"] for line in failed})
    return names if failed and excused and run.status == 1 and len(names) <= MAX_AGAIN else []


def run_again(run: Run) -> list[str]:
    """Run failed tests once more, alone; the names of those that passed, which are flaky. All passed: so has the leg."""
    names = may_run_again(run)
    if not names:
        return []
    (again,) = run_together(
        [Leg(f"{run.leg.name}-again", (run.leg.command[0], *PYTEST, *names), AGAIN_MINUTES)]
    )
    failed_again = {line["test"] for line in again.tests("failed")}
    flaky = [name for name in names if name not in failed_again] if again.status in (0, 1) else []
    if again.passed:
        run.status = 0
    return flaky


def indented_end(text: str) -> str:
    lines = text.rstrip().splitlines()[-OUTPUT_LINES:]
    return "\n".join(f"   | {line[:300]}" for line in lines)


def summary(runs: Sequence[Run], flaky: Sequence[str]) -> str:
    parts = ["== summary ".ljust(100, "="), *map(headline, runs)]
    slowest = sorted((line["seconds"], line["test"]) for run in runs for line in run.outcomes)[-10:]
    parts += ["-- slowest", *(f"   {seconds:6.1f} s  {test}" for seconds, test in reversed(slowest))]
    for run in runs:
        for line in run.tests("failed"):
            label = "FLAKY (passed alone)" if line["test"] in flaky else "FAILED"
            parts.append(f"-- {label} {line['test']}  ({line['seconds']} s)\n{indented_end(line['output'])}")
        if not run.passed and not run.tests("failed"):
            log = run.log.read_text(errors="replace")
            parts.append(f"-- FAILED {run.leg.name}: the end of {run.log}\n{indented_end(log)}")
    if len(flaky) > MAX_FLAKY:
        parts.append(f"-- FAILED: {len(flaky)} flaky tests, {MAX_FLAKY} are allowed")
    num_failed = sum(
        len({line["test"] for line in run.tests("failed")} - set(flaky)) or not run.passed for run in runs
    )
    num_failed += len(flaky) > MAX_FLAKY
    num_passed = sum(len(run.tests("passed")) or run.passed for run in runs) + len(flaky)
    num_skipped = sum(len(run.tests("skipped")) for run in runs)
    parts.append(f"{num_passed} passed, {num_failed} failed, {num_skipped} skipped")
    return "\n".join(parts)


def main(words: Sequence[str]) -> int:
    legs = list(legs_of(words or ["test"]))
    if not (ROOT / VLLM_PYTHON).exists() and not any(leg.name == "vllm" for leg in legs):
        needs_vllm = [leg for leg in legs if leg.command[0] == VLLM_PYTHON]
        if needs_vllm and os.environ.get("CI"):
            raise SystemExit("ci.run: vLLM is not installed; run 'make vllm'")
        for leg in needs_vllm:
            print(f"{leg.name} is skipped: vLLM is not installed; run 'make vllm'", flush=True)
            legs.remove(leg)
    print(f"logs: {FOLDER}; {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}", flush=True)
    groups: list[list[Leg]] = []
    for leg in legs:
        groups[-1].append(leg) if leg.beside and groups else groups.append([leg])
    runs = [run for group in groups for run in run_together(group)]
    flaky = [name for run in runs if not run.passed for name in run_again(run)]
    print(summary(runs, flaky), flush=True)
    return int(len(flaky) > MAX_FLAKY or not all(run.passed for run in runs))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
