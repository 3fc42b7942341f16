"""Starts the gateway, keeps it up, drains it: the only place that joins bus, media, model and HTTP."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import logging
import random
import signal
import time
from functools import partial
from importlib.metadata import version

from mmd_api.pipeline import PipelineConfig
from mmd_api.subjects import Subjects
from mmd_workers import closing
from mmd_workers.closing import close_each
from mmd_workers.errors import MmdError, PeerLostError
from mmd_workers.gateway.app import Gateway, build_app
from mmd_workers.gateway.demand import Demand
from mmd_workers.gateway.hold import MediaHold
from mmd_workers.gateway.intake import Intake
from mmd_workers.gateway.lifecycle import Dispatcher
from mmd_workers.gateway.router import Router
from mmd_workers.model.frontend import load_frontend
from mmd_workers.observe import bus as bus_watch
from mmd_workers.observe.logs import configure
from mmd_workers.observe.metrics import Metrics
from mmd_workers.observe.server import HttpServer
from mmd_workers.observe.tracing import Tracing
from mmd_workers.settings import WorkerSettings
from mmd_workers.wire.bus import Bus
from mmd_workers.wire.jobs import EncodeQueue
from mmd_workers.wire.media import MediaServer
from mmd_workers.wire.messages import Heartbeat, Load
from mmd_workers.wire.peers import Heartbeater, PeerDirectory

HOLD_BODIES = 4  # largest bodies that the media budget has room for
DRAIN_RESERVE_SECONDS = 5  # of the grace period, for closing
DEFAULT_MAX_WAITING_REQUESTS = 512
QUEUE_PERIOD_SECONDS = 0.5
QUIET_SECONDS = 2.0  # without a new request: then clients have found another gateway
DRAIN_CHECK_SECONDS = 0.05

_log = logging.getLogger(__name__)


async def serve(settings: WorkerSettings, stop: asyncio.Event | None = None) -> None:
    """Run until SIGTERM or SIGINT (or `stop`): then refuse new requests, finish those in hand, and return.

    Raises:
        UnsupportedModelError: the model's settings cannot be loaded.
        PeerLostError: no NATS server.
    """
    stop = stop if stop is not None else _stop_on_signals()
    pipeline, spec = settings.pipeline, settings.pipeline.spec
    frontend = await asyncio.to_thread(load_frontend, spec.model, spec.gateway.media)
    subjects = Subjects(pipeline.namespace, pipeline.name, pipeline.revision)
    bus = await Bus.connect(settings.nats_url, settings.pod, subjects, settings.nats_inbox)
    directory = PeerDirectory(bus, spec.observability.heartbeat_timeout_milliseconds / 1000)
    first_pool = spec.prefill
    router = Router(
        pipeline.revision,
        first_pool.max_waiting_requests if first_pool is not None else DEFAULT_MAX_WAITING_REQUESTS,
        random.Random(settings.incarnation),  # noqa: S311 - spreads load, guards nothing
    )
    metrics = _metrics(pipeline)
    tracing = Tracing(settings.pod, pipeline.name, pipeline.namespace, spec.observability.otlp_endpoint)
    dispatcher = Dispatcher(bus, directory, router, settings.pod, spec.gateway.max_retries, metrics)
    max_body_bytes = spec.gateway.max_body_mebibytes << 20
    hold = MediaHold(HOLD_BODIES * max_body_bytes)
    demand = Demand(spec.slo.percentile)
    dispatcher.on_first_token = demand.first_token
    gateway = Gateway(
        model=spec.model.id,
        max_body_bytes=max_body_bytes,
        max_concurrent_requests=spec.gateway.max_concurrent_requests,
        request_timeout_seconds=spec.gateway.request_timeout_seconds,
        frontend=frontend,
        intake=Intake(pipeline, frontend, metrics),
        hold=hold,
        dispatcher=dispatcher,
        directory=directory,
        bus=bus,
        metrics=metrics,
        tracing=tracing,
        slo=spec.slo,
        demand=demand,
    )

    def beat() -> Heartbeat:
        return Heartbeat(
            pod=settings.pod,
            pool="gateway",
            roles=[],
            incarnation=settings.incarnation,
            revision=pipeline.revision,
            state="draining" if gateway.draining else "ready",
            http_endpoint=f"{settings.pod_ip}:{settings.http_port}",
            sent=time.time(),
            load=Load(),
        )

    heartbeater = Heartbeater(bus, beat, spec.observability.heartbeat_milliseconds / 1000)
    media_server = MediaServer(bus, settings.pod, hold.get)
    server = HttpServer(
        build_app(gateway, beat, spec.gateway.web_page), _listen_address(settings.pod_ip), settings.http_port
    )
    watching = [asyncio.create_task(bus_watch.watch(bus, metrics), name="watch-bus")]
    if spec.encoder is not None:
        watching.append(
            asyncio.create_task(_watch_queue(EncodeQueue(bus), metrics, demand), name="watch-queue")
        )
    try:
        await directory.start()
        await dispatcher.start()
        await media_server.start()
        await heartbeater.start()
        await server.start()
        _log.info("gateway %s serves %s on port %d", settings.pod, spec.model.id, settings.http_port)
        await stop.wait()
        await _drain(gateway, heartbeater, settings.grace_seconds)
    finally:
        for task in watching:
            task.cancel()
        await asyncio.gather(*watching, return_exceptions=True)
        await close_each(
            server.stop,
            heartbeater.close,
            dispatcher.close,
            media_server.close,
            directory.close,
            bus.close,
            partial(asyncio.to_thread, tracing.close),
        )


def run(settings: WorkerSettings) -> None:
    """Run the gateway as a process; the exit code says whether it ended well."""
    configure(settings.pod, settings.pipeline.spec.observability.log_level)
    try:
        closing.run(serve(settings))
    except MmdError as error:
        _log.critical("cannot serve (%s): %s", error.code, error.message)
        raise SystemExit(1) from error


def _metrics(pipeline: PipelineConfig) -> Metrics:
    metrics, slo = Metrics(("gateway",)), pipeline.spec.slo
    metrics.build.info(
        {"version": version("multimodal-operator"), "revision": pipeline.revision, "roles": "gateway"}
    )
    for signal_name, milliseconds in (("ttft", slo.ttft_milliseconds), ("itl", slo.itl_milliseconds)):
        if milliseconds is not None:
            metrics.slo_target.labels(signal_name).set(milliseconds / 1000)
            metrics.slo_objective.labels(signal_name).set(slo.percentile / 100)
    return metrics


async def _watch_queue(queue: EncodeQueue, metrics: Metrics, demand: Demand) -> None:
    """Make the queue and tell what waits in it, until cancelled. What cannot be read is absent, not zero.

    A server that lost its store has no queue any more: it is made anew within a period.
    """
    gauges = (metrics.queue_jobs, metrics.queue_work)
    while True:
        try:
            depths = await queue.depth()
            demand.queue_read(depths)
            for modality, depth in depths.items():
                for gauge, value in zip(gauges, (depth.jobs, depth.work), strict=True):
                    gauge.labels(modality).set(value)
        except MmdError as error:
            _log.debug("%s", error.message)
            demand.queue_unreadable()
            for gauge in gauges:
                gauge.clear()
            with contextlib.suppress(PeerLostError):  # tried again in a moment
                await queue.ensure()
        await asyncio.sleep(QUEUE_PERIOD_SECONDS)


async def _drain(gateway: Gateway, heartbeater: Heartbeater, grace_seconds: float) -> None:
    """Finish what is in hand, and what clients still send over connections that they have: nobody is refused on the way out."""
    gateway.draining = True
    await heartbeater.beat()
    if gateway.running:
        _log.info("draining: %d requests in hand", gateway.running)
    try:
        async with asyncio.timeout(max(1, grace_seconds - DRAIN_RESERVE_SECONDS)):
            while gateway.running or time.monotonic() - gateway.last_request < QUIET_SECONDS:
                await asyncio.sleep(DRAIN_CHECK_SECONDS)
    except TimeoutError:
        _log.warning("the grace period is over with %d requests in hand: they are cut off", gateway.running)


def _listen_address(pod_ip: str) -> str:
    """On a loopback address nobody else is let in; in a pod, port-forwarding comes over loopback as well."""
    return pod_ip if ipaddress.ip_address(pod_ip).is_loopback else "0.0.0.0"  # noqa: S104


def _stop_on_signals() -> asyncio.Event:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    return stop
