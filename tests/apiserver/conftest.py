"""A real API server (etcd and kube-apiserver), started once for the suite, with the CRD; and an operator process beside it."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[1] / "api"))
sys.path.append(str(Path(__file__).parent))

pytest.importorskip("kubernetes")

from control_plane import TOKEN, ControlPlane
from kubernetes import client, watch
from operator_process import OperatorProcess
from standin import Namespace

from mmd_api.crd import custom_resource_definition


@pytest.fixture(scope="session")
def control_plane(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ControlPlane]:
    plane = ControlPlane(tmp_path_factory.mktemp("apiserver"))
    try:
        plane.start()
        yield plane
    finally:
        plane.stop()


@pytest.fixture(scope="session")
def api(control_plane: ControlPlane) -> Iterator[client.ApiClient]:
    """The administrator's client, with the CRD established."""
    configuration = client.Configuration(host=control_plane.url)
    configuration.verify_ssl = False
    configuration.api_key = {"authorization": f"Bearer {TOKEN}"}
    definition = custom_resource_definition()
    with client.ApiClient(configuration) as made:
        extensions = client.ApiextensionsV1Api(made)
        extensions.create_custom_resource_definition(definition)
        name = definition["metadata"]["name"]
        for event in watch.Watch().stream(
            extensions.list_custom_resource_definition,
            field_selector=f"metadata.name={name}",
            timeout_seconds=30,
        ):
            conditions = event["object"].status.conditions or []
            if any(c.type == "Established" and c.status == "True" for c in conditions):
                break
        else:
            pytest.fail("the definition was not established")
        yield made


@pytest.fixture
def namespace(api: client.ApiClient, request: pytest.FixtureRequest) -> Namespace:
    """A namespace of the test's own, in which the test plays controllers and kubelet."""
    return Namespace.create(api, request.node.name)


@pytest.fixture
def operator(control_plane: ControlPlane, namespace: Namespace, tmp_path: Path) -> Iterator[OperatorProcess]:
    """An operator that serves the test's namespace; it runs from the beginning."""
    process = OperatorProcess(control_plane.kubeconfig(), namespace.name, tmp_path)
    try:
        process.start()
        yield process
    finally:
        process.kill()


@pytest.fixture(autouse=True)
def _operator_log(request: pytest.FixtureRequest) -> Iterator[None]:
    """What the operator said, where a test fails."""
    yield
    process = request.node.funcargs.get("operator")
    if isinstance(process, OperatorProcess):
        sys.stdout.write(process.said()[-4000:])
