"""`mmd top`: pools, queues, KV and decisions of a running deployment, live."""

from __future__ import annotations

import json
import sys
import time
from typing import Annotated

import typer
from rich.live import Live

from mmd_cli import top as view
from mmd_cli.console import AdminUrlOption, NameOption, console, fail
from mmd_cli.errors import CommandError
from mmd_cli.local import state


def top(
    url: AdminUrlOption = None,
    name: NameOption = None,
    seconds: Annotated[float, typer.Option(min=0.2, max=60, help="Seconds between two refreshes.")] = 1.0,
    once: Annotated[bool, typer.Option(help="Print one sample and exit.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one sample as JSON, for scripts.")] = False,
) -> None:
    """Show pools, queues, KV and decisions, live, until Ctrl-C."""
    try:
        gateway = url or state.find(name).admin_url
        before = view.look(gateway)
        title = name or gateway
        time.sleep(seconds)
        now = view.look(gateway)
        seen = view.facts(now, before, state.decisions_of(url, name))
        if as_json:
            sys.stdout.write(json.dumps(seen, indent=1) + "\n")
        elif once or not console.is_terminal:
            console.print(view.rendered(title, seen))
        else:
            with Live(view.rendered(title, seen), console=console, screen=True, auto_refresh=False) as live:
                while True:
                    time.sleep(seconds)
                    before, now = now, view.look(gateway)
                    live.update(
                        view.rendered(title, view.facts(now, before, state.decisions_of(url, name))),
                        refresh=True,
                    )
    except CommandError as error:
        raise fail(error) from error
    except KeyboardInterrupt:
        return
