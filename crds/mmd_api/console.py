"""How every command tells a user what is wrong with a file."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NoReturn

import typer

from mmd_api.faults import InvalidDeploymentError


def fail_with_faults(errors: Mapping[str, InvalidDeploymentError]) -> NoReturn:
    """Print each fault as `file: field.path: what is wrong; remedy` on standard error and exit with status 1."""
    for file, error in errors.items():
        for fault in error.faults:
            typer.echo(f"{file}: {fault}", err=True)
    raise typer.Exit(1)
