"""The life of a request: admitted, read, prepared, given room for its answers, placed, answered, recorded. Any
failure becomes the client's error, and all that the request held is released."""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Awaitable
from typing import Any, ClassVar, Generic, TypeVar

from starlette.datastructures import Headers

from mmd_api.contract.errors import ClientGoneError, DeadlineError, MmdError
from mmd_workers.gateway.accounting import count_request, end_trace
from mmd_workers.gateway.answers import AnswerShare, AnswerSize
from mmd_workers.gateway.api_errors import INTERNAL, ApiError, ErrorShape, api_error
from mmd_workers.gateway.authentication import tenant_of
from mmd_workers.gateway.body import read_json
from mmd_workers.gateway.chat import truncated_seconds
from mmd_workers.gateway.chat_request import ChatRequest, GenerationRequest, parse_chat_request
from mmd_workers.gateway.choices import Choices
from mmd_workers.gateway.completion_request import CompletionRequest, parse_completion_request
from mmd_workers.gateway.exchange import Exchange, ReceiveChannel, Scope, SendChannel
from mmd_workers.gateway.gateway import Gateway
from mmd_workers.gateway.hold import RequestReservation
from mmd_workers.gateway.intake import Prepared
from mmd_workers.gateway.shapes import AnswerShape, ChatShape, TextShape
from mmd_workers.gateway.timeline import Timeline
from mmd_workers.gateway.translated import TranslatedRequest
from mmd_workers.observe.logs import request_context

MAX_CLIENT_REQUEST_ID = 128
CLIENT_GONE_STATUS = 499

_Body = TypeVar("_Body")
_Asked = TypeVar("_Asked", bound=GenerationRequest)
_Chat = TypeVar("_Chat", bound=ChatRequest)
_Result = TypeVar("_Result")

_log = logging.getLogger(__name__)


class Endpoint(ABC, Generic[_Body]):
    """A path that takes a JSON body, as an ASGI application: it must see the client go at any moment.

    `prefix`: of the ids of its requests. `counts`: whether its requests are in the metrics and among the recent requests. `errors`: how
    its clients get errors. `id_headers`: more headers in which they look for the request's id.
    """

    prefix: ClassVar[str]
    counts: ClassVar[bool] = True
    errors: ClassVar[ErrorShape] = ErrorShape()
    id_headers: ClassVar[tuple[str, ...]] = ()

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway

    @abstractmethod
    def _parse(self, body: object) -> _Body:
        """Validate a decoded body."""

    @abstractmethod
    async def _answer(self, exchange: Exchange, request: _Body, reservation: RequestReservation) -> None:
        """Respond to a valid request."""

    async def __call__(self, scope: Scope, receive: ReceiveChannel, send: SendChannel) -> None:
        """Answer one request, and release all that it held, whatever happens."""
        gateway = self._gateway
        request_id = f"{self.prefix}{uuid.uuid4().hex}"
        headers = Headers(scope=scope)
        own_id = headers.get("x-client-request-id", "")[:MAX_CLIENT_REQUEST_ID]
        timeline = Timeline(request_id, arrived=time.time(), client_request_id=own_id)
        root = gateway.tracing.begin(headers, timeline.arrived, request_id)
        timeline.trace_id = root.trace_id
        tenant = tenant_of(scope)
        timeline.tenant = tenant.name if tenant else ""
        exchange = Exchange(request_id, receive, send, headers, timeline, root.carrier, self.errors, tenant)
        exchange.notes |= dict.fromkeys(self.id_headers, request_id)
        exchange.notes["x-mmd-gateway"] = gateway.pod
        reservation = gateway.hold.reservation()
        try:
            with request_context(request_id, root.trace_id), gateway.admit(tenant):
                if self.counts:
                    gateway.dispatcher.timelines.open(timeline)
                try:
                    body = await read_json(
                        exchange.headers,
                        receive,
                        gateway.max_body_bytes,
                        reservation,
                        gateway.deadline(timeline.arrived),
                    )
                    request = self._parse(body)
                    del body
                    await _until_gone(receive, self._answer(exchange, request, reservation))
                finally:
                    reservation.release()
        except ApiError as error:
            await exchange.fail(error)
        except ClientGoneError as error:
            timeline.status = CLIENT_GONE_STATUS
            timeline.code, timeline.error = error.code, error.message
        except MmdError as error:
            await exchange.fail(api_error(error))
        except Exception:  # noqa: BLE001 - a bug must not leave the client waiting
            _log.exception("%s failed", request_id)
            await exchange.fail(ApiError(MmdError(INTERNAL)))
        finally:
            timeline.finished = time.time()
            if self.counts:
                count_request(gateway.metrics, gateway.slo, timeline)
            if gateway.access and tenant:
                gateway.access.count(tenant, timeline.status)
            end_trace(gateway.tracing, timeline, root)

    async def _in_time(self, exchange: Exchange, work: Awaitable[_Result]) -> _Result:
        """Await the preparation of a request, until its deadline."""
        gateway = self._gateway
        try:
            async with asyncio.timeout(max(0.0, gateway.deadline(exchange.timeline.arrived) - time.time())):
                return await work
        except TimeoutError as error:
            raise DeadlineError(
                f"the media did not arrive, or the grammar was not compiled, within the request timeout of {gateway.request_timeout_seconds:.0f} s; "
                "send smaller media or use faster servers, retry, or raise spec.gateway.requestTimeoutSeconds"
            ) from error


