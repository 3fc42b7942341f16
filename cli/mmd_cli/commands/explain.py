"""`mmd explain`: explains the sizes of a deployment's pools on a cluster.

The Kubernetes client is imported only when the command runs.
"""

from __future__ import annotations

import asyncio
import json
from typing import Annotated

import typer


def explain(
    name: Annotated[str, typer.Argument(help="Name of the MultimodalDeployment.")],
    namespace: Annotated[str, typer.Option("--namespace", "-n", help="Its namespace.")] = "default",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, for scripts.")] = False,
) -> None:
    """Explain the current pool sizes of a deployment on a cluster."""
    from mmd_operator.explain import NoDeploymentError, lines, status_of

    try:
        status = asyncio.run(status_of(namespace, name))
    except NoDeploymentError as error:
        typer.echo(f"mmd explain: {error}", err=True)
        raise typer.Exit(1) from error
    if as_json:
        typer.echo(json.dumps({"lines": lines(status), "status": status}, indent=1))
        return
    for line in lines(status):
        typer.echo(line)
