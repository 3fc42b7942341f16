"""Random requests of every path of a real deployment of the demo model with two gateways and API keys, made from its OpenAPI document; then
nothing may be held for any.

    python -m bench.fuzz [--requests 20000] [--seed 1]

The report has the statuses and codes of all answers, the fields that no request had, and the memory of each process before and after.
It exits 1 if no request had a field of the document, nested ones included, or if one had a status of a defect, no answer, one that is not as the document has it, or a repeat that differs, if a pod ended or logged an exception, if a
process has grown by more than `GROWN_MEBIBYTES`, or if a pod still holds blocks, sequences or media at the end.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path

import psutil
from rich.console import Console

from bench.report import keep
from support.serving.asking import HANG_SECONDS
from support.serving.fuzzing import fuzz, fuzzed_deployment
from support.serving.held import assert_nothing_held
from support.serving.local_deployment import Deployment

GROWN_MEBIBYTES = 512
"""After requests of every kind, until which allocators and caches with a bound have filled; retained answers are a part of it."""
FIRST_REQUESTS = 300


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--requests", type=int, default=20_000)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, fuzzed_deployment(Path(folder)) as deployment:
        pids = _pids(deployment)
        with deployment.http(HANG_SECONDS) as client:
            first = fuzz(client, min(FIRST_REQUESTS, options.requests), options.seed + 1)
            before, begun = _mebibytes(pids), time.monotonic()
            report = fuzz(client, options.requests, options.seed)
        seconds = time.monotonic() - begun
        failures = [*first.failures, *report.failures]
        running = _pids(deployment)
        failures += [f"{name} ended" for name, pid in pids.items() if running.get(name) != pid]
        failures += deployment.logged("Traceback")
        try:
            assert_nothing_held(deployment)
        except AssertionError as error:
            failures.append(f"still held at the end: {error}")
        memory = {name: (before[name], after) for name, after in _mebibytes(pids).items()}
    failures += [
        f"{name} grew from {start} to {end} MiB"
        for name, (start, end) in memory.items()
        if end - start > GROWN_MEBIBYTES
    ]
    facts = {"seed": options.seed, "seconds": round(seconds), "resident_mebibytes": memory}
    body = report.as_json() | facts | {"failures": failures}
    path = keep("fuzz", body)
    console = Console()
    shown = (
        "requests",
        "seconds",
        "sent_again",
        "statuses",
        "codes",
        "fields_not_sent",
        "resident_mebibytes",
    )
    console.print_json(data={name: body[name] for name in shown})
    for failure in failures[:20]:
        console.print(failure, style="red", markup=False)
    console.print(f"{len(failures)} failures; report in {path}")
    sys.exit(bool(failures))


def _pids(deployment: Deployment) -> dict[str, int]:
    """Processes that run, by pod."""
    pids = {pod.name: deployment.pid(pod) for pod in deployment.local.pods}
    return {name: pid for name, pid in pids.items() if pid is not None}


def _mebibytes(pids: dict[str, int]) -> dict[str, int]:
    """Resident memory of the processes that still run."""
    return {
        name: psutil.Process(pid).memory_info().rss >> 20
        for name, pid in pids.items()
        if psutil.pid_exists(pid)
    }


if __name__ == "__main__":
    main()
