"""The gateway."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from mmd_api.base import ApiModel
from mmd_api.spec.fields import Labels, Name
from mmd_api.spec.media import MediaPolicy
from mmd_api.spec.pods import PodTemplate, Resources, Toleration

LEAVE_SERVICE_SECONDS = 4
"""A gateway that ends serves on for this long, until nodes have taken it out of the Service."""


_LATE_AND_CLOSING_SECONDS = 11
"""Of a gateway's grace period: for requests that still come over connections that clients keep, and for closing."""


class AuthSpec(ApiModel):
    """API keys that clients need, by tenant. Where it is omitted, anyone who can reach the gateway can use it."""

    keys_secret: Name
    """Name of a Secret whose key `keys.yaml` lists tenants, with hashes of their API keys, their models and limits (docs/security.md)."""


class GatewaySpec(ApiModel):
    """HTTP gateway, the entry point for clients."""

    replicas: Annotated[int, Field(ge=1, le=100)] = 1
    """Number of gateway pods."""
    resources: Resources = Resources()
    """CPU and memory of each pod."""
    node_selector: Labels = {}
    """Labels that a node must have to run the pods."""
    tolerations: Annotated[list[Toleration], Field(max_length=16)] = []
    """Taints that the pods tolerate."""
    template: PodTemplate = PodTemplate()
    """Overrides for the pods."""
    media: MediaPolicy = MediaPolicy()
    """Limits on the media of a request and on their sources."""
    max_body_mebibytes: Annotated[int, Field(ge=1, le=4096)] = 256
    """Maximum size of a request body."""
    max_concurrent_requests: Annotated[int, Field(ge=1, le=100_000)] = 1024
    """Maximum number of concurrent requests per gateway pod. Further requests are rejected with status 429."""
    request_timeout_seconds: Annotated[int, Field(ge=1, le=86_400)] = 600
    """Deadline of a request, from its arrival to the last token."""
    max_retries: Annotated[int, Field(ge=0, le=20)] = 5
    """Maximum number of times a request is rescheduled after a worker was lost."""
    web_page: bool = True
    """Whether the gateway serves its web page at /."""
    auth: AuthSpec | None = None
    """API keys that clients need."""

    @property
    def grace_seconds(self) -> int:
        """From the deletion of a pod to SIGKILL: a request of the last moment may take its whole deadline."""
        return gateway_grace_seconds(
            self.template.termination_grace_period_seconds, self.request_timeout_seconds
        )

    @property
    def drain_seconds(self) -> int:
        """From SIGTERM, which comes when the pod has left the Service, to SIGKILL."""
        return self.grace_seconds - LEAVE_SERVICE_SECONDS


def gateway_grace_seconds(configured: int, request_timeout: int) -> int:
    """The grace period of gateways. A stream lives in its gateway and cannot move: the deadline of requests decides, not the pod template."""
    return max(configured, request_timeout + LEAVE_SERVICE_SECONDS + _LATE_AND_CLOSING_SECONDS)
