"""What the planner predicts beside what really happens: TTFT of the same requests in the model and on a running deployment.

    python -m bench.predictions [--rate 8] [--seconds 60]

The numbers of the model come from one load, as `mmd simulate --calibrate URL` takes them from a gateway. Predicted are that load, the same
kind of load with other requests (another seed), one of half the rate and one of one and a half times the rate. All loads run in turns of
some seconds, again and again: so whatever else this machine does falls on all of them alike.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import logging
import os
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import yaml
from rich.console import Console
from rich.table import Table

from bench.openloop import Ask, Kind, drive, mixed
from bench.report import keep
from mmd_api.spec.deployment import MultimodalDeploymentSpec
from mmd_cli.local import up
from mmd_operator.simulate.calibration import Calibration
from mmd_operator.simulate.measured import Seen, calibrated, seen
from mmd_operator.simulate.model import Pipeline
from mmd_operator.simulate.policies import Static

SHARES: dict[Kind, float] = {"text": 0.5, "image": 0.3, "video": 0.1, "audio": 0.1}
LOADS = {"calibration": 1.0, "other requests": 1.0, "lighter": 0.5, "heavier": 1.5}
POINTS = (50, 90, 99)
SLICE_SECONDS = 10.0
GOAL_PERCENT = 20.0
KV = {"kvCacheMebibytes": 64}
RESOURCE = {
    "apiVersion": "serving.multimodal.dev/v1alpha1",
    "kind": "MultimodalDeployment",
    "metadata": {"name": "bench"},
    "spec": {
        "model": {"id": "builtin/demo", "dtype": "Float32"},
        "encoder": {"replicas": 1, "gpus": 0, "cacheMebibytes": 64},
        "prefill": {"replicas": 1, "gpus": 0, **KV},
        "decode": {"replicas": 1, "gpus": 0, "maxSequences": 32, **KV},
        "transfer": {"kv": {"backend": "Gloo"}},
    },
}
console = Console()


def slices(rate: float, seconds: float, seed: int) -> list[list[Ask]]:
    """A load in stretches of `SLICE_SECONDS`, each with requests of its own."""
    count = max(1, round(seconds / SLICE_SECONDS))
    return [mixed(rate, SLICE_SECONDS, 100 * seed + number, SHARES) for number in range(count)]


async def timelines(
    local: up.LocalDeployment, asks: list[Ask]
) -> tuple[list[dict[str, Any]], dict[str, Any], int]:
    """Run one stretch. Returns what the gateway remembers of it, how its workers are, and how many requests failed."""
    answered = await drive(local.gateway_url, asks)
    found = []
    async with httpx.AsyncClient(base_url=local.admin_url) as client:
        for one in answered:
            reply = await client.get(f"/debug/requests/{one.request_id}")
            found.append(reply.raise_for_status().json())
        state = (await client.get("/debug/state")).raise_for_status().json()
    return found, state, sum(one.ttft_seconds is None for one in answered)


async def measure(
    rate: float, seconds: float, seed: int
) -> tuple[MultimodalDeploymentSpec, dict[str, Seen], dict[str, Any]]:
    """All loads in turns on one deployment."""
    prepared = {name: slices(rate * part, seconds, seed + n) for n, (name, part) in enumerate(LOADS.items())}
    warm = mixed(rate, 5.0, 9_999, SHARES)
    kept: dict[str, list[dict[str, Any]]] = defaultdict(list)
    states: dict[str, Any] = {}
    failed = 0
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "bench.yaml"
        file.write_text(yaml.safe_dump(RESOURCE))
        deployment = up.load(file)
        async with up.running(deployment, log_line=lambda *_: None) as local:
            await drive(local.gateway_url, warm)
            begun, idle = time.monotonic(), _idle_seconds()
            for turn in itertools.zip_longest(*prepared.values(), fillvalue=None):
                for name, asks in zip(prepared, turn, strict=True):
                    if asks is None:
                        continue
                    found, state, lost = await timelines(local, asks)
                    kept[name] += found
                    failed += lost
                    states[name] = state
            took = time.monotonic() - begun
            machine = {
                "seconds": took,
                "cores_idle": (_idle_seconds() - idle) / took,
                "cores": os.cpu_count(),
            }
            machine["failed_requests"] = failed
    return deployment.spec, {name: seen(kept[name], states[name]) for name in prepared}, machine


def _idle_seconds() -> float:
    """Of all cores together, since the machine started."""
    fields = Path("/proc/stat").read_text().split("\n", 1)[0].split()
    return (int(fields[4]) + int(fields[5])) / os.sysconf("SC_CLK_TCK")


def compare(spec: MultimodalDeploymentSpec, found: Seen, numbers: Calibration) -> dict[str, Any]:
    """Measured and predicted percentiles of TTFT in seconds, and the error in percent; of all requests and of each kind."""
    sizes = {"encoder": 1, "prefill": 1, "decode": 1}
    modelled = Pipeline(spec, found.trace, numbers, Static(), start_sizes=sizes).run().ttft_seconds  # type: ignore[arg-type]
    took = np.array([r.ttft_seconds for r in found.requests])
    kinds = {"all": np.ones(len(took), dtype=bool), **found.trace.kinds()}
    rows: dict[str, Any] = {}
    for kind, mine in kinds.items():
        measured, predicted = (np.percentile(values[mine], POINTS) for values in (took, modelled))
        rows[kind] = {
            "requests": int(mine.sum()),
            "measured_seconds": dict(zip(map(_name, POINTS), measured.tolist(), strict=True)),
            "predicted_seconds": dict(zip(map(_name, POINTS), predicted.tolist(), strict=True)),
            "error_percent": dict(
                zip(map(_name, POINTS), (100 * (predicted / measured - 1)).tolist(), strict=True)
            ),
        }
    return rows


def _name(point: int) -> str:
    return f"p{point}"


def table(loads: dict[str, Any]) -> Table:
    """The report for a reader."""
    made = Table(title="TTFT in ms: measured, predicted, error", title_justify="left")
    for heading in ("load", "requests of", "count", *map(_name, POINTS)):
        made.add_column(heading, justify="left" if heading in ("load", "requests of") else "right")
    for load, kinds in loads.items():
        for kind, row in kinds.items():
            cells = (
                f"{1000 * row['measured_seconds'][p]:.0f} {1000 * row['predicted_seconds'][p]:.0f} {row['error_percent'][p]:+.0f} %"
                for p in map(_name, POINTS)
            )
            made.add_row(load if kind == "all" else "", kind, str(row["requests"]), *cells)
    return made


def main() -> None:
    """Measure, predict, print, keep."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rate", type=float, default=8.0, help="requests a second of the calibration load")
    parser.add_argument("--seconds", type=float, default=60.0, help="of each load")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--name", default="predictions")
    options = parser.parse_args()
    logging.disable(logging.WARNING)
    spec, found, machine = asyncio.run(measure(options.rate, options.seconds, options.seed))
    numbers = calibrated(found["calibration"], spec, Calibration.load(None))
    loads = {name: compare(spec, load, numbers) for name, load in found.items()}
    console.print(table(loads))
    console.print(f"cores that nothing used meanwhile: {machine['cores_idle']:.2f} of {machine['cores']}")
    body = {
        "options": vars(options),
        "goal": {"error_percent_below": GOAL_PERCENT, "load": "calibration"},
        "meanwhile": machine,
        "calibration": numbers.model_dump(mode="json", by_alias=True),
        "loads": loads,
    }
    console.print(f"report: {keep(options.name, body)}", highlight=False)


if __name__ == "__main__":
    main()
