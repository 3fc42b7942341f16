"""Names and labels of everything that belongs to one deployment; no other module spells them."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from typing import Any

from mmd_api.contract.pools import PoolName
from mmd_api.pipeline import pipeline_revision
from mmd_api.readers import Component
from mmd_api.resource import GROUP, MultimodalDeployment
from mmd_api.spec.deployment import MultimodalDeploymentSpec
from mmd_api.status import PinnedRevision

Manifest = dict[str, Any]

DEPLOYMENT_LABEL = f"{GROUP}/deployment"
REVISION_LABEL = f"{GROUP}/revision"
COMPONENT_LABEL = "app.kubernetes.io/component"
BUILT_ANNOTATION = f"{GROUP}/built"
"""On workloads whose controller replaces pods when the template changes (the gateway's Deployment, LeaderWorkerSets): digest of the
template as the operator that wrote it built it."""
APPLIED_ANNOTATION = f"{GROUP}/applied"
"""On the same workloads: digest of the template as the API server had it after the operator's last apply."""
CONFIG_HASH_ANNOTATION = f"{GROUP}/config-hash"
INPUTS_ANNOTATION = f"{GROUP}/inputs"
"""On pods: hash of what they were made from; see `mmd_api.pipeline.inputs_of`."""
CONFIG_FOLDER = "/etc/mmd"
GATEWAY_PORT = 8000
"""Port of the API alone, which an Ingress or a load balancer may expose to everyone."""
ADMIN_PORT = 8080
"""Port of metrics, state and probes; on a gateway, also of recent requests and of demand."""
ADMIN_PORT_NAME = "admin"
"""Name of that port on a gateway's container. A worker has one port, which is called `http`."""
NATS_PORT = 4222
NATS_MONITOR_PORT = 8222


KEYS_VOLUME = "keys"
"""The volume of a gateway with the Secret of its API keys."""


def container_name(component: str) -> str:
    """Name of the container of a gateway or a worker, beside which a cluster may inject others."""
    return "gateway" if component == "gateway" else "worker"


@dataclass(frozen=True, slots=True)
class RevisionScope:
    """One pipeline revision of one deployment in one namespace: what every builder is given."""

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
    def config(self) -> str:
        """Name of the ConfigMap of this revision."""
        return f"{self.name}-{self.revision}"

    def pool(self, pool: PoolName) -> str:
        """Name of a pool's workload and headless Service of this revision: two revisions can stand side by side."""
        return f"{self.name}-{pool}-{self.revision}"

    def selector(self, component: Component | None = None) -> dict[str, str]:
        """Labels that select this deployment's pods, or those of one component, over all revisions."""
        labels = {DEPLOYMENT_LABEL: self.name}
        return labels if component is None else {**labels, COMPONENT_LABEL: component}

    def pool_selector(self, pool: PoolName) -> dict[str, str]:
        """Labels that select a pool's pods of this revision."""
        return {**self.selector(pool), REVISION_LABEL: self.revision}

    def labels(self, component: Component | None = None, *, of_revision: bool) -> dict[str, str]:
        """Labels of an object. `of_revision`: it comes and goes with the pipeline revision."""
        labels = {
            "app.kubernetes.io/name": "multimodal-deployment",
            "app.kubernetes.io/instance": self.name,
            "app.kubernetes.io/managed-by": "multimodal-operator",
            **self.selector(component),
        }
        return {**labels, REVISION_LABEL: self.revision} if of_revision else labels

    def metadata(self, name: str, component: Component | None = None, *, of_revision: bool) -> Manifest:
        """Metadata of an object; the applier adds the ownerReference."""
        return {
            "name": name,
            "namespace": self.namespace,
            "labels": self.labels(component, of_revision=of_revision),
        }


def template_digest(template: Manifest) -> str:
    """Short hash of a pod template as it was built."""
    return hashlib.sha256(json.dumps(template, sort_keys=True).encode()).hexdigest()[:16]
