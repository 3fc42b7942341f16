"""Workload kinds and how they differ: where their pod templates are, and whose Events report pods that could not be created.

Everything else in the operator treats them alike: a pool is a workload with replicas, and a replica is one pod or a group of pods. The
first pod of a group leads, and the operator talks to it alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

LWS_GROUP = "leaderworkerset.x-k8s.io"
LWS_VERSION = "v1"
LWS_PLURAL = "leaderworkersets"
SET_NAME_LABEL = "leaderworkerset.sigs.k8s.io/name"
"""Label of everything that LeaderWorkerSet creates. Its StatefulSets may have the labels of the pool too, but are not pools."""
WORKER_INDEX_LABEL = "leaderworkerset.sigs.k8s.io/worker-index"
"""Label with a pod's index in its group; the leader's is 0."""
INSTALL_LWS = "kubectl apply --server-side -f https://github.com/kubernetes-sigs/lws/releases/download/v0.10.0/manifests.yaml"


@dataclass(frozen=True, slots=True)
class WorkloadKind:
    """One workload kind. `template_field`: the field of `spec` with everything that its pods are made from."""

    template_field: str
    pools: bool = False
    """Whether pools are of this kind. The operator sets their sizes through `/scale`."""
    installed_by_users: bool = False
    """Whether its controller is not part of Kubernetes: it may be missing or broken, and its older releases write less of the status."""

    def templates(self, body: Mapping[str, Any]) -> Mapping[str, Any]:
        """Everything that the pods of an object are made from."""
        templates: Mapping[str, Any] = body["spec"][self.template_field]
        return templates

    def pod_template(self, body: Mapping[str, Any]) -> Mapping[str, Any]:
        """The pod template; for a group, the followers' template, which has the same inputs as the leader's."""
        templates = self.templates(body)
        followers: Mapping[str, Any] = templates.get("workerTemplate", templates)
        return followers

    def is_seen(self, body: Mapping[str, Any]) -> bool:
        """Whether the controller has acted on the newest spec.

        A user-installed controller that does not report a generation counts as having acted once it has reported anything.
        """
        status = body.get("status", {})
        observed_generation = status.get("observedGeneration")
        if observed_generation is None and self.installed_by_users:
            return bool(status)
        return bool((observed_generation or 0) >= body["metadata"].get("generation", 0))

    def group_size(self, body: Mapping[str, Any]) -> int:
        """Pods per replica."""
        return int(self.templates(body).get("size", 1))


WORKLOADS: dict[str, WorkloadKind] = {
    "Deployment": WorkloadKind("template"),
    "StatefulSet": WorkloadKind("template", pools=True),
    "LeaderWorkerSet": WorkloadKind("leaderWorkerTemplate", pools=True, installed_by_users=True),
}
POOL_KINDS = tuple(name for name, kind in WORKLOADS.items() if kind.pools)
