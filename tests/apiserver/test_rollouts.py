"""Rollouts of a pipeline revision: alongside the old one, whole before it serves, and back again."""

from __future__ import annotations

import pytest

from mmd_api.pipeline import pipeline_revision
from mmd_operator.resources.naming import REVISION_LABEL
from support.cluster.deployments import ANOTHER_MODEL, FIRST_MODEL, SPEC, deployment
from support.cluster.standin import Namespace, eventually

pytestmark = pytest.mark.usefixtures("any_operator")

OLD = pipeline_revision(deployment(SPEC).spec)
NEW = pipeline_revision(deployment({**SPEC, **ANOTHER_MODEL}).spec)


@pytest.fixture
def serving(namespace: Namespace) -> Namespace:
    """A namespace with a deployment that serves its first revision."""
    namespace.apply({**SPEC, "network": {"egress": "Restricted"}})
    namespace.settled(namespace.is_ready)
    assert namespace.get()["status"]["pipelineRevision"] == OLD
    return namespace


def egress_policies(namespace: Namespace) -> set[str]:
    """What those of a deployment are for: gateways, NATS, and the pools of a revision."""
    names = (key.partition("/")[2] for key in namespace.objects() if key.startswith("NetworkPolicy/"))
    return {name.removeprefix("demo.egress-") for name in names if name.startswith("demo.egress-")}


def both_stand(namespace: Namespace) -> None:
    assert namespace.revisions() == {OLD, NEW}


def only(namespace: Namespace, revision: str) -> None:
    assert namespace.revisions() == {revision}
    assert namespace.gateway_revision() == revision


def test_a_complete_revision_serves_and_the_old_one_goes_once_unused(serving: Namespace):
    serving.change(ANOTHER_MODEL)
    eventually(lambda: both_stand(serving))
    eventually(lambda: is_progressing(serving, "BringingUp"))
    assert serving.gateway_revision() == OLD
    assert serving.condition("Ready")[0] == "True"
    held = serving.gateway_pods()[0]
    serving.core.patch_namespaced_pod(
        held.metadata.name, serving.name, {"metadata": {"finalizers": ["example.com/held"]}}
    )

    serving.settled(lambda: gateway_at(serving, NEW))
    serving.settled(lambda: is_progressing(serving, "Draining"))
    assert egress_policies(serving) == {"gateway", "nats", OLD, NEW}
    assert serving.revisions() == {OLD, NEW}  # a gateway pod of the old revision still finishes what it holds
    assert serving.get()["status"]["pipelineRevision"] == NEW

    serving.core.patch_namespaced_pod(held.metadata.name, serving.name, {"metadata": {"finalizers": None}})
    serving.settled(lambda: only(serving, NEW))
    serving.settled(serving.is_ready)
    assert not [o for key, o in serving.objects().items() if o.metadata.labels.get(REVISION_LABEL) == OLD]
    assert egress_policies(serving) == {"gateway", "nats", NEW}
    serving.change({"network": None})
    serving.settled(lambda: egress_is_open(serving))


def egress_is_open(namespace: Namespace) -> None:
    assert not egress_policies(namespace)


def gateway_at(namespace: Namespace, revision: str) -> None:
    assert namespace.gateway_revision() == revision


def is_progressing(namespace: Namespace, reason: str) -> None:
    assert namespace.condition("Progressing")[1] == reason, namespace.condition("Progressing")


def test_a_bad_revision_never_serves_reports_why_and_can_be_reverted(serving: Namespace):
    serving.broken.add(NEW)
    serving.change(ANOTHER_MODEL)
    serving.settled(lambda: serving.stateful_set("decode", NEW))
    crash(serving)
    serving.settled(lambda: is_progressing(serving, "RolloutStuck"))
    message = serving.condition("Progressing")[2]
    assert OLD in message
    assert "no such weights" in message
    assert serving.condition("Degraded")[:2] == ("True", "CrashLoop")
    assert serving.condition("Ready")[0] == "True"
    assert serving.gateway_revision() == OLD
    assert serving.get()["status"]["pipelineRevision"] == OLD
    serving.reported("RolloutStuck", "no such weights")

    serving.change(FIRST_MODEL)
    serving.core.delete_namespaced_pod("crashing", serving.name)
    serving.settled(lambda: only(serving, OLD))
    serving.settled(serving.is_ready)


def crash(namespace: Namespace) -> None:
    """A worker of the new revision that ended with an error, as its kubelet would tell it."""
    labels = namespace.stateful_set("decode", NEW).spec.template.metadata.labels
    namespace.pod("crashing", labels)
    state = {
        "name": "worker",
        "image": "none",
        "imageID": "",
        "ready": False,
        "restartCount": 4,
        "state": {"waiting": {"reason": "CrashLoopBackOff", "message": "back-off 40s"}},
        "lastState": {
            "terminated": {"exitCode": 1, "reason": "Error", "message": "ModelNotFoundError: no such weights"}
        },
    }
    namespace.core.patch_namespaced_pod_status(
        "crashing", namespace.name, {"status": {"containerStatuses": [state]}}
    )


def test_a_gateway_that_others_delete_or_set_back_serves_the_pools_that_are_ready(serving: Namespace):
    serving.broken.add(NEW)
    serving.change(ANOTHER_MODEL)
    serving.settled(lambda: both_stand(serving))
    serving.apps.delete_namespaced_deployment("demo-gateway", serving.name)
    serving.settled(lambda: gateway_comes_back(serving, OLD))
    serving.settled(lambda: answers(serving))
    both_stand(serving)
    earlier = {"spec": {"template": {"metadata": {"labels": {REVISION_LABEL: "cccccccccc"}}}}}
    serving.apps.patch_namespaced_deployment("demo-gateway", serving.name, earlier)
    serving.settled(lambda: gateway_at(serving, OLD))
    both_stand(serving)
    serving.broken.discard(NEW)
    serving.settled(lambda: only(serving, NEW))
    serving.settled(serving.is_ready)


def answers(namespace: Namespace) -> None:
    assert namespace.condition("Ready")[0] == "True", namespace.condition("Ready")


def gateway_comes_back(namespace: Namespace, revision: str) -> None:
    assert "Deployment/demo-gateway" in namespace.objects()
    gateway_at(namespace, revision)


def test_an_autoscaled_pool_begins_a_new_revision_at_its_size(namespace: Namespace):
    pool = {"gpus": 0, "autoscaling": {"minReplicas": 1, "maxReplicas": 8}}
    namespace.apply({**SPEC, "decode": pool})
    namespace.settled(namespace.is_ready)
    name = namespace.stateful_set("decode").metadata.name
    namespace.apps.patch_namespaced_stateful_set_scale(name, namespace.name, {"spec": {"replicas": 5}})
    namespace.settled(namespace.is_ready)
    assert namespace.stateful_set("decode").spec.replicas == 5  # within its bounds: the scaler's business
    namespace.change(ANOTHER_MODEL)
    namespace.settled(namespace.is_ready)
    assert namespace.stateful_set("decode").spec.replicas == 5
    namespace.change({"decode": {"autoscaling": {"maxReplicas": 3}}})
    namespace.settled(lambda: sized(namespace, 3))


def sized(namespace: Namespace, replicas: int) -> None:
    assert namespace.stateful_set("decode").spec.replicas == replicas
