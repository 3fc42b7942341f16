"""A real API server (etcd and kube-apiserver) with the CRD, and an operator.

Most tests take `any_operator`: their namespace is on the API server that all pytest processes of the run share, and so is the operator.
Tests that start, end or configure operators, or change what is not in their namespace, have an API server that only their process uses.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Generator, Iterable, Iterator
from pathlib import Path

import pytest
from kubernetes import client

from mmd_api.crd import custom_resource_definition
from mmd_api.pool_resource import pool_definition
from mmd_operator.kube.pauses import Pauses
from support.cluster.control_plane import TOKEN, ControlPlane, binaries
from support.cluster.definitions import establish
from support.cluster.operator_process import OperatorProcess
from support.cluster.quick_pauses import QUICK_PAUSES
from support.cluster.shared_server import AnyOperator, SharedServer, administrator, shared_in
from support.cluster.standin import Namespace
from support.cluster.unruly_server import UnrulyServer
from support.servers.kept import Kept

HERE = Path(__file__).parent
SHARED: pytest.StashKey[Kept] = pytest.StashKey()


def shares_server(fixtures: Iterable[str]) -> bool:
    """Whether a test with these fixtures uses the shared API server."""
    names = set(fixtures)
    return bool(names & {"any_operator", "shared_api"}) and "operator" not in names


def pytest_configure(config: pytest.Config) -> None:
    """Nobody checks the certificate of an API server of tests: thousands of warnings would hide others."""
    config.addinivalue_line("filterwarnings", "ignore::urllib3.exceptions.InsecureRequestWarning")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests that do not use the shared API server run in few processes of pytest-xdist, since each has to start another."""
    for item in items:
        if HERE not in item.path.parents or item.get_closest_marker("xdist_group"):
            continue
        if not shares_server(getattr(item, "fixturenames", ())):
            item.add_marker(pytest.mark.xdist_group("own-operator"))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """A failure shows what the test's own operator logged last, and what it does."""
    report = yield
    operator = getattr(item, "funcargs", {}).get("operator")
    if call.when == "call" and report.failed and isinstance(operator, OperatorProcess):
        report.sections.append(("The operator", operator.stacks()))
    return report


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """After the fixtures have ended, however the session did."""
    if shared := session.config.stash.get(SHARED, None):
        shared.join()


@pytest.fixture(scope="session")
def shared_server(
    pytestconfig: pytest.Config, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[SharedServer]:
    base = tmp_path_factory.getbasetemp()
    of_run = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base
    binaries()  # skips where there are none
    pytestconfig.stash[SHARED] = shared = shared_in(of_run / "shared-api-server")
    with shared.use() as facts:
        yield SharedServer(**facts)


@pytest.fixture(scope="session")
def shared_api(shared_server: SharedServer) -> Iterator[client.ApiClient]:
    """The administrator's client of the shared API server."""
    with administrator(shared_server.url) as made:
        yield made


@pytest.fixture(scope="session")
def control_plane(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ControlPlane]:
    """An API server that no other process uses."""
    plane = ControlPlane(tmp_path_factory.mktemp("apiserver"))
    try:
        plane.start()
        yield plane
    finally:
        plane.stop()


@pytest.fixture(scope="session")
def api(control_plane: ControlPlane) -> Iterator[client.ApiClient]:
    """The administrator's client of `control_plane`, which serves the CRDs."""
    with administrator(control_plane.url) as made:
        for definition in (custom_resource_definition(), pool_definition()):
            establish(made, definition)
        yield made


@pytest.fixture
def namespace(request: pytest.FixtureRequest) -> Iterator[Namespace]:
    """A namespace of the test's own, in which the test plays controllers and kubelet."""
    if not shares_server(request.fixturenames):
        yield Namespace.create(request.getfixturevalue("api"), request.node.name)
        return
    made = Namespace.create(request.getfixturevalue("shared_api"), request.node.name)
    yield made
    made.abandon()


@pytest.fixture
def unruly(control_plane: ControlPlane, tmp_path: Path) -> Iterator[UnrulyServer]:
    """A way to the API server that refuses, delays and ends what the test wants; see `kubeconfig`."""
    server = UnrulyServer(control_plane.url, TOKEN, tmp_path)
    server.start()
    yield server
    server.stop()


@pytest.fixture
def kubeconfig(request: pytest.FixtureRequest) -> Path:
    """The way to the test's API server, for the operator and for command lines."""
    if shares_server(request.fixturenames):
        return Path(request.getfixturevalue("shared_server").kubeconfig)
    return request.getfixturevalue("control_plane").kubeconfig()


@pytest.fixture
def pauses() -> Pauses:
    """The pauses of the test's own operators."""
    return QUICK_PAUSES


@pytest.fixture
def operator(
    kubeconfig: Path, namespace: Namespace, tmp_path: Path, pauses: Pauses
) -> Iterator[OperatorProcess]:
    """An operator of the test's own that serves its namespace; it runs from the beginning."""
    process = OperatorProcess(kubeconfig, namespace.name, tmp_path, pauses=pauses)
    try:
        process.start()
        yield process
    finally:
        process.kill()


@pytest.fixture
def any_operator(request: pytest.FixtureRequest) -> AnyOperator:
    """An operator serves the test's namespace: `operator` where the test has it too, else the shared one."""
    if not shares_server(request.fixturenames):
        return request.getfixturevalue("operator")
    server: SharedServer = request.getfixturevalue("shared_server")
    assert server.operator_runs(), server.log_text()[-4000:]
    return server


@pytest.fixture(autouse=True)
def _operator_log(request: pytest.FixtureRequest) -> Iterator[None]:
    """What the operator logged, where a test fails."""
    yield
    found = request.node.funcargs.get("any_operator", request.node.funcargs.get("operator"))
    namespace = request.node.funcargs.get("namespace")
    if isinstance(found, SharedServer) and isinstance(namespace, Namespace):
        sys.stdout.write(found.log_about(namespace.name)[-4000:])
    elif isinstance(found, OperatorProcess):
        sys.stdout.write(found.log_text()[-4000:])