class _Generation(Endpoint[_Asked]):
    """A path whose requests are answered by the model."""

    @abstractmethod
    async def _prepare(
        self, exchange: Exchange, request: _Asked, reservation: RequestReservation
    ) -> tuple[list[Prepared], AnswerShape, int]:
        """The prompts, the shape of the answers, and the characters of prompts in them. What the request no longer needs is freed."""

    async def _answer(self, exchange: Exchange, request: _Asked, reservation: RequestReservation) -> None:
        gateway = self._gateway
        exchange.timeline.model = request.model
        gateway.check_model(request.model, exchange.tenant)
        prompts, shape, echo = await self._in_time(exchange, self._prepare(exchange, request, reservation))
        if truncated := truncated_seconds([prepared.layout for prepared in prompts]):
            exchange.notes["x-mmd-truncated-audio-seconds"] = str(truncated)
        choices = Choices(gateway, exchange, request, prompts, shape)
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
        )
        try:
            await _reserve(share, size, gateway.deadline(exchange.timeline.arrived))
            for index in range(size.n):
                choices.open(index)
                await asyncio.sleep(0)
            if request.stream:
                await choices.stream()
            else:
                await choices.whole()
        finally:
            share.release()
            await choices.release()


class Conversations(_Generation[_Chat]):
    """A path whose requests are conversations, whatever the shape of their answers."""

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
    """A path whose requests become chats: faults name the fields that they had."""

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


async def _reserve(share: AnswerShare, size: AnswerSize, deadline: float) -> None:
    """Room for all the answers at their full length, before any pod begins to generate them."""
    try:
        async with asyncio.timeout(max(0.0, deadline - time.time())):
            await share.reserve(size)
    except TimeoutError as error:
        raise DeadlineError(
            "the gateway had no memory for the answer before the request deadline; retry, request fewer tokens or log "
            "probabilities, or raise spec.gateway.resources.memory"
        ) from error


async def _until_gone(receive: ReceiveChannel, answer: Any) -> None:
    """Run `answer`, and cancel it when the client hangs up."""
    work: asyncio.Task[None] = asyncio.create_task(answer)
    gone = asyncio.create_task(_hung_up(receive))
    try:
        await asyncio.wait({work, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not work.done():
            raise ClientGoneError("the client hung up")
        work.result()
    finally:
        for task in (work, gone):
            task.cancel()
        await asyncio.wait({work, gone})


async def _hung_up(receive: ReceiveChannel) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
