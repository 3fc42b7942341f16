"""The commands that run in pods: `mmd worker`, `mmd gateway` and `mmd fetch-weights`.

Each command imports its slow dependencies only when it runs.
"""

from __future__ import annotations

import signal
import sys
from pathlib import Path
from typing import Annotated, cast

import typer

from mmd_api.contract.pools import POOL_NAMES, ROLES, Role
from mmd_workers.basics.imports import frozen_imports


def worker(
    pool: Annotated[str, typer.Option(help="encoder, prefill or decode: the pool this pod belongs to.")],
    roles: Annotated[str, typer.Option(help="Comma-separated roles out of encode, prefill, decode.")],
) -> None:
    """Run one worker pod (what the containers of the pools run)."""
    _exit_on_sigterm()
    with frozen_imports():
        from mmd_workers.process.settings import WorkerSettings
        from mmd_workers.worker import run

    role_names = roles.split(",")
    if pool not in POOL_NAMES or not set(role_names) <= set(ROLES):
        raise typer.BadParameter(
            f"--pool {pool} --roles {roles}: invalid; see --help for the accepted values"
        )
    run(WorkerSettings.from_environment(), pool, cast("tuple[Role, ...]", tuple(role_names)))


def gateway() -> None:
    """Run one gateway pod (what the gateway's container runs)."""
    _exit_on_sigterm()
    with frozen_imports():
        from mmd_workers.gateway.process.gateway_process import run
        from mmd_workers.process.settings import WorkerSettings

    run(WorkerSettings.from_environment())


def fetch_weights(
    items: Annotated[
        list[str], typer.Option("--item", help="Field of the spec and URL, as FIELD=URL. Repeatable.")
    ],
    claim: Annotated[str, typer.Option(help="Name of the volume in messages.")] = "",
    last_words: Annotated[Path, typer.Option(help="File for the final progress.")] = Path(
        "/dev/termination-log"
    ),
) -> None:
    """Download weights to the cache (what the Job of spec.model.storage.cache runs)."""
    from mmd_api.weights import Download
    from mmd_workers.weights import pod

    downloads = [Download(field, url) for field, _, url in (item.partition("=") for item in items)]
    pod.end(pod.run(downloads, claim, last_words))


def _exit_on_sigterm() -> None:
    """Exit on SIGTERM until the event loop installs its own handler.

    Linux does not deliver the signal to a container's first process without a handler: a pod deleted during its start would
    go on, and serve, until its grace period ends.
    """
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
