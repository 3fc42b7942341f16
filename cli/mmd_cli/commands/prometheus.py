"""`mmd prometheus`: a Prometheus configuration for the deployment running on this machine."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from mmd_cli.console import AdminUrlOption, NameOption, fail
from mmd_cli.errors import CommandError
from mmd_cli.local import state
from mmd_cli.prometheus import configuration


def prometheus(
    url: AdminUrlOption = None,
    name: NameOption = None,
    rules: Annotated[
        Path | None,
        typer.Option(exists=True, help="Alert rules: charts/multimodal-operator/alerts/rules.yaml."),
    ] = None,
    seconds: Annotated[int, typer.Option(min=1, max=60, help="Scrape interval in seconds.")] = 5,
) -> None:
    """Print a Prometheus configuration that finds every pod of the deployment running on this machine."""
    try:
        gateway = url or state.find(name).admin_url
    except CommandError as error:
        raise fail(error) from error
    sys.stdout.write(configuration(gateway, rules, seconds))
