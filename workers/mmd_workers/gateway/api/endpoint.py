"""The life of a request at any path: let in, read, answered, recorded. `generation` answers those to the model.

Any failure becomes the client's error, and everything that the request held is released.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import re
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import ClassVar, Generic, TypeVar

from starlette.datastructures import Headers

from mmd_api.contract.errors import ClientGoneError, DeadlineError, InvalidValueError, MmdError
from mmd_workers.gateway.answers.exchange import Exchange, ReceiveChannel, Scope, SendChannel, until_gone
from mmd_workers.gateway.api.audit import show_timeline
from mmd_workers.gateway.api.authentication import tenant_of
from mmd_workers.gateway.api.gateway import Gateway
from mmd_workers.gateway.api.request_records import count_request, end_trace
from mmd_workers.gateway.basics.api_errors import INTERNAL, ApiError, ErrorShape, api_error
from mmd_workers.gateway.basics.body import read_json
from mmd_workers.gateway.basics.media_hold import RequestReservation
from mmd_workers.gateway.placement.timeline import Timeline
from mmd_workers.observe.logs import request_context

MAX_CLIENT_REQUEST_ID = 128
CLIENT_GONE_STATUS = 499
TIMEOUT_HEADER = "x-request-timeout"
_SECONDS = re.compile(r"[0-9]{1,9}(\.[0-9]{1,9})?")

_Body = TypeVar("_Body")
_Result = TypeVar("_Result")

_log = logging.getLogger(__name__)


class Endpoint(ABC):
    """Serves one path as an ASGI application, because it must notice at any moment that the client has gone.

    `prefix`: beginning of its request ids. `counts`: True if its requests appear in the metrics and among the recent requests. `errors`: the
    form of errors for its clients. `id_headers`: further response headers in which clients look for the request id.
    """

    prefix: ClassVar[str]
    counts: ClassVar[bool] = True
    errors: ClassVar[ErrorShape] = ErrorShape()
    id_headers: ClassVar[tuple[str, ...]] = ()

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway

    @abstractmethod
    async def _respond(self, exchange: Exchange, reservation: RequestReservation) -> None:
        """Read the request and answer it."""

    async def __call__(self, scope: Scope, receive: ReceiveChannel, send: SendChannel) -> None:
        """Answer one request, and release everything it held, whatever happens."""
        gateway = self._gateway
        request_id = f"{self.prefix}{uuid.uuid4().hex}"
        headers = Headers(scope=scope)
        client_request_id = headers.get("x-client-request-id", "")[:MAX_CLIENT_REQUEST_ID]
        timeline = Timeline(request_id, arrived=time.time(), client_request_id=client_request_id)
        show_timeline(scope, timeline)
        root = gateway.tracing.begin(headers, timeline.arrived, request_id)
        timeline.trace_id = root.trace_id
        tenant = tenant_of(scope)
        timeline.tenant = tenant.name if tenant else ""
        exchange = Exchange(request_id, receive, send, headers, timeline, root.carrier, self.errors, tenant)
        exchange.scope = scope
        exchange.notes |= dict.fromkeys(self.id_headers, request_id)
        exchange.notes["x-mmd-gateway"] = gateway.pod
        reservation = gateway.hold.reservation()
        try:
            async with failures_answered(exchange):
                with request_context(request_id, root.trace_id), gateway.admit(tenant):
                    if self.counts:
                        gateway.dispatcher.timelines.open(timeline)
                    try:
                        await self._respond(exchange, reservation)
                    finally:
                        reservation.release()
        finally:
            timeline.end(time.time())
            if self.counts and not (timeline.repeats and timeline.code == "ok"):
                count_request(gateway.metrics, gateway.settings.slo, timeline)
            if gateway.access and tenant:
                gateway.access.count(tenant, timeline.status)
            end_trace(gateway.tracing, timeline, root)

    def _deadline(self, exchange: Exchange) -> float:
        """The Unix time by which the request must have ended."""
        return self._gateway.deadline(exchange.timeline.arrived, exchange.deadline)

    def _set_deadline(self, exchange: Exchange) -> None:
        """Set the client's own deadline, if it sent one."""
        exchange.deadline = _client_deadline(exchange)
        if exchange.deadline < self._gateway.deadline(exchange.timeline.arrived):
            exchange.timeline.own_deadline = exchange.deadline


class JsonEndpoint(Endpoint, Generic[_Body]):
    """Serves one path for requests with a JSON body."""

    @abstractmethod
    def _parse(self, body: object) -> _Body:
        """Validate a decoded body."""

    @abstractmethod
    async def _answer(self, exchange: Exchange, request: _Body, reservation: RequestReservation) -> None:
        """Respond to a valid request."""

    async def _respond(self, exchange: Exchange, reservation: RequestReservation) -> None:
        """Read the request and answer it."""
        self._set_deadline(exchange)
        request = await self._read(exchange, reservation)
        await until_gone(exchange.receive, self._answer(exchange, request, reservation))

    async def _read(
        self,
        exchange: Exchange,
        reservation: RequestReservation,
        on_part: Callable[[bytes], None] = lambda _part: None,
    ) -> _Body:
        """Read and validate the request. `on_part` is called with each part of its body."""
        gateway = self._gateway
        deadline = self._deadline(exchange)
        body = await read_json(
            exchange.headers,
            exchange.receive,
            gateway.settings.max_body_bytes,
            reservation,
            deadline,
            on_part,
        )
        return self._parse(body)

    async def _in_time(self, exchange: Exchange, work: Awaitable[_Result]) -> _Result:
        """Await the preparation of a request, at most until its deadline.

        Raises:
            DeadlineError: the preparation took longer.
        """
        deadline = self._deadline(exchange)
        try:
            async with asyncio.timeout(max(0.0, deadline - time.time())):
                return await work
        except TimeoutError as error:
            seconds = deadline - exchange.timeline.arrived
            raise DeadlineError(
                f"the media did not arrive, or the grammar was not compiled, within the request timeout of {round(seconds, 3):g} s; "
                "send smaller media or use faster servers, retry, or raise x-request-timeout or spec.gateway.requestTimeoutSeconds"
            ) from error


@contextlib.asynccontextmanager
async def failures_answered(exchange: Exchange) -> AsyncIterator[None]:
    """Turn any failure within this context into the client's error."""
    timeline = exchange.timeline
    try:
        yield
    except ApiError as error:
        await exchange.fail(error)
    except ClientGoneError as error:
        timeline.status = CLIENT_GONE_STATUS
        timeline.code, timeline.error = error.code, error.message
    except MmdError as error:
        await exchange.fail(api_error(error))
    except Exception:  # noqa: BLE001 - a bug must not leave the client waiting
        _log.exception("%s failed", exchange.request_id)
        await exchange.fail(ApiError(MmdError(INTERNAL)))


def _client_deadline(exchange: Exchange) -> float:
    """The Unix time by which the client wants its request to end; infinite if it sets none.

    Raises:
        ApiError: 400, the header is invalid.
    """
    value = exchange.headers.get(TIMEOUT_HEADER)
    if value is None:
        return math.inf
    if not _SECONDS.fullmatch(value) or not float(value):
        fault = InvalidValueError(f"{TIMEOUT_HEADER}: send seconds as a number above 0, such as 30 or 2.5")
        raise ApiError(fault, param=TIMEOUT_HEADER)
    return exchange.timeline.arrived + float(value)
