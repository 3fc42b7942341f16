"""Media files with damage of every kind through the sandbox that opens media, from the files and documents of tests/media.

    python -m bench.mutations [--files 100000] [--seed 1] [--processes 2]

The report has what was decoded and refused of each format, and every file that crashed or hung its decoder, got an error without a remedy or
a result other than promised, by its name and number (`support.serving.mutations.mutant` makes it again). It exits 1 if there is one, or if
anything is left behind: a process, memory of a medium, an open file of a decode process, or memory that it keeps.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import time

from rich.console import Console
from rich.table import Table

from bench.report import keep
from mmd_workers.media.sandbox import DecodePool
from support.serving import mutations


async def measure(files: int, seed: int, processes: int) -> mutations.Report:
    pool = DecodePool(processes, mutations.POLICY.decode_timeout_seconds)
    await pool.start()
    return await mutations.run(mutations.originals(), files, seed, pool)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--files", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--processes", type=int, default=2)
    options = parser.parse_args()
    begun = time.monotonic()
    report = asyncio.run(measure(options.files, options.seed, options.processes))
    seconds = time.monotonic() - begun
    table = Table("format", "decoded", "refused")
    kinds = sorted(report.decoded | report.refused)
    for kind in kinds:
        table.add_row(kind, str(report.decoded[kind]), str(report.refused[kind]))
    path = keep(
        "mutations",
        {
            "files": options.files,
            "seed": options.seed,
            "seconds": round(seconds),
            "formats": {
                kind: {"decoded": report.decoded[kind], "refused": report.refused[kind]} for kind in kinds
            },
            "slowest": {"seconds": round(report.slowest[0], 2), "file": report.slowest[1]},
            "resident_mebibytes": {str(pid): sizes for pid, sizes in report.mebibytes.items()},
            "failures": report.failures,
        },
    )
    console = Console()
    console.print(table)
    console.print(f"slowest: {report.slowest[0]:.2f} s, {report.slowest[1]}")
    for failure in report.failures[:20]:
        console.print(failure, style="red", markup=False)
    console.print(
        f"{len(report.failures)} failures of {options.files} files in {seconds:.0f} s; report in {path}"
    )
    sys.exit(bool(report.failures))


if __name__ == "__main__":
    main()
