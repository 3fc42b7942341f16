"""One API server that the pytest processes of a run share.

It has the definitions of all kinds, and one operator for all namespaces.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TypeAlias

from kubernetes import client

from mmd_api.crd import custom_resource_definition
from mmd_api.pool_resource import pool_definition
from support.cluster.control_plane import TOKEN, ControlPlane
from support.cluster.definitions import OF_USERS, establish
from support.cluster.operator_process import LeasePlace, OperatorProcess
from support.cluster.quick_pauses import QUICK_PAUSES
from support.servers.kept import Facts, Kept, keep

LEASE_NAMESPACE = "default"
START_SECONDS = 180.0


@dataclass(frozen=True)
class SharedServer:
    """The server as its users know it. They must neither restart the operator nor change definitions."""

    url: str
    kubeconfig: str
    operator_log: str
    operator_pid: int

    def log_text(self) -> str:
        """What the operator has logged so far, about all namespaces."""
        return Path(self.operator_log).read_text()

    def log_about(self, namespace: str) -> str:
        """The lines that name a namespace."""
        lines = self.log_text().splitlines(keepends=True)
        return "".join(line for line in lines if f"{namespace}/" in line)

    def operator_runs(self) -> bool:
        try:
            os.kill(self.operator_pid, 0)
        except ProcessLookupError:
            return False
        return True


AnyOperator: TypeAlias = OperatorProcess | SharedServer


def administrator(url: str) -> client.ApiClient:
    """A client with all rights."""
    configuration = client.Configuration(host=url)
    configuration.verify_ssl = False
    configuration.api_key = {"authorization": f"Bearer {TOKEN}"}
    return client.ApiClient(configuration)


def shared_in(folder: Path) -> Kept:
    """The server of a run. `folder`: the same for all processes of the run."""
    return Kept(folder, [sys.executable, "-m", __name__, str(folder)], START_SECONDS)


@contextmanager
def _running(folder: Path) -> Iterator[Facts]:
    plane = ControlPlane(folder)
    operator = OperatorProcess(
        plane.kubeconfig(), "", folder, lease=LeasePlace(LEASE_NAMESPACE), pauses=QUICK_PAUSES
    )
    try:
        plane.start()
        with administrator(plane.url) as api:
            for definition in (custom_resource_definition(), pool_definition(), *OF_USERS.values()):
                establish(api, definition)
        operator.start()
        try:
            pid = operator.process.pid
            assert pid is not None
            yield asdict(SharedServer(plane.url, str(plane.kubeconfig()), str(operator.log), pid))
        finally:
            operator.kill()
    finally:
        plane.stop()


if __name__ == "__main__":
    keep(Path(sys.argv[1]), _running(Path(sys.argv[1])))
