"""Three nats-servers on loopback, configured as the operator configures a cluster.

Independent of what clients do.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import httpx

from mmd_api.resource import MultimodalDeployment
from mmd_cli.local.pods import free_port
from mmd_operator.resources.naming import RevisionScope
from mmd_operator.resources.nats import PASSWORD_PREFIX, users_configuration
from mmd_operator.resources.nats_cluster import ALIVE, ROUTES_KEY, configuration, environment, route
from mmd_workers.wire.server import NatsServer
from support.harness.waiting import wait_until

SERVERS = 3
HEALTHY_SECONDS = 60.0
_VARIABLES = {"MMD_SERVER_NAME", "MMD_ROUTES_PASSWORD"}


class NatsCluster(NatsServer):
    """Three servers that start, stop and are killed as one. `servers` has them one by one.

    Their ports and their data stay. The passwords are in `environment`, which all have; a change takes effect
    at the next start.
    """

    def __init__(self, folder: Path, deployment: MultimodalDeployment, passwords: Mapping[str, str]) -> None:
        scope = RevisionScope.of(deployment, deployment.metadata.namespace or "default")
        assert scope.spec.nats.replicas == SERVERS
        super().__init__(folder)
        self.environment = {PASSWORD_PREFIX + user: password for user, password in passwords.items()}
        clients, routes, monitors = ([free_port() for _ in range(SERVERS)] for _ in range(3))
        variables = {v["name"] for v in environment(scope)}
        assert variables >= _VARIABLES
        addresses = [route("127.0.0.1", passwords[ROUTES_KEY], port) for port in routes]
        common = {f"MMD_ROUTE_{number}": address for number, address in enumerate(addresses)}
        common["MMD_ROUTES_PASSWORD"] = passwords[ROUTES_KEY]
        assert variables == {*common, "MMD_SERVER_NAME"}
        self.servers = [
            NatsMember(
                folder / name,
                monitor,
                port=client,
                configuration=_on_loopback(scope, port, monitor),
                environment={**self.environment, **common, "MMD_SERVER_NAME": name},
            )
            for name, client, port, monitor in zip(scope.nats_servers, clients, routes, monitors, strict=True)
        ]

    @property
    def url(self) -> str:
        return ",".join(server.url for server in self.servers)

    @property
    def crashed(self) -> bool:
        """Always False: only the test starts and ends servers."""
        return False

    @property
    def printed(self) -> list[str]:
        return [line for server in self.servers for line in server.printed]

    @property
    def pid(self) -> int | None:
        return next((pid for server in self.servers if (pid := server.pid) is not None), None)

    def start(self, timeout_seconds: float = HEALTHY_SECONDS) -> NatsCluster:
        for server in self.servers:
            server.environment.update(self.environment)
            server.spawn()
        for server in self.servers:
            server.until_healthy(timeout_seconds)
        return self

    def stop(self, timeout_seconds: float = 10.0) -> None:
        for server in self.servers:
            server.stop(timeout_seconds)

    def kill(self) -> None:
        for server in self.servers:
            server.kill()


class NatsMember(NatsServer):
    def __init__(self, folder: Path, monitor: int, **options: object) -> None:
        super().__init__(folder, **options)  # type: ignore[arg-type]
        self._monitor = f"http://127.0.0.1:{monitor}"

    def is_healthy(self, path: str = "/healthz") -> bool:
        """Whether a probe of Kubernetes would succeed."""
        try:
            return httpx.get(self._monitor + path, timeout=2).status_code == httpx.codes.OK
        except httpx.HTTPError:
            return False

    def until_healthy(self, seconds: float | None = None) -> None:
        """Wait until it would be Ready, as a rolling update does before it continues.

        `seconds`: the deadline of a program that starts it.
        """

        def is_ready() -> bool:
            if self.crashed:
                raise RuntimeError(f"nats-server crashed: {self.printed}")
            return self.is_healthy()

        wait_until(
            is_ready,
            lambda: f"healthy (alive: {self.is_healthy(ALIVE)}): {self.printed[-10:]}",
            seconds=seconds,
        )


def _on_loopback(scope: RevisionScope, port: int, monitor: int) -> str:
    """The configuration that the operator writes, with ports of one machine."""
    text = configuration(scope).replace("port: 6222", f'host: "127.0.0.1", port: {port}')
    head = f'server_name: $MMD_SERVER_NAME\nhttp: "127.0.0.1:{monitor}"\nmax_payload: 8388608\n'
    return head + text + users_configuration(scope.namespace, scope.name)
