"""A deployment's life against a real API server: made, whole, changed, paused, deleted."""

from __future__ import annotations

import json

import pytest

from support.cluster.deployments import SPEC
from support.cluster.standin import Namespace, eventually, is_gone

pytestmark = pytest.mark.usefixtures("any_operator")


def test_a_deployment_is_made_becomes_ready_and_goes_without_a_trace(namespace: Namespace):
    namespace.apply(SPEC)
    namespace.settled(namespace.is_ready)
    status = namespace.get()["status"]
    assert status["poolsSummary"] == "E 1/1 P 1/1 D 2/2"
    assert status["pools"]["decode"] == {
        "desired": 2,
        "ready": 2,
        "draining": 0,
        "revision": status["pipelineRevision"],
    }
    assert status["endpoint"] == f"http://demo-gateway.{namespace.name}.svc:8000"
    owners = {o.metadata.owner_references[0].uid for o in namespace.objects().values()}
    assert owners == {namespace.get()["metadata"]["uid"]}
    namespace.reported("Created", "StatefulSet")

    namespace.delete()
    namespace.settled(lambda: is_gone(namespace))
    assert not namespace.objects()
    namespace.reported("Removed")


def test_nothing_is_written_for_a_change_that_changes_nothing(namespace: Namespace):
    namespace.apply(SPEC)
    namespace.settled(namespace.is_ready)
    before = versions(namespace)
    namespace.change({"gpuBudget": 64})
    namespace.change({"gpuBudget": None})
    namespace.settled(namespace.is_ready)
    assert versions(namespace) == before


def test_a_runtime_setting_is_written_to_the_configuration_alone(namespace: Namespace):
    namespace.apply(SPEC)
    namespace.settled(namespace.is_ready)
    before = versions(namespace)
    revision = namespace.get()["status"]["pipelineRevision"]
    namespace.change({"slo": {"ttftMilliseconds": 500}, "gateway": {"webPage": False, "maxRetries": 1}})
    namespace.settled(lambda: promises(namespace, revision, 500))
    namespace.settled(namespace.is_ready)
    after = versions(namespace)
    assert {key for key in before if before[key] != after[key]} == {f"ConfigMap/demo-{revision}"}


def versions(namespace: Namespace) -> dict[str, str]:
    return {key: o.metadata.resource_version for key, o in namespace.objects().items()}


def promises(namespace: Namespace, revision: str, milliseconds: int) -> None:
    files = namespace.objects()[f"ConfigMap/demo-{revision}"].data
    assert json.loads(files["gateway.json"])["spec"].get("slo") == {"ttftMilliseconds": milliseconds}


def test_a_paused_deployment_is_left_unchanged_until_it_is_resumed(namespace: Namespace):
    namespace.apply(SPEC)
    namespace.settled(namespace.is_ready)
    namespace.change({"paused": True})
    eventually(lambda: has(namespace, "Progressing", "Paused"))
    namespace.change({"decode": {"replicas": 5}})
    generation = namespace.get()["metadata"]["generation"]
    eventually(lambda: acted_on(namespace, generation))
    assert namespace.stateful_set("decode").spec.replicas == 2
    namespace.change({"paused": False})
    namespace.settled(namespace.is_ready)
    assert namespace.stateful_set("decode").spec.replicas == 5
    namespace.reported("Scaled", "from 2 to 5")


def has(namespace: Namespace, kind: str, reason: str) -> None:
    assert namespace.condition(kind)[1] == reason, namespace.get().get("status")


def acted_on(namespace: Namespace, generation: int) -> None:
    assert namespace.get()["status"]["observedGeneration"] >= generation


def test_a_paused_deployment_can_be_deleted(namespace: Namespace):
    namespace.apply({**SPEC, "paused": True})
    eventually(lambda: has(namespace, "Progressing", "Paused"))
    assert not namespace.objects()
    namespace.delete()
    namespace.settled(lambda: is_gone(namespace))


def test_a_removed_pool_goes_after_the_rest_has_taken_over(namespace: Namespace):
    namespace.apply(SPEC)
    namespace.settled(namespace.is_ready)
    before = set(namespace.objects())
    namespace.change({"encoder": None})
    eventually(lambda: prefill_encodes(namespace))
    assert before <= set(namespace.objects())  # its pods are not replaced yet: the encoder is still needed
    namespace.settled(lambda: no_encoder(namespace))
    namespace.settled(namespace.is_ready)
    assert namespace.get()["status"]["poolsSummary"] == "P 1/1 D 2/2"
    assert namespace.condition("EncoderReady") == ("", "", "")


def prefill_encodes(namespace: Namespace) -> None:
    assert "encode,prefill" in namespace.stateful_set("prefill").spec.template.spec.containers[0].args


def no_encoder(namespace: Namespace) -> None:
    assert not [key for key in namespace.objects() if "encoder" in key]


def test_a_change_of_one_pools_resources_rolls_that_pool_alone(namespace: Namespace):
    namespace.apply(SPEC)
    namespace.settled(namespace.is_ready)
    before = templates(namespace)
    namespace.change({"prefill": {"resources": {"memory": "3Gi"}}})
    eventually(lambda: asks_for(namespace, "3Gi"))
    changed = {name for name, template in templates(namespace).items() if template != before[name]}
    assert changed == {namespace.stateful_set("prefill").metadata.name}


def templates(namespace: Namespace) -> dict[str, object]:
    sets = namespace.apps.list_namespaced_stateful_set(namespace.name).items
    deployments = namespace.apps.list_namespaced_deployment(namespace.name).items
    return {item.metadata.name: item.spec.template.to_dict() for item in [*sets, *deployments]}


def asks_for(namespace: Namespace, memory: str) -> None:
    worker = namespace.stateful_set("prefill").spec.template.spec.containers[0]
    assert (worker.resources.limits or {}).get("memory") == memory
