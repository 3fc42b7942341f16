"""Deleting a namespace ends although it takes no new object, no Event either, and takes the operator's Role with it."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

import pytest

from mmd_operator.kube.pauses import Pauses
from support.cluster.control_plane import ControlPlane
from support.cluster.deployments import SPEC
from support.cluster.operator_process import LeasePlace, OperatorProcess
from support.cluster.standin import Namespace, eventually

from .rights import RULES, bind, token_of

pytestmark = pytest.mark.xdist_group("cluster-wide")
ENDS_SECONDS = 3.0
"""How long the container takes to end; a deletion timestamp is 30 s, the grace period, ahead."""


@pytest.fixture(params=["a ClusterRole", "a Role in the namespace"])
def operator(
    request: pytest.FixtureRequest,
    control_plane: ControlPlane,
    namespace: Namespace,
    tmp_path: Path,
    pauses: Pauses,
) -> Iterator[OperatorProcess]:
    """An operator whose Lease is not in the namespace that is deleted, but whose rights may be."""
    if request.param == "a ClusterRole":
        kubeconfig = control_plane.kubeconfig()
    else:
        account = ("default", namespace.name)
        namespace.core.create_namespaced_service_account("default", {"metadata": {"name": namespace.name}})
        bind(namespace, namespace.name, RULES["rules"], account)
        bind(namespace, "default", RULES["leaseRules"], account)
        kubeconfig = control_plane.kubeconfig(token_of(namespace, *account))
    process = OperatorProcess(
        kubeconfig, namespace.name, tmp_path, lease=LeasePlace("default"), pauses=pauses
    )
    process.start()
    yield process
    process.kill()


def test_deleting_a_namespace_ends_while_a_deployment_serves_in_it(
    control_plane: ControlPlane, namespace: Namespace, operator: OperatorProcess
) -> None:
    """With the real namespace controller, which removes the pods first and then everything else in no order."""
    control_plane.start_controllers()
    namespace.apply(SPEC)
    namespace.settled(namespace.is_ready)
    labels = namespace.stateful_set("decode").spec.template.metadata.labels
    namespace.pod("on-a-node", labels, node="somewhere")
    namespace.core.delete_namespace(namespace.name)

    def gone() -> None:
        for pod in namespace.core.list_namespaced_pod(namespace.name).items:
            asked = pod.metadata.deletion_timestamp
            if (
                asked
                and pod.spec.node_name
                and (datetime.now(UTC) - asked).total_seconds() > ENDS_SECONDS - 30
            ):
                namespace._end_pod(pod.metadata.name)  # the kubelet, once the container has ended
        left = namespace.core.list_namespace(field_selector=f"metadata.name={namespace.name}").items
        assert not left, left[0].status.conditions

    eventually(gone)


def test_a_draining_gateway_does_not_hold_up_namespace_deletion(
    control_plane: ControlPlane, namespace: Namespace, operator: OperatorProcess
) -> None:
    """Its requests cannot end well any more: the namespace controller has ended their workers and NATS at the same moment."""
    control_plane.start_controllers()
    namespace.apply(SPEC)
    namespace.settled(namespace.is_ready)
    labels = namespace.gateway_pods()[0].metadata.labels
    namespace.pod("drains", labels, node="somewhere", grace_seconds=600)
    namespace.core.delete_namespace(namespace.name)

    def gone() -> None:
        for pod in namespace.core.list_namespaced_pod(namespace.name).items:
            deadline = pod.metadata.deletion_timestamp
            if deadline and pod.spec.node_name and datetime.now(UTC) >= deadline:
                namespace._end_pod(pod.metadata.name)  # the kubelet, at the end of the grace period
        left = namespace.core.list_namespace(field_selector=f"metadata.name={namespace.name}").items
        assert not left, left[0].status.conditions

    eventually(gone)
