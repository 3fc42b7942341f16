"""The HTTP surface: chat completions as JSON or server-sent events, models, health, metrics, recent timelines. No logic of its own."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import math
import time
import uuid
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, MutableMapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any, get_args

from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from mmd_api.spec import SloSpec
from mmd_workers.engine.blocks import block_hash
from mmd_workers.errors import MmdError
from mmd_workers.gateway import page
from mmd_workers.gateway.api import (
    ApiError,
    AssistantMessage,
    ChatCompletion,
    ChatCompletionChunk,
    ChatRequest,
    Choice,
    ChoiceLogprobs,
    ChunkChoice,
    TokenLogprobs,
    Usage,
    parse_chat_request,
)
from mmd_workers.gateway.body import ClientGoneError, read_json
from mmd_workers.gateway.chat import ChoiceStream, usage_of
from mmd_workers.gateway.demand import Demand
from mmd_workers.gateway.hold import MediaHold, Reservation
from mmd_workers.gateway.intake import MAX_SEED, Intake, Prepared, api_error
from mmd_workers.gateway.lifecycle import Dispatcher
from mmd_workers.gateway.requests import SequenceSpec
from mmd_workers.gateway.router import FeatureNeed, RouteRequest
from mmd_workers.gateway.timeline import Timeline, kept_promises, sequence_id
from mmd_workers.model.types import Frontend
from mmd_workers.observe.logs import request_context
from mmd_workers.observe.metrics import Metrics, exemplar
from mmd_workers.observe.server import scraped
from mmd_workers.observe.tracing import Root, Tracing
from mmd_workers.wire.bus import Bus
from mmd_workers.wire.messages import Heartbeat, PodState
from mmd_workers.wire.peers import PeerDirectory

Scope = MutableMapping[str, Any]
ReceiveChannel = Callable[[], Awaitable[MutableMapping[str, Any]]]
SendChannel = Callable[[MutableMapping[str, Any]], Awaitable[None]]

STREAM_OPENS_AFTER_SECONDS = 5.0  # without a token; until then a failure still gets its HTTP status
KEEPALIVE_SECONDS = 10.0
MAX_HASHED_BLOCKS = 1024  # of a prompt, for locality: about 10 ms
LATE_PHASES_SECONDS = 0.25
SHOWN_PODS = 256  # in /debug/state
MAX_CLIENT_REQUEST_ID = 128
CLIENT_GONE_STATUS = 499

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class Gateway:
    """Everything that requests share. `draining`: about to end; connections are closed after their next answer."""

    model: str
    max_body_bytes: int
    max_concurrent_requests: int
    request_timeout_seconds: int
    frontend: Frontend
    intake: Intake
    hold: MediaHold
    dispatcher: Dispatcher
    directory: PeerDirectory
    bus: Bus
    metrics: Metrics
    tracing: Tracing
    slo: SloSpec
    demand: Demand
    started: float = field(default_factory=time.time)
    draining: bool = False
    running: int = 0
    last_request: float = -math.inf

    @contextlib.contextmanager
    def admit(self) -> Any:
        """Count a request in and out.

        Raises:
            ApiError: 429, too many at once.
        """
        self.last_request = time.monotonic()
        if self.running >= self.max_concurrent_requests:
            raise ApiError(
                429,
                f"{self.running} requests are in hand and the limit is {self.max_concurrent_requests}: retry, "
                "or raise spec.gateway.maxConcurrentRequests",
                code="too_many_requests",
                retry_after_seconds=1.0,
            )
        self.running += 1
        try:
            yield
        finally:
            self.running -= 1

    def model_len(self) -> int:
        """The longest sequence that every ready worker takes; 0: nobody has said."""
        lengths = [
            beat.max_model_len
            for beat in self.directory.pods()
            if beat.max_model_len and "prefill" in beat.roles
        ]
        return min(lengths, default=0)


class _FarewellMiddleware:
    """While the gateway drains, every answer closes its connection: the next request of that client opens one to another pod."""

    def __init__(self, app: Any, gateway: Gateway) -> None:
        self._app = app
        self._gateway = gateway

    async def __call__(self, scope: Scope, receive: ReceiveChannel, send: SendChannel) -> None:
        async def closing(message: MutableMapping[str, Any]) -> None:
            if message["type"] == "http.response.start" and self._gateway.draining:
                message = {**message, "headers": [*message.get("headers", ()), (b"connection", b"close")]}
            await send(message)

        await self._app(scope, receive, closing)


@dataclass(slots=True)
class _Exchange:
    """One HTTP request on its way."""

    request_id: str
    receive: ReceiveChannel
    send: SendChannel
    headers: Headers
    timeline: Timeline
    trace: dict[str, str]
    streaming: bool = False

    async def reply(self, status: int, body: bytes, headers: dict[str, str] | None = None) -> None:
        """A whole JSON response."""
        self.timeline.status = status
        response = Response(
            body, status, {"x-request-id": self.request_id, **(headers or {})}, media_type="application/json"
        )
        await response({"type": "http"}, self.receive, self.send)

    async def events(self, *events: str) -> None:
        """Server-sent events; the first call opens the stream."""
        if not self.streaming:
            self.streaming = True
            self.timeline.status = 200
            headers = {
                "content-type": "text/event-stream; charset=utf-8",
                "cache-control": "no-cache",
                "x-accel-buffering": "no",
                "x-request-id": self.request_id,
            }
            raw = [(name.encode(), value.encode()) for name, value in headers.items()]
            await self.send({"type": "http.response.start", "status": 200, "headers": raw})
        if events:
            await self.send(
                {"type": "http.response.body", "body": "".join(events).encode(), "more_body": True}
            )

    async def fail(self, error: ApiError) -> None:
        """The error as a response, or as the last event of a stream that has begun."""
        self.timeline.code, self.timeline.error = error.code, error.message
        if self.streaming:
            self.timeline.status = error.status
            await self.events(f"data: {json.dumps(error.body())}\n\n", "data: [DONE]\n\n")
            await self.send({"type": "http.response.body", "body": b""})
            return
        headers = {}
        if error.retry_after_seconds is not None:
            headers["retry-after"] = str(max(1, round(error.retry_after_seconds)))
        if error.status in (408, 413):
            headers["connection"] = "close"  # the rest of the body is not read
        await self.reply(error.status, json.dumps(error.body()).encode(), headers)


class ChatCompletions:
    """POST /v1/chat/completions, as an ASGI application: it must see the client go at any moment."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway

    async def __call__(self, scope: Scope, receive: ReceiveChannel, send: SendChannel) -> None:
        """Answer one request; whatever happens, nothing of it is left."""
        gateway = self._gateway
        request_id = f"chatcmpl-{uuid.uuid4().hex}"
        headers = Headers(scope=scope)
        own_id = headers.get("x-client-request-id", "")[:MAX_CLIENT_REQUEST_ID]
        timeline = Timeline(request_id, arrived=time.time(), client_request_id=own_id)
        root = gateway.tracing.begin(headers, timeline.arrived, request_id)
        timeline.trace_id = root.trace_id
        exchange = _Exchange(request_id, receive, send, headers, timeline, root.carrier)
        reservation = gateway.hold.reservation()
        gateway.dispatcher.timelines.open(timeline)
        try:
            with request_context(request_id, root.trace_id), gateway.admit():
                try:
                    body = await read_json(exchange.headers, receive, gateway.max_body_bytes, reservation)
                    request = parse_chat_request(body)
                    del body
                    await self._until_gone(exchange, self._answer(exchange, request, reservation))
                finally:
                    reservation.release()
        except ApiError as error:
            await exchange.fail(error)
        except MmdError as error:
            await exchange.fail(api_error(error))
        except ClientGoneError:
            timeline.status, timeline.code = CLIENT_GONE_STATUS, "client_gone"
            timeline.error = "the client hung up"
        except Exception:  # noqa: BLE001 - a bug must not leave the client waiting
            _log.exception("%s failed", request_id)
            await exchange.fail(ApiError(500, "internal error: see the gateway's log", code="internal"))
        finally:
            timeline.finished = time.time()
            self._count(timeline)
            self._trace(timeline, root)

    async def _until_gone(self, exchange: _Exchange, answer: Any) -> None:
        """Run `answer`, and cancel it when the client hangs up."""
        work: asyncio.Task[None] = asyncio.create_task(answer)
        gone = asyncio.create_task(_hung_up(exchange.receive))
        try:
            await asyncio.wait({work, gone}, return_when=asyncio.FIRST_COMPLETED)
            if not work.done():
                raise ClientGoneError
            work.result()
        finally:
            for task in (work, gone):
                task.cancel()
            await asyncio.wait({work, gone})

    async def _answer(self, exchange: _Exchange, request: ChatRequest, reservation: Reservation) -> None:
        gateway = self._gateway
        exchange.timeline.model = request.model
        if request.model != gateway.model:
            raise ApiError(
                404,
                f"model {request.model!r} is not served here: use {gateway.model!r}",
                code="model_not_found",
                param="model",
            )
        prepared = await gateway.intake.prepare(request, reservation, exchange.timeline, gateway.model_len())
        news = asyncio.Event()
        choices: list[ChoiceStream] = []
        try:
            for index in range(request.n or 1):
                choices.append(self._open(exchange, request, prepared, index, news))
            if request.stream:
                await self._stream(exchange, request, prepared, choices, news)
            else:
                await self._whole(exchange, request, prepared, choices, news)
        finally:
            for choice in choices:
                await gateway.dispatcher.release(choice.sequence)

    def _open(
        self, exchange: _Exchange, request: ChatRequest, prepared: Prepared, index: int, news: asyncio.Event
    ) -> ChoiceStream:
        gateway, timeline = self._gateway, exchange.timeline
        sampling = replace(prepared.sampling, seed=(prepared.sampling.seed + index) % MAX_SEED)
        spec = SequenceSpec(
            request_id=sequence_id(exchange.request_id, index),
            token_ids=prepared.layout.token_ids,
            features=prepared.features,
            sampling=sampling,
            arrived=timeline.arrived,
            deadline=timeline.arrived + gateway.request_timeout_seconds,
            trace=exchange.trace,
        )
        route = RouteRequest(
            request_id=spec.request_id,
            num_tokens=len(spec.token_ids),
            max_tokens=sampling.max_tokens,
            features=tuple(
                FeatureNeed(f.feature_id, f.modality, f.work, f.num_tokens) for f in prepared.features
            ),
            prefix_blocks=self._prefix_blocks(prepared),
        )
        sequence = gateway.dispatcher.open(spec, route, timeline, news)
        return ChoiceStream(index, sequence, gateway.frontend, request.stops, bool(request.logprobs))

    def _prefix_blocks(self, prepared: Prepared) -> tuple[str, ...]:
        """Identities of the prompt's first whole blocks; none while no pod says what it has cached."""
        pods = [beat for beat in self._gateway.directory.pods("prefill") if beat.prefix_blocks]
        size = max((beat.load.kv_block_tokens for beat in pods), default=0)
        if not size:
            return ()
        token_ids = prepared.layout.token_ids
        spans = [
            (start, length, feature.feature_id)
            for feature in prepared.features
            for start, length in feature.ranges
        ]
        blocks: list[str] = []
        parent = b""
        for start in range(0, min(len(token_ids), MAX_HASHED_BLOCKS * size) - size + 1, size):
            parent = block_hash(parent, token_ids[start : start + size], start, spans)
            blocks.append(parent.hex())
        return tuple(blocks)

    async def _progress(
        self, choices: list[ChoiceStream], news: asyncio.Event
    ) -> AsyncIterator[list[ChunkChoice]]:
        """What each wake-up brought, until every choice has finished; an empty list now and then when nothing comes."""
        patience = STREAM_OPENS_AFTER_SECONDS
        while True:
            news.clear()
            ready = [chunk for choice in choices if (chunk := choice.advance()) is not None]
            for choice in choices:
                if choice.finish_reason is not None:
                    await self._gateway.dispatcher.release(choice.sequence)
            if ready:
                yield ready
            if all(choice.finish_reason is not None for choice in choices):
                return
            if ready or any(c.finish_reason is None and c.sequence.ended for c in choices):
                continue
            try:
                async with asyncio.timeout(patience):
                    await news.wait()
            except TimeoutError:
                patience = KEEPALIVE_SECONDS
                yield []

    async def _stream(
        self,
        exchange: _Exchange,
        request: ChatRequest,
        prepared: Prepared,
        choices: list[ChoiceStream],
        news: asyncio.Event,
    ) -> None:
        created = int(time.time())

        def chunk(**fields: Any) -> str:
            made = ChatCompletionChunk(
                id=exchange.request_id,
                object="chat.completion.chunk",
                created=created,
                model=request.model,
                **fields,
            )
            return f"data: {made.model_dump_json(exclude_unset=True)}\n\n"

        async for ready in self._progress(choices, news):
            if ready:
                await exchange.events(*(chunk(choices=[part]) for part in ready))
            else:
                await exchange.events(": waiting\n\n")
        usage = await self._finish(exchange, request, prepared, choices)
        closing: dict[str, Any] = {}
        if request.stream_options is not None and request.stream_options.include_usage:
            closing["usage"] = usage
        if _wants_timings(exchange, request):
            closing["timings"] = exchange.timeline.timings()
        last = [chunk(choices=[], **closing)] if closing else []
        await exchange.events(*last, "data: [DONE]\n\n")
        await exchange.send({"type": "http.response.body", "body": b""})

    async def _whole(
        self,
        exchange: _Exchange,
        request: ChatRequest,
        prepared: Prepared,
        choices: list[ChoiceStream],
        news: asyncio.Event,
    ) -> None:
        texts: list[list[str]] = [[] for _ in choices]
        logprobs: list[list[TokenLogprobs]] = [[] for _ in choices]
        async for ready in self._progress(choices, news):
            for part in ready:
                texts[part.index].append(part.delta.content or "")
                if part.logprobs is not None:
                    logprobs[part.index].extend(part.logprobs.content)
        usage = await self._finish(exchange, request, prepared, choices)
        completion = ChatCompletion(
            id=exchange.request_id,
            created=int(time.time()),
            model=request.model,
            choices=[
                Choice(
                    index=choice.index,
                    message=AssistantMessage(content="".join(texts[choice.index])),
                    logprobs=ChoiceLogprobs(content=logprobs[choice.index]) if request.logprobs else None,
                    finish_reason=choice.finish_reason or "stop",
                )
                for choice in choices
            ],
            usage=usage,
        )
        exclude = {"timings"}
        if _wants_timings(exchange, request):
            completion.timings, exclude = exchange.timeline.timings(), set()
        await exchange.reply(200, completion.model_dump_json(exclude=exclude).encode())

    async def _finish(
        self, exchange: _Exchange, request: ChatRequest, prepared: Prepared, choices: list[ChoiceStream]
    ) -> Usage:
        """Counts, and the workers' last reports if the client asked for timings."""
        timeline = exchange.timeline
        if _wants_timings(exchange, request):
            until = time.monotonic() + LATE_PHASES_SECONDS
            while time.monotonic() < until and not timeline.is_complete():
                await asyncio.sleep(0.01)
        timeline.finished = time.time()
        timeline.finish_reasons = [choice.finish_reason or "" for choice in choices]
        usage = usage_of(
            prepared.layout, sum(choice.completion_tokens for choice in choices), timeline.cached_tokens()
        )
        timeline.usage = usage.model_dump()
        counted = self._gateway.metrics.tokens
        for modality in ("text", "image", "video", "audio"):
            tokens = timeline.usage["prompt_tokens_details"][f"{modality}_tokens"]
            counted.labels(f"prompt_{modality}").inc(tokens)
        counted.labels("prompt_cached").inc(usage.prompt_tokens_details.cached_tokens)
        counted.labels("output").inc(usage.completion_tokens)
        return usage

    def _count(self, timeline: Timeline) -> None:
        modality, metrics = timeline.modality(), self._gateway.metrics
        metrics.requests.labels(modality, timeline.code).inc()
        trace = exemplar(timeline.trace_id)
        whole = (timeline.last_token or timeline.finished) - timeline.arrived
        metrics.e2e.labels(modality).observe(whole, trace)
        if timeline.first_token:
            metrics.ttft.labels(modality).observe(timeline.first_token - timeline.arrived, trace)
        if timeline.code != "ok":
            metrics.errors.labels(timeline.code).inc()
        for signal, kept in kept_promises(timeline, self._gateway.slo).items():
            metrics.slo.labels(signal, "kept" if kept else "missed").inc()

    def _trace(self, timeline: Timeline, root: Root) -> None:
        """Close the request's span; those of the workers are their own."""
        own = [phase for pod, _, _, phase in timeline.phases if pod == "gateway"]
        self._gateway.tracing.record(root.carrier, own)
        for attempt in timeline.attempts:
            root.event("placed", attempt.placed, pod=attempt.prefill_pod, attempt=attempt.number)
        if timeline.first_token:
            root.event("first token", timeline.first_token)
        facts: dict[str, str | float] = {"modality": timeline.modality(), "status": timeline.status}
        if timeline.usage:
            facts |= {name: timeline.usage[name] for name in ("prompt_tokens", "completion_tokens")}
        root.end(timeline.finished, "" if timeline.code == "ok" else timeline.code, **facts)


