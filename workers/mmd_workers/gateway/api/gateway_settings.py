"""The settings of gateways from a deployment's spec. A changed spec replaces all of them in one assignment, so none is forgotten."""

from __future__ import annotations

from dataclasses import dataclass

from mmd_api.spec.deployment import MultimodalDeploymentSpec
from mmd_api.spec.observability import SloSpec


@dataclass(frozen=True, slots=True)
class GatewaySettings:
    """The settings for serving requests.

    `models`: names of the one model, the preferred name first. `adapters`: names of its adapters, each served as a model.
    `prefixes_per_tenant`: tenants do not share cached prefixes. `allowed_origins`: origins of other sites whose web pages may call the
    gateway. `audit`: requests are written to the audit log.
    """

    models: tuple[str, ...]
    adapters: tuple[str, ...]
    prefixes_per_tenant: bool
    allowed_origins: tuple[str, ...]
    max_body_bytes: int
    max_concurrent_requests: int
    request_timeout_seconds: int
    slo: SloSpec
    web_page: bool
    audit: bool

    @classmethod
    def of(cls, spec: MultimodalDeploymentSpec) -> GatewaySettings:
        """The settings in this spec."""
        gateway = spec.gateway
        return cls(
            models=spec.model.names,
            adapters=tuple(adapter.name for adapter in spec.engine.adapters),
            prefixes_per_tenant=gateway.auth is not None and gateway.auth.prefix_cache == "PerTenant",
            allowed_origins=tuple(gateway.cors.allowed_origins) if gateway.cors is not None else (),
            max_body_bytes=gateway.max_body_mebibytes << 20,
            max_concurrent_requests=gateway.max_concurrent_requests,
            request_timeout_seconds=gateway.request_timeout_seconds,
            slo=spec.slo,
            web_page=gateway.web_page,
            audit=gateway.audit_log,
        )
