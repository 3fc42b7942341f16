"""Printing, error reports and exit codes of every command, and the options that several commands share."""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import Coroutine, Mapping
from typing import Annotated, Any, NoReturn, TypeVar

import typer
from rich.console import Console
from rich.markup import escape

from mmd_api.contract.errors import MmdError
from mmd_api.faults import InvalidDeploymentError
from mmd_cli.errors import CommandError
from mmd_workers.observe.logs import printable

T = TypeVar("T")

console = Console(width=None if sys.stdout.isatty() else 160)
errors = Console(stderr=True)

NO_KEYS = "none needed, so anyone who can reach the gateway can use it (spec.gateway.auth is not set)"

UrlOption = Annotated[
    str | None,
    typer.Option(help="Address of the gateway. Defaults to the deployment running on this machine."),
]
AdminUrlOption = Annotated[
    str | None,
    typer.Option(help="URL of the gateway's admin port. Defaults to the deployment running on this machine."),
]
AdminUrlsOption = Annotated[
    list[str] | None,
    typer.Option(
        "--url",
        help="URL of a gateway's admin port, once for each gateway. Defaults to the deployment running on this machine.",
    ),
]
NameOption = Annotated[
    str | None, typer.Option(help="Name of the deployment, if several run on this machine.")
]


def fail(error: MmdError | CommandError) -> typer.Exit:
    """Print an error, with its code if the contract's table has it.

    Raise the result to exit with status 1.
    """
    message = escape(printable(error.message, keep="\n"))
    code = f" ({error.code})" if isinstance(error, MmdError) else ""
    errors.print(f"[red]error[/red]{code}: {message}", highlight=False, soft_wrap=True)
    return typer.Exit(1)


def run(work: Coroutine[Any, Any, T]) -> T:
    """Run a command's coroutine; an error is printed as one line, not as a traceback."""
    try:
        return asyncio.run(work)
    except (MmdError, CommandError) as error:
        raise fail(error) from error
    except InvalidDeploymentError as error:
        for fault in error.faults:
            errors.print(f"[red]error[/red] (invalid): {fault}", highlight=False, soft_wrap=True)
        raise typer.Exit(1) from error
    except asyncio.CancelledError as error:
        raise typer.Exit(128 + signal.SIGTERM) from error


def fail_with_faults(errors: Mapping[str, InvalidDeploymentError]) -> NoReturn:
    """Print each fault as `file: field.path: what is wrong; remedy` on standard error and exit with status 1."""
    for file, error in errors.items():
        for fault in error.faults:
            typer.echo(f"{file}: {fault}", err=True)
    raise typer.Exit(1)
