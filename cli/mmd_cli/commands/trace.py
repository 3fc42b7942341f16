"""`mmd trace`: shows the timeline of a recent request."""

from __future__ import annotations

import json
import sys
from typing import Annotated, Any

import typer
from rich.table import Table
from rich.text import Text

from mmd_cli.console import AdminUrlsOption, NameOption, console, fail
from mmd_cli.errors import CommandError
from mmd_cli.local import state
from mmd_workers.observe.logs import printable


def trace(
    request: Annotated[
        str, typer.Argument(help="Request id: the response's `id` or its x-request-id header.")
    ],
    urls: AdminUrlsOption = None,
    name: NameOption = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, for scripts.")] = False,
) -> None:
    """Show the timeline of a recent request, phase by phase."""
    from mmd_cli import client as gateway_client

    try:
        _, admin_urls = state.watched(urls, name)
        timeline = gateway_client.timeline(admin_urls, request)
    except CommandError as error:
        raise fail(error) from error
    if as_json:
        sys.stdout.write(json.dumps(timeline, indent=1) + "\n")
        return
    begin, width = float(timeline["arrived"]), 40
    last = max([timeline["last_token"], *(phase["end"] for phase in timeline["phases"])])
    span = max(float(timeline["finished"] or last) - begin, 1e-6)
    now_in = timeline.get("phase")  # older gateways do not report it
    where = f"in {now_in.replace('_', ' ')}" if now_in else timeline["code"]
    title = f"{timeline['request_id']}  {where}  trace {timeline['trace_id']}"
    table = Table(title=title, title_justify="left")
    for heading in ("phase", "pod", "from ms", "ms", "when", "what"):
        table.add_column(heading, justify="right" if heading.endswith("ms") else "left")
    for phase in sorted(timeline["phases"], key=lambda item: item["start"]):
        indent = min(width - 1, max(0, int(width * (phase["start"] - begin) / span)))
        length = max(1, min(width - indent, round(width * (phase["end"] - phase["start"]) / span)))
        table.add_row(
            phase["name"].replace("_", " "),
            phase.get("pod", ""),
            f"{1000 * (phase['start'] - begin):.1f}",
            f"{1000 * (phase['end'] - phase['start']):.1f}",
            " " * indent + "█" * length,
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
        if attempt.get("ttft_seconds"):
            console.print(printable(_estimate(attempt)), highlight=False, markup=False, soft_wrap=True)
        if attempt["lost"]:
            console.print(
                printable(
                    f"attempt {attempt['number']} on {attempt['prefill_pod']} was lost: {attempt['lost']}"
                ),
                highlight=False,
                markup=False,
            )
    if timeline.get("degraded_by"):  # older gateways do not report it
        console.print(f"the model got less of the media because of: {', '.join(timeline['degraded_by'])}")
    if timeline["error"]:
        console.print(printable(timeline["error"]), highlight=False, markup=False, soft_wrap=True)


def _estimate(attempt: dict[str, Any]) -> str:
    """The router's estimate for an attempt, and the time it took."""
    seconds = dict(attempt["estimated"])
    ttft = seconds.pop("ttft")
    terms = ", ".join(f"{term} {1000 * value:.1f}" for term, value in seconds.items())
    return (
        f"attempt {attempt['number']} on {attempt['prefill_pod']}: first token after {1000 * attempt['ttft_seconds']:.1f} ms, "
        f"estimated {1000 * ttft:.1f} ms ({terms})"
    )
