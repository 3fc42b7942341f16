"""`mmd simulate`: shows what the autoscaler would do with a trace, before anybody pays for it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, NoReturn

import typer
import yaml

from mmd_api.faults import InvalidDeploymentError
from mmd_api.resource import load
from mmd_api.spec.deployment import MultimodalDeploymentSpec
from mmd_cli.console import fail_with_faults

GENERATED = ("bursty", "diurnal", "video-storm")
PICTURES = (".png", ".svg", ".pdf")


def simulate(
    file: Annotated[str, typer.Option("-f", "--file", help="Deployment file, or -.")],
    trace: Annotated[
        Path | None,
        typer.Option(help="Trace file: Azure or BurstGPT (.csv), Mooncake or Qwen-Bailian (.jsonl)."),
    ] = None,
    generate: Annotated[
        str | None, typer.Option(help=f"Instead of a trace, one of: {', '.join(GENERATED)}.")
    ] = None,
    rate: Annotated[float, typer.Option(help="Requests per second to generate.", min=0.001)] = 5.0,
    seconds: Annotated[float, typer.Option(help="Seconds of load to generate.", min=1.0)] = 1800.0,
    seed: Annotated[int, typer.Option(help="Seed of the generator.", min=0)] = 0,
    calibration: Annotated[
        Path | None, typer.Option(help="Measured calibration (YAML). Defaults to assumed values.")
    ] = None,
    calibrate: Annotated[
        str | None,
        typer.Option(
            help="URL of a gateway that has served requests, to calibrate from; --calibration fills the gaps."
        ),
    ] = None,
    save_calibration: Annotated[
        Path | None, typer.Option(help="File to write the calibration to (YAML), for use with --calibration.")
    ] = None,
    compare: Annotated[
        bool, typer.Option(help="Also simulate HPAs on CPU and GPU, KEDA on queues, and a static split.")
    ] = False,
    recommend: Annotated[
        bool, typer.Option(help="Recommend a static split and an autoscaling policy for the SLO.")
    ] = False,
    attainment_percent: Annotated[
        float,
        typer.Option(help="Share of requests that must meet the SLO, for --recommend.", min=1, max=100),
    ] = 99.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
    plot: Annotated[Path | None, typer.Option(help="File to write a plot to (.png, .svg, .pdf).")] = None,
) -> None:
    """Run the autoscaler and the router against a trace in a model of the pipeline: SLO attainment, GPU-hours, replicas, losses."""
    try:
        import numpy  # noqa: F401 - checked before anything is read

        if plot is not None:
            import matplotlib  # noqa: F401
    except ImportError as error:
        _fail(f"{error}; install it with: pip install 'multimodal-operator[simulate]'")
    from mmd_cli.simulated_router import SimulatedRouter
    from mmd_operator.simulate.calibration import Calibration
    from mmd_operator.simulate.measured import NotMeasuredError, calibrated, look
    from mmd_operator.simulate.report import plot as draw
    from mmd_operator.simulate.report import table
    from mmd_operator.simulate.runs import Planner
    from mmd_operator.simulate.traces import GENERATORS, TraceError, load_trace

    if (trace is None) == (generate is None):
        _fail("set either --trace or --generate")
    if generate is not None and generate not in GENERATORS:
        _fail(f"--generate {generate}: not one of {', '.join(GENERATORS)}")
    if plot is not None and plot.suffix.lower() not in PICTURES:
        _fail(f"--plot {plot}: unsupported extension; use one of {', '.join(PICTURES)}")
    try:
        spec = load(file).spec
    except InvalidDeploymentError as error:
        fail_with_faults({file: error})
    try:
        numbers = Calibration.load(calibration)
        if calibrate is not None:
            numbers = calibrated(look(calibrate), spec, numbers)
        if save_calibration is not None:
            save_calibration.write_text(numbers.to_yaml(), encoding="utf-8")
    except InvalidDeploymentError as error:
        fail_with_faults({str(calibration): error})
    except (NotMeasuredError, OSError) as error:
        _fail(str(error))
    try:
        requests = load_trace(trace) if trace else GENERATORS[generate or ""](rate, seconds, seed)
    except TraceError as error:
        _fail(str(error))
    try:
        planner = Planner(spec, requests, numbers, placing=SimulatedRouter)
        runs = list(planner.compared()) if compare else [planner.autoscaler()]
        tuned: MultimodalDeploymentSpec | None = None
        if recommend:
            runs.append(planner.static_split(attainment_percent / 100))
            best, tuned = planner.tuned(attainment_percent / 100)
            runs.append(best)
    except InvalidDeploymentError as error:
        fail_with_faults({file: error})
    if plot is not None:
        draw(plot, requests, runs[0])
    if as_json:
        result: dict[str, object] = {"trace": requests.name, "runs": [run.summary() for run in runs]}
        if tuned is not None:
            result["recommended"] = {
                "static": dict(runs[-2].sizes or {}),
                "autoscaling": _autoscaling(tuned),
                "cheaper": min(runs[-2:], key=lambda run: run.cost_hours).policy,
            }
        typer.echo(json.dumps(result))
        return
    _print(table(requests, runs))
    if calibration is None and calibrate is None:
        typer.echo(
            "The workers' performance is assumed; calibrate from a running gateway with --calibrate URL."
        )
    if runs[0].bottleneck_share:
        shares = ", ".join(f"{pool} {share:.0%}" for pool, share in runs[0].bottleneck_share.items())
        typer.echo(f"Bottleneck, by share of time: {shares}")
    if tuned is not None:
        split, policy = runs[-2:]
        sizes = ", ".join(f"{pool} {size}" for pool, size in (split.sizes or {}).items())
        typer.echo(
            f"Static split: {sizes} keeps {split.attainment:.2%} in the SLO for {split.cost_hours:.2f} hours."
        )
        typer.echo(
            f"Autoscaling keeps {policy.attainment:.2%} for {policy.cost_hours:.2f} hours with:\n"
            + yaml.safe_dump(_autoscaling(tuned), sort_keys=False).rstrip()
        )


def _autoscaling(spec: MultimodalDeploymentSpec) -> dict[str, object]:
    """The autoscaling sections of a spec, as a file has them."""
    dumped = spec.model_dump(mode="json", by_alias=True, exclude_unset=True)
    return {
        pool: part["autoscaling"]
        for pool, part in dumped.items()
        if isinstance(part, dict) and "autoscaling" in part
    }


def _print(table: object) -> None:
    from rich.console import Console

    console = Console()
    if not console.is_terminal:
        console.width = 140
    console.print(table)


def _fail(message: str) -> NoReturn:
    typer.echo(f"mmd simulate: {message}", err=True)
    raise typer.Exit(1)
