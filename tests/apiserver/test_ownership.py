"""What is the operator's, what is the scaler's, what is somebody else's."""

from __future__ import annotations

import pytest

from mmd_api.pipeline import pipeline_revision
from support.cluster.deployments import ANOTHER_MODEL, SPEC, deployment
from support.cluster.standin import Namespace, counted, eventually

pytestmark = pytest.mark.usefixtures("any_operator")


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

    def restored() -> None:
        found = serving.core.read_namespaced_service(service, serving.name)
        assert found.spec.selector["app.kubernetes.io/component"] == "gateway"
        assert found.metadata.labels["app.kubernetes.io/component"] == "gateway"
        assert found.metadata.labels["team"] == "blue"
        assert found.spec.session_affinity == "ClientIP"

    eventually(restored)
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

    def restored() -> None:
        template = serving.stateful_set("decode").spec.template
        assert template.spec.termination_grace_period_seconds == 120

    eventually(restored)


def test_a_deleted_object_is_made_again(serving: Namespace):
    old = serving.core.read_namespaced_config_map("demo-nats", serving.name).metadata.uid
    serving.core.delete_namespaced_config_map("demo-nats", serving.name)

    def made_again() -> None:
        found = [c for c in serving.core.list_namespaced_config_map(serving.name).items]
        uids = [c.metadata.uid for c in found if c.metadata.name == "demo-nats"]
        assert uids
        assert uids != [old]

    eventually(made_again)


def test_a_size_that_another_client_set_on_a_fixed_pool_is_reverted(serving: Namespace):
    name = serving.stateful_set("decode").metadata.name
    serving.apps.patch_namespaced_stateful_set_scale(name, serving.name, {"spec": {"replicas": 7}})

    def set_back() -> None:
        assert serving.stateful_set("decode").spec.replicas == 2
        assert any("from 7 to 2" in message for message in serving.events("Scaled"))

    eventually(set_back)


@pytest.mark.parametrize("replicas", [0, 3])
def test_sizes_that_another_client_set_on_the_gateway_and_nats_are_reverted(
    serving: Namespace, replicas: int
):
    size = {"spec": {"replicas": replicas}}
    serving.apps.patch_namespaced_stateful_set_scale("demo-nats", serving.name, size)
    serving.apps.patch_namespaced_deployment_scale("demo-gateway", serving.name, size)

    def set_back() -> None:
        nats = serving.apps.read_namespaced_stateful_set("demo-nats", serving.name)
        gateway = serving.apps.read_namespaced_deployment("demo-gateway", serving.name)
        assert (nats.spec.replicas, gateway.spec.replicas) == (1, 1)

    serving.settled(set_back)
    serving.reported("Scaled", f"StatefulSet demo-nats from {replicas} to 1 pods")
    serving.reported("Scaled", f"Deployment demo-gateway from {replicas} to 1 pods")
    serving.change({"gateway": {"replicas": 2}})
    serving.settled(lambda: gateways(serving, 2))
    serving.settled(serving.is_ready)


def gateways(namespace: Namespace, replicas: int) -> None:
    assert namespace.apps.read_namespaced_deployment("demo-gateway", namespace.name).spec.replicas == replicas


def test_the_gateway_keeps_its_size_while_a_rollout_holds_it(serving: Namespace):
    serving.broken |= {pipeline_revision(deployment({**SPEC, **ANOTHER_MODEL}).spec)}
    serving.change({**ANOTHER_MODEL, "gateway": {"replicas": 2}})
    serving.settled(lambda: gateways(serving, 2))
    serving.apps.patch_namespaced_deployment_scale("demo-gateway", serving.name, {"spec": {"replicas": 5}})
    serving.settled(lambda: gateways(serving, 2))
    serving.reported("Scaled", "Deployment demo-gateway from 5 to 2 pods")


def test_every_disruption_budget_lets_a_drain_take_the_only_pod(serving: Namespace):
    budgets = {
        b.metadata.name: b.spec
        for b in serving.policy.list_namespaced_pod_disruption_budget(serving.name).items
    }
    revision = serving.get()["status"]["pipelineRevision"]
    pools = {f"demo-{pool}-{revision}" for pool in ("encoder", "prefill", "decode")}
    assert budgets.keys() == {"demo-nats", "demo-gateway"} | pools
    for name, budget in budgets.items():
        assert (budget.max_unavailable, budget.min_available) == (1, None), name
        assert budget.unhealthy_pod_eviction_policy == "AlwaysAllow"


def test_nats_is_scheduled_as_in_the_spec(serving: Namespace):
    serving.change(
        {
            "nats": {
                "nodeSelector": {"kind": "cpu"},
                "tolerations": [{"key": "cpu", "operator": "Exists"}],
                "template": {
                    "priorityClassName": "high",
                    "labels": {"team": "blue"},
                    "annotations": {"a": "b"},
                },
            }
        }
    )

    def placed() -> None:
        template = serving.apps.read_namespaced_stateful_set("demo-nats", serving.name).spec.template
        assert template.spec.node_selector == {"kind": "cpu"}
        assert [t.key for t in template.spec.tolerations] == ["cpu"]
        assert template.spec.priority_class_name == "high"
        assert template.metadata.labels["team"] == "blue"
        assert template.metadata.annotations["a"] == "b"

    eventually(placed)


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


def test_an_object_of_another_owner_is_left_unchanged_and_named(namespace: Namespace):
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


def test_a_quota_that_is_too_small_is_reported_in_a_condition(namespace: Namespace):
    namespace.core.create_namespaced_resource_quota(
        namespace.name, {"metadata": {"name": "small"}, "spec": {"hard": {"count/services": "1"}}}
    )
    eventually(lambda: counted(namespace))
    namespace.apply(SPEC)

    def told() -> None:
        status, reason, message = namespace.condition("Degraded")
        assert (status, reason) == ("True", "QuotaExceeded"), (reason, message)
        assert "raise ResourceQuota small, or request less" in message

    eventually(told)
    namespace.core.delete_namespaced_resource_quota("small", namespace.name)
    namespace.settled(namespace.is_ready)
