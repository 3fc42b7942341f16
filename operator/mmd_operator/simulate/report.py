"""Runs as a table for people, as JSON for programs and as a plot."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
from rich.table import Table

from mmd_api.contract.pools import PoolName
from mmd_operator.simulate.runs import Run
from mmd_operator.simulate.traces import Trace

_COLOURS: dict[PoolName, str] = {"encoder": "#c1440e", "prefill": "#2a6f97", "decode": "#4c956c"}
_POINTS = 240


def table(trace: Trace, runs: Sequence[Run]) -> Table:
    """Table with one line per run."""
    rows = Table(title=f"{trace.name}: {len(trace):,} requests in {trace.seconds:,.0f} s")
    for column in (
        "policy",
        "in SLO",
        "lost",
        "GPU-hours",
        "TTFT p50",
        "p95",
        "p99",
        "ITL p95",
        "replicas, mean / most",
    ):
        rows.add_column(column, justify="left" if column == "policy" else "right")
    for run in runs:
        ttft, itl = run.result.ttft_seconds, run.result.itl_seconds
        sizes = ", ".join(
            f"{pool[0].upper()} {_mean(n):.1f} / {n.max(initial=0)}"
            for pool, n in run.result.replicas.items()
        )
        rows.add_row(
            run.policy,
            f"{run.attainment:.2%}",
            str(sum(run.result.lost.values())),
            f"{run.result.gpu_seconds / 3600:.2f}",
            *(_seconds(ttft, point) for point in (50, 95, 99)),
            _seconds(itl, 95),
            sizes,
        )
    return rows


def _mean(values: npt.NDArray[np.int64]) -> float:
    return float(values.mean()) if len(values) else 0.0


def _seconds(values: npt.NDArray[np.float64], point: int) -> str:
    valid = values[~np.isnan(values)]
    if not len(valid):
        return "-"
    seconds = float(np.percentile(valid, point))
    return f"{seconds:.2f} s" if seconds >= 1 else f"{seconds * 1000:.1f} ms"


def plot(path: Path, trace: Trace, run: Run) -> None:
    """Plot arrivals, replicas (ready ones filled) and TTFT over time, in the picture format of the path's suffix."""
    from matplotlib.figure import Figure

    result = run.result
    end = max(result.end_seconds, 1.0)
    edges = np.linspace(0, end, _POINTS + 1)
    minutes, width = edges[:-1] / 60, end / _POINTS
    figure = Figure(figsize=(9, 7), layout="constrained")
    arrivals, replicas, ttft = figure.subplots(3, 1, sharex=True)

    with_media = sum(trace.media.values()) > 0
    arrivals.fill_between(
        minutes, np.histogram(trace.arrivals, edges)[0] / width, step="post", color="#cccccc", label="all"
    )
    arrivals.fill_between(
        minutes,
        np.histogram(trace.arrivals[with_media], edges)[0] / width,
        step="post",
        color=_COLOURS["encoder"],
        alpha=0.6,
        label="with media",
    )
    arrivals.set_ylabel("requests / s")
    arrivals.legend(loc="upper right")

    for pool, sizes in result.replicas.items():
        replicas.step(result.ticks / 60, sizes, where="post", color=_COLOURS[pool], label=pool)
        replicas.fill_between(
            result.ticks / 60, result.ready[pool], step="post", color=_COLOURS[pool], alpha=0.12
        )
    replicas.set_ylabel("replicas (ready: shaded)")
    replicas.set_ylim(bottom=0)
    replicas.legend(loc="upper right")

    bins = np.clip(np.digitize(trace.arrivals, edges) - 1, 0, _POINTS - 1)
    for point, style in ((50, ":"), (95, "-")):
        line = [_percentile(result.ttft_seconds[bins == n], point) for n in range(_POINTS)]
        ttft.plot(minutes, line, style, color="#333333", label=f"p{point}")
    if run.ttft_slo_seconds is not None:
        ttft.axhline(run.ttft_slo_seconds, color="#d00000", linewidth=0.8, label="SLO")
    ttft.set_ylabel("TTFT of arrivals, s")
    ttft.set_yscale("log")
    ttft.set_xlabel("minutes")
    ttft.legend(loc="upper right")
    figure.suptitle(
        f"{trace.name} under {run.policy}: {run.attainment:.1%} in SLO, {run.cost_hours:.2f} GPU-hours"
        if result.gpu_seconds
        else f"{trace.name} under {run.policy}: {run.attainment:.1%} in SLO, {run.cost_hours:.2f} replica-hours"
    )
    figure.savefig(path, dpi=80)


def _percentile(values: npt.NDArray[np.float64], point: int) -> float:
    valid = values[~np.isnan(values)]
    return float(np.percentile(valid, point)) if len(valid) else float("nan")
