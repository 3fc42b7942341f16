"""`mmd report`: shows how well a deployment met its SLO, as one HTML page."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Annotated

import typer

from mmd_cli import gateways, slo_report
from mmd_cli.console import AdminUrlsOption, NameOption, console, fail
from mmd_cli.errors import CommandError
from mmd_cli.local import state
from mmd_cli.pictures import Prometheus, TimeWindow


def report(
    urls: AdminUrlsOption = None,
    name: NameOption = None,
    prometheus: Annotated[
        str | None,
        typer.Option(help="URL of a Prometheus server. Without it, the gateways' recent requests are used."),
    ] = None,
    namespace: Annotated[
        str, typer.Option(help="Namespace of the deployment, with --prometheus.")
    ] = "default",
    deployment: Annotated[str | None, typer.Option(help="Name of the deployment, with --prometheus.")] = None,
    hours: Annotated[float, typer.Option(min=0.01, help="Length of the period, with --prometheus.")] = 1.0,
    output: Annotated[Path, typer.Option("--output", "-o", help="File to write the page to.")] = Path(
        "mmd-report.html"
    ),
    as_json: Annotated[
        bool, typer.Option("--json", help="Also print the figures as JSON, for scripts.")
    ] = False,
) -> None:
    """Write one HTML page: SLO attainment, bottlenecks over time, pool sizes and cost."""
    try:
        if prometheus is not None:
            chosen = deployment or state.find(name).name
            now = time.time()
            window = TimeWindow(namespace, chosen, now - 3600 * hours, now)
            local = deployment is None
            page = slo_report.from_prometheus(
                Prometheus(prometheus), window, state.decisions_of(None, name) if local else {}
            )
        else:
            title, admin_urls = state.watched(urls, name)
            snapshot = gateways.look(admin_urls, requests=True)
            page = slo_report.from_gateways(title, snapshot, state.decisions_of(urls, name))
    except CommandError as error:
        raise fail(error) from error
    output.write_text(page.html())
    if as_json:
        sys.stdout.write(json.dumps({"figures": page.figures, "notes": page.notes}, indent=1) + "\n")
        return
    for title, value in page.figures.items():
        console.print(f"{title}: [bold]{value}[/bold]", highlight=False)
    for note in page.notes:
        console.print(note, highlight=False, soft_wrap=True)
    console.print(f"report: {output.resolve()}", highlight=False, soft_wrap=True)
