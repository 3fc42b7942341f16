"""Kinds of objects that make pods, and how they differ: where their pod templates are, whose Events report pods that could not be made.

Everything else in the operator treats them alike: a pool is a workload with replicas, and a replica is one pod or a group of pods, of
which the first leads and is the one that the operator talks to.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

LWS_GROUP = "leaderworkerset.x-k8s.io"
LWS_VERSION = "v1"
LWS_PLURAL = "leaderworkersets"
SET_NAME_LABEL = "leaderworkerset.sigs.k8s.io/name"
"""Of everything that LeaderWorkerSet makes. Its StatefulSets may have the labels of the pool too, and they are no pools."""
WORKER_INDEX_LABEL = "leaderworkerset.sigs.k8s.io/worker-index"
"""Of a pod in its group; the leader's is 0."""
INSTALL_LWS = "kubectl apply --server-side -f https://github.com/kubernetes-sigs/lws/releases/download/v0.10.0/manifests.yaml"


@dataclass(frozen=True, slots=True)
class WorkloadKind:
    """One kind. `template_field`: below `spec`, everything that its pods are made from."""

    template_field: str
    pools: bool = False
    """Whether pools are of this kind; the operator sets their sizes by `/scale`."""
    installed_by_users: bool = False
    """Whether its controller is no part of Kubernetes: it may be missing or broken, and older releases of it write less of the status."""

    def templates(self, body: Mapping[str, Any]) -> Mapping[str, Any]:
        """All that the pods of an object are made from."""
        found: Mapping[str, Any] = body["spec"][self.template_field]
        return found

    def pod_template(self, body: Mapping[str, Any]) -> Mapping[str, Any]:
        """The template of its pods; of a group, of the followers, which are made from the same inputs as the leader."""
        found = self.templates(body)
        followers: Mapping[str, Any] = found.get("workerTemplate", found)
        return followers

    def is_seen(self, body: Mapping[str, Any]) -> bool:
        """Whether the controller has acted on the newest spec; where it does not report which it acted on, whether it has reported
        anything."""
        status = body.get("status", {})
        seen = status.get("observedGeneration")
        if seen is None and self.installed_by_users:
            return bool(status)
        return bool((seen or 0) >= body["metadata"].get("generation", 0))

    def group_size(self, body: Mapping[str, Any]) -> int:
        """Pods of a replica."""
        return int(self.templates(body).get("size", 1))


WORKLOADS: dict[str, WorkloadKind] = {
    "Deployment": WorkloadKind("template"),
    "StatefulSet": WorkloadKind("template", pools=True),
    "LeaderWorkerSet": WorkloadKind("leaderWorkerTemplate", pools=True, installed_by_users=True),
}
POOL_KINDS = tuple(name for name, kind in WORKLOADS.items() if kind.pools)
