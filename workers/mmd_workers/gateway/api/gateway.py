"""The shared state of a gateway's requests: its parts, its limits, and the admission of requests. Independent of HTTP."""

from __future__ import annotations

import contextlib
import hashlib
import math
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from mmd_api.contract.errors import ModelNotFoundError, TooManyRequestsError
from mmd_api.contract.pools import Modality
from mmd_workers.caches.index import CacheIndex
from mmd_workers.gateway.access.bearer_tokens import TokenVerifier
from mmd_workers.gateway.access.certificate import Certificate
from mmd_workers.gateway.access.keys import Access, KnownTenant
from mmd_workers.gateway.api.audit_log import AuditLog
from mmd_workers.gateway.api.gateway_settings import GatewaySettings
from mmd_workers.gateway.basics.api_errors import ApiError
from mmd_workers.gateway.basics.media_hold import Budget, MediaHold
from mmd_workers.gateway.idempotency.repeats import Repeats
from mmd_workers.gateway.intake.encode_on_upload import EncodeOnUpload
from mmd_workers.gateway.intake.intake import Intake
from mmd_workers.gateway.intake.prepared import Prepared
from mmd_workers.gateway.intake.tenant_files import Files
from mmd_workers.gateway.picker.endpoint_picker import EndpointPicker
from mmd_workers.gateway.placement.admission import Admission, FairAdmission
from mmd_workers.gateway.placement.demand import GatewayDemand
from mmd_workers.gateway.placement.dispatcher import Dispatcher
from mmd_workers.gateway.placement.timeline import Timeline
from mmd_workers.gateway.placement.work import Size
from mmd_workers.model.interfaces import Frontend
from mmd_workers.observe.metrics import Metrics
from mmd_workers.observe.tracing import Tracing
from mmd_workers.wire.bus import Bus
from mmd_workers.wire.peers import PeerDirectory

WAITING_TOKEN_BYTES = 36  # each token of a waiting prompt: an integer, and its slot in a list
MAX_SHOWN_NAME_CHARACTERS = 256  # an error about an unknown model shows this much of the name


