"""The NATS servers."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from mmd_api.base import ApiModel
from mmd_api.rule import Rule
from mmd_api.spec.fields import CpuQuantity, Labels, Name
from mmd_api.spec.pods import PodTemplate, Resources, Toleration


def _nats_url_given(n: NatsSpec) -> bool:
    return n.managed or n.url is not None


def _nats_url_used(n: NatsSpec) -> bool:
    return not n.managed or (n.url is None and n.credentials_secret is None)


def _nats_url_without_password(n: NatsSpec) -> bool:
    return n.url is None or "@" not in n.url


def _nats_majority(n: NatsSpec) -> bool:
    return n.replicas != 2


def _nats_class_used(n: NatsSpec) -> bool:
    return n.storage_class_name is None or (n.managed and n.storage == "PersistentVolumeClaim")


NATS = (
    Rule(
        field="replicas",
        cel="self.replicas != 2",
        holds=_nats_majority,
        problem="of 2 servers, the loss of one leaves no majority",
        remedy="set replicas to 1 or 3",
    ),
    Rule(
        field="storageClassName",
        cel="!has(self.storageClassName) || (self.managed && self.storage == 'PersistentVolumeClaim')",
        holds=_nats_class_used,
        problem="storageClassName is for claims, and no managed server has one",
        remedy="set managed: true and storage: PersistentVolumeClaim, or remove it",
    ),
    Rule(
        field="url",
        cel="self.managed || has(self.url)",
        holds=_nats_url_given,
        problem="managed is false, but url is not set",
        remedy="set url, or managed: true",
    ),
    Rule(
        field="url",
        cel="!self.managed || (!has(self.url) && !has(self.credentialsSecret))",
        holds=_nats_url_used,
        problem="url and credentialsSecret refer to an external server, but managed is true",
        remedy="set managed: false, or remove them",
    ),
    Rule(
        field="url",
        cel="!has(self.url) || !self.url.contains('@')",
        holds=_nats_url_without_password,
        problem="the URL contains a password, which this resource would expose",
        remedy="store them under the keys username and password of a Secret, and set credentialsSecret to its name",
    ),
)


_URLS = r"^(nats|tls|ws|wss)://[^/\s,]+(,(nats|tls|ws|wss)://[^/\s,]+)*$"


class NatsResources(Resources):
    """CPU and memory of a NATS server."""

    cpu: CpuQuantity | None = "250m"
    """CPU request. All pools stall if NATS runs short of CPU."""


class NatsSpec(ApiModel, rules=NATS):
    """NATS servers: managed by the operator, or existing ones at `url`."""

    managed: bool = True
    """Whether the operator manages NATS servers for this deployment."""
    replicas: Annotated[int, Field(ge=1, le=3)] = 1
    """Number of managed servers, 1 or 3, and of copies of every JetStream stream. Three serve on while one of them is away."""
    url: Annotated[str, Field(max_length=512, pattern=_URLS)] | None = None
    """URL of an existing server, such as tls://nats.example.com:4222. Those of a cluster are separated by commas."""
    credentials_secret: Name | None = None
    """Name of a Secret with the keys `username` and `password` for the existing server."""
    password_generation: Annotated[int, Field(ge=1, le=2_147_483_647)] = 1
    """Generation of the passwords of the managed servers. A change replaces them; those of the previous generation stay valid."""
    storage: Literal["EmptyDir", "PersistentVolumeClaim"] = "EmptyDir"
    """Where a managed server keeps its streams. EmptyDir: on its node's disk, as long as its pod. PersistentVolumeClaim: on a volume of its own, deleted with the deployment."""
    storage_class_name: Name | None = None
    """Storage class of the volumes. Defaults to the cluster's default class."""
    storage_mebibytes: Annotated[int, Field(ge=64, le=1_048_576)] = 1024
    """Maximum JetStream storage of a managed server. On its disk it may take 2.5 times as much until removed messages are compacted."""
    resources: NatsResources = NatsResources()
    """CPU and memory of each managed server."""
    node_selector: Labels = {}
    """Labels that a node must have to run a managed server."""
    tolerations: Annotated[list[Toleration], Field(max_length=16)] = []
    """Taints that a managed server tolerates."""
    template: PodTemplate = PodTemplate()
    """Overrides for the pods of the managed servers."""
