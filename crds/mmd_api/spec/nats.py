"""The NATS server."""

from __future__ import annotations

from typing import Annotated

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


NATS = (
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


class NatsResources(Resources):
    """CPU and memory of the NATS server."""

    cpu: CpuQuantity | None = "250m"
    """CPU request. All pools stall if NATS runs short of CPU."""


class NatsSpec(ApiModel, rules=NATS):
    """NATS server: managed by the operator, or an existing one at `url`."""

    managed: bool = True
    """Whether the operator manages a NATS server for this deployment."""
    url: Annotated[str, Field(max_length=512, pattern=r"^(nats|tls|ws|wss)://[^/\s]+$")] | None = None
    """URL of an existing server, such as tls://nats.example.com:4222."""
    credentials_secret: Name | None = None
    """Name of a Secret with the keys `username` and `password` for the existing server."""
    password_generation: Annotated[int, Field(ge=1, le=2_147_483_647)] = 1
    """Generation of the passwords of the managed server. A change replaces them; those of the previous generation stay valid."""
    storage_mebibytes: Annotated[int, Field(ge=64, le=1_048_576)] = 1024
    """Maximum JetStream storage of the managed server."""
    resources: NatsResources = NatsResources()
    """CPU and memory of the managed server."""
    node_selector: Labels = {}
    """Labels that a node must have to run the managed server."""
    tolerations: Annotated[list[Toleration], Field(max_length=16)] = []
    """Taints that the managed server tolerates."""
    template: PodTemplate = PodTemplate()
    """Overrides for the pod of the managed server."""
