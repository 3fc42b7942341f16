"""The tests of the gate several times over, to find those that fail in some runs only.

    python -m bench.flakes [--runs 3] [--load] [--seed 1] [--legs test demo] [--more]

With `--load` two processes take both cores meanwhile, and a random process that the tests started is stopped for one to three seconds,
again and again. The report names each test that failed, in which runs, with the output of its last failure. It exits 1 if any did.
It is kept after each run; `--more` adds runs to it where it is of the same commit, with or without load as these.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing
import random
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import psutil
from rich.console import Console

from bench.report import REPORTS, code, keep
from ci.run import Run, legs_of, only_run, run_legs
from mmd_workers.wire.server import die_with_parent

STOPPED_SECONDS = (1.0, 3.0)
PAUSE_SECONDS = (1.0, 3.0)
SPINNERS = 2
PATIENCE = 3
REPORT = "flakes"


@dataclass
class Failures:
    """Of one test, over all runs."""

    runs: set[int] = field(default_factory=set)
    output: str = ""


class Stopper(threading.Thread):
    """Stops one descendant of this process after another; never one of `spared`."""

    def __init__(self, rng: random.Random, spared: set[int]) -> None:
        super().__init__(daemon=True)
        self.num_stopped = 0
        self._rng, self._spared, self._over = rng, spared, threading.Event()

    def run(self) -> None:
        while not self._over.wait(self._rng.uniform(*PAUSE_SECONDS)):
            running = [
                one for one in psutil.Process().children(recursive=True) if one.pid not in self._spared
            ]
            if running:
                self._stop_for_a_while(self._rng.choice(running))

    def _stop_for_a_while(self, process: psutil.Process) -> None:
        with contextlib.suppress(psutil.Error):
            process.suspend()
            self.num_stopped += 1
            try:
                self._over.wait(self._rng.uniform(*STOPPED_SECONDS))
            finally:
                process.resume()

    def close(self) -> None:
        self._over.set()
        self.join()


def _spin() -> None:
    die_with_parent()
    while True:
        pass


@contextlib.contextmanager
def load(seed: int) -> Iterator[Stopper]:
    """Both cores are taken and processes stand still, until the block ends."""
    spinners = [multiprocessing.Process(target=_spin, daemon=True) for _ in range(SPINNERS)]
    for spinner in spinners:
        spinner.start()
    stopper = Stopper(random.Random(seed), {spinner.pid for spinner in spinners if spinner.pid})
    stopper.start()
    try:
        yield stopper
    finally:
        stopper.close()
        for spinner in spinners:
            spinner.kill()


@dataclass
class Findings:
    """Of all runs so far."""

    failures: dict[str, Failures] = field(default_factory=dict)
    legs: list[dict[str, Any]] = field(default_factory=list)
    seconds: list[int] = field(default_factory=list)
    """Of each run."""

    @classmethod
    def kept(cls, commit: str, load: bool, words: list[str]) -> Findings:
        """Those of the kept report, or none where it is of another commit, other legs or another kind."""
        path = REPORTS / f"{REPORT}.json"
        report = json.loads(path.read_text()) if path.exists() else {}
        is_same = (report.get("code"), report.get("load"), report.get("words")) == (commit, load, words)
        if not is_same or commit.endswith("-dirty"):
            return cls()
        failures = {
            name: Failures(set(one["runs"]), one["output"]) for name, one in report["failures"].items()
        }
        return cls(failures, report["legs"], report["seconds"])

    @property
    def runs(self) -> int:
        """How many there were."""
        return len(self.seconds)

    def body(self) -> dict[str, Any]:
        """For the report."""
        failures = {
            name: {"runs": sorted(one.runs), "output": one.output} for name, one in self.failures.items()
        }
        return {"runs": self.runs, "seconds": self.seconds, "legs": self.legs, "failures": failures}

    def add(self, words: list[str], patience: float) -> None:
        """Run the legs once, beside one another as in a gate, with so many times their budgets."""
        number, begun = self.runs, time.monotonic()
        legs = [replace(leg, budget_minutes=leg.budget_minutes * patience) for leg in legs_of(words)]
        for run in run_legs(legs):
            self.legs.append(
                {
                    "run": number,
                    "leg": run.leg.name,
                    "seconds": round(run.seconds),
                    "cpu_seconds": round(run.cpu_seconds),
                    "longest_stall_seconds": round(run.stall_seconds, 1),
                    "passed": len(run.passed_names),
                }
            )
            for name, output in _failed(run):
                failed = self.failures.setdefault(name, Failures())
                failed.runs.add(number)
                failed.output = output[-4000:]
        self.seconds.append(round(time.monotonic() - begun))


def _failed(run: Run) -> Iterator[tuple[str, str]]:
    tests = run.tests("failed")
    yield from ((line["test"], line["output"]) for line in tests)
    if not run.passed and not tests:
        yield f"leg {run.leg.name}", run.log.read_text(errors="replace")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--load", action="store_true")
    parser.add_argument("--seed", type=int, default=1, help="of what is stopped, and when")
    parser.add_argument("--legs", nargs="+", default=["test", "demo"])
    parser.add_argument("--more", action="store_true", help="add to the runs of the kept report")
    options = parser.parse_args()
    findings = Findings.kept(code(), options.load, options.legs) if options.more else Findings()
    stopped = 0
    for _ in range(options.runs):
        seed = options.seed + findings.runs
        with only_run(), load(seed) if options.load else contextlib.nullcontext() as stopper:
            findings.add(options.legs, PATIENCE if options.load else 1)
        stopped += stopper.num_stopped if stopper else 0
        facts = {
            "load": options.load,
            "words": options.legs,
            "seed": options.seed,
            "processes_stopped_now": stopped,
        }
        path = keep(REPORT, facts | findings.body())
    console = Console()
    for name, one in findings.failures.items():
        console.print(
            f"{name}: failed in {len(one.runs)} of {findings.runs} runs", markup=False, soft_wrap=True
        )
    console.print(f"{len(findings.failures)} tests failed in some of {findings.runs} runs; report in {path}")
    sys.exit(bool(findings.failures))


if __name__ == "__main__":
    main()
