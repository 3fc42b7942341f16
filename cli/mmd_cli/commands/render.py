"""`mmd render`: prints the objects that the operator would apply.

Importing this needs no cluster and no kopf.
"""

from __future__ import annotations

import json
from typing import Annotated

import typer
import yaml

from mmd_api.faults import InvalidDeploymentError
from mmd_api.resource import load_all
from mmd_cli.console import fail_with_faults
from mmd_operator.resources.plan import plan_objects


def render(
    file: Annotated[str, typer.Option("-f", "--file", help="Deployment file, or - for standard input.")],
    namespace: Annotated[
        str | None,
        typer.Option("--namespace", "-n", help="Namespace. Defaults to the file's, then to `default`."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one List, for scripts.")] = False,
) -> None:
    """Print every Kubernetes object that the operator would apply, as YAML."""
    try:
        objects = [
            manifest
            for deployment in load_all(file)
            for manifest in plan_objects(deployment, namespace or deployment.metadata.namespace or "default")
        ]
    except InvalidDeploymentError as error:
        fail_with_faults({file: error})
    if as_json:
        typer.echo(json.dumps({"apiVersion": "v1", "kind": "List", "items": objects}, indent=1))
    else:
        typer.echo(to_yaml(objects), nl=False)


class _PlainDumper(yaml.SafeDumper):
    """Writes YAML without anchors, and text of several lines as a block."""

    def ignore_aliases(self, data: object) -> bool:
        return True


def _text(dumper: yaml.SafeDumper, value: str) -> yaml.ScalarNode:
    return dumper.represent_scalar("tag:yaml.org,2002:str", value, style="|" if "\n" in value else None)


_PlainDumper.add_representer(str, _text)


def to_yaml(objects: list[dict[str, object]]) -> str:
    """Objects as one YAML stream, with keys in the order of the builders."""
    return yaml.dump_all(objects, Dumper=_PlainDumper, sort_keys=False, explicit_start=True, width=10_000)
