"""The life of a request: admitted, read, prepared, given room for its answers, placed, answered, recorded. Any
failure becomes the client's error, and all that the request held is released."""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from typing import Any

from starlette.datastructures import Headers

from mmd_api.contract.errors import ClientGoneError, DeadlineError, MmdError
from mmd_workers.gateway.accounting import count_request, end_trace
from mmd_workers.gateway.answers import AnswerShare, AnswerSize
from mmd_workers.gateway.api_errors import INTERNAL, ApiError, api_error
from mmd_workers.gateway.body import read_json
from mmd_workers.gateway.chat import truncated_seconds
from mmd_workers.gateway.chat_request import ChatRequest, parse_chat_request
from mmd_workers.gateway.choices import Choices
from mmd_workers.gateway.exchange import Exchange, ReceiveChannel, Scope, SendChannel
from mmd_workers.gateway.gateway import Gateway
from mmd_workers.gateway.hold import RequestReservation
from mmd_workers.gateway.intake import Prepared
from mmd_workers.gateway.timeline import Timeline
from mmd_workers.observe.logs import request_context

MAX_CLIENT_REQUEST_ID = 128
CLIENT_GONE_STATUS = 499

_log = logging.getLogger(__name__)


class ChatCompletions:
    """POST /v1/chat/completions, as an ASGI application: it must see the client go at any moment."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway

    async def __call__(self, scope: Scope, receive: ReceiveChannel, send: SendChannel) -> None:
        """Answer one request, and release all that it held, whatever happens."""
        gateway = self._gateway
        request_id = f"chatcmpl-{uuid.uuid4().hex}"
        headers = Headers(scope=scope)
        own_id = headers.get("x-client-request-id", "")[:MAX_CLIENT_REQUEST_ID]
        timeline = Timeline(request_id, arrived=time.time(), client_request_id=own_id)
        root = gateway.tracing.begin(headers, timeline.arrived, request_id)
        timeline.trace_id = root.trace_id
        exchange = Exchange(request_id, receive, send, headers, timeline, root.carrier)
        exchange.notes["x-mmd-gateway"] = gateway.pod
        reservation = gateway.hold.reservation()
        gateway.dispatcher.timelines.open(timeline)
        try:
            with request_context(request_id, root.trace_id), gateway.admit():
                try:
                    body = await read_json(
                        exchange.headers,
                        receive,
                        gateway.max_body_bytes,
                        reservation,
                        gateway.deadline(timeline.arrived),
                    )
                    request = parse_chat_request(body)
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
            count_request(gateway.metrics, gateway.slo, timeline)
            end_trace(gateway.tracing, timeline, root)

    async def _answer(
        self, exchange: Exchange, request: ChatRequest, reservation: RequestReservation
    ) -> None:
        gateway = self._gateway
        exchange.timeline.model = request.model
        gateway.check_model(request.model)
        timeline = exchange.timeline
        try:
            async with asyncio.timeout(max(0.0, gateway.deadline(timeline.arrived) - time.time())):
                prepared = await gateway.intake.prepare(request, reservation, timeline, gateway.model_len())
        except TimeoutError as error:
            raise DeadlineError(
                f"the media did not arrive within the request timeout of {gateway.request_timeout_seconds:.0f} s; send smaller media or use faster "
                "servers, or raise spec.gateway.requestTimeoutSeconds"
            ) from error
        if truncated := truncated_seconds(prepared.layout):
            exchange.notes["x-mmd-truncated-audio-seconds"] = str(truncated)
        request.messages.clear()  # their data URLs are no longer needed, nor counted in the reservation
        choices = Choices(gateway, exchange, request, prepared)
        share = AnswerShare(gateway.answers)
        try:
            await _reserve(share, request, prepared, gateway.deadline(timeline.arrived))
            for index in range(request.n or 1):
                choices.open(index)
            if request.stream:
                await choices.stream()
            else:
                await choices.whole()
        finally:
            share.release()
            await choices.release()


async def _reserve(share: AnswerShare, request: ChatRequest, prepared: Prepared, deadline: float) -> None:
    """Room for all the answers at their full length, before any pod begins to generate them."""
    size = AnswerSize(
        n=request.n or 1,
        max_tokens=prepared.sampling.max_tokens,
        logprobs=bool(request.logprobs),
        top_logprobs=request.top_logprobs or 0,
        token_ids=bool(request.return_token_ids),
        stream=bool(request.stream),
    )
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
