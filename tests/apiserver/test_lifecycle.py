"""A deployment's life against a real API server: made, whole, changed, deleted."""

from __future__ import annotations

from operator_process import OperatorProcess
from standin import Namespace, eventually

SPEC = {
    "model": {"id": "builtin/demo", "dtype": "Float32"},
    "encoder": {"gpus": 0},
    "prefill": {"gpus": 0},
    "decode": {"gpus": 0, "replicas": 2},
    "transfer": {"kv": {"backend": "Gloo"}},
}


def test_a_deployment_is_made_becomes_ready_and_goes_without_a_trace(
    namespace: Namespace, operator: OperatorProcess
):
    namespace.apply(SPEC)
    namespace.settled(namespace.is_ready)
    status = namespace.get()["status"]
    assert status["poolsSummary"] == "E 1/1 P 1/1 D 2/2"
    assert status["pools"]["decode"]["desired"] == 2
    assert status["pools"]["decode"]["revision"] == status["pipelineRevision"]
    assert status["endpoint"] == f"http://demo-gateway.{namespace.name}.svc:8000"
    owners = {o.metadata.owner_references[0].uid for o in namespace.objects().values()}
    assert owners == {namespace.get()["metadata"]["uid"]}
    assert namespace.events("Created")

    namespace.delete()
    namespace.settled(lambda: _gone(namespace))
    assert not namespace.objects()
    assert namespace.events("Removed")


def _gone(namespace: Namespace) -> None:
    assert not namespace.exists()


def test_nothing_is_written_when_nothing_changes(namespace: Namespace, operator: OperatorProcess):
    namespace.apply(SPEC)
    namespace.settled(namespace.is_ready)
    before = {key: o.metadata.resource_version for key, o in namespace.objects().items()}
    version = namespace.get()["metadata"]["resourceVersion"]
    namespace.core.create_namespaced_config_map(
        namespace.name,
        {"metadata": {"name": "noise", "labels": {"serving.multimodal.dev/deployment": "demo"}}},
    )
    namespace.change({"paused": False})
    eventually(lambda: None)
    assert {
        key: o.metadata.resource_version for key, o in namespace.objects().items() if key in before
    } == before
    assert namespace.get()["metadata"]["resourceVersion"] == version
