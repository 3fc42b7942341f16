"""Plays the controller of a namespace's LeaderWorkerSets, which makes groups of pods."""

from __future__ import annotations

from typing import Any

from mmd_operator.resources.naming import DEPLOYMENT_LABEL
from mmd_operator.resources.workload_kinds import (
    LWS_GROUP,
    LWS_PLURAL,
    LWS_VERSION,
    SET_NAME_LABEL,
    WORKER_INDEX_LABEL,
)
from support.cluster.standin import Namespace

WHERE = (LWS_GROUP, LWS_VERSION)
IMAGE = f"docker.io/library/multimodal-worker@sha256:{'a' * 64}"
"""Image that nodes pull for the tag."""
ONE_POD: dict[str, Any] = {
    "model": {"id": "builtin/demo", "dtype": "Float32"},
    "engine": {"type": "VLLM", "decode": {"tensorParallelSize": 2}},
    "encoder": {"gpus": 0},
    "decode": {"gpus": 2, "replicas": 2},
}
GROUPS = {
    **ONE_POD,
    "engine": {"type": "VLLM", "decode": {"tensorParallelSize": 2, "pipelineParallelSize": 2}},
}
"""Four GPUs for each replica, two for each pod."""


class GroupController:
    """Makes the StatefulSets and pods of LeaderWorkerSets, and reports how many groups are Ready.

    Pods are on nodes at once. A group is Ready if all its pods are. The StatefulSets, which make nothing
    here, have the labels of their LeaderWorkerSet, as since its release 0.10.
    """

    def __init__(self, namespace: Namespace) -> None:
        self.namespace = namespace

    def sets(self) -> list[dict[str, Any]]:
        listed = self.namespace.custom.list_namespaced_custom_object(
            *WHERE, self.namespace.name, LWS_PLURAL, label_selector=DEPLOYMENT_LABEL
        )
        return list(listed["items"])

    def only(self) -> dict[str, Any]:
        (group_set,) = self.sets()
        return group_set

    def pods(self) -> dict[str, Any]:
        """Pods of groups, by name."""
        listed = self.namespace.core.list_namespaced_pod(
            self.namespace.name, label_selector=WORKER_INDEX_LABEL
        )
        return {pod.metadata.name: pod for pod in listed.items}

    def step(self) -> None:
        """Make missing pods, remove those beyond the size, and report how many groups are Ready."""
        present, expected = self.pods(), {}
        self._keep_stateful_sets()
        for item in self.sets():
            name, spec = item["metadata"]["name"], item["spec"]
            templates = spec["leaderWorkerTemplate"]
            for group in range(spec["replicas"]):
                expected[f"{name}-{group}"] = (templates["leaderTemplate"], name, group, 0)
                for worker in range(1, templates["size"]):
                    expected[f"{name}-{group}-{worker}"] = (templates["workerTemplate"], name, group, worker)
        for pod in present.keys() - expected.keys():
            self.namespace._end_pod(pod)
        for pod, arguments in expected.items():
            if pod not in present:
                self._make(pod, *arguments)
        ready = {name for name, pod in present.items() if _is_ready(pod)}
        for item in self.sets():
            self._report(item, ready)

    def stateful_sets(self) -> dict[str, Any]:
        """The StatefulSets of LeaderWorkerSets, by name."""
        listed = self.namespace.apps.list_namespaced_stateful_set(
            self.namespace.name, label_selector=SET_NAME_LABEL
        )
        return {item.metadata.name: item for item in listed.items}

    def _keep_stateful_sets(self) -> None:
        """Keep one StatefulSet for all leaders, and one for the followers of each group."""
        present, expected, apps = self.stateful_sets(), {}, self.namespace.apps
        for item in self.sets():
            name, spec = item["metadata"]["name"], item["spec"]
            templates = spec["leaderWorkerTemplate"]
            expected[name] = (item, spec["replicas"], templates["leaderTemplate"])
            for group in range(spec["replicas"]):
                expected[f"{name}-{group}"] = (item, templates["size"] - 1, templates["workerTemplate"])
        for name in present.keys() - expected.keys():
            apps.delete_namespaced_stateful_set(name, self.namespace.name)
        for name, (item, replicas, template) in expected.items():
            if name not in present:
                apps.create_namespaced_stateful_set(
                    self.namespace.name, _stateful_set(name, item, replicas, template)
                )
            elif present[name].spec.replicas != replicas:
                scale = {"spec": {"replicas": replicas}}
                apps.patch_namespaced_stateful_set_scale(name, self.namespace.name, scale)

    def _make(self, pod: str, template: dict[str, Any], name: str, group: int, worker: int) -> None:
        labels = {
            **template["metadata"]["labels"],
            SET_NAME_LABEL: name,
            "leaderworkerset.sigs.k8s.io/group-index": str(group),
            WORKER_INDEX_LABEL: str(worker),
        }
        annotations = template["metadata"].get("annotations", {})
        body = {
            "metadata": {"name": pod, "labels": labels, "annotations": annotations},
            "spec": template["spec"],
        }
        self.namespace.core.create_namespaced_pod(self.namespace.name, body)
        self.set_status(pod, {"conditions": [{"type": "PodScheduled", "status": "True"}]})

    def _report(self, item: dict[str, Any], ready: set[str]) -> None:
        spec, name = item["spec"], item["metadata"]["name"]
        size = spec["leaderWorkerTemplate"]["size"]
        groups = [
            {f"{name}-{n}", *(f"{name}-{n}-{worker}" for worker in range(1, size))}
            for n in range(spec["replicas"])
        ]
        status = {
            "observedGeneration": item["metadata"]["generation"],
            "replicas": spec["replicas"],
            "updatedReplicas": spec["replicas"],
            "readyReplicas": sum(group <= ready for group in groups),
        }
        if item.get("status", {}) != status:
            self.namespace.custom.patch_namespaced_custom_object_status(
                *WHERE, self.namespace.name, LWS_PLURAL, name, {"status": status}
            )

    def run(self, pod: str, address: str | None = None) -> None:
        """Let a kubelet run a pod, which is then Ready."""
        conditions = [{"type": kind, "status": "True"} for kind in ("PodScheduled", "Ready")]
        container = {"name": "worker", "image": "none", "imageID": IMAGE, "ready": True, "restartCount": 0}
        status: dict[str, Any] = {
            "conditions": conditions,
            "containerStatuses": [{**container, "state": {"running": {}}}],
        }
        if address is not None:
            status |= {"podIP": address, "podIPs": [{"ip": address}]}
        self.set_status(pod, status)

    def run_all(self) -> None:
        for name, pod in self.pods().items():
            if not _is_ready(pod):
                self.run(name)

    def set_status(self, pod: str, status: dict[str, Any]) -> None:
        self.namespace.core.patch_namespaced_pod_status(pod, self.namespace.name, {"status": status})

    def crash(self, pod: str, words: str) -> None:
        """Let a container end and start again."""
        ended = {"terminated": {"exitCode": 1, "reason": "Error", "message": words}}
        state = {
            "name": "worker",
            "image": "none",
            "imageID": "",
            "ready": False,
            "restartCount": 1,
            "state": {"running": {}},
            "lastState": ended,
        }
        unready = [{"type": "PodScheduled", "status": "True"}, {"type": "Ready", "status": "False"}]
        self.set_status(pod, {"conditions": unready, "containerStatuses": [state]})

    def recreate(self, group: str) -> None:
        """Recreate a group, as restartPolicy: RecreateGroupOnPodRestart does."""
        for name in self.pods():
            if name == group or name.startswith(f"{group}-"):
                self.namespace._end_pod(name)
        self.step()


def _stateful_set(
    name: str, group_set: dict[str, Any], replicas: int, template: dict[str, Any]
) -> dict[str, Any]:
    metadata, selector = group_set["metadata"], {SET_NAME_LABEL: name}
    labels = {**template["metadata"]["labels"], **selector}
    owner = {"apiVersion": group_set["apiVersion"], "kind": group_set["kind"], "controller": True}
    return {
        "metadata": {
            "name": name,
            "labels": {**metadata["labels"], SET_NAME_LABEL: metadata["name"]},
            "ownerReferences": [{**owner, "name": metadata["name"], "uid": metadata["uid"]}],
        },
        "spec": {
            "replicas": replicas,
            "serviceName": metadata["name"],
            "selector": {"matchLabels": selector},
            "template": {**template, "metadata": {**template["metadata"], "labels": labels}},
        },
    }


def _is_ready(pod: Any) -> bool:
    return any(c.type == "Ready" and c.status == "True" for c in pod.status.conditions or ())
