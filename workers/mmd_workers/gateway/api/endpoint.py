"""The life of a request: admitted, read, prepared, given room for its answers, placed, answered, recorded.

Any failure becomes the client's error, and everything that the request held is released.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
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
from mmd_workers.gateway.answers.answer_budget import AnswerShare, AnswerSize
from mmd_workers.gateway.answers.answer_shape import AnswerShape
from mmd_workers.gateway.answers.exchange import Exchange, ReceiveChannel, Scope, SendChannel, until_gone
from mmd_workers.gateway.api.accounting import count_request, end_trace
from mmd_workers.gateway.api.audit import show_timeline
from mmd_workers.gateway.api.authentication import tenant_of
from mmd_workers.gateway.api.chat.chat_shape import ChatShape
from mmd_workers.gateway.api.choices import Choices
from mmd_workers.gateway.api.completions.text_shape import TextShape
from mmd_workers.gateway.api.gateway import Gateway
from mmd_workers.gateway.basics.api_errors import INTERNAL, ApiError, ErrorShape, api_error
from mmd_workers.gateway.basics.body import read_json
from mmd_workers.gateway.basics.media_hold import RequestReservation
from mmd_workers.gateway.content.chat_request import ChatRequest, GenerationRequest, parse_chat_request
from mmd_workers.gateway.content.completion_request import CompletionRequest, parse_completion_request
from mmd_workers.gateway.content.translation import TranslatedRequest
from mmd_workers.gateway.idempotency.repeats import keyed_request
from mmd_workers.gateway.intake.intake import Prepared
from mmd_workers.gateway.intake.omissions import headers_of
from mmd_workers.gateway.placement.timeline import Timeline
from mmd_workers.observe.logs import request_context

MAX_CLIENT_REQUEST_ID = 128
CLIENT_GONE_STATUS = 499
TIMEOUT_HEADER = "x-request-timeout"
_SECONDS = re.compile(r"[0-9]{1,9}(\.[0-9]{1,9})?")

_Body = TypeVar("_Body")
_Request = TypeVar("_Request", bound=GenerationRequest)
_Chat = TypeVar("_Chat", bound=ChatRequest)
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
            async with _failures_answered(exchange):
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


class _Generation(JsonEndpoint[_Request]):
    """Serves a path whose requests the model answers. A request with an idempotency key may repeat another."""

    async def _respond(self, exchange: Exchange, reservation: RequestReservation) -> None:
        tenant = exchange.tenant.name if exchange.tenant else ""
        keyed = keyed_request(exchange.headers, tenant, self.prefix)
        if keyed is None:
            await super()._respond(exchange, reservation)
            return
        self._set_deadline(exchange)
        digest = hashlib.sha256()
        request = await self._read(exchange, reservation, digest.update)

        repeats, deadline = self._gateway.repeats, self._deadline(exchange)
        answer = repeats.find(keyed, digest.digest())
        if answer is not None:
            del request
            reservation.release()
            await repeats.repeat(exchange, keyed, answer, deadline)
            return

        if not keyed.resumes:
            self._check_model(exchange, request)  # before other gateways learn of its key

        unanswered = [request]
        del request

        async def make(maker: Exchange) -> bool:
            async with _failures_answered(maker):
                await self._answer(maker, unanswered.pop(), reservation)
                return True
            return False

        def not_needed() -> None:
            unanswered.clear()
            reservation.release()

        await repeats.first(exchange, keyed, digest.digest(), deadline, make, not_needed)

    def _check_model(self, exchange: Exchange, request: _Request) -> None:
        exchange.timeline.model = request.model
        self._gateway.check_model(request.model, exchange.tenant)

    @abstractmethod
    async def _prepare(
        self, exchange: Exchange, request: _Request, reservation: RequestReservation
    ) -> tuple[list[Prepared], AnswerShape, int]:
        """Prepare the prompts, the shape of the answers, and the number of prompt characters they repeat; free what the request no longer needs."""

    async def _answer(self, exchange: Exchange, request: _Request, reservation: RequestReservation) -> None:
        gateway = self._gateway
        self._check_model(exchange, request)
        prompts, shape, echo = await self._in_time(exchange, self._prepare(exchange, request, reservation))
        exchange.notes |= headers_of([prepared.layout for prepared in prompts])
        share = AnswerShare(gateway.answers)
        size = AnswerSize(
            n=len(prompts) * (request.n or 1),
            max_tokens=max(prepared.sampling.max_tokens for prepared in prompts),
            logprobs=request.num_logprobs is not None,
            top_logprobs=request.num_logprobs or 0,
            token_ids=bool(request.return_token_ids),
            stream=bool(request.stream) and not shape.keeps_text,
            prompts=len(prompts) if isinstance(request, CompletionRequest) else 0,
            echo_characters=echo,
            echo_tokens=(request.n or 1)
            * sum(len(prepared.layout.token_ids) for prepared in prompts)
            * request.prompt_logprobs,
        )
        deadline = self._deadline(exchange)
        try:
            # Before admission: otherwise its room in the pools would stay empty while the request waits for memory.
            await _reserve(share, size, deadline)
            admission = gateway.ask_for_admission(
                exchange.tenant, prompts, request.n or 1, reservation.num_bytes, deadline, exchange.timeline
            )
            choices = Choices(gateway, exchange, request, prompts, shape, admission)
            try:
                for index in range(size.n):
                    choices.open(index)
                    await asyncio.sleep(0)
                if request.stream:
                    await choices.stream()
                else:
                    await choices.whole()
            finally:
                if admission is not None:
                    admission.release(choices.answers())
                await choices.release()
        finally:
            share.release()


class Conversations(_Generation[_Chat]):
    """Serves a path whose requests are conversations, in any API."""

    @abstractmethod
    def _shape(self, exchange: Exchange, request: _Chat, prepared: Prepared) -> AnswerShape:
        """The shape of the answers."""

    async def _prepare(
        self, exchange: Exchange, request: _Chat, reservation: RequestReservation
    ) -> tuple[list[Prepared], AnswerShape, int]:
        gateway = self._gateway
        prepared = await gateway.intake.prepare(request, reservation, exchange.timeline, gateway.model_len())
        request.messages.clear()  # their data URLs are no longer needed, nor counted in the reservation
        request.tools = request.tool_choice = None
        return [prepared], self._shape(exchange, request, prepared), 0


class Translations(Conversations[TranslatedRequest]):
    """Serves a path whose requests are translated into chats; errors name the original fields."""

    async def _answer(
        self, exchange: Exchange, request: TranslatedRequest, reservation: RequestReservation
    ) -> None:
        with request.names.in_faults():
            await super()._answer(exchange, request, reservation)


class ChatCompletions(Conversations[ChatRequest]):
    """POST /v1/chat/completions."""

    prefix = "chatcmpl-"

    def _parse(self, body: object) -> ChatRequest:
        return parse_chat_request(body)

    def _shape(self, _exchange: Exchange, request: ChatRequest, _prepared: Prepared) -> ChatShape:
        return ChatShape(
            logprobs=request.num_logprobs is not None,
            token_ids=bool(request.return_token_ids),
            usage=request.wants_usage,
        )


class TextCompletions(_Generation[CompletionRequest]):
    """POST /v1/completions."""

    prefix = "cmpl-"

    def _parse(self, body: object) -> CompletionRequest:
        return parse_completion_request(body)

    async def _prepare(
        self, exchange: Exchange, request: CompletionRequest, reservation: RequestReservation
    ) -> tuple[list[Prepared], AnswerShape, int]:
        gateway = self._gateway
        prompts = await gateway.intake.prepare_texts(
            request, reservation, exchange.timeline, gateway.model_len()
        )
        echo: list[str] = []
        if request.echo:
            for (_, prompt), prepared in zip(request.prompts, prompts, strict=True):
                text = prompt if isinstance(prompt, str) else await self._text(prepared)
                echo += [text] * (request.n or 1)
        request.prompt = ""  # a list of tokens now
        reservation.release()
        shape = TextShape(
            logprobs=request.num_logprobs,
            token_ids=bool(request.return_token_ids),
            usage=request.wants_usage,
            echo=echo,
        )
        return prompts, shape, sum(map(len, echo))

    async def _text(self, prepared: Prepared) -> str:
        return await asyncio.to_thread(
            self._gateway.frontend.decode, prepared.layout.token_ids, special_tokens=True
        )


@contextlib.asynccontextmanager
async def _failures_answered(exchange: Exchange) -> AsyncIterator[None]:
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


async def _reserve(share: AnswerShare, size: AnswerSize, deadline: float) -> None:
    """Reserve room for all answers at full length, before any pod begins to generate them.

    Raises:
        DeadlineError: there was no room before the deadline.
    """
    try:
        async with asyncio.timeout(max(0.0, deadline - time.time())):
            await share.reserve(size)
    except TimeoutError as error:
        raise DeadlineError(
            "the gateway had no memory for the answer before the request deadline; retry, request fewer tokens or log "
            "probabilities, or raise x-request-timeout or spec.gateway.resources.memory"
        ) from error
