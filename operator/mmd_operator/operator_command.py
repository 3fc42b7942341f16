"""`mmd operator`, the command run in the operator's pod.

kopf and the Kubernetes client are imported only when the command runs.
"""

from __future__ import annotations

import asyncio
import logging
import os
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from mmd_operator.serve import Options


def operator(
    namespace: Annotated[
        list[str] | None, typer.Option("--namespace", "-n", help="Namespace to watch. Repeatable.")
    ] = None,
    all_namespaces: Annotated[
        bool, typer.Option("--all-namespaces", "-A", help="Watch all namespaces.")
    ] = False,
    lease_namespace: Annotated[
        str | None,
        typer.Option(
            help="Namespace of the Lease. Defaults to POD_NAMESPACE, then to the first --namespace."
        ),
    ] = None,
    lease_name: Annotated[
        str,
        typer.Option(help="Name of the Lease. Operators that share it act one at a time."),
    ] = "multimodal-operator",
    health_port: Annotated[
        int, typer.Option(min=0, max=65535, help="Port for /healthz and /metrics; 0 disables both.")
    ] = 8080,
    log_level: Annotated[str, typer.Option(help="Minimum log level.")] = "INFO",
) -> None:
    """Run the Kubernetes operator, which reconciles MultimodalDeployments."""
    from mmd_operator.serve import Options

    if bool(namespace) == all_namespaces:
        raise typer.BadParameter("set either --namespace or --all-namespaces")
    resolved_lease_namespace = (
        lease_namespace or os.environ.get("POD_NAMESPACE") or (namespace[0] if namespace else "default")
    )
    options = Options(
        namespaces=tuple(namespace or ()),
        lease_namespace=resolved_lease_namespace,
        health_port=health_port,
        lease_name=lease_name,
    )
    run(options, log_level)


def run(options: Options, log_level: str = "INFO") -> None:
    """Run the operator until SIGTERM, or until it must end.

    Raises:
        typer.Exit: the operator lost the Lease, or the CRD is not installed.
    """
    from mmd_operator.serve import NoDefinitionError, NotLeaderError, serve

    logging.basicConfig(level=log_level.upper(), format="%(asctime)s %(levelname)s %(name)s %(message)s")
    logging.getLogger("kopf").setLevel(logging.WARNING)
    try:
        asyncio.run(serve(options))
    except (NotLeaderError, NoDefinitionError) as error:
        typer.echo(f"mmd operator: {error}", err=True)
        raise typer.Exit(1) from error