def _wants_timings(exchange: _Exchange, request: ChatRequest) -> bool:
    return bool(request.timings) or exchange.headers.get("x-mmd-timings", "").lower() == "true"


async def _hung_up(receive: ReceiveChannel) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def build_app(gateway: Gateway, heartbeat: Callable[[], Heartbeat], web_page: bool) -> Starlette:
    """Routes of the gateway; `heartbeat` says how it is; unknown paths and methods get OpenAI-shaped errors too."""

    async def models(_request: Request) -> Response:
        return JSONResponse({"object": "list", "data": [_model(gateway)]})

    async def model(request: Request) -> Response:
        if request.path_params["name"] != gateway.model:
            error = ApiError(
                404,
                f"model {request.path_params['name']!r} is not served here: use {gateway.model!r}",
                code="model_not_found",
                param="model",
            )
            return JSONResponse(error.body(), error.status)
        return JSONResponse(_model(gateway))

    async def health(_request: Request) -> Response:
        return JSONResponse({"status": "alive"})

    async def ready(_request: Request) -> Response:
        pods = {
            role: sum(role in beat.roles for beat in gateway.directory.pods())
            for role in ("encode", "prefill", "decode")
        }
        is_ready = gateway.bus.is_connected and not gateway.draining
        reason = (
            "draining" if gateway.draining else "" if gateway.bus.is_connected else "no connection to NATS"
        )
        body = {"ready": is_ready, "reason": reason, "ready_pods": pods}
        return JSONResponse(body, 200 if is_ready else 503)

    async def metrics(request: Request) -> Response:
        _sample(gateway)
        return scraped(gateway.metrics, request)

    async def requests(request: Request) -> Response:
        count = request.query_params.get("limit", "100")
        kept = gateway.dispatcher.timelines.newest(int(count) if count.isdigit() else 100)
        return JSONResponse({"requests": kept})

    async def one_request(request: Request) -> Response:
        timeline = gateway.dispatcher.timelines.get(request.path_params["request_id"])
        if timeline is None:
            error = ApiError(
                404, "this gateway keeps no such request: it keeps the newest 512", code="not_found"
            )
            return JSONResponse(error.body(), error.status)
        return JSONResponse(timeline.to_json())

    async def state(_request: Request) -> Response:
        pods = gateway.directory.pods(state=None)
        workers = [beat for beat in pods if beat.roles]
        return JSONResponse(
            {
                **asdict(heartbeat()),
                "running": gateway.running,
                "limits": {
                    "max_body_bytes": gateway.max_body_bytes,
                    "max_concurrent_requests": gateway.max_concurrent_requests,
                },
                "num_pods": len(workers),
                "pods": [_shown(beat) for beat in workers[:SHOWN_PODS]],
            }
        )

    async def demand(_request: Request) -> Response:
        beat = heartbeat()
        held = gateway.dispatcher.held_by_role()
        return JSONResponse(gateway.demand.report(beat.pod, beat.revision, held))

    async def targets(_request: Request) -> Response:
        """Who may be scraped, in the words of Prometheus's HTTP service discovery."""
        common = {"namespace": gateway.bus.subjects.namespace, "deployment": gateway.bus.subjects.name}
        beats = [*gateway.directory.pods(state=None), heartbeat()]
        return JSONResponse(
            [
                {
                    "targets": [beat.http_endpoint],
                    "labels": {**common, "pod": beat.pod, "component": beat.pool},
                }
                for beat in {beat.pod: beat for beat in beats}.values()
            ]
        )

    async def http_error(_request: Request, error: Exception) -> Response:
        status = error.status_code if isinstance(error, HTTPException) else 500
        known = "POST /v1/chat/completions, GET /v1/models, /health, /ready, /metrics, /debug/requests"
        fault = ApiError(status, f"no such path or method: this server has {known}", code="not_found")
        return JSONResponse(fault.body(), status)

    return Starlette(
        middleware=[Middleware(_FarewellMiddleware, gateway=gateway)],
        routes=[
            Route("/v1/chat/completions", ChatCompletions(gateway), methods=["POST"]),
            Route("/v1/models", models),
            Route("/v1/models/{name:path}", model),
            Route("/health", health),
            Route("/livez", health),
            Route("/ready", ready),
            Route("/readyz", ready),
            Route("/metrics", metrics),
            Route("/demand", demand),
            Route("/debug/state", state),
            Route("/debug/requests", requests),
            Route("/debug/targets", targets),
            Route("/debug/requests/{request_id}", one_request),
            *(page.routes() if web_page else ()),
        ],
        exception_handlers={HTTPException: http_error},
    )


