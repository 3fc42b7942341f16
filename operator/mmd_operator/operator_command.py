"""`mmd operator`, the command that runs in the operator's pod, and `mmd explain`, which tells what it decided and why.

kopf and the Kubernetes client are imported only when a command runs.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
from typing import Annotated

import typer


def register(app: typer.Typer) -> None:
    """Add this file's commands to `mmd`."""

    @app.command()
    def explain(
        name: Annotated[str, typer.Argument(help="Name of the MultimodalDeployment.")],
        namespace: Annotated[str, typer.Option("--namespace", "-n", help="Its namespace.")] = "default",
        as_json: Annotated[bool, typer.Option("--json", help="For programs.")] = False,
    ) -> None:
        """Say why the pools of a deployment on a cluster have the sizes they have."""
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

    @app.command()
    def operator(
        namespace: Annotated[
            list[str] | None, typer.Option("--namespace", "-n", help="Serve this namespace; repeat for more.")
        ] = None,
        all_namespaces: Annotated[
            bool, typer.Option("--all-namespaces", "-A", help="Serve every namespace.")
        ] = False,
        lease_namespace: Annotated[
            str | None,
            typer.Option(help="Where the Lease lies; else POD_NAMESPACE, else the first --namespace."),
        ] = None,
        health_port: Annotated[
            int, typer.Option(min=0, max=65535, help="Port of /healthz and /metrics; 0: none.")
        ] = 8080,
        log_level: Annotated[str, typer.Option(help="Least severe line that is written.")] = "INFO",
    ) -> None:
        """Run the Kubernetes operator: turn MultimodalDeployments into pods and keep them so."""
        from mmd_operator.serve import NoDefinitionError, NotLeaderError, Options, serve

        if bool(namespace) == all_namespaces:
            raise typer.BadParameter("give either --namespace or --all-namespaces")
        home = (
            lease_namespace or os.environ.get("POD_NAMESPACE") or (namespace[0] if namespace else "default")
        )
        logging.basicConfig(level=log_level.upper(), format="%(asctime)s %(levelname)s %(name)s %(message)s")
        logging.getLogger("kopf").setLevel(logging.WARNING)
        try:
            asyncio.run(serve(Options(tuple(namespace or ()), home, health_port)))
        except (NotLeaderError, NoDefinitionError) as error:
            typer.echo(f"mmd operator: {error}", err=True)
            raise typer.Exit(1) from error
