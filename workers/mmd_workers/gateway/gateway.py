"""What all requests of a gateway share: its parts, its limits, and which requests it admits. Independent of HTTP."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

from mmd_api.contract.errors import ModelNotFoundError, TooManyRequestsError
from mmd_api.spec.observability import SloSpec
from mmd_workers.gateway.access import Access, KnownTenant
from mmd_workers.gateway.api_errors import ApiError
from mmd_workers.gateway.demand import GatewayDemand
from mmd_workers.gateway.hold import Budget, MediaHold
from mmd_workers.gateway.intake import Intake
from mmd_workers.gateway.lifecycle import Dispatcher
from mmd_workers.model.interfaces import Frontend
from mmd_workers.observe.metrics import Metrics
from mmd_workers.observe.tracing import Tracing
from mmd_workers.wire.bus import Bus
from mmd_workers.wire.peers import PeerDirectory

MAX_NAME_CHARACTERS = 256  # of an unknown model, in the error


@dataclass(slots=True)
class Gateway:
    """Everything that requests share.

    `access`: who may use it; None: anyone who can reach it.
    `models`: the names of the one model, the preferred one first. `adapters`: those of its adapters, each served as a model.
    `block_tokens`: of the blocks by whose identities pods name what they have cached.
    `draining`: about to end; connections are closed after their next answer. `failed`: what ended unexpectedly, so that the gateway ends too; empty if nothing did.
    """

    pod: str
    models: tuple[str, ...]
    max_body_bytes: int
    max_concurrent_requests: int
    request_timeout_seconds: int
    block_tokens: int
    frontend: Frontend
    intake: Intake
    hold: MediaHold
    answers: Budget
    dispatcher: Dispatcher
    directory: PeerDirectory
    bus: Bus
    metrics: Metrics
    tracing: Tracing
    slo: SloSpec
    demand: GatewayDemand
    access: Access | None = None
    adapters: tuple[str, ...] = ()
    web_page: bool = True
    started: float = field(default_factory=time.time)
    draining: bool = False
    failed: str = ""
    drained_at: float = math.inf  # Unix seconds: requests that come while it drains end by then
    running: int = 0
    last_request: float = -math.inf

    @property
    def names(self) -> tuple[str, ...]:
        """Everything that clients may request as a model."""
        return (*self.models, *self.adapters)

    def adapter_of(self, name: str) -> str:
        """The adapter that a served name stands for; empty: the model alone."""
        return name if name in self.adapters else ""

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

    def deadline(self, arrived: float) -> float:
        """When a request that arrived then must have ended; both in Unix seconds."""
        return min(arrived + self.request_timeout_seconds, self.drained_at)

    @contextlib.contextmanager
    def admit(self, tenant: KnownTenant | None) -> Iterator[None]:
        """Count a request in and out; `tenant`: whose it is.

        Raises:
            TooManyRequestsError: too many at once.
            RateLimitError: too many of that tenant.
        """
        self.last_request = time.monotonic()
        if self.running >= self.max_concurrent_requests:
            raise TooManyRequestsError(
                f"{self.running} requests are running, and the limit is {self.max_concurrent_requests}; retry, "
                "or raise spec.gateway.maxConcurrentRequests",
                retry_after_seconds=1.0,
            )
        with self.access.admitted(tenant) if self.access and tenant else contextlib.nullcontext():
            self.running += 1
            try:
                yield
            finally:
                self.running -= 1

    def model_len(self) -> int:
        """The longest sequence that every ready worker takes; 0: none has reported it."""
        lengths = [
            beat.max_model_len
            for beat in self.directory.pods()
            if beat.max_model_len and "prefill" in beat.roles
        ]
        return min(lengths, default=0)
