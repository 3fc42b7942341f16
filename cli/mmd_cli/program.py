"""The root of the `mmd` program: it finds commands by their entry points and knows none of them.

Pods start through it too (`mmd worker`, `mmd gateway`, `mmd operator`), so it imports only the command that was asked for.
"""

from __future__ import annotations

import os
import sys
from collections import defaultdict
from dataclasses import dataclass, field
from importlib.metadata import entry_points

import typer
from typer.core import TyperGroup

LOOPBACK = ("localhost", "127.0.0.1", "::1")
COMMANDS_GROUP = "mmd.commands"
"""Group of entry points: the name of a command, and its function, or the program of several commands."""
_EXTRA_OF = {
    "operator": "operator",
    "explain": "operator",
    "rollout": "operator",
    "simulate": "simulate",
}  # by command; all others need `worker`


@dataclass(slots=True)
class Program:
    """The `mmd` program, and a line for each group of commands that it had to leave out."""

    app: typer.Typer
    left_out: list[str] = field(default_factory=list)

    def commands(self) -> set[str]:
        """Names of the commands that can be run."""
        click_group = typer.main.get_command(self.app)
        return set(click_group.commands) if isinstance(click_group, TyperGroup) else set()


def build(only: str | None = None) -> Program:
    """The program with all commands of the entry points, or with `only` one if that exists.

    A command whose libraries are not installed is left out, and the rest still work.
    """
    app = typer.Typer(
        name="mmd",
        no_args_is_help=True,
        pretty_exceptions_enable=False,
        add_completion=False,
        rich_markup_mode=None,
    )

    @app.callback()
    def root() -> None:
        """Encoder, prefill and decode pools for multimodal models, from one file."""

    entries = sorted(entry_points(group=COMMANDS_GROUP), key=lambda e: e.name)
    missing: dict[tuple[str, str], list[str]] = defaultdict(list)
    for entry_point in [e for e in entries if e.name == only] or entries:
        try:
            command = entry_point.load()
        except ImportError as error:
            missing[_EXTRA_OF.get(entry_point.name, "worker"), str(error)].append(entry_point.name)
        else:
            if isinstance(command, typer.Typer):
                app.add_typer(command, name=entry_point.name)
            else:
                app.command(name=entry_point.name)(command)
    return Program(
        app,
        [_unavailable(", ".join(names), error, extra) for (extra, error), names in missing.items()],
    )


def _unavailable(names: str, error: str, extra: str) -> str:
    return f"mmd: not available: {names} ({error}); install with: pip install 'multimodal-operator[{extra}]'"


def _reach_loopback_directly() -> None:
    """Keep requests to this machine, by this process and those that it starts, from the proxy of the environment.

    Both spellings get the same hosts: where there are two, libraries read one of them, and `*` counts only alone.
    """
    given = os.environ.get("no_proxy") or os.environ.get("NO_PROXY", "")
    others = [host.strip() for host in given.split(",") if host.strip()]
    direct = "*" if "*" in others else ",".join(dict.fromkeys([*others, *LOOPBACK]))
    os.environ["no_proxy"] = os.environ["NO_PROXY"] = direct


def main() -> None:
    """Run the `mmd` program.

    Missing libraries are reported in help, and to those who ask for a missing command.
    """
    _reach_loopback_directly()
    requested = next((argument for argument in sys.argv[1:] if not argument.startswith("-")), None)
    program = build(requested)
    if requested not in program.commands():
        for line in program.left_out:
            typer.echo(line, err=True)
    try:
        program.app()
    except ModuleNotFoundError as error:
        if (error.name or "mmd_").startswith("mmd_"):
            raise
        name = requested or "mmd"
        typer.echo(_unavailable(name, str(error), _EXTRA_OF.get(name, "worker")), err=True)
        raise SystemExit(1) from error
