"""An operator that serves several namespaces: one that it may not read does not hold up the others, and is served once it may."""

from __future__ import annotations

import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from kubernetes import client
from prometheus_client.parser import text_string_to_metric_families

from mmd_cli.local.pods import free_port
from support.cluster.control_plane import ControlPlane
from support.cluster.deployments import SPEC
from support.cluster.operator_process import LeasePlace, OperatorProcess
from support.cluster.quick_pauses import QUICK_PAUSES
from support.cluster.standin import Namespace, eventually
from support.cluster.unruly_server import UnrulyServer

from .rights import RULES, bind, token_of

SMALL = {**{key: SPEC[key] for key in ("model", "transfer")}, "decode": {"gpus": 0, "replicas": 1}}


@dataclass
class Teams:
    """Two namespaces, and an operator that is to serve both. It reaches the API server through `door`."""

    first: Namespace
    second: Namespace
    operator: OperatorProcess
    door: UnrulyServer
    port: int
    account: tuple[str, str]

    def grant(self, namespace: Namespace) -> None:
        bind(namespace, namespace.name, RULES["rules"], self.account)

    def revoke(self, namespace: Namespace) -> None:
        rbac = client.RbacAuthorizationV1Api(namespace.core.api_client)
        rbac.delete_namespaced_role_binding(self.account[1], namespace.name)

    def rebind(self, namespace: Namespace) -> None:
        rbac = client.RbacAuthorizationV1Api(namespace.core.api_client)
        rbac.delete_namespaced_role(self.account[1], namespace.name)
        self.grant(namespace)

    def unread(self) -> set[str]:
        """Namespaces that the operator reports as not read."""
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/metrics", timeout=10) as answer:
            families = text_string_to_metric_families(answer.read().decode())
        return {
            sample.labels["namespace"]
            for family in families
            for sample in family.samples
            if sample.name == "mmd_operator_unread_seconds" and sample.value > 0
        }

    def reports_unread(self, *namespaces: Namespace) -> None:
        assert self.unread() == {namespace.name for namespace in namespaces}

    def is_healthy(self) -> None:
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/healthz", timeout=10) as answer:
            assert answer.status == 200
        assert self.operator.wait(0) is None


@pytest.fixture
def teams(
    request: pytest.FixtureRequest,
    api: client.ApiClient,
    control_plane: ControlPlane,
    namespace: Namespace,
    tmp_path: Path,
) -> Iterator[Teams]:
    """The operator's Lease and account are in the first namespace; it has no rights on deployments yet, and does not run."""
    account = (namespace.name, "operator")
    namespace.core.create_namespaced_service_account(namespace.name, {"metadata": {"name": "operator"}})
    bind(namespace, namespace.name, [*RULES["rules"], *RULES["leaseRules"]], account)
    door = UnrulyServer(control_plane.url, token_of(namespace, *account), tmp_path)
    door.start()
    second, port = Namespace.create(api, f"second of {request.node.name}"), free_port()
    process = OperatorProcess(
        door.kubeconfig,
        second.name,
        tmp_path,
        port,
        (namespace.name,),
        LeasePlace(namespace.name),
        pauses=QUICK_PAUSES,
    )
    try:
        yield Teams(namespace, second, process, door, port, account)
    finally:
        if process._process is not None:
            process.kill()
        door.stop()


def sized(namespace: Namespace, replicas: int) -> None:
    assert namespace.stateful_set("decode").spec.replicas == replicas


def has_service(namespace: Namespace, name: str) -> None:
    services = namespace.core.list_namespaced_service(namespace.name).items
    assert name in {service.metadata.name for service in services}


def test_a_namespace_without_rights_does_not_hold_up_the_others(teams: Teams) -> None:
    """From the beginning, and although it is the first that the operator is given."""
    teams.operator.start()
    for namespace in (teams.first, teams.second):
        namespace.apply(SMALL)
    teams.first.settled(teams.first.is_ready)
    eventually(lambda: teams.reports_unread(teams.second))
    teams.is_healthy()
    assert f"namespace {teams.second.name} cannot be read" in teams.operator.log_text()
    teams.grant(teams.second)
    teams.second.settled(teams.second.is_ready)
    eventually(teams.reports_unread)
    teams.is_healthy()


@pytest.mark.parametrize("expired", [False, True], ids=["history-kept", "history-lost"])
def test_revoked_rights_end_only_their_namespace_until_they_are_back(teams: Teams, expired: bool) -> None:
    teams.grant(teams.second)
    teams.operator.start()
    for namespace in (teams.first, teams.second):
        namespace.apply(SMALL)
        namespace.settled(namespace.is_ready)
    eventually(teams.reports_unread)

    teams.revoke(teams.second)
    teams.door.cut_watches(expired=expired)  # the API server looks at rights when a watch begins
    eventually(lambda: teams.reports_unread(teams.second))
    for namespace in (teams.first, teams.second):
        namespace.change({"decode": {"replicas": 2}})
    teams.second.core.delete_namespaced_service("demo-gateway", teams.second.name)
    eventually(lambda: sized(teams.first, 2))
    teams.first.settled(teams.first.is_ready)
    sized(teams.second, 1)
    teams.is_healthy()

    teams.rebind(teams.second)
    eventually(lambda: sized(teams.second, 2))
    teams.second.settled(teams.second.is_ready)
    eventually(lambda: has_service(teams.second, "demo-gateway"))
    eventually(teams.reports_unread)
    teams.is_healthy()
