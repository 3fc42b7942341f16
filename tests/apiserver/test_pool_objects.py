"""MultimodalPools on a real API server: kubectl scales a pool, an HPA may name it, and a size that is not theirs to set is reverted."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from kubernetes import client

from mmd_api.pool_resource import POOL_KIND, POOL_PLURAL
from mmd_api.resource import API_VERSION, GROUP, VERSION
from support.cluster.control_plane import binaries
from support.cluster.shared_server import AnyOperator
from support.cluster.standin import Namespace

from .fleet import IDLE, Fleet, assert_condition, assert_drain_requested, scaled


@pytest.fixture
def fleet(namespace: Namespace, any_operator: AnyOperator) -> Iterator[Fleet]:
    made = Fleet(namespace)
    yield made
    made.stop()


def kubectl(kubeconfig: Path, namespace: Namespace, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [
            str(binaries() / "kubectl"),
            f"--kubeconfig={kubeconfig}",
            f"--namespace={namespace.name}",
            *arguments,
        ],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def scale(kubeconfig: Path, namespace: Namespace, pool: str, replicas: int) -> None:
    result = kubectl(kubeconfig, namespace, "scale", f"mmp/demo-{pool}", f"--replicas={replicas}")
    assert result.returncode == 0, result.stderr


def size_of(namespace: Namespace, pool: str) -> tuple[int, int, int] | None:
    """Desired, present and Ready replicas, by the `scale` subresource and the status; None where there is no object."""
    name = f"demo-{pool}"
    where = (GROUP, VERSION, namespace.name, POOL_PLURAL, name)
    listed = namespace.custom.list_namespaced_custom_object(
        *where[:4], field_selector=f"metadata.name={name}"
    )
    if not any("status" in item for item in listed["items"]):
        return None
    scale = namespace.custom.get_namespaced_custom_object_scale(*where)
    status = namespace.custom.get_namespaced_custom_object(*where)["status"]
    assert scale["status"]["selector"] == status["selector"]
    return scale["spec"]["replicas"], scale["status"]["replicas"], status["readyReplicas"]


def assert_sizes(namespace: Namespace, pool: str, *expected: int) -> None:
    assert size_of(namespace, pool) == expected


def test_kubectl_scales_an_external_pool_and_no_other(kubeconfig: Path, fleet: Fleet):
    namespace = fleet.namespace
    namespace.apply(scaled(mode="External"))
    fleet.until(namespace.is_ready)
    fleet.until(lambda: assert_sizes(namespace, "encoder", 1, 1, 1))

    scale(kubeconfig, namespace, "encoder", 9)
    fleet.until(lambda: fleet.assert_size("encoder", 3))
    fleet.until(lambda: assert_condition(fleet, "ScalingLimited", "True", "MaxReplicas"))
    fleet.until(lambda: assert_sizes(namespace, "encoder", 9, 3, 3))
    namespace.reported("Scaled", "from 1 to 3 pods; encoder scales from 1 to 3 replicas (External)")

    for pod in fleet.pods_of("encoder"):
        pod.load = IDLE
    last = fleet.pods_of("encoder")[2]
    last.holds_work = True
    scale(kubeconfig, namespace, "encoder", 2)
    fleet.until(lambda: assert_drain_requested(last))
    fleet.assert_size("encoder", 3)
    last.holds_work = False
    fleet.until(lambda: fleet.assert_size("encoder", 2))

    assert kubectl(kubeconfig, namespace, "delete", "mmp/demo-encoder").returncode == 0
    fleet.until(lambda: assert_sizes(namespace, "encoder", 2, 2, 2))

    scale(kubeconfig, namespace, "decode", 4)
    namespace.reported("SizeReverted", "set spec.decode.autoscaling.mode to External")
    fleet.until(lambda: assert_sizes(namespace, "decode", 1, 1, 1))
    fleet.assert_size("decode", 1)

    shown = kubectl(kubeconfig, namespace, "get", "mmp")
    assert shown.stdout.splitlines()[0].split() == ["NAME", "DESIRED", "REPLICAS", "READY", "AGE"]
    refused = kubectl(
        kubeconfig, namespace, "patch", "mmp/demo-encoder", "--type=merge", '--patch={"spec":{"replicas":1001}}'
    )  # fmt: skip
    assert "spec.replicas" in refused.stderr


def test_an_hpa_may_name_a_pool(shared_api: client.ApiClient, namespace: Namespace):
    hpa = {
        "metadata": {"name": "demo-encoder"},
        "spec": {
            "scaleTargetRef": {"apiVersion": API_VERSION, "kind": POOL_KIND, "name": "demo-encoder"},
            "minReplicas": 1,
            "maxReplicas": 4,
            "metrics": [
                {"type": "Resource", "resource": {"name": "cpu", "target": {"type": "Utilization", "averageUtilization": 70}}}
            ],
        },
    }  # fmt: skip
    client.AutoscalingV2Api(shared_api).create_namespaced_horizontal_pod_autoscaler(
        namespace.name, hpa, field_validation="Strict"
    )
