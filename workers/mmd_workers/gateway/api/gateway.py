"""What all requests of a gateway share: its parts, its limits, and which requests it admits. Independent of HTTP."""

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
from mmd_workers.gateway.intake.intake import Intake, Prepared
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

TOKEN_BYTES = 36  # of a prompt that waits: an integer, and its place in a list
MAX_NAME_CHARACTERS = 256  # of an unknown model, in the error


@dataclass(slots=True)
class Gateway:
    """Everything that requests share.

    `access`: who may use it; None: anyone who can reach it. `tokens`: what may stand for its tenants besides keys. `certificate`: of its port for clients; None: that speaks plain HTTP.
    `admissions`: the order in which requests of tenants start; None where there are
    no tenants: then all start at once. `picker`: where a platform's own gateway asks which gateway pod takes a request.
    `files`: that clients upload; None where they may not. `encode_on_upload`: encodes them then.
    `listening`: its port for clients is open. `draining`: about to end; connections are closed after their next answer. `failed`: what ended unexpectedly, so that the gateway ends too; empty if nothing did.
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
    drained_at: float = math.inf  # Unix seconds: requests that come while it drains end by then
    running: int = 0
    last_request: float = -math.inf

    @property
    def names(self) -> tuple[str, ...]:
        """Everything that clients may request as a model."""
        return (*self.settings.models, *self.settings.adapters)

    def adapter_of(self, name: str) -> str:
        """The adapter that a served name stands for; empty: the model alone."""
        return name if name in self.settings.adapters else ""

    def cache_salt(self, wanted: str | None, tenant: KnownTenant | None) -> str:
        """With whom a request shares its prefix: with those that have the same one. Bounded, and no text of a client's. `wanted`: by the client;
        empty where it shares with everybody.
        """
        owner = tenant.name if tenant is not None and self.settings.prefixes_per_tenant else ""
        if not (owner or wanted):
            return ""
        return hashlib.blake2b(f"{len(owner)} {owner} {wanted or ''}".encode(), digest_size=16).hexdigest()

    def names_for(self, tenant: KnownTenant | None) -> list[str]:
        """Of these, those that a tenant may use; all where there are no tenants."""
        return [name for name in self.names if tenant is None or tenant.may_use(name)]

    def check_model(self, name: str, tenant: KnownTenant | None) -> None:
        """Check that this gateway serves the model, to that tenant.

        Raises:
            ApiError: 404, with the names that are served. A model that the tenant may not use does not exist for it.
        """
        if name not in (served := self.names_for(tenant)):
            names = " or ".join(repr(one) for one in served)
            remedy = f"use {names}" if names else "this API key allows none that is"
            fault = ModelNotFoundError(
                f"model {name[:MAX_NAME_CHARACTERS]!r} is not served by this gateway; {remedy}"
            )
            raise ApiError(fault, param="model")

    @property
    def unusable(self) -> str:
        """Why no client could use it: it has no keys to check, or no certificate to show."""
        secrets = (self.access, self.certificate)
        return next((secret.unavailable for secret in secrets if secret and secret.unavailable), "")

    @property
    def serves(self) -> bool:
        """Whether a client would get an answer now, from pods that are there or that are on their way."""
        return self.listening and not self.failed and not self.unusable

    def deadline(self, arrived: float, wanted: float = math.inf) -> float:
        """When a request that arrived then must have ended, whose client wants it to end by `wanted`; all in Unix seconds."""
        return min(arrived + self.settings.request_timeout_seconds, self.drained_at, wanted)

    @contextlib.contextmanager
    def admit(self, tenant: KnownTenant | None) -> Iterator[None]:
        """Count a request in and out; `tenant`: whose it is.

        Raises:
            TooManyRequestsError: too many at once.
            RateLimitError: too many of that tenant.
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
        """Whether one more request may come. Of tenants, one that has few may take the place of one that waits, of a tenant that has many;
        it does so when it has been read and is about to wait itself.
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
        """A request's place in the order of tenants, to be released when it ends; None where there are none. `answers`: to each prompt.
        `num_bytes`: held for the request. `deadline`: Unix seconds; of the requests of a tenant the earliest starts first.

        Raises:
            RateLimitError: the tenant has too much work, or too much of it waits.
            TooManyRequestsError: the gateway is full, and nobody has to make a place.
            OverloadedError: too much waits of all.
        """
        if self.admissions is None or tenant is None:
            return None
        is_full = self.running - self.admissions.leaving > self.settings.max_concurrent_requests
        if is_full and not self.admissions.make_place(tenant):
            raise self._full()
        expected_tokens = tenant.usage.expected_output_tokens
        size = _size_of(prompts, answers, expected_tokens, self.dispatcher.is_suspected)
        num_bytes += TOKEN_BYTES * size.all_prompt_tokens
        return self.admissions.ask(tenant, size, num_bytes, deadline, timeline)

    def resize_admission(
        self, admission: Admission, prompts: Sequence[Prepared], answers: int, tenant: KnownTenant
    ) -> None:
        """A request has other prompts than it was admitted with. See `ask_for_admission`."""
        expected_tokens = tenant.usage.expected_output_tokens
        admission.resize(_size_of(prompts, answers, expected_tokens, self.dispatcher.is_suspected))

    def model_len(self) -> int:
        """The longest sequence that every ready worker takes; 0: none has reported it."""
        lengths = [
            beat.max_model_len
            for beat in self.directory.pods()
            if beat.max_model_len and "prefill" in beat.roles
        ]
        return min(lengths, default=0)


def _size_of(
    prompts: Sequence[Prepared], answers: int, expected_tokens: float, is_suspected: Callable[[str], bool]
) -> Size:
    """What a request asks for. `answers`: to each prompt. `expected_tokens`: of each of them, if the request allows as many.
    `is_suspected`: whether only encoder pods get a medium.
    """
    work: Counter[Modality] = Counter()
    media_tokens = 0
    for prepared in prompts:
        for feature in prepared.features:
            work[feature.modality] += feature.work
            media_tokens += feature.num_tokens
    output = sum(math.ceil(min(expected_tokens, prepared.sampling.max_tokens)) for prepared in prompts)
    return Size(
        prompt_tokens=sum(len(prepared.layout.token_ids) for prepared in prompts),
        output_tokens=answers * output,
        prompts=len(prompts),
        answers=answers,
        companion_tokens=sum(prepared.companion_tokens for prepared in prompts),
        encode_work=work,
        media_tokens=media_tokens,
        encoders_only=any(is_suspected(f.feature_id) for prepared in prompts for f in prepared.features),
    )
