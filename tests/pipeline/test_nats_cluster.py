"""A deployment on three NATS servers, which are killed one by one and all at once while clients keep asking."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from mmd_api.resource import MultimodalDeployment
from mmd_cli.local import up
from mmd_cli.samples import draw
from support.servers.nats_cluster import NatsCluster
from support.serving.askers import SPEC, Askers
from support.serving.local_deployment import Deployment, write

pytestmark = [pytest.mark.processes, pytest.mark.xdist_group("nats-cluster"), pytest.mark.timeout(600)]

SAMPLES = [draw(kind, seed) for kind, seed in (("image", 1), ("audio", 2))]
"""One for each asker."""


@pytest.fixture
def deployment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Deployment]:
    def cluster(folder: Path, resource: MultimodalDeployment, objects: list[dict[str, Any]]) -> NatsCluster:
        (passwords,) = (o["stringData"] for o in objects if o["kind"] == "Secret")
        return NatsCluster(folder, resource, passwords)

    monkeypatch.setattr(up, "_nats", cluster)
    monkeypatch.setattr(up, "for_one_machine", lambda resource: resource)
    with Deployment(
        write(tmp_path / "cluster.yaml", {**SPEC, "nats": {"replicas": 3}}, name="cluster")
    ) as running:
        yield running


def test_nats_servers_killed_singly_and_together_cause_no_wrong_answer(deployment: Deployment) -> None:
    cluster = deployment.local.nats
    assert isinstance(cluster, NatsCluster)
    with Askers(deployment, SAMPLES) as askers:
        askers.all_are_answered_twice()
        pids = {pod.name: deployment.pid(pod) for pod in deployment.local.pods}
        for server in cluster.servers:
            deployment._on_the_thread_that_lasts(server.kill)
            askers.all_are_answered_twice()
            deployment._on_the_thread_that_lasts(server.spawn)
            server.until_healthy()
        assert askers.errors == []
        with deployment.without_nats():
            pass
        askers.all_are_answered_twice()
    assert {pod.name: deployment.pid(pod) for pod in deployment.local.pods} == pids
    assert {error.status_code for error in askers.errors} <= {503}
    askers.check()
