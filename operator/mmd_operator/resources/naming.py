"""Names and labels of everything that belongs to one deployment; no other module spells them."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from typing import Any, Literal

from mmd_api.contract.pools import PoolName
from mmd_api.pipeline import pipeline_revision
from mmd_api.readers import Component
from mmd_api.resource import GROUP, MultimodalDeployment
from mmd_api.spec.deployment import MultimodalDeploymentSpec
from mmd_api.spec.model import WeightsCache
from mmd_api.status import PinnedRevision

Manifest = dict[str, Any]

DEPLOYMENT_LABEL = f"{GROUP}/deployment"
REVISION_LABEL = f"{GROUP}/revision"
COMPONENT_LABEL = "app.kubernetes.io/component"
BUILT_ANNOTATION = f"{GROUP}/built"
"""On workloads whose controller replaces pods when the template changes (the gateway's Deployment, LeaderWorkerSets): digest of the
template as built by the operator that wrote it."""
APPLIED_ANNOTATION = f"{GROUP}/applied"
"""On the same workloads: digest of the template as the API server had it after the operator's last apply."""
CONFIG_HASH_ANNOTATION = f"{GROUP}/config-hash"
INPUTS_ANNOTATION = f"{GROUP}/inputs"
"""On pods: hash of what they were made from; see `mmd_api.pipeline.inputs_of`."""
GPUS_ANNOTATION = f"{GROUP}/gpus"
"""On pods whose GPUs are claims or have another name than nvidia.com/gpu: the number of GPUs."""
GPU_RESOURCE_ANNOTATION = f"{GROUP}/gpu-resource"
"""On pods whose GPUs have another name than nvidia.com/gpu: that name."""
CONFIG_FOLDER = "/etc/mmd"
GATEWAY_PORT = 8000
"""Port of the API only; an Ingress or a load balancer may expose it to everyone."""
ADMIN_PORT = 8080
"""Port of metrics, state and probes; on a gateway, also of recent requests and demand."""
ADMIN_PORT_NAME = "admin"
"""Name of the admin port on a gateway's container. A worker has one port, named `http`."""
PICKER_PORT = 9002
"""gRPC port of a gateway with an InferencePool, where Gateways ask which pod takes a request."""
PICKER_PORT_NAME = "picker"
NATS_PORT = 4222
NATS_MONITOR_PORT = 8222
NATS_ROUTE_PORT = 6222
"""Port where the NATS servers of a cluster connect to one another."""


WEIGHTS: Literal["weights"] = "weights"
"""Component of the Job that downloads weights, and of their claim. It serves no requests."""
LabelledPart = Component | Literal["weights"]
KEYS_VOLUME = "keys"
"""A gateway's volume with the Secret of its API keys."""
TLS_VOLUME = "tls"
"""A gateway's volume with the Secret of its TLS certificate."""


def container_name(component: str) -> str:
    """Name of a gateway's or worker's own container; a cluster may inject others."""
    return "gateway" if component == "gateway" else "worker"


@dataclass(frozen=True, slots=True)
class RevisionScope:
    """One pipeline revision of one deployment in one namespace, the input of every builder."""

    name: str
    namespace: str
    revision: str
    spec: MultimodalDeploymentSpec
    pinned: PinnedRevision | None = None

    @classmethod
    def of(
        cls, deployment: MultimodalDeployment, namespace: str, pinned: PinnedRevision | None = None
    ) -> RevisionScope:
        """The scope of a deployment's present revision."""
        revision = pipeline_revision(deployment.spec)
        return cls(deployment.metadata.name, namespace, revision, deployment.spec, pinned)

    @property
    def gateway(self) -> str:
        """Name of the gateway's Deployment and Service; it outlives revisions."""
        return f"{self.name}-gateway"

    @property
    def nats(self) -> str:
        """Name of the managed NATS server's objects; it outlives revisions."""
        return f"{self.name}-nats"

    @property
    def nats_servers(self) -> tuple[str, ...]:
        """Names of the managed NATS servers: names of their pods and, if there are several, of each server's Service."""
        return tuple(f"{self.nats}-{ordinal}" for ordinal in range(self.spec.nats.replicas))

    def nats_host(self, server: str) -> str:
        """Host name of a Service of the managed NATS servers."""
        return f"{server}.{self.namespace}.svc"

    @property
    def config(self) -> str:
        """Name of the ConfigMap of this revision."""
        return f"{self.name}-{self.revision}"

    def pool(self, pool: PoolName) -> str:
        """Name of a pool's workload and headless Service of this revision: two revisions can exist side by side."""
        return f"{self.name}-{pool}-{self.revision}"

    def selector(self, component: LabelledPart | None = None) -> dict[str, str]:
        """Labels that select the pods of this deployment, or of one of its components, across all revisions."""
        labels = {DEPLOYMENT_LABEL: self.name}
        return labels if component is None else {**labels, COMPONENT_LABEL: component}

    def pool_selector(self, pool: PoolName) -> dict[str, str]:
        """Labels that select a pool's pods of this revision."""
        return {**self.selector(pool), REVISION_LABEL: self.revision}

    def labels(self, component: LabelledPart | None = None, *, of_revision: bool) -> dict[str, str]:
        """Labels of an object. `of_revision`: it comes and goes with the pipeline revision."""
        labels = {
            "app.kubernetes.io/name": "multimodal-deployment",
            "app.kubernetes.io/instance": self.name,
            "app.kubernetes.io/managed-by": "multimodal-operator",
            **self.selector(component),
        }
        return {**labels, REVISION_LABEL: self.revision} if of_revision else labels

    def metadata(self, name: str, component: LabelledPart | None = None, *, of_revision: bool) -> Manifest:
        """Metadata of an object; the applier adds the ownerReference."""
        return {
            "name": name,
            "namespace": self.namespace,
            "labels": self.labels(component, of_revision=of_revision),
        }


def claim_of(deployment: str, cache: WeightsCache) -> str:
    """Name of a cache's claim. A claim created by the operator outlives revisions."""
    return cache.claim_name or f"{deployment}-{WEIGHTS}"


def template_digest(template: Manifest) -> str:
    """Short hash of a pod template as it was built."""
    return hashlib.sha256(json.dumps(template, sort_keys=True).encode()).hexdigest()[:16]
