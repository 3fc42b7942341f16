"""`mmd validate`: reports what is wrong with deployment files.

Needs nothing but the resource's own package. Where vLLM is installed, it also checks settings for vLLM.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from mmd_api.faults import Fault, InvalidDeploymentError, cluster_faults
from mmd_api.resource import load_all
from mmd_cli.console import fail, fail_with_faults
from mmd_cli.local.engines import EngineMissingError, engine_faults
from mmd_cli.local.located import located


def validate(
    files: Annotated[
        list[str],
        typer.Option("-f", "--file", help="Deployment file, or - for standard input. Repeatable."),
    ],
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, for scripts.")] = False,
) -> None:
    """Report everything that is wrong with deployment files: field, problem, remedy."""
    names: dict[str, list[str]] = {file: [] for file in files}
    only_here: dict[str, list[Fault]] = {file: [] for file in files}
    errors: dict[str, InvalidDeploymentError] = {}
    for file in files:
        try:
            deployments = load_all(file)
            on_this_machine = [located(deployment, Path(file).parent) for deployment in deployments]
            if faults := [f for local in on_this_machine for f in engine_faults(local.spec.engine)]:
                raise InvalidDeploymentError(faults)
        except InvalidDeploymentError as error:
            errors[file] = error
            continue
        except EngineMissingError as error:
            raise fail(error) from error
        for deployment in deployments:
            faults = cluster_faults(deployment)
            names[file].append(deployment.metadata.name)
            only_here[file] += faults
            if not as_json:
                valid = "is valid for `mmd up` only:" if faults else "is valid"
                typer.echo(f"{file}: {deployment.metadata.name} {valid}")
                for fault in faults:
                    typer.echo(f"{file}: {fault}")
    if as_json:
        results = [
            {
                "file": file,
                "valid": file not in errors,
                "names": names[file],
                "faults": [asdict(fault) for fault in errors[file].faults] if file in errors else [],
                "clusterFaults": [asdict(fault) for fault in only_here[file]],
            }
            for file in files
        ]
        typer.echo(json.dumps(results, indent=1))
        raise typer.Exit(1 if errors else 0)
    if errors:
        fail_with_faults(errors)