@dataclass(slots=True)
class Gateway:
    """Everything that requests share.

    `access`: who may use the gateway; None: anyone who can reach it. `tokens`: verifies the bearer tokens that tenants may send instead of
    keys. `certificate`: certificate of the port for clients; None: the port speaks plain HTTP. `admissions`: the order in which requests of
    tenants start; None if there are no tenants, and then all start at once. `picker`: tells a platform's own gateway which gateway pod takes a
    request. `files`: files that clients upload; None if they may not. `encode_on_upload`: encodes files when they are uploaded.
    `listening`: the port for clients is open. `draining`: the gateway is about to end; connections are closed after their next answer.
    `drained_at`: Unix time by which requests that arrive during the drain must end. `failed`: the part that ended unexpectedly, so that the
    gateway ends too; empty if none did.
    """

    pod: str
    settings: GatewaySettings
    frontend: Frontend
    intake: Intake
    hold: MediaHold
    answers: Budget
    repeats: Repeats
    dispatcher: Dispatcher
    directory: PeerDirectory
    bus: Bus
    metrics: Metrics
    tracing: Tracing
    demand: GatewayDemand
    audit_log: AuditLog
    prefix_index: CacheIndex
    feature_index: CacheIndex
    access: Access | None = None
    tokens: TokenVerifier | None = None
    certificate: Certificate | None = None
    admissions: FairAdmission | None = None
    picker: EndpointPicker | None = None
    files: Files | None = None
    encode_on_upload: EncodeOnUpload | None = None
    started: float = field(default_factory=time.time)
    listening: bool = False
    draining: bool = False
    failed: str = ""
    drained_at: float = math.inf
    running: int = 0
    last_request: float = -math.inf

    @property
    def names(self) -> tuple[str, ...]:
        """Everything that clients may request as a model."""
        return (*self.settings.models, *self.settings.adapters)

    def adapter_of(self, name: str) -> str:
        """The adapter with this served name; empty if the name is the model's own."""
        return name if name in self.settings.adapters else ""

    def cache_salt(self, wanted: str | None, tenant: KnownTenant | None) -> str:
        """The salt of a request's cached prefix: requests share prefixes only if their salts are equal.

        Returns a hash, which is bounded and has no text from clients; empty if the request shares its prefix with all others. `wanted`: the salt
        that the client sent.
        """
        owner = tenant.name if tenant is not None and self.settings.prefixes_per_tenant else ""
        if not (owner or wanted):
            return ""
        return hashlib.blake2b(f"{len(owner)} {owner} {wanted or ''}".encode(), digest_size=16).hexdigest()

    def names_for(self, tenant: KnownTenant | None) -> list[str]:
        """The names that a tenant may use; all if there are no tenants."""
        return [name for name in self.names if tenant is None or tenant.may_use(name)]

    def check_model(self, name: str, tenant: KnownTenant | None) -> None:
        """Check that this gateway serves the model to this tenant.

        Raises:
            ApiError: 404, with the served names. A model that the tenant may not use does not exist for it.
        """
        if name not in (served := self.names_for(tenant)):
            names = " or ".join(repr(model) for model in served)
            remedy = f"use {names}" if names else "this API key allows none that is"
            fault = ModelNotFoundError(
                f"model {name[:MAX_SHOWN_NAME_CHARACTERS]!r} is not served by this gateway; {remedy}"
            )
            raise ApiError(fault, param="model")

    @property
    def unusable(self) -> str:
        """Why no client can use the gateway: keys or the certificate are missing; empty if they are available."""
        secrets = (self.access, self.certificate)
        return next((secret.unavailable for secret in secrets if secret and secret.unavailable), "")

    @property
    def serves(self) -> bool:
        """True if a client would get an answer now, from pods that exist or are starting."""
        return self.listening and not self.failed and not self.unusable

    def deadline(self, arrived: float, wanted: float = math.inf) -> float:
        """The time by which a request must have ended. `arrived`: time of its arrival. `wanted`: the client's own deadline. All are Unix seconds."""
        return min(arrived + self.settings.request_timeout_seconds, self.drained_at, wanted)

    @contextlib.contextmanager
    def admit(self, tenant: KnownTenant | None) -> Iterator[None]:
        """Count a request of the gateway and of its tenant while it runs.

        The tenant's limits are checked first. So a tenant beyond them learns which limit it has reached even if the gateway is full, and the
        refusal misses no promise of `spec.slo`.

        Raises:
            TooManyRequestsError: too many requests are running.
            RateLimitError: the tenant has reached one of its limits.
        """
        self.last_request = time.monotonic()
        if self.access and tenant:
            self.access.check_limits(tenant)
        if not self._has_place(tenant):
            raise self._full()
        with self.access.admitted(tenant) if self.access and tenant else contextlib.nullcontext():
            self.running += 1
            try:
                yield
            finally:
                self.running -= 1

    def _has_place(self, tenant: KnownTenant | None) -> bool:
        """True if there is a place for one more request.

        With tenants, a request of a tenant that has few may replace a waiting request of a tenant that has many. It does so when it has been
        read and is about to wait itself.
        """
        if self.admissions is None or tenant is None:
            return self.running < self.settings.max_concurrent_requests
        beyond = self.running + 1 - self.admissions.leaving - self.settings.max_concurrent_requests
        return beyond <= 0 or self.admissions.has_place_for(tenant, tenant.usage.running + 1, beyond)

    def _full(self) -> TooManyRequestsError:
        return TooManyRequestsError(
            f"{self.running} requests are running, and the limit is {self.settings.max_concurrent_requests}; retry, "
            "or raise spec.gateway.maxConcurrentRequests",
            retry_after_seconds=1.0,
        )

    def ask_for_admission(
        self,
        tenant: KnownTenant | None,
        prompts: Sequence[Prepared],
        answers: int,
        num_bytes: int,
        deadline: float,
        timeline: Timeline,
    ) -> Admission | None:
        """The place of a request in the order of tenants, to be released when the request ends; None if there are no tenants.

        `answers`: number of answers to each prompt. `num_bytes`: bytes held for the request. `deadline`: Unix seconds; the requests of a
        tenant start in the order of their deadlines.

        Raises:
            RateLimitError: the tenant has too much work, or too much of it is waiting.
            TooManyRequestsError: the gateway is full, and no waiting request has to give up its place.
            OverloadedError: too much work of all tenants is waiting.
        """
        if self.admissions is None or tenant is None:
            return None
        is_full = self.running - self.admissions.leaving > self.settings.max_concurrent_requests
        if is_full and not self.admissions.make_place(tenant):
            raise self._full()
        expected_tokens = tenant.usage.expected_output_tokens
        size = _size_of(prompts, answers, expected_tokens, self.dispatcher.is_suspected)
        num_bytes += WAITING_TOKEN_BYTES * size.all_prompt_tokens
        return self.admissions.ask(tenant, size, num_bytes, deadline, timeline)

    def resize_admission(
        self, admission: Admission, prompts: Sequence[Prepared], answers: int, tenant: KnownTenant
    ) -> None:
        """Adjust an admission to a request's changed prompts. The parameters are those of `ask_for_admission`."""
        expected_tokens = tenant.usage.expected_output_tokens
        admission.resize(_size_of(prompts, answers, expected_tokens, self.dispatcher.is_suspected))

    def model_len(self) -> int:
        """The longest sequence that every Ready worker accepts; 0 if none has reported a limit."""
        lengths = [
            beat.max_model_len
            for beat in self.directory.pods()
            if beat.max_model_len and "prefill" in beat.roles
        ]
        return min(lengths, default=0)


def _size_of(
    prompts: Sequence[Prepared], answers: int, expected_tokens: float, is_suspected: Callable[[str], bool]
) -> Size:
    """The size of a request, as work for the pools.

    `answers`: number of answers to each prompt. `expected_tokens`: expected length of each answer, if the request allows that many.
    `is_suspected`: tells whether a medium goes to encoder pods only.
    """
    work: Counter[Modality] = Counter()
    media_tokens = 0
    for prepared in prompts:
        for feature in prepared.features:
            work[feature.modality] += feature.work
            media_tokens += feature.num_tokens
    output_tokens = sum(math.ceil(min(expected_tokens, prepared.sampling.max_tokens)) for prepared in prompts)
    return Size(
        prompt_tokens=sum(len(prepared.layout.token_ids) for prepared in prompts),
        output_tokens=answers * output_tokens,
        prompts=len(prompts),
        answers=answers,
        companion_tokens=sum(prepared.companion_tokens for prepared in prompts),
        encode_work=work,
        media_tokens=media_tokens,
        encoders_only=any(is_suspected(f.feature_id) for prepared in prompts for f in prepared.features),
    )
