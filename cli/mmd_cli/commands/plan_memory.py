"""`mmd plan-memory`: how the pods of a deployment would use their memory."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from mmd_api.contract.errors import MmdError
from mmd_api.faults import InvalidDeploymentError
from mmd_cli.console import console, errors, fail


def plan_memory(
    file: Annotated[Path, typer.Option("--file", "-f", exists=True, help="A MultimodalDeployment.")],
    memory: Annotated[
        str | None,
        typer.Option(
            help="Memory of each GPU (80Gi), or of each pod on CPUs. Defaults to the pools' memory limits."
        ),
    ] = None,
) -> None:
    """Print how a deployment's pods would use their memory and how many requests fit, without loading weights.

    Exit status: 0, all pods start; 1, invalid, or a pod would not start; 3, the tower's memory is unknown for some modality.
    """
    from mmd_cli import plan_memory as planner
    from mmd_cli.local import up as runner

    try:
        deployment = runner.load(file)
        planned = planner.plan(deployment.spec, planner.memory_of(deployment.spec, memory))
    except MmdError as error:
        raise fail(error) from error
    except InvalidDeploymentError as error:
        for fault in error.faults:
            errors.print(f"[red]error[/red] (invalid): {fault}", highlight=False, soft_wrap=True)
        raise typer.Exit(1) from error
    for line in planner.lines_of(planned):
        console.print(line, highlight=False, soft_wrap=True, markup=False)
    if any(pool.refusal for pool in planned.pools):
        raise typer.Exit(1)
    if any(pool.tower.unknown for pool in planned.pools):
        raise typer.Exit(3)
