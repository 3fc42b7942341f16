"""The tests of the gate several times over, to find those that fail in some runs only.

    python -m bench.flakes [--runs 3] [--load] [--seed 1] [--legs unit apiserver vllm-engine deployments]

With `--load` two processes take both cores meanwhile, and a random process that the tests started is stopped for one to three seconds,
again and again. The report names each test that failed, in how many runs, with the output of its last failure. It exits 1 if any did.
"""

from __future__ import annotations

import argparse
import contextlib
import multiprocessing
import random
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import psutil
from rich.console import Console

from bench.report import keep
from ci.run import Run, legs_of, run_together
from mmd_workers.wire.server import die_with_parent

STOPPED_SECONDS = (1.0, 3.0)
PAUSE_SECONDS = (1.0, 3.0)
SPINNERS = 2
PATIENCE = 3


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


def repeat(words: list[str], runs: int, patience: float) -> tuple[dict[str, Failures], list[dict[str, Any]]]:
    """Run the legs so many times, with so many times their budgets; the failures of each test or leg, and how long each leg took."""
    failures: dict[str, Failures] = {}
    times = []
    for number in range(runs):
        for leg in legs_of(words):
            (run,) = run_together([replace(leg, budget_minutes=leg.budget_minutes * patience)])
            times.append(
                {
                    "run": number,
                    "leg": leg.name,
                    "seconds": round(run.seconds),
                    "longest_stall_seconds": round(run.stall_seconds, 1),
                    "passed": len(run.tests("passed")),
                }
            )
            for name, output in _failed(run):
                failed = failures.setdefault(name, Failures())
                failed.runs.add(number)
                failed.output = output[-4000:]
    return failures, times


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
    parser.add_argument("--legs", nargs="+", default=["unit", "apiserver", "vllm-engine", "deployments"])
    options = parser.parse_args()
    with load(options.seed) if options.load else contextlib.nullcontext() as stopper:
        failures, times = repeat(options.legs, options.runs, PATIENCE if options.load else 1)
    body = {
        "runs": options.runs,
        "load": options.load,
        "seed": options.seed,
        "processes_stopped": stopper.num_stopped if stopper else 0,
        "legs": times,
        "failures": {
            name: {"runs": sorted(one.runs), "output": one.output} for name, one in failures.items()
        },
    }
    path = keep("flakes", body)
    console = Console()
    for name, one in failures.items():
        kind = (
            "in every run" if len(one.runs) == options.runs else f"in {len(one.runs)} of {options.runs} runs"
        )
        console.print(f"{name}: failed {kind}", markup=False, soft_wrap=True)
    console.print(f"{len(failures)} tests failed in some run; report in {path}")
    sys.exit(bool(failures))


if __name__ == "__main__":
    main()