def _model(gateway: Gateway) -> dict[str, Any]:
    return {
        "id": gateway.model,
        "object": "model",
        "created": int(gateway.started),
        "owned_by": "multimodal-operator",
        "max_model_len": gateway.model_len() or gateway.frontend.max_model_len,
        "modalities": ["text", *sorted(gateway.frontend.modalities)],
    }


def _shown(beat: Heartbeat) -> dict[str, Any]:
    """A heartbeat without its samples of cached contents, which are long and say nothing to people."""
    return asdict(replace(beat, prefix_blocks=[], features=[]))


def _sample(gateway: Gateway) -> None:
    """Set the gauges that are only looked at when they are scraped."""
    dispatcher, hold, metrics = gateway.dispatcher, gateway.hold, gateway.metrics
    metrics.requests_running.set(gateway.running)
    metrics.held_bytes.set(hold.used_bytes)
    held = dispatcher.held_by_role()
    pods = Counter((role, beat.state) for beat in gateway.directory.pods(state=None) for role in beat.roles)
    metrics.gateway_pods.clear()
    for role in ("encode", "prefill", "decode"):
        metrics.gateway_held.labels(role).set(held.get(role, 0))
        metrics.gateway_pods.labels(role, "ready").set(0)
    for (role, state), count in pods.items():
        metrics.gateway_pods.labels(role, state).set(count)
    for state in get_args(PodState):
        metrics.pod_state.labels(state).set(state == ("draining" if gateway.draining else "ready"))
    metrics.gateway_sequences.set(dispatcher.live_sequences)
    metrics.media_budget.set(hold.budget_bytes)
    metrics.media_items.set(hold.held_media)
    metrics.media_waiting.set(hold.waiting)
