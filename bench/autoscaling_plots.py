"""The pictures of docs/measurements/autoscaling.md: one rule each, from the very code that `mmd simulate --plot` runs.

python -m bench.autoscaling_plots [--folder docs/images]
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import yaml

from mmd_api.resource import MultimodalDeployment
from mmd_operator.simulate.calibration import Calibration
from mmd_operator.simulate.report import plot
from mmd_operator.simulate.runs import Planner
from mmd_operator.simulate.traces import GENERATORS

ROOT = Path(__file__).parents[1]
NO_WINDOW = {"scaleDownStabilizationSeconds": 0, "scaleDownCooldownSeconds": 0, "maxScaleDownPercent": 100}
PICTURES: dict[str, tuple[str, float, dict[str, Any]]] = {
    "autoscaling-storm": ("video-storm", 2.0, {}),
    "autoscaling-no-window": (
        "bursty",
        2.0,
        {"encoder": NO_WINDOW, "prefill": NO_WINDOW, "decode": NO_WINDOW},
    ),
    "autoscaling-window": ("bursty", 2.0, {}),
    "autoscaling-zero": (
        "video-storm",
        0.02,
        {"encoder": {"minReplicas": 0, "scaleToZeroAfterSeconds": 120}},
    ),
    "autoscaling-budget": ("video-storm", 2.0, {"gpuBudget": 6}),
}
"""Trace, requests a second, and what differs from examples/gpu.yaml."""
SECONDS = 1800.0
SEED = 7


def changed(changes: dict[str, Any]) -> MultimodalDeployment:
    body = yaml.safe_load((ROOT / "examples" / "gpu.yaml").read_text())
    for key, value in changes.items():
        if isinstance(value, dict):
            body["spec"][key]["autoscaling"].update(value)
        else:
            body["spec"][key] = value
    return MultimodalDeployment.parse(body)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--folder", type=Path, default=ROOT / "docs" / "images")
    folder = parser.parse_args().folder
    for name, (generator, rate, changes) in PICTURES.items():
        trace = GENERATORS[generator](rate, SECONDS, SEED)
        run = Planner(changed(changes).spec, trace, Calibration.load(None)).autoscaler()
        path = folder / f"{name}.png"
        plot(path, trace, run)
        hours, most = run.cost_hours, {p: int(n.max()) for p, n in run.result.replicas.items()}
        print(
            f"{path}: {run.attainment:.2%} in SLO, {hours:.2f} GPU-hours, {len(run.changes)} changes, most {most}"
        )


if __name__ == "__main__":
    main()
