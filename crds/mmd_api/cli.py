"""The root of the `mmd` program: it gathers the commands of every installed package and knows none of them."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from importlib.metadata import EntryPoint, entry_points

import typer
from typer.core import TyperGroup

COMMANDS_GROUP = "mmd.commands"
_EXTRA_OF = {"operator": "operator", "workers": "worker"}


@dataclass(slots=True)
class Program:
    """The `mmd` program, and a line for each package whose commands it had to leave out."""

    app: typer.Typer
    left_out: list[str] = field(default_factory=list)

    def commands(self) -> set[str]:
        """Names of the commands that can be run."""
        click_group = typer.main.get_command(self.app)
        return set(click_group.commands) if isinstance(click_group, TyperGroup) else set()


def build() -> Program:
    """The program with the commands of all entry points of the group `mmd.commands`."""
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

    program = Program(app)
    for entry_point in sorted(entry_points(group=COMMANDS_GROUP), key=lambda e: e.name):
        _register(program, entry_point)
    return program


def _register(program: Program, entry_point: EntryPoint) -> None:
    """Add one package's commands; one whose libraries are not installed is left out, and the rest still work."""
    try:
        register = entry_point.load()
    except ImportError as error:
        extra = _EXTRA_OF.get(entry_point.name, entry_point.name)
        program.left_out.append(
            f"mmd: the commands of {entry_point.name} are left out ({error}); "
            f"install them with: pip install 'multimodal-operator[{extra}]'"
        )
        return
    register(program.app)


def main() -> None:
    """Entry point of the `mmd` program. What was left out is said to those who miss it: in help and for unknown commands."""
    program = build()
    wanted = next((argument for argument in sys.argv[1:] if not argument.startswith("-")), None)
    if wanted not in program.commands():
        for line in program.left_out:
            typer.echo(line, err=True)
    program.app()
