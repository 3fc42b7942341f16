"""`mmd rollout`: shows and controls the rollouts of a deployment on a cluster, as `kubectl rollout` does for
Deployments.

The Kubernetes client is imported only when a command runs.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Annotated

import typer
import yaml
from rich.markup import escape
from rich.table import Table

from mmd_cli.console import console, run
from mmd_cli.errors import CommandError
from mmd_workers.observe.logs import printable

rollout = typer.Typer(no_args_is_help=True, help="Show, undo, pause and resume rollouts of a deployment.")

NameArgument = Annotated[str, typer.Argument(help="Name of the MultimodalDeployment.")]
NamespaceOption = Annotated[str, typer.Option("--namespace", "-n", help="Its namespace.")]


@rollout.command()
def history(
    name: NameArgument,
    namespace: NamespaceOption = "default",
    revision: Annotated[
        int | None, typer.Option(min=1, help="Print the spec of this revision as YAML instead.")
    ] = None,
) -> None:
    """List the recorded specs of a deployment, with what each changed."""
    run(_history(name, namespace, revision))


@rollout.command()
def undo(
    name: NameArgument,
    namespace: NamespaceOption = "default",
    to_revision: Annotated[
        int | None,
        typer.Option(
            min=1, help="Revision to return to. Defaults to the newest other one that was complete."
        ),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Only print what would change; the API server checks it.")
    ] = False,
) -> None:
    """Write an earlier spec back. Sizes and other fields that no pod reads stay as they are."""
    run(_undo(name, namespace, to_revision, dry_run=dry_run))


@rollout.command()
def status(
    name: NameArgument,
    namespace: NamespaceOption = "default",
    watch: Annotated[bool, typer.Option(help="Wait until the rollout has ended.")] = True,
    timeout: Annotated[float, typer.Option(min=1, max=86_400, help="Seconds to wait at most.")] = 3600.0,
) -> None:
    """Wait until a rollout is complete. Exits with 1 if it fails or takes too long."""
    run(_status(name, namespace, timeout if watch else None, lambda line: typer.echo(printable(line))))


@rollout.command()
def pause(name: NameArgument, namespace: NamespaceOption = "default") -> None:
    """Let changes of the spec wait, except those of sizes and of other fields that no pod reads."""
    run(_pause(name, namespace, paused=True))


@rollout.command()
def resume(name: NameArgument, namespace: NamespaceOption = "default") -> None:
    """Roll out what has changed since `mmd rollout pause`."""
    run(_pause(name, namespace, paused=False))


async def _history(name: str, namespace: str, number: int | None) -> None:
    from mmd_api.history import spec_digest
    from mmd_cli.cluster_rollouts import DeploymentOnCluster, connected
    from mmd_cli.rollout_history import chosen, history_rows, spec_of

    async with connected() as api:
        deployment = DeploymentOnCluster(api, namespace, name)
        body = await deployment.read()
        entries = await deployment.history(body["metadata"]["uid"])
    present = spec_digest(spec_of(body, body["spec"]))
    if number is not None:
        typer.echo(yaml.safe_dump(chosen(entries, present, number).spec, sort_keys=False), nl=False)
        return
    table = Table()
    for heading in ("revision", "pipeline revision", "recorded", "complete", "state", "changes"):
        table.add_column(heading)
    for row in history_rows(body, entries, present):
        table.add_row(*(escape(printable(cell, keep="\n")) for cell in row))
    console.print(table)


async def _undo(name: str, namespace: str, number: int | None, *, dry_run: bool) -> None:
    from mmd_api.history import spec_digest
    from mmd_cli.cluster_rollouts import DeploymentOnCluster, connected
    from mmd_cli.rollout_history import chosen, differences, spec_of, undone

    async with connected() as api:
        deployment = DeploymentOnCluster(api, namespace, name)
        body = await deployment.read()
        entries = await deployment.history(body["metadata"]["uid"])
        present = spec_of(body, body["spec"])
        entry = chosen(entries, spec_digest(present), number)
        spec = undone(body, entry)
        lines = differences(present, spec_of(body, spec))
        if not lines:
            typer.echo(f"{name} has the spec of revision {entry.number} already")
            return
        await deployment.replace_spec(body, spec, dry_run=dry_run)
    for line in lines:
        typer.echo(printable(line))
    typer.echo(f"{name} {'would return' if dry_run else 'returns'} to revision {entry.number}")


async def _status(name: str, namespace: str, seconds: float | None, report: Callable[[str], None]) -> None:
    from mmd_cli.cluster_rollouts import DeploymentOnCluster, connected
    from mmd_cli.rollout_history import state_of

    words = "nothing is known of it"
    try:
        async with connected() as api, asyncio.timeout(seconds):
            async for body in DeploymentOnCluster(api, namespace, name).states():
                state = state_of(body)
                if state.complete is False:
                    raise CommandError(state.words)
                if state.words != words:
                    report(state.words)
                words = state.words
                if state.complete or seconds is None:
                    return
    except TimeoutError:
        raise CommandError(
            f"the rollout of {name} is not complete after {seconds:.0f} s ({words}); see `kubectl describe mmd {name}`"
        ) from None


async def _pause(name: str, namespace: str, *, paused: bool) -> None:
    from mmd_cli.cluster_rollouts import DeploymentOnCluster, connected

    async with connected() as api:
        await DeploymentOnCluster(api, namespace, name).pause(paused=paused)
    typer.echo(f"{name} {'paused' if paused else 'resumed'}")
