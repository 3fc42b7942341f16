"""A real operator that reads real workers, and a Prometheus that watches both: only controllers, kubelet and nodes are played."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml
from kubernetes import client

from mmd_cli.local.pods import free_port
from support.cluster.control_plane import ControlPlane
from support.cluster.operator_process import OperatorProcess
from support.cluster.standin import Namespace
from support.servers.prometheus_server import Prometheus, hurried
from support.serving.local_deployment import Deployment
from support.serving.observed_fixture import observed_deployment
from support.serving.under_load import about_videos, clients, hung

from .discovery import Discovery, configuration
from .fleet import QUICK, Fleet, assert_condition

pytestmark = [
    pytest.mark.processes,
    pytest.mark.xdist_group("operator-limited"),
    pytest.mark.timeout(600),
]

VIDEOS_AT_ONCE = 4


@dataclass
class Watched:
    """A deployment of real workers under an operator, and the Prometheus that watches."""

    workers: Deployment
    fleet: Fleet
    prometheus: Prometheus


@pytest.fixture
def watched(control_plane: ControlPlane, api: client.ApiClient, tmp_path: Path) -> Iterator[Watched]:
    file = observed_deployment(tmp_path / "demo.yaml", "demo")
    spec = yaml.safe_load(file.read_text())["spec"]
    del spec["encoder"]["replicas"]
    spec["encoder"]["autoscaling"] = QUICK
    spec["encoder"]["schedulingDeadlineSeconds"] = 0
    namespace, port = Namespace.create(api, "limited"), free_port()
    operator = OperatorProcess(control_plane.kubeconfig(), namespace.name, tmp_path, health_port=port)
    discovery = Discovery(namespace, tmp_path / "pods.json")
    config = configuration(port, hurried(tmp_path / "rules.yaml", windows=10, waits=300), discovery.file)
    operator.start()
    try:
        with Deployment(file, gateways=1) as workers, Prometheus(tmp_path, config) as prometheus:
            real = {pod.name: pod.http_url for pod in workers.local.pods}
            (encoder,) = workers.pods("encoder")
            revision = workers.state(encoder)["revision"]
            fleet = Fleet(
                namespace, {**real, f"demo-gateway-{revision}": workers.pods("gateway")[0].admin_url}
            )
            fleet.unschedulable = {f"{encoder.name.rpartition('-')[0]}-{n}" for n in range(1, 3)}
            try:
                namespace.apply(spec)
                fleet.until(namespace.is_ready)
                fleet.until(lambda: assert_condition(fleet, "MetricsFresh", "True", "AllReporting"))
                discovery.write()
                prometheus.until_scraped(len(real))
                yield Watched(workers, fleet, prometheus)
            finally:
                fleet.stop()
    finally:
        operator.kill()


def test_a_backlog_that_grows_where_no_gpu_is_left_is_an_alert(watched: Watched) -> None:
    """The encoder hangs, the operator asks for another, and no node has room for it."""
    workers, fleet, prometheus = watched.workers, watched.fleet, watched.prometheus
    (encoder,) = workers.pods("encoder")
    where = {"namespace": fleet.namespace.name, "deployment": "demo"}
    expected = {**where, "role": "encode", "reason": "Unschedulable"}
    begun = time.time()
    with clients(workers) as submit:
        asked = [submit(about_videos(1))]
        assert asked[0].result(timeout=60)

        def speed_is_known() -> None:
            assert prometheus.query('mmd_encode_work_per_second{modality="video"} > 0')
            assert "videoMilli" in fleet.namespace.get()["status"]["pools"]["encoder"]["throughput"]

        fleet.until(speed_is_known)
        with hung(workers.pid(encoder)):

            def fires() -> None:
                asked.extend(submit(about_videos(VIDEOS_AT_ONCE)) for _ in range(8))
                fired = prometheus.firing("MmdBacklogGrowsLimited", begun)
                assert any(expected.items() <= alert.items() for alert in fired), fired

            fleet.until(fires)
            assert_condition(fleet, "ScalingLimited", "True", "Unschedulable", "encoder")
        assert all(job.result(timeout=150) for job in asked)
    assert prometheus.firing("MmdRequestsLost", begun) == []
