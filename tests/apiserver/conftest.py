"""A real API server (etcd and kube-apiserver), started once for the suite, with the CRD; and an operator process next to it."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("kubernetes")

from kubernetes import client, watch
from tenacity import Retrying, stop_after_delay, wait_fixed

from mmd_api.crd import custom_resource_definition
from mmd_api.pool_resource import POOL_PLURAL, pool_definition
from mmd_api.resource import GROUP, PLURAL, VERSION
from tests.support.control_plane import TOKEN, ControlPlane
from tests.support.operator_process import OperatorProcess
from tests.support.standin import Namespace
from tests.support.unruly_server import UnrulyServer


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
    """The administrator's client, with the CRDs established."""
    configuration = client.Configuration(host=control_plane.url)
    configuration.verify_ssl = False
    configuration.api_key = {"authorization": f"Bearer {TOKEN}"}
    definitions = (custom_resource_definition(), pool_definition())
    with client.ApiClient(configuration) as made:
        extensions = client.ApiextensionsV1Api(made)
        for definition in definitions:
            _establish(extensions, definition)
        until_stored = Retrying(stop=stop_after_delay(30), wait=wait_fixed(0.1), reraise=True)
        for plural in (PLURAL, POOL_PLURAL):
            until_stored(client.CustomObjectsApi(made).list_cluster_custom_object, GROUP, VERSION, plural)
        yield made


def _establish(extensions: client.ApiextensionsV1Api, definition: dict[str, Any]) -> None:
    extensions.create_custom_resource_definition(definition)
    name = definition["metadata"]["name"]
    for event in watch.Watch().stream(
        extensions.list_custom_resource_definition,
        field_selector=f"metadata.name={name}",
        timeout_seconds=30,
    ):
        conditions = event["object"].status.conditions or []
        if any(c.type == "Established" and c.status == "True" for c in conditions):
            return
    pytest.fail(f"{name} was not established")


@pytest.fixture
def namespace(api: client.ApiClient, request: pytest.FixtureRequest) -> Namespace:
    """A namespace of the test's own, in which the test plays controllers and kubelet."""
    return Namespace.create(api, request.node.name)


@pytest.fixture
def unruly(control_plane: ControlPlane, tmp_path: Path) -> Iterator[UnrulyServer]:
    """A way to the API server that refuses, delays and ends what the test wants; see `kubeconfig`."""
    server = UnrulyServer(control_plane.url, TOKEN, tmp_path)
    server.start()
    yield server
    server.stop()


@pytest.fixture
def kubeconfig(control_plane: ControlPlane) -> Path:
    """The operator's way to the API server."""
    return control_plane.kubeconfig()


@pytest.fixture
def operator(kubeconfig: Path, namespace: Namespace, tmp_path: Path) -> Iterator[OperatorProcess]:
    """An operator that serves the test's namespace; it runs from the beginning."""
    process = OperatorProcess(kubeconfig, namespace.name, tmp_path)
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
        sys.stdout.write(process.log_text()[-4000:])
