"""`mmd trace`: the timeline of a recent request."""

from __future__ import annotations

import json
import sys
from typing import Annotated

import typer
from rich.table import Table
from rich.text import Text

from mmd_cli.console import AdminUrlOption, NameOption, console, fail
from mmd_cli.errors import CommandError
from mmd_cli.local import state
from mmd_workers.observe.logs import printable


def trace(
    request: Annotated[
        str, typer.Argument(help="Request id: the response's `id` or its x-request-id header.")
    ],
    url: AdminUrlOption = None,
    name: NameOption = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, for scripts.")] = False,
) -> None:
    """Show the timeline of a recent request, phase by phase."""
    from mmd_cli import client as gateway_client

    try:
        timeline = gateway_client.timeline(url or state.find(name).admin_url, request)
    except CommandError as error:
        raise fail(error) from error
    if as_json:
        sys.stdout.write(json.dumps(timeline, indent=1) + "\n")
        return
    begin, width = float(timeline["arrived"]), 40
    span = max(float(timeline["finished"]) - begin, 1e-6)
    title = f"{timeline['request_id']}  {timeline['code']}  trace {timeline['trace_id']}"
    table = Table(title=title, title_justify="left")
    for heading in ("phase", "pod", "from ms", "ms", "when", "what"):
        table.add_column(heading, justify="right" if heading.endswith("ms") else "left")
    for phase in sorted(timeline["phases"], key=lambda item: item["start"]):
        left = min(width - 1, max(0, int(width * (phase["start"] - begin) / span)))
        length = max(1, min(width - left, round(width * (phase["end"] - phase["start"]) / span)))
        table.add_row(
            phase["name"].replace("_", " "),
            phase.get("pod", ""),
            f"{1000 * (phase['start'] - begin):.1f}",
            f"{1000 * (phase['end'] - phase['start']):.1f}",
            " " * left + "█" * length,
            Text(
                printable(
                    ", ".join(
                        f"{name} {value}" for name, value in phase["detail"].items() if name != "feature"
                    )
                )
            ),
        )
    console.print(table)
    for attempt in timeline["attempts"]:
        if attempt["lost"]:
            console.print(
                printable(
                    f"attempt {attempt['number']} on {attempt['prefill_pod']} was lost: {attempt['lost']}"
                ),
                highlight=False,
                markup=False,
            )
    if timeline["error"]:
        console.print(printable(timeline["error"]), highlight=False, markup=False, soft_wrap=True)
