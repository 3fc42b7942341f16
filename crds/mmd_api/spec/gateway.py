"""The gateway."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from mmd_api.base import ApiModel
from mmd_api.contract.picker import MIN_MEMORY_MEBIBYTES
from mmd_api.rule import Rule
from mmd_api.spec.exposure import HttpRouteSpec, InferencePoolSpec, IngressSpec, ServiceSpec
from mmd_api.spec.fields import Labels, Name, TenantName, amount_of
from mmd_api.spec.media import MediaPolicy
from mmd_api.spec.pods import PodTemplate, Resources, Toleration

LEAVE_SERVICE_SECONDS = 4
"""How long an ending gateway continues to serve, until nodes have taken it out of the Service."""


TLS_CERTIFICATE, TLS_KEY = "tls.crt", "tls.key"
"""Entries of a Secret of type kubernetes.io/tls."""


_LATE_AND_CLOSING_SECONDS = 11
"""Part of a gateway's grace period for late requests over connections that clients keep, and for closing."""


FILE_OVERHEAD_DIVISOR = 32
FILES_PER_MEBIBYTE = 512
"""Number of files whose entries, and the headers of their chunks, take at most a mebibyte."""


class OidcSpec(ApiModel):
    """OpenID Connect issuer whose tokens clients may send in place of an API key."""

    issuer: Annotated[str, Field(max_length=512, pattern=r"^https://[^\s?#]+$")]
    """URL of the issuer, exactly as its tokens have it in `iss`. Its keys are found through its discovery document."""
    audience: Annotated[str, Field(min_length=1, max_length=512)]
    """Audience that a token must have in `aud`: the name under which the issuer knows this gateway."""
    tenant_claim: Annotated[str, Field(min_length=1, max_length=256)] = "tenant"
    """Claim of a token that names its tenant, one of `keys.yaml`."""
    default_tenant: TenantName | None = None
    """Tenant of `keys.yaml` for tokens whose claim is missing or names none of the file. Without it, they are refused."""


class AuthSpec(ApiModel):
    """API keys that clients need, by tenant. Where it is omitted, anyone who can reach the gateway can use it."""

    keys_secret: Name
    """Name of a Secret whose key `keys.yaml` lists tenants, with hashes of their API keys, their models and limits (docs/security.md)."""
    oidc: OidcSpec | None = None
    """Issuer of tokens that clients may send in place of an API key."""
    prefix_cache: Literal["Shared", "PerTenant"] = "Shared"
    """Whether tenants share the KV of prompts that begin alike. PerTenant hides from others, who could measure the time to the first token, that a
    tenant has sent a prompt; one that all tenants have in common is then computed for each of them. Features of media are shared either way."""


class TlsSpec(ApiModel):
    """TLS of the gateway's port for clients. Where it is omitted, that port speaks plain HTTP."""

    secret_name: Name
    """Name of a Secret of type kubernetes.io/tls: `tls.crt` has the certificate, followed by those of its issuers, `tls.key` the private key (docs/security.md)."""


def _origins_as_browsers_send_them(c: CorsSpec) -> bool:
    defaults = (("https://", ":443"), ("http://", ":80"))
    return not any(
        o.startswith(scheme) and o.endswith(port) for o in c.allowed_origins for scheme, port in defaults
    )


CORS = (
    Rule(
        field="allowedOrigins",
        cel="!self.allowedOrigins.exists(o, (o.startsWith('https://') && o.endsWith(':443')) || (o.startsWith('http://') && o.endsWith(':80')))",
        holds=_origins_as_browsers_send_them,
        problem="browsers leave the port of the scheme out of an origin, so one with :443 of https or :80 of http matches no page",
        remedy="remove the port",
    ),
)


class CorsSpec(ApiModel, rules=CORS):
    """Web pages of other origins that may call the gateway (CORS). Where it is omitted, browsers let none."""

    allowed_origins: Annotated[
        list[Annotated[str, Field(max_length=512, pattern=r"^https?://[a-z0-9.:\[\]-]+$")]],
        Field(max_length=64),
    ]
    """Origins of these pages as browsers send them: scheme, host in lower case, and a port other than the scheme's, such as https://app.example.com. No wildcards."""


def _files_fit_one_another(f: FilesSpec) -> bool:
    return f.max_file_mebibytes <= f.max_tenant_mebibytes <= f.max_mebibytes


FILES = (
    Rule(
        field="maxTenantMebibytes",
        cel="self.maxFileMebibytes <= self.maxTenantMebibytes && self.maxTenantMebibytes <= self.maxMebibytes",
        holds=_files_fit_one_another,
        problem="a file has to fit into those of its tenant, and these into all files",
        remedy="set maxFileMebibytes to maxTenantMebibytes or less, and that to maxMebibytes or less",
    ),
)


