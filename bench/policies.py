"""GPU-hours at equal SLO attainment: our autoscaler compared with HPAs on CPU and GPU utilisation, KEDA on queue lengths and static splits, in the simulator.

    python -m bench.policies [--rate 5] [--seconds 2400] [--attainment 0.99] [--calibration FILE]

Every policy is tuned: of its own grid of targets, the cheapest setting that keeps the SLO for the wanted share of requests
counts, or the best one if none does. The traces, the calibration and the seed are the same for all. At the end a trace of a million
requests is run once under the autoscaler, for the simulator's own speed.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from bench import report
from mmd_api.contract.pools import POOL_NAMES
from mmd_api.resource import load
from mmd_api.spec.deployment import MultimodalDeploymentSpec
from mmd_operator.simulate.calibration import Calibration
from mmd_operator.simulate.runs import Planner, Run
from mmd_operator.simulate.traces import GENERATORS, Trace

SPEC = Path(__file__).parents[1] / "examples" / "gpu.yaml"
BOUNDS = {"min_replicas": 1, "max_replicas": 8}
GPU_BUDGET = 24
"""Room for every policy: none wins by the bounds that the example sets."""
CPU_TARGETS = (0.05, 0.1, 0.15, 0.2, 0.3, 0.5, 0.75)
"""Low ones too: a replica with a GPU keeps one of its four cores busy at most."""
GPU_TARGETS = (0.3, 0.45, 0.6, 0.75, 0.9)
QUEUE_SCALES = (0.125, 0.25, 0.5, 1.0, 2.0)
SEED = 7
MILLION = 1_000_000


def tuned(planner: Planner, goal: float) -> dict[str, tuple[Run, str]]:
    """The best run of each policy, with the setting that made it."""
    own, spec = planner.tuned(goal)
    scaling = spec.encoder.autoscaling if spec.encoder else None
    target = scaling.target_backlog_milliseconds if scaling else 0
    as_written = planner.autoscaler()
    static = planner.static_split(goal)
    return {
        "autoscaler": cheapest(
            [(as_written, "as in the file"), (own, f"{own.policy}, backlog {target} ms")], goal
        ),
        "cpu-hpa": cheapest([(planner.hpa("cpu", t), f"target {t:.0%}") for t in CPU_TARGETS], goal),
        "gpu-hpa": cheapest([(planner.hpa("gpu", t), f"target {t:.0%}") for t in GPU_TARGETS], goal),
        "queue-length": cheapest([(planner.queue_length(s), f"targets x {s}") for s in QUEUE_SCALES], goal),
        "static": (static, ", ".join(f"{pool} {size}" for pool, size in (static.sizes or {}).items())),
    }


def cheapest(runs: list[tuple[Run, str]], goal: float) -> tuple[Run, str]:
    good = [entry for entry in runs if entry[0].attainment >= goal]
    if good:
        return min(good, key=lambda entry: entry[0].cost_hours)
    return max(runs, key=lambda entry: entry[0].attainment)


def roomy() -> MultimodalDeploymentSpec:
    spec = load(SPEC).spec
    pools = {}
    for name in POOL_NAMES:
        part = getattr(spec, name)
        pools[name] = part.model_copy(update={"autoscaling": part.autoscaling.model_copy(update=BOUNDS)})
    return spec.model_copy(update={**pools, "gpu_budget": GPU_BUDGET})


def traces(rate: float, seconds: float) -> Iterator[Trace]:
    for make in GENERATORS.values():
        yield make(rate, seconds, SEED)


def speed(spec: MultimodalDeploymentSpec, calibration: Calibration) -> dict[str, float]:
    """A million requests at a rate that the largest pools can carry."""
    trace = GENERATORS["diurnal"](12.0, MILLION / 12.0, SEED)
    begun, cpu = time.perf_counter(), time.process_time()
    run = Planner(spec, trace, calibration).autoscaler()
    return {
        "requests": len(trace),
        "seconds": time.perf_counter() - begun,
        "cpu_seconds": time.process_time() - cpu,
        "attainment": run.attainment,
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rate", type=float, default=5.0, help="requests a second")
    parser.add_argument("--seconds", type=float, default=2400.0)
    parser.add_argument("--attainment", type=float, default=0.99)
    parser.add_argument("--calibration", type=Path, help="measured numbers; else the assumed ones")
    options = parser.parse_args()
    spec, calibration = roomy(), Calibration.load(options.calibration)
    table = Table(title=f"GPU-hours at {options.attainment:.1%} of requests in the SLO", title_justify="left")
    for column in ("trace", "policy", "in SLO", "GPU-hours", "TTFT p99", "lost", "setting"):
        table.add_column(column, justify="left" if column in ("trace", "policy", "setting") else "right")
    found: dict[str, dict[str, Any]] = {}
    for trace in traces(options.rate, options.seconds):
        best = tuned(Planner(spec, trace, calibration), options.attainment)
        found[trace.name] = {}
        for policy, (run, setting) in best.items():
            summary = run.summary()
            lost = sum(run.result.lost.values())
            p99 = summary["ttft_seconds"]["p99"]  # type: ignore[index]
            found[trace.name][policy] = {
                "setting": setting,
                "keeps_slo": run.attainment >= options.attainment,
                "attainment": run.attainment,
                "gpu_hours": run.cost_hours,
                "ttft_p99_seconds": p99,
                "requests": summary["requests"],
                "lost": lost,
            }
            share = (
                f"{run.attainment:.2%}"
                if run.attainment >= options.attainment
                else f"[red]{run.attainment:.2%}[/red]"
            )
            table.add_row(
                trace.name, policy, share, f"{run.cost_hours:.2f}", f"{p99:.2f} s", str(lost), setting
            )
    million = speed(spec, calibration)
    Console(width=150).print(table)
    print(
        f"{million['requests']:,} requests simulated in {million['seconds']:.1f} s ({million['cpu_seconds']:.1f} s of one core)"
    )
    path = report.keep(
        "policies",
        {
            "spec": f"{SPEC.name} with {BOUNDS} and {GPU_BUDGET} GPUs",
            "calibration": str(options.calibration or "assumed"),
            "goal": options.attainment,
            "rate": options.rate,
            "seconds": options.seconds,
            "seed": SEED,
            "traces": found,
            "million": million,
        },
    )
    print(path)


if __name__ == "__main__":
    main()
