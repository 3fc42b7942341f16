"""Every state that a user can get pods into shows as a condition with its remedy, and goes when it is fixed."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest

from support.cluster.deployments import SPEC
from support.cluster.standin import Namespace, eventually

pytestmark = pytest.mark.usefixtures("any_operator")


def waiting(
    reason: str, message: str, restarts: int = 0, last: dict[str, Any] | None = None
) -> dict[str, Any]:
    state = {
        "name": "worker",
        "image": "none",
        "imageID": "",
        "ready": False,
        "restartCount": restarts,
        "state": {"waiting": {"reason": reason, "message": message}},
    }
    return {"containerStatuses": [{**state, "lastState": {"terminated": last}} if last else state]}


def unscheduled(message: str) -> dict[str, Any]:
    condition = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": message}
    return {"conditions": [condition]}


STATES: dict[str, tuple[dict[str, Any], list[str]]] = {
    "ImageNotPulled": (
        waiting("ImagePullBackOff", 'Back-off pulling image "nowhere/worker:1"'),
        ["nowhere/worker:1", "spec.image.worker", "pullSecrets"],
    ),
    "SecretMissing": (
        waiting("CreateContainerConfigError", 'secret "hub-token" not found'),
        ["hub-token", "create the Secret"],
    ),
    "VolumePending": (
        unscheduled('0/3 nodes are available: persistentvolumeclaim "weights" not found.'),
        ["weights", "spec.model.storage.claimName"],
    ),
    "NoGpu": (
        unscheduled("0/3 nodes are available: 3 Insufficient nvidia.com/gpu."),
        ["Insufficient nvidia.com/gpu", "add GPU nodes"],
    ),
    "Unschedulable": (
        unscheduled("0/3 nodes are available: 3 node(s) didn't match Pod's node affinity/selector."),
        ["node affinity", "nodeSelector"],
    ),
    "OutOfMemory": (
        waiting("CrashLoopBackOff", "back-off", 3, {"exitCode": 137, "reason": "OOMKilled"}),
        ["ran out of memory", "resources.memory"],
    ),
    "CrashLoop": (
        waiting(
            "CrashLoopBackOff",
            "back-off",
            5,
            {
                "exitCode": 1,
                "reason": "Error",
                "message": "cannot serve (model_not_found): /models/none is not there",
            },
        ),
        ["/models/none is not there", "kubectl logs --previous"],
    ),
}


def test_each_bad_pod_state_is_reported_until_it_is_fixed(namespace: Namespace):
    namespace.apply({**SPEC, "encoder": {"gpus": 0, "schedulingDeadlineSeconds": 0}})
    namespace.settled(namespace.is_ready)
    labels = namespace.stateful_set("encoder").spec.template.metadata.labels
    for reason, (status, words) in STATES.items():
        name = f"bad-{reason.lower()}"
        namespace.pod(name, labels)
        namespace.core.patch_namespaced_pod_status(name, namespace.name, {"status": status})

        def told(expected: str = reason, needed: list[str] = words) -> None:
            found = namespace.condition("Degraded")
            assert found[:2] == ("True", expected), found
            for word in needed:
                assert word in found[2]

        eventually(told)
        eventually(partial(reported, namespace, reason, words[0]))
        namespace._end_pod(name)
        eventually(lambda: fine(namespace))


def test_pods_that_a_kubelet_refuses_one_after_the_other_are_named(namespace: Namespace):
    """Each is gone a moment after it failed, and its successor has the same name."""
    namespace.apply(SPEC)
    namespace.settled(namespace.is_ready)
    labels = namespace.stateful_set("encoder").spec.template.metadata.labels
    words = "Allocate failed due to no healthy devices present"
    refused = {"phase": "Failed", "reason": "UnexpectedAdmissionError", "message": words}
    for _ in range(3):
        namespace.pod("unlucky-0", labels)
        namespace.core.patch_namespaced_pod_status("unlucky-0", namespace.name, {"status": refused})
        namespace._end_pod("unlucky-0")

    def told() -> None:
        found = namespace.condition("Degraded")
        assert found[:2] == ("True", "PodsFail"), found
        assert words in found[2]

    eventually(told)


def reported(namespace: Namespace, reason: str, words: str) -> None:
    assert any(words in message for message in namespace.events(reason)), reason


def fine(namespace: Namespace) -> None:
    assert namespace.condition("Degraded")[:2] == ("False", "NoProblem")


def test_pods_rejected_by_a_policy_are_reported_with_its_message(namespace: Namespace):
    """A StatefulSet controller that is refused pods says so in Events only."""
    namespace.apply(SPEC)
    namespace.settled(namespace.is_ready)
    namespace.change({"encoder": {"replicas": 2}})
    eventually(lambda: asked_for(namespace, 2))
    name = namespace.stateful_set("encoder").metadata.name
    about = {"kind": "StatefulSet", "name": name, "namespace": namespace.name, "apiVersion": "apps/v1"}
    words = 'pods "x" is forbidden: violates PodSecurity "restricted:latest": seccompProfile'
    event = {"metadata": {"generateName": "refused-"}, "involvedObject": about, "type": "Warning"}
    namespace.core.create_namespaced_event(
        namespace.name, {**event, "reason": "FailedCreate", "message": f"create Pod failed: {words}"}
    )
    seen = namespace.stateful_set("encoder").metadata.generation
    namespace.apps.patch_namespaced_stateful_set_status(
        name, namespace.name, {"status": {"observedGeneration": seen, "replicas": 1, "readyReplicas": 1}}
    )

    def told() -> None:
        status, reason, message = namespace.condition("Degraded")
        assert (status, reason) == ("True", "AdmissionRefused"), (reason, message)
        assert "seccompProfile" in message

    eventually(told)


def asked_for(namespace: Namespace, replicas: int) -> None:
    assert namespace.stateful_set("encoder").spec.replicas == replicas


PARTS: dict[str, Any] = {
    "volumes": [{"name": "scratch", "emptyDir": {}}],
    "volumeMounts": [{"name": "scratch", "mountPath": "/scratch"}],
    "envFrom": [{"configMapRef": {"name": "proxies", "optional": True}}],
    "env": [{"name": "NODE", "valueFrom": {"fieldRef": {"fieldPath": "spec.nodeName"}}}],
    "sidecars": [{"name": "logs", "image": "logs:1"}],
    "initContainers": [{"name": "fetch", "image": "fetch:1"}],
    "sharedMemory": "2Gi",
    "topologySpreadConstraints": [
        {"topologyKey": "zone", "maxSkew": 1, "whenUnsatisfiable": "DoNotSchedule"}
    ],
    "patch": {"spec": {"dnsPolicy": "Default"}},
}


def test_a_template_that_makes_no_pod_is_reported_and_the_pods_stay(namespace: Namespace):
    namespace.apply(SPEC)
    namespace.settled(namespace.is_ready)
    before = namespace.stateful_set("encoder").spec.template.to_dict()
    for patch, field in (
        ({"dnsPolice": "Default"}, ".spec.template.spec.dnsPolice"),
        ({"dnsPolicy": "Sometimes"}, "spec.template.spec.dnsPolicy"),
    ):
        namespace.change({"encoder": {"template": {"patch": {"spec": patch}}}})

        def refused(words: str = field) -> None:
            status, reason, message = namespace.condition("Degraded")
            assert (status, reason) == ("True", "ObjectRefused"), (reason, message)
            assert words in message
            assert "fix what spec.encoder.template sets there" in message

        eventually(refused)
        assert namespace.stateful_set("encoder").spec.template.to_dict() == before
        namespace.change({"encoder": {"template": {"patch": None}}})
        eventually(lambda: fine(namespace))
    namespace.change({"encoder": {"template": PARTS, "gpuResource": "amd.com/gpu", "gpus": 1}})

    def applied() -> None:
        pod = namespace.stateful_set("encoder").spec.template.spec
        assert [c.name for c in pod.containers] == ["worker", "logs"]
        assert pod.containers[0].resources.limits == {"amd.com/gpu": "1"}
        assert pod.dns_policy == "Default"
        assert pod.topology_spread_constraints[0].label_selector.match_labels
        assert pod.init_containers[0].security_context.capabilities.drop == ["ALL"]

    eventually(applied)
