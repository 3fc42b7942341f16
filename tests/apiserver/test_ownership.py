"""What is the operator's, what is the scaler's, what is somebody else's."""

from __future__ import annotations

import pytest
from deployments import SPEC
from standin import Namespace, eventually

pytestmark = pytest.mark.usefixtures("operator")


@pytest.fixture
def serving(namespace: Namespace) -> Namespace:
    namespace.apply(SPEC)
    namespace.settled(namespace.is_ready)
    return namespace


def test_foreign_edits_of_owned_fields_are_undone_and_others_are_left(serving: Namespace):
    service = "demo-gateway"
    edit = {
        "metadata": {"labels": {"app.kubernetes.io/component": "stolen", "team": "blue"}},
        "spec": {"selector": {"app.kubernetes.io/component": "stolen"}, "sessionAffinity": "ClientIP"},
    }
    serving.core.patch_namespaced_service(service, serving.name, edit)

    def mended() -> None:
        found = serving.core.read_namespaced_service(service, serving.name)
        assert found.spec.selector["app.kubernetes.io/component"] == "gateway"
        assert found.metadata.labels["app.kubernetes.io/component"] == "gateway"
        assert found.metadata.labels["team"] == "blue"
        assert found.spec.session_affinity == "ClientIP"

    eventually(mended)
    eventually(lambda: repaired(serving, "Service demo-gateway"))


def repaired(namespace: Namespace, what: str) -> None:
    assert any(what in message for message in namespace.events("Repaired")), namespace.events("Repaired")


def test_a_field_taken_by_a_forced_apply_is_taken_back(serving: Namespace):
    name = serving.stateful_set("decode").metadata.name
    serving.apps.patch_namespaced_stateful_set(
        name,
        serving.name,
        {"spec": {"template": {"spec": {"terminationGracePeriodSeconds": 1}}}},
        field_manager="somebody",
        force=None,
    )

    def mended() -> None:
        template = serving.stateful_set("decode").spec.template
        assert template.spec.termination_grace_period_seconds == 120

    eventually(mended)


def test_a_deleted_object_is_made_again(serving: Namespace):
    old = serving.core.read_namespaced_config_map("demo-nats", serving.name).metadata.uid
    serving.core.delete_namespaced_config_map("demo-nats", serving.name)

    def made_again() -> None:
        found = [c for c in serving.core.list_namespaced_config_map(serving.name).items]
        uids = [c.metadata.uid for c in found if c.metadata.name == "demo-nats"]
        assert uids
        assert uids != [old]

    eventually(made_again)


def test_a_size_that_somebody_else_set_on_a_fixed_pool_is_set_back(serving: Namespace):
    name = serving.stateful_set("decode").metadata.name
    serving.apps.patch_namespaced_stateful_set_scale(name, serving.name, {"spec": {"replicas": 7}})

    def set_back() -> None:
        assert serving.stateful_set("decode").spec.replicas == 2
        assert any("from 7 to 2" in message for message in serving.events("Scaled"))

    eventually(set_back)


def test_the_size_outlives_applies_that_leave_it_out(serving: Namespace):
    """An applier that stops writing a field it alone owns resets it: the scaler must own it too."""
    managers = {
        entry.manager
        for entry in serving.stateful_set("decode").metadata.managed_fields
        if "f:replicas" in entry.fields_v1.get("f:spec", {})
    }
    assert "multimodal-operator-scaler" in managers
    serving.change({"decode": {"resources": {"memory": "2Gi"}}})

    def applied() -> None:
        limits = serving.stateful_set("decode").spec.template.spec.containers[0].resources.limits
        assert limits == {"memory": "2Gi"}

    eventually(applied)
    assert serving.stateful_set("decode").spec.replicas == 2


def test_an_object_of_somebody_else_is_refused_left_alone_and_named(namespace: Namespace):
    namespace.core.create_namespaced_config_map(
        namespace.name, {"metadata": {"name": "demo-nats"}, "data": {"mine": "yes"}}
    )
    namespace.apply(SPEC)

    def refused() -> None:
        status, reason, message = namespace.condition("Degraded")
        assert (status, reason) == ("True", "NameTaken")
        assert "ConfigMap demo-nats" in message
        assert "delete it" in message

    eventually(refused)
    found = namespace.core.read_namespaced_config_map("demo-nats", namespace.name)
    assert found.data == {"mine": "yes"}
    assert not found.metadata.owner_references
    namespace.core.delete_namespaced_config_map("demo-nats", namespace.name)
    namespace.settled(namespace.is_ready)


def test_an_orphan_of_this_deployment_is_adopted(namespace: Namespace):
    labels = {
        "serving.multimodal.dev/deployment": "demo",
        "app.kubernetes.io/managed-by": "multimodal-operator",
    }
    namespace.core.create_namespaced_config_map(
        namespace.name, {"metadata": {"name": "demo-nats", "labels": labels}, "data": {"nats.conf": "old"}}
    )
    namespace.apply(SPEC)
    namespace.settled(namespace.is_ready)
    found = namespace.core.read_namespaced_config_map("demo-nats", namespace.name)
    assert found.metadata.owner_references[0].uid == namespace.get()["metadata"]["uid"]
    assert "jetstream" in found.data["nats.conf"]


def test_a_quota_that_is_too_small_is_told_in_a_condition(namespace: Namespace):
    namespace.core.create_namespaced_resource_quota(
        namespace.name, {"metadata": {"name": "small"}, "spec": {"hard": {"count/services": "1"}}}
    )
    eventually(lambda: counted(namespace))
    namespace.apply(SPEC)

    def told() -> None:
        status, reason, message = namespace.condition("Degraded")
        assert (status, reason) == ("True", "QuotaExceeded"), (reason, message)
        assert "raise the namespace's ResourceQuota" in message

    eventually(told)
    namespace.core.delete_namespaced_resource_quota("small", namespace.name)
    namespace.settled(namespace.is_ready, 90)


def counted(namespace: Namespace) -> None:
    """Without a controller-manager nobody counts: the test does."""
    status = {"status": {"hard": {"count/services": "1"}, "used": {"count/services": "1"}}}
    namespace.core.patch_namespaced_resource_quota_status("small", namespace.name, status)
