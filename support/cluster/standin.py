"""A namespace in which the test plays the controllers and the kubelet.

It reports of workloads that their pods are running, or are not.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from typing import Any, TypeVar

from kubernetes import client

from mmd_api.resource import API_VERSION, GROUP, KIND, PLURAL, VERSION
from mmd_operator.resources.naming import DEPLOYMENT_LABEL, REVISION_LABEL
from support.harness.waiting import eventually

T = TypeVar("T")
WAIT_SECONDS = 45
"""How long a test follows the status of a deployment."""


def _without_addresses(item: dict[str, Any]) -> dict[str, Any]:
    spec = item.get("spec", {})
    return {**item, "spec": {k: v for k, v in spec.items() if k not in ("clusterIP", "clusterIPs")}}


class Namespace:
    """One namespace, and the actions of a test in it."""

    def __init__(self, api: client.ApiClient, name: str) -> None:
        self.name = name
        self.core, self.apps = client.CoreV1Api(api), client.AppsV1Api(api)
        self.custom = client.CustomObjectsApi(api)
        self.policy, self.network = client.PolicyV1Api(api), client.NetworkingV1Api(api)
        self.batch = client.BatchV1Api(api)
        self.leases = client.CoordinationV1Api(api)
        self.broken: set[str] = set()
        """Pipeline revisions whose pods never become ready."""
        self.unready: set[str] = set()
        """Pods that never become ready."""

    @classmethod
    def create(cls, api: client.ApiClient, test_name: str) -> Namespace:
        """Create a namespace. `test_name`: a different one each time that a test runs."""
        short = re.sub(r"[^a-z0-9]+", "-", test_name.lower())[:40].strip("-")
        name = f"{short}-{hashlib.sha256(test_name.encode()).hexdigest()[:6]}"
        namespace = cls(api, name)
        namespace.core.create_namespace({"metadata": {"name": name}})
        namespace.core.create_namespaced_service_account(name, {"metadata": {"name": "default"}})
        return namespace

    def abandon(self) -> None:
        """Remove its deployments, whose objects nobody needs any more, so that no operator keeps working on
        them.
        """
        where = (GROUP, VERSION, self.name, PLURAL)
        for item in self.custom.list_namespaced_custom_object(*where)["items"]:
            name = item["metadata"]["name"]
            try:
                self.custom.delete_namespaced_custom_object(*where, name)
                self.custom.patch_namespaced_custom_object(*where, name, {"metadata": {"finalizers": None}})
            except client.ApiException as error:
                if error.status != 404:  # it had no finalizer
                    raise

    # The resource

    def apply(self, spec: dict[str, Any], name: str = "demo", **metadata: Any) -> dict[str, Any]:
        body = {
            "apiVersion": API_VERSION,
            "kind": KIND,
            "metadata": {"name": name, **metadata},
            "spec": spec,
        }
        return self.custom.create_namespaced_custom_object(GROUP, VERSION, self.name, PLURAL, body)

    def change(self, spec: dict[str, Any], name: str = "demo") -> dict[str, Any]:
        """A merge patch of the spec, as `kubectl patch` would send it."""
        return self.custom.patch_namespaced_custom_object(
            GROUP, VERSION, self.name, PLURAL, name, {"spec": spec}
        )

    def get(self, name: str = "demo") -> dict[str, Any]:
        return self.custom.get_namespaced_custom_object(GROUP, VERSION, self.name, PLURAL, name)

    def exists(self, name: str = "demo") -> bool:
        try:
            self.get(name)
        except client.ApiException as error:
            if error.status == 404:
                return False
            raise
        return True

    def delete(self, name: str = "demo") -> None:
        self.custom.delete_namespaced_custom_object(GROUP, VERSION, self.name, PLURAL, name)

    def condition(self, kind: str, name: str = "demo") -> tuple[str, str, str]:
        """Status, reason and message; empty where it was never set."""
        conditions = self.get(name).get("status", {}).get("conditions", [])
        condition = next((c for c in conditions if c["type"] == kind), None)
        return (condition["status"], condition["reason"], condition["message"]) if condition else ("", "", "")

    def events(self, reason: str) -> list[str]:
        return [e.message for e in self.core.list_namespaced_event(self.name).items if e.reason == reason]

    def reported(self, reason: str, words: str = "") -> None:
        """Wait for an Event, which is written after the fact."""

        def written() -> None:
            assert any(words in message for message in self.events(reason)), (reason, self.events(reason))

        eventually(written)

    # Objects that the operator made

    def objects(self) -> dict[str, Any]:
        """All objects of deployments in the namespace, by `Kind/name`."""
        lists = {
            "ConfigMap": self.core.list_namespaced_config_map,
            "PersistentVolumeClaim": self.core.list_namespaced_persistent_volume_claim,
            "Job": self.batch.list_namespaced_job,
            "Service": self.core.list_namespaced_service,
            "StatefulSet": self.apps.list_namespaced_stateful_set,
            "Deployment": self.apps.list_namespaced_deployment,
            "PodDisruptionBudget": self.policy.list_namespaced_pod_disruption_budget,
            "NetworkPolicy": self.network.list_namespaced_network_policy,
        }
        return {
            f"{kind}/{item.metadata.name}": item
            for kind, listing in lists.items()
            for item in listing(self.name, label_selector=DEPLOYMENT_LABEL).items
        }

    def content(self) -> dict[str, Any]:
        """The objects without anything that differs between runs: two equal ends have equal content."""
        api = self.core.api_client
        return {
            key: {
                "labels": item.metadata.labels,
                "body": {
                    k: v
                    for k, v in _without_addresses(api.sanitize_for_serialization(item)).items()
                    if k in ("spec", "data")
                },
            }
            for key, item in self.objects().items()
        }

    def stateful_set(self, pool: str, revision: str | None = None) -> Any:
        matches = [
            item
            for item in self.apps.list_namespaced_stateful_set(
                self.name, label_selector=f"app.kubernetes.io/component={pool}"
            ).items
            if revision in (None, item.metadata.labels.get(REVISION_LABEL))
        ]
        assert len(matches) == 1, [item.metadata.name for item in matches]
        return matches[0]

    def revisions(self) -> set[str]:
        """Pipeline revisions that have StatefulSets."""
        listed = self.apps.list_namespaced_stateful_set(self.name, label_selector=REVISION_LABEL).items
        return {item.metadata.labels[REVISION_LABEL] for item in listed}

    def gateway_revision(self, name: str = "demo") -> str:
        gateway = self.apps.read_namespaced_deployment(f"{name}-gateway", self.name)
        return gateway.spec.template.metadata.labels[REVISION_LABEL]

    def job(self) -> Any:
        """The one Job there is."""
        jobs = self.batch.list_namespaced_job(self.name).items
        assert len(jobs) == 1, [job.metadata.name for job in jobs]
        return jobs[0]

    # Controllers and kubelet

    def complete_job(self, name: str) -> None:
        """Write what the Job controller writes when a pod of the Job has succeeded."""
        now = datetime.now(UTC).isoformat()
        conditions = [
            {"type": kind, "status": "True", "reason": "CompletionsReached", "lastTransitionTime": now}
            for kind in ("SuccessCriteriaMet", "Complete")
        ]
        status = {"startTime": now, "completionTime": now, "succeeded": 1, "conditions": conditions}
        self.batch.patch_namespaced_job_status(name, self.name, {"status": status})

    def release_claims(self) -> None:
        """Release deleted claims, which a controller keeps while a pod uses them."""
        for claim in self.core.list_namespaced_persistent_volume_claim(self.name).items:
            if claim.metadata.deletion_timestamp is not None:
                body = {"metadata": {"finalizers": None}}
                self.core.patch_namespaced_persistent_volume_claim(claim.metadata.name, self.name, body)

    def fail_job(self, name: str, at: datetime) -> None:
        """Write what the Job controller writes when it starts no further pod."""
        condition = {
            "status": "True",
            "reason": "PodFailurePolicy",
            "message": "container weights failed with exit code 47",
            "lastTransitionTime": at.isoformat(),
        }
        conditions = [{"type": kind, **condition} for kind in ("FailureTarget", "Failed")]
        status = {"startTime": at.isoformat(), "failed": 1, "conditions": conditions}
        self.batch.patch_namespaced_job_status(name, self.name, {"status": status})

    def settle(self) -> None:
        """Report once that every workload's pods are new and ready, except those of broken revisions."""
        for item in self.apps.list_namespaced_stateful_set(self.name).items:
            names = {f"{item.metadata.name}-{n}" for n in range(item.spec.replicas)}
            self._set_status("StatefulSet", item, 0 if self._is_broken(item) else len(names - self.unready))
        for item in self.apps.list_namespaced_deployment(self.name).items:
            self._set_status("Deployment", item, 0 if self._is_broken(item) else item.spec.replicas)
            self._gateway_pods(item)

    def _is_broken(self, item: Any) -> bool:
        return (item.spec.template.metadata.labels or {}).get(REVISION_LABEL) in self.broken

    def _set_status(self, kind: str, item: Any, ready: int) -> None:
        status = {
            "observedGeneration": item.metadata.generation,
            "replicas": item.spec.replicas,
            "readyReplicas": ready,
            "availableReplicas": ready,
            "updatedReplicas": item.spec.replicas,
        }
        present = self.core.api_client.sanitize_for_serialization(item.status) or {}
        if all(present.get(key, 0) == value for key, value in status.items()):
            return
        patch = {
            "StatefulSet": self.apps.patch_namespaced_stateful_set_status,
            "Deployment": self.apps.patch_namespaced_deployment_status,
        }[kind]
        try:
            patch(item.metadata.name, self.name, {"status": status})
        except client.ApiException as error:
            if error.status != 404:  # removed meanwhile
                raise

    def _gateway_pods(self, gateway: Any) -> None:
        """Keep one gateway pod of the template's revision, and end those of other revisions."""
        revision = gateway.spec.template.metadata.labels[REVISION_LABEL]
        deployment = gateway.metadata.labels[DEPLOYMENT_LABEL]
        pods = self.gateway_pods(deployment)
        if not any(p.metadata.labels[REVISION_LABEL] == revision for p in pods):
            self.pod_of(f"{gateway.metadata.name}-{revision}", gateway.spec.template)
        for pod in pods:
            if pod.metadata.labels[REVISION_LABEL] != revision:
                self._end_pod(pod.metadata.name)

    def gateway_pods(self, deployment: str = "demo") -> list[Any]:
        selector = f"{DEPLOYMENT_LABEL}={deployment},app.kubernetes.io/component=gateway"
        return list(self.core.list_namespaced_pod(self.name, label_selector=selector).items)

    def pod_of(self, name: str, template: Any) -> None:
        """Make a pod from its template as a controller does, with labels, annotations, ports, volumes and
        image.
        """
        ports = template.spec.containers[0].ports or ()
        self.pod(
            name,
            template.metadata.labels,
            annotations=template.metadata.annotations,
            ports=[{"name": port.name, "containerPort": port.container_port} for port in ports],
            image=template.spec.containers[0].image,
            container=template.spec.containers[0].name,
            volumes=template.spec.volumes or (),
        )

    def pod(
        self,
        name: str,
        labels: dict[str, str],
        finalizers: tuple[str, ...] = (),
        annotations: dict[str, str] | None = None,
        ports: Sequence[dict[str, Any]] = (),
        node: str | None = None,
        image: str = "none",
        grace_seconds: int = 30,
        container: str = "worker",
        volumes: Sequence[Any] = (),
    ) -> None:
        """Make a pod. A pod on a node ends only when its kubelet reports so."""
        metadata = {"labels": labels, "finalizers": list(finalizers), "annotations": annotations or {}}
        body = {
            "metadata": {"name": name, **metadata},
            "spec": {
                "containers": [{"name": container, "image": image, "ports": list(ports)}],
                "nodeName": node,
                "terminationGracePeriodSeconds": grace_seconds,
                "volumes": list(volumes),
            },
        }
        self.core.create_namespaced_pod(self.name, body)

    def end_pods(self, deployment: str = "demo") -> None:
        """Delete the gateway's pods if its Deployment is gone, as the garbage collector and the kubelet would."""
        if not self.apps.list_namespaced_deployment(self.name).items:
            for pod in self.gateway_pods(deployment):
                self._end_pod(pod.metadata.name)

    def _end_pod(self, name: str) -> None:
        try:
            self.core.delete_namespaced_pod(name, self.name, grace_period_seconds=0)
        except client.ApiException as error:
            if error.status != 404:
                raise

    def settled(self, check: Callable[[], T], seconds: float | None = None) -> T:
        """`eventually`, while controllers and kubelet do their work."""

        def step() -> T:
            self.settle()
            self.end_pods()
            return check()

        return eventually(step, seconds)

    def is_ready(self, name: str = "demo") -> None:
        body = self.get(name)  # read once: two readings may mix states that never existed together
        status = body.get("status", {})
        conditions = {c["type"]: (c["status"], c["reason"]) for c in status.get("conditions", [])}
        assert conditions.get("Ready", ("",))[0] == "True", status
        assert conditions.get("Progressing", ("", ""))[1] == "Complete", status
        assert status["observedGeneration"] == body["metadata"]["generation"]


def is_gone(namespace: Namespace) -> None:
    assert not namespace.exists()


def counted(namespace: Namespace) -> None:
    """Write the use of a quota: without a controller-manager only the test counts."""
    status = {"status": {"hard": {"count/services": "1"}, "used": {"count/services": "1"}}}
    namespace.core.patch_namespaced_resource_quota_status("small", namespace.name, status)


def exhaust(namespace: Namespace) -> None:
    """Let the namespace have no further StatefulSet. Without a controller-manager only the test counts."""
    hard = {"count/statefulsets.apps": "0"}
    body = {"metadata": {"name": "none"}, "spec": {"hard": hard}}
    namespace.core.create_namespaced_resource_quota(namespace.name, body)
    status = {"status": {"hard": hard, "used": hard}}
    namespace.core.patch_namespaced_resource_quota_status("none", namespace.name, status)


def forget_the_dead(namespace: Namespace) -> None:
    """Delete the Leases of killed operators.

    A Lease ends by itself after 15 s, but fifty times that is too long for a test.
    """
    for lease in namespace.leases.list_namespaced_lease(namespace.name).items:
        namespace.leases.delete_namespaced_lease(lease.metadata.name, namespace.name)
