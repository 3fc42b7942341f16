"""The commands that look at a running deployment: top, report, prometheus. None of them changes anything."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Annotated, Any

import httpx
import typer
from rich.console import Console
from rich.live import Live

from mmd_workers.errors import MmdError
from mmd_workers.local import slo_report, state, top
from mmd_workers.local.pictures import Prometheus, Window
from mmd_workers.local.prometheus import configuration

console = Console(width=None if sys.stdout.isatty() else 160)
errors = Console(stderr=True)

UrlOption = Annotated[
    str | None, typer.Option(help="The gateway's address; default: the deployment that runs here.")
]
NameOption = Annotated[str | None, typer.Option(help="Which of several deployments that run here.")]


def register(app: typer.Typer) -> None:
    """Add this file's commands to the root command."""
    app.command(name="top")(top_command)
    app.command(name="report")(report)
    app.command(name="prometheus")(prometheus)


def _fail(error: MmdError) -> typer.Exit:
    errors.print(f"[red]error[/red] ({error.code}): {error.message}", highlight=False, soft_wrap=True)
    return typer.Exit(1)


def _decisions(url: str | None, name: str | None) -> dict[str, str]:
    """The local autoscaler's last decisions; a gateway elsewhere has none to tell."""
    return dict(state.find(name).decisions) if url is None else {}


def top_command(
    url: UrlOption = None,
    name: NameOption = None,
    seconds: Annotated[float, typer.Option(min=0.2, max=60, help="Between two looks.")] = 1.0,
    once: Annotated[bool, typer.Option(help="Look twice, show it, and end.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="One look for programs.")] = False,
) -> None:
    """Show pools, queues, KV and decisions, live, until Ctrl-C."""
    try:
        gateway = url or state.find(name).gateway_url
        before = top.look(gateway)
        title = name or gateway
        time.sleep(seconds)
        now = top.look(gateway)
        seen = top.facts(now, before, _decisions(url, name))
        if as_json:
            sys.stdout.write(json.dumps(seen, indent=1) + "\n")
        elif once or not console.is_terminal:
            console.print(top.shown(title, seen))
        else:
            with Live(top.shown(title, seen), console=console, screen=True, auto_refresh=False) as live:
                while True:
                    time.sleep(seconds)
                    before, now = now, top.look(gateway)
                    live.update(top.shown(title, top.facts(now, before, _decisions(url, name))), refresh=True)
    except MmdError as error:
        raise _fail(error) from error
    except KeyboardInterrupt:
        return


def report(
    url: UrlOption = None,
    name: NameOption = None,
    prometheus: Annotated[
        str | None, typer.Option(help="A Prometheus server; without one, what the gateway remembers is used.")
    ] = None,
    namespace: Annotated[
        str, typer.Option(help="With --prometheus: the deployment's namespace.")
    ] = "default",
    deployment: Annotated[str | None, typer.Option(help="With --prometheus: the deployment's name.")] = None,
    hours: Annotated[float, typer.Option(min=0.01, help="With --prometheus: how far back.")] = 1.0,
    output: Annotated[Path, typer.Option("--output", "-o", help="Where the page goes.")] = Path(
        "mmd-report.html"
    ),
    as_json: Annotated[bool, typer.Option("--json", help="Print the figures for programs, too.")] = False,
) -> None:
    """Write one HTML page: promises kept, bottlenecks over time, sizes and cost."""
    try:
        if prometheus is not None:
            chosen = deployment or state.find(name).name
            now = time.time()
            window = Window(namespace, chosen, now - 3600 * hours, now)
            local = deployment is None
            made = slo_report.from_prometheus(
                Prometheus(prometheus), window, _decisions(None, name) if local else {}
            )
        else:
            gateway = url or state.find(name).gateway_url
            made = slo_report.from_requests(
                name or gateway, _remembered(gateway), _promised_ttft(gateway), _decisions(url, name)
            )
    except MmdError as error:
        raise _fail(error) from error
    output.write_text(made.html())
    if as_json:
        sys.stdout.write(json.dumps({"figures": made.figures, "notes": made.notes}, indent=1) + "\n")
        return
    for title, value in made.figures.items():
        console.print(f"{title}: [bold]{value}[/bold]", highlight=False)
    for note in made.notes:
        console.print(note, highlight=False, soft_wrap=True)
    console.print(f"report: {output.resolve()}", highlight=False, soft_wrap=True)


def _remembered(gateway: str) -> list[dict[str, Any]]:
    try:
        answer = httpx.get(
            f"{gateway}/debug/requests", params={"limit": 512}, timeout=10.0
        ).raise_for_status()
    except httpx.HTTPError as error:
        raise top.UnreachableError(f"no gateway answers at {gateway} ({error}): is it running?") from error
    requests: list[dict[str, Any]] = answer.json()["requests"]
    return requests


def _promised_ttft(gateway: str) -> float | None:
    return top.look(gateway).total("mmd_slo_target_seconds", signal="ttft") or None


def prometheus(
    url: UrlOption = None,
    name: NameOption = None,
    rules: Annotated[
        Path | None,
        typer.Option(exists=True, help="charts/multimodal-operator/alerts/rules.yaml, for alerts."),
    ] = None,
    seconds: Annotated[int, typer.Option(min=1, max=60, help="Between two scrapes.")] = 5,
) -> None:
    """Print a Prometheus configuration that finds every pod of the deployment that runs here."""
    try:
        gateway = url or state.find(name).gateway_url
    except MmdError as error:
        raise _fail(error) from error
    sys.stdout.write(configuration(gateway, rules, seconds))
