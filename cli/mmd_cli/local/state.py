"""Files with the addresses of running local deployments, for `mmd status`, `mmd chat` and `mmd top`."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from mmd_cli.errors import CommandError

EXITED = "exited with code"
"""Part of the line that reports the end of a pod. A demo that shows no other line shows it."""


class NotRunningError(CommandError):
    """No local deployment to talk to."""


@dataclass(frozen=True, slots=True)
class RunningPod:
    """A pod of a running local deployment."""

    name: str
    component: str
    admin_url: str


@dataclass(frozen=True, slots=True)
class Running:
    """A running local deployment: written when its pods have been started, removed when it stops.

    `admin_url`: the gateway's URL for everything that is not for clients. `decisions`: the last decision of
    each pool.
    """

    name: str
    pid: int
    gateway_url: str
    admin_url: str
    pods: list[RunningPod]
    decisions: dict[str, str] = field(default_factory=dict)

    @property
    def gateways(self) -> list[str]:
        """Admin URLs of all gateways."""
        return [pod.admin_url for pod in self.pods if pod.component == "gateway"]


def state_directory() -> Path:
    """`$MMD_STATE_DIR`, else `mmd` below `$XDG_STATE_HOME` or ~/.local/state."""
    if explicit := os.environ.get("MMD_STATE_DIR"):
        return Path(explicit)
    base = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    return Path(base) / "mmd"


def write(running: Running) -> Path:
    """Write the file of a deployment."""
    path = state_directory() / f"{running.name}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(".part")  # a reader finds the whole file
    part.write_text(json.dumps(asdict(running), indent=1))
    part.rename(path)
    return path


def find(name: str | None = None) -> Running:
    """The running deployment of this name, or the only one.

    Raises:
        NotRunningError: none runs, or several do and no name was given.
    """
    deployments = []
    for path in sorted(state_directory().glob(f"{name or '*'}.json")):
        data = json.loads(path.read_text())
        running = Running(**{**data, "pods": [RunningPod(**pod) for pod in data["pods"]]})
        if Path(f"/proc/{running.pid}").exists() or not Path("/proc").exists():
            deployments.append(running)
    if not deployments:
        wanted = f"deployment {name}" if name else "a deployment"
        raise NotRunningError(
            f"{wanted} is not running on this machine; start one with: mmd up -f examples/demo.yaml"
        )
    if len(deployments) > 1:
        names = ", ".join(running.name for running in deployments)
        raise NotRunningError(f"several deployments run on this machine ({names}); name one with --name")
    return deployments[0]


def watched(urls: Sequence[str] | None, name: str | None) -> tuple[str, Sequence[str]]:
    """A title and the admin URLs of gateways: the given ones, or those of the running deployment.

    Raises:
        NotRunningError: see `find`.
    """
    if urls:
        return ", ".join(urls), urls
    running = find(name)
    return running.name, running.gateways


def decisions_of(urls: Sequence[str] | None, name: str | None) -> dict[str, str]:
    """The last decisions of the local autoscaler. Gateways elsewhere, at `urls`, have none."""
    return {} if urls else dict(find(name).decisions)
