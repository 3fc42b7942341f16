"""Commands of the `mmd` program that need nothing but the resource's own package."""

from __future__ import annotations

from typing import Annotated

import typer

from mmd_api.console import fail_with_faults
from mmd_api.faults import InvalidDeploymentError, cluster_faults
from mmd_api.resource import load_all


def register(app: typer.Typer) -> None:
    """Add this package's commands to `mmd`."""

    @app.command()
    def validate(
        files: Annotated[
            list[str], typer.Option("-f", "--file", help="Deployment file, or -; repeat for more.")
        ],
    ) -> None:
        """Say everything that is wrong with deployment files: field, problem, remedy."""
        errors: dict[str, InvalidDeploymentError] = {}
        for file in files:
            try:
                deployments = load_all(file)
            except InvalidDeploymentError as error:
                errors[file] = error
                continue
            for deployment in deployments:
                only_here = cluster_faults(deployment)
                typer.echo(
                    f"{file}: {deployment.metadata.name} is valid"
                    + (" for `mmd up` only:" if only_here else "")
                )
                for fault in only_here:
                    typer.echo(f"{file}: {fault}")
        if errors:
            fail_with_faults(errors)
