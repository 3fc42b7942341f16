"""`mmd top`: shows pools, queues, KV and decisions of a running deployment, live."""

from __future__ import annotations

import json
import sys
import time
from typing import Annotated

import typer
from rich.live import Live

from mmd_cli import gateways
from mmd_cli import top as view
from mmd_cli.console import AdminUrlsOption, NameOption, console, fail
from mmd_cli.errors import CommandError
from mmd_cli.local import state


def top(
    urls: AdminUrlsOption = None,
    name: NameOption = None,
    seconds: Annotated[float, typer.Option(min=0.2, max=60, help="Seconds between two refreshes.")] = 1.0,
    once: Annotated[bool, typer.Option(help="Print one sample and exit.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one sample as JSON, for scripts.")] = False,
) -> None:
    """Show pools, queues, KV and decisions, live, until Ctrl-C."""
    try:
        title, admin_urls = state.watched(urls, name)
        before = gateways.look(admin_urls)
        time.sleep(seconds)
        now = gateways.look(admin_urls)
        facts = view.facts(now, before, state.decisions_of(urls, name))
        if as_json:
            sys.stdout.write(json.dumps(facts, indent=1) + "\n")
        elif once or not console.is_terminal:
            console.print(view.rendered(title, facts))
        else:
            with Live(view.rendered(title, facts), console=console, screen=True, auto_refresh=False) as live:
                while True:
                    time.sleep(seconds)
                    before, now = now, gateways.look(admin_urls)
                    live.update(
                        view.rendered(title, view.facts(now, before, state.decisions_of(urls, name))),
                        refresh=True,
                    )
    except CommandError as error:
        raise fail(error) from error
    except KeyboardInterrupt:
        return
