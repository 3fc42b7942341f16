"""An operator of another release, which writes manifests differently, takes over a serving deployment."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from mmd_operator.kube.pauses import Pauses
from mmd_operator.observed.observed import FIELD_MANAGER
from mmd_operator.resources.naming import APPLIED_ANNOTATION, INPUTS_ANNOTATION
from support.cluster.control_plane import ControlPlane
from support.cluster.deployments import SPEC
from support.cluster.operator_process import OperatorProcess, another_release
from support.cluster.standin import Namespace, eventually


@pytest.fixture
def next_release(control_plane: ControlPlane, namespace: Namespace, tmp_path: Path, pauses: Pauses):
    """An operator of the next release, not started yet; the namespace is as the first one left it."""
    first = OperatorProcess(control_plane.kubeconfig(), namespace.name, tmp_path, pauses=pauses)
    second = OperatorProcess(
        control_plane.kubeconfig(), namespace.name, tmp_path, prepare=another_release, pauses=pauses
    )
    try:
        first.start()
        namespace.apply(SPEC)
        namespace.settled(namespace.is_ready)
        pool_pods(namespace, "decode")
        assert first.stop() == 0
        yield second
    finally:
        first.kill()
        second.kill()


@pytest.fixture
def upgraded(namespace: Namespace, next_release: OperatorProcess):
    """A namespace with pods of a first release, its gateway's template, and an operator of the next release that runs."""
    before = gateway_template(namespace)
    next_release.start()
    return namespace, before


def pool_pods(namespace: Namespace, pool: str) -> None:
    """The Ready pods that a StatefulSet controller would have made."""
    made = namespace.stateful_set(pool)
    for ordinal in range(made.spec.replicas):
        name = f"{made.metadata.name}-{ordinal}"
        namespace.pod_of(name, made.spec.template)
        ready = {"conditions": [{"type": "Ready", "status": "True"}]}
        namespace.core.patch_namespaced_pod_status(name, namespace.name, {"status": ready})


def pods(namespace: Namespace) -> dict[str, str]:
    selector = "app.kubernetes.io/component=decode"
    found = namespace.core.list_namespaced_pod(namespace.name, label_selector=selector).items
    return {p.metadata.name: p.metadata.uid for p in found}


def gateway_template(namespace: Namespace) -> Any:
    found = namespace.apps.read_namespaced_deployment("demo-gateway", namespace.name)
    return namespace.core.api_client.sanitize_for_serialization(found.spec.template)


def probe_timeout(namespace: Namespace) -> int:
    (container,) = namespace.stateful_set("decode").spec.template.spec.containers
    return int(container.liveness_probe.timeout_seconds)


def taken_over(namespace: Namespace) -> None:
    """The new release has written the templates for pods to come."""
    assert probe_timeout(namespace) == 6


def test_pods_stay_when_only_the_operator_has_changed(upgraded: tuple[Namespace, Any]) -> None:
    namespace, template = upgraded
    before = pods(namespace)
    assert len(before) == 2
    eventually(lambda: taken_over(namespace))
    namespace.settled(namespace.is_ready)
    namespace.change(
        {"decode": {"autoscaling": None, "replicas": 2}, "gpuBudget": 9}
    )  # a pass with the new templates
    namespace.settled(namespace.is_ready)
    assert pods(namespace) == before
    assert namespace.stateful_set("decode").spec.update_strategy.type == "OnDelete"
    assert gateway_template(namespace) == template


def test_pods_that_are_replaced_for_another_reason_have_the_new_template(
    upgraded: tuple[Namespace, Any],
) -> None:
    namespace, template = upgraded
    before = pods(namespace)
    eventually(lambda: taken_over(namespace))
    namespace.settled(namespace.is_ready)
    namespace.change({"decode": {"maxSequences": 7}, "gateway": {"resources": {"cpu": "1"}}})
    namespace.settled(lambda: one_is_gone(namespace, before))
    eventually(lambda: gateway_is_new(namespace, template))


def one_is_gone(namespace: Namespace, before: dict[str, str]) -> None:
    """The first to be replaced is the one with the highest ordinal, and the other stays meanwhile."""
    assert [name[-1] for name in before if name not in pods(namespace)] == ["1"]


def gateway_is_new(namespace: Namespace, template: Any) -> None:
    now = gateway_template(namespace)
    assert (
        now["metadata"]["annotations"][INPUTS_ANNOTATION]
        != template["metadata"]["annotations"][INPUTS_ANNOTATION]
    )
    assert now["spec"]["containers"][0]["livenessProbe"]["timeoutSeconds"] == 6


IMAGE = {"image": "rival/image:1"}
EDITS = {
    "image": IMAGE,
    "variable": {"env": [{"name": "MMD_GRACE_SECONDS", "value": "1"}]},
    "removed": {"env": [{"name": "MMD_NATS_INBOX", "$patch": "delete"}]},
}


@pytest.mark.parametrize("edit", EDITS.values(), ids=EDITS)
def test_a_template_changed_while_no_operator_ran_is_not_adopted(
    namespace: Namespace, next_release: OperatorProcess, edit: dict[str, Any]
) -> None:
    template = gateway_template(namespace)
    tamper(namespace, edit)
    next_release.start()
    namespace.settled(lambda: restored(namespace, template))


def test_pods_of_a_release_that_left_no_digest_stay_too(
    namespace: Namespace, next_release: OperatorProcess
) -> None:
    template = gateway_template(namespace)
    forget_digest(namespace)
    next_release.start()
    eventually(lambda: taken_over(namespace))
    namespace.settled(namespace.is_ready)
    assert gateway_template(namespace) == template
    eventually(lambda: digest_is_known(namespace))


def test_a_template_without_a_digest_is_not_adopted_from_its_owner(
    namespace: Namespace, next_release: OperatorProcess
) -> None:
    template = gateway_template(namespace)
    forget_digest(namespace)
    tamper(namespace, IMAGE)
    next_release.start()
    namespace.settled(lambda: restored(namespace, template))


def forget_digest(namespace: Namespace) -> None:
    """As earlier releases left the gateway's Deployment."""
    body = {"metadata": {"annotations": {APPLIED_ANNOTATION: None}}}
    namespace.apps.patch_namespaced_deployment(
        "demo-gateway", namespace.name, body, field_manager=FIELD_MANAGER
    )


def digest_is_known(namespace: Namespace) -> None:
    found = namespace.apps.read_namespaced_deployment("demo-gateway", namespace.name)
    assert found.metadata.annotations.get(APPLIED_ANNOTATION)


def test_a_kept_template_that_another_client_then_changes_is_restored(
    upgraded: tuple[Namespace, Any],
) -> None:
    namespace, template = upgraded
    eventually(lambda: taken_over(namespace))
    namespace.settled(namespace.is_ready)
    assert gateway_template(namespace) == template
    tamper(namespace, IMAGE)
    namespace.settled(lambda: restored(namespace, template))


def tamper(namespace: Namespace, edit: dict[str, Any]) -> None:
    before = gateway_template(namespace)
    body = {"spec": {"template": {"spec": {"containers": [{"name": "gateway", **edit}]}}}}
    namespace.apps.patch_namespaced_deployment("demo-gateway", namespace.name, body, field_manager="rival")
    assert gateway_template(namespace) != before


def restored(namespace: Namespace, before: Any) -> None:
    """As the next release builds it, which differs from the first in the timeouts of probes alone."""
    expected = json.dumps(before).replace('"timeoutSeconds": 5', '"timeoutSeconds": 6')
    assert gateway_template(namespace) == json.loads(expected)