class FilesSpec(ApiModel, rules=FILES):
    """Files that clients upload once and name in requests (/v1/files). They are kept by the NATS server. Where it is omitted, there are none."""

    max_mebibytes: Annotated[int, Field(ge=1, le=1_048_576)] = 512
    """Maximum size of all files together."""
    max_tenant_mebibytes: Annotated[int, Field(ge=1, le=1_048_576)] = 256
    """Maximum size of all files of a tenant. Without auth, all clients are one tenant."""
    max_file_mebibytes: Annotated[int, Field(ge=1, le=65_536)] = 64
    """Maximum size of a file."""
    max_files: Annotated[int, Field(ge=1, le=10_000)] = 10_000
    """Maximum number of files. A tenant may have the share of them that maxTenantMebibytes is of maxMebibytes."""
    lifetime_seconds: Annotated[int, Field(ge=60, le=31_536_000)] = 86_400
    """Time after which a file is deleted. An upload may ask for less."""
    encode_on_upload: bool = False
    """Whether encoder pods encode a file right after its upload, while no request waits for them."""

    @property
    def max_tenant_files(self) -> int:
        """Maximum number of files of a tenant."""
        return max(1, self.max_files * self.max_tenant_mebibytes // self.max_mebibytes)

    @property
    def stored_mebibytes(self) -> int:
        """Space that the NATS server sets aside for files.

        It covers their bytes, what the server adds to each chunk of them, and their entries.
        """
        return (
            self.max_mebibytes
            + -(-self.max_mebibytes // FILE_OVERHEAD_DIVISOR)
            + self.max_files // FILES_PER_MEBIBYTE
            + 1
        )


def _leaves_memory_beside_picker(gateway: GatewaySpec) -> bool:
    memory = gateway.resources.memory
    return gateway.inference_pool is None or memory is None or amount_of(memory) > MIN_MEMORY_MEBIBYTES << 20


GATEWAY = (
    Rule(
        field="resources.memory",
        cel="!has(self.inferencePool) || !has(self.resources.memory)"
        f" || quantity(string(self.resources.memory)).compareTo(quantity('{MIN_MEMORY_MEBIBYTES}Mi')) > 0",
        holds=_leaves_memory_beside_picker,
        problem=f"with inferencePool the endpoint picker may take {MIN_MEMORY_MEBIBYTES}Mi of it, and nothing is left to the gateway",
        remedy="raise it to 2Gi or more, or remove inferencePool",
    ),
    Rule(
        field="inferencePool",
        cel="!has(self.inferencePool) || !has(self.tls)",
        holds=lambda gateway: gateway.inference_pool is None or gateway.tls is None,
        problem="Gateways reach the pods of an InferencePool over plain HTTP, and tls makes these speak TLS alone",
        remedy="remove tls, since Gateways terminate TLS, or remove inferencePool",
    ),
    Rule(
        field="service.type",
        cel="!has(self.inferencePool) || self.service.type == 'ClusterIP'",
        holds=lambda gateway: gateway.inference_pool is None or gateway.service.type == "ClusterIP",
        problem="the Service has the port of the endpoint picker, which a load balancer would open to everyone",
        remedy="set service.type: ClusterIP, since Gateways have addresses of their own, or remove inferencePool",
    ),
)


class GatewaySpec(ApiModel, rules=GATEWAY):
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
    tls: TlsSpec | None = None
    """TLS of the port for clients."""
    cors: CorsSpec | None = None
    """Web pages of other origins that may call the gateway."""
    service: ServiceSpec = ServiceSpec()
    """Service of the gateway."""
    http_route: HttpRouteSpec | None = None
    """HTTPRoute of the Gateway API that sends requests to the gateway."""
    inference_pool: InferencePoolSpec | None = None
    """InferencePool of the Gateway API Inference Extension, for Gateways that ask which pod takes a request."""
    ingress: IngressSpec | None = None
    """Ingress that sends requests to the gateway."""
    files: FilesSpec | None = None
    """Files that clients upload and name in requests."""
    audit_log: bool = False
    """Whether gateways write a line of JSON to standard output for every request, without its content (docs/security.md)."""

    @property
    def exposed_by(self) -> tuple[str, ...]:
        """Kinds of objects, and types of Service, that lead clients outside the cluster to the gateway."""
        kinds = {"HTTPRoute": self.http_route, "InferencePool": self.inference_pool, "Ingress": self.ingress}
        balanced = ("LoadBalancer",) if self.service.type == "LoadBalancer" else ()
        return tuple(kind for kind, spec in kinds.items() if spec is not None) + balanced

    @property
    def grace_seconds(self) -> int:
        """Time from the deletion of a pod to SIGKILL.

        A request of the last moment may take its whole deadline.
        """
        return gateway_grace_seconds(
            self.template.termination_grace_period_seconds, self.request_timeout_seconds
        )

    @property
    def drain_seconds(self) -> int:
        """Time from SIGTERM, which comes when the pod has left the Service, to SIGKILL."""
        return self.grace_seconds - LEAVE_SERVICE_SECONDS


def gateway_grace_seconds(configured: int, request_timeout: int) -> int:
    """The grace period of gateways.

    A stream lives in its gateway and cannot move, so the deadline of requests decides, not the pod template.
    """
    return max(configured, request_timeout + LEAVE_SERVICE_SECONDS + _LATE_AND_CLOSING_SECONDS)
