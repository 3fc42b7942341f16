"""Starts the gateway, keeps it up, drains it: the only place that joins bus, media, model and HTTP."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import signal
import time
from collections.abc import Coroutine
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from mmd_api.contract.errors import MmdError, PeerLostError
from mmd_api.contract.load import PodLoad
from mmd_api.contract.subjects import Subjects
from mmd_api.pipeline import PipelineConfig
from mmd_api.spec.deployment import MultimodalDeploymentSpec
from mmd_api.spec.observability import SloSpec
from mmd_workers import closing
from mmd_workers.closing import close_each
from mmd_workers.gateway.admin import build_admin_app
from mmd_workers.gateway.answers import answer_budget
from mmd_workers.gateway.app import build_app
from mmd_workers.gateway.demand import GatewayDemand
from mmd_workers.gateway.gateway import Gateway
from mmd_workers.gateway.hold import ALLOWANCE_BYTES, MediaHold
from mmd_workers.gateway.intake import Intake
from mmd_workers.gateway.lifecycle import Dispatcher
from mmd_workers.gateway.router import Router
from mmd_workers.identity import check_pinned, identified
from mmd_workers.limited_log import RateLimitedLog
from mmd_workers.live import LiveConfig
from mmd_workers.media.sandbox import DecodePool
from mmd_workers.memory import host_bytes, resident_bytes
from mmd_workers.model.frontend import load_frontend
from mmd_workers.observe import bus as bus_watch
from mmd_workers.observe.logs import configure, set_level
from mmd_workers.observe.metrics import Metrics
from mmd_workers.observe.server import MAX_CONNECTIONS, HttpServer, listen_address
from mmd_workers.observe.startup import Startup
from mmd_workers.observe.tracing import Tracing
from mmd_workers.settings import WorkerSettings
from mmd_workers.warmup import WarmUpStep, media_steps, warm_up
from mmd_workers.wire.bus import Bus
from mmd_workers.wire.jobs import EncodeQueue
from mmd_workers.wire.media import MediaServer
from mmd_workers.wire.messages import Heartbeat
from mmd_workers.wire.peers import Heartbeater, PeerDirectory, sent_now

HOLD_BODIES = 4  # largest bodies that the media budget has room for
PROBE_PROCESSES = 2
MIN_HOLD_BYTES = 64 << 20
DRAIN_RESERVE_SECONDS = 5  # of the grace period, for closing
DEFAULT_MAX_WAITING_REQUESTS = 512
QUEUE_PERIOD_SECONDS = 0.5
QUIET_SECONDS = 2.0  # without a new request: then clients have found another gateway
ANSWER_SECONDS = 0.5  # from a request's deadline to the end of its answer
DRAIN_CHECK_SECONDS = 0.05

_log = logging.getLogger(__name__)


async def serve(settings: WorkerSettings, stop: asyncio.Event | None = None) -> None:
    """Run until SIGTERM or SIGINT (or `stop`): then serve on until no new request comes, finish those in flight, and return.

    Raises:
        UnsupportedModelError: the model's settings cannot be loaded.
        PeerLostError: no NATS server.
        RevisionMismatchError: the configuration names another model than this process runs.
    """
    stop = stop if stop is not None else _stop_on_signals()
    pipeline, spec = settings.pipeline, settings.pipeline.spec
    frontend = await asyncio.to_thread(load_frontend, spec.model, spec.gateway.media)
    subjects = Subjects(pipeline.namespace, pipeline.name, settings.mesh)
    bus = await Bus.connect(
        settings.nats_url, settings.pod, subjects, settings.nats_inbox, login=settings.nats_login
    )
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
    hold = MediaHold(_hold_bytes(max_body_bytes), allowance_bytes=ALLOWANCE_BYTES)
    demand = GatewayDemand(spec.slo.percentile)
    dispatcher.on_first_token = demand.first_token
    sandbox = DecodePool(PROBE_PROCESSES, spec.gateway.media.decode_timeout_seconds)
    gateway = Gateway(
        models=spec.model.names,
        max_body_bytes=max_body_bytes,
        max_concurrent_requests=spec.gateway.max_concurrent_requests,
        request_timeout_seconds=spec.gateway.request_timeout_seconds,
        frontend=frontend,
        intake=Intake(pipeline, frontend, sandbox, metrics),
        hold=hold,
        answers=answer_budget(host_bytes()),
        dispatcher=dispatcher,
        directory=directory,
        bus=bus,
        metrics=metrics,
        tracing=tracing,
        slo=spec.slo,
        demand=demand,
        web_page=spec.gateway.web_page,
    )

    def reconfigure(fresh: MultimodalDeploymentSpec) -> None:
        """Take settings that changed while this process runs; requests in flight keep those they started with."""
        gateway.max_body_bytes = fresh.gateway.max_body_mebibytes << 20
        gateway.max_concurrent_requests = fresh.gateway.max_concurrent_requests
        gateway.web_page = fresh.gateway.web_page
        gateway.models = fresh.model.names
        gateway.slo = fresh.slo
        gateway.intake.policy = fresh.gateway.media
        sandbox.set_timeout(fresh.gateway.media.decode_timeout_seconds)
        hold.resize(_hold_bytes(gateway.max_body_bytes))
        dispatcher.max_retries = fresh.gateway.max_retries
        if fresh.prefill is not None:
            router.max_waiting_requests = fresh.prefill.max_waiting_requests
        demand.percentile = fresh.slo.percentile
        _show_promises(metrics, fresh.slo)
        _check_memory(gateway)
        set_level(fresh.observability.log_level)

    _check_memory(gateway)

    def beat() -> Heartbeat:
        return Heartbeat(
            pod=settings.pod,
            pool="gateway",
            roles=[],
            incarnation=settings.incarnation,
            revision=pipeline.revision,
            state="draining" if gateway.draining else "ready",
            http_endpoint=f"{settings.pod_ip}:{admin.port}",
            sent=sent_now(),
            load=PodLoad(),
            identity=settings.identity,
            commit=settings.commit,
        )

    heartbeater = Heartbeater(bus, beat, spec.observability.heartbeat_milliseconds / 1000)
    media_server = MediaServer(bus, settings.pod, hold.get)
    address = listen_address(settings.pod_ip)
    server = HttpServer(
        build_app(gateway),
        address,
        settings.http_port,
        lambda: max(MAX_CONNECTIONS, 2 * gateway.max_concurrent_requests),
    )
    admin = HttpServer(build_admin_app(gateway, beat), address, settings.admin_port)
    watching: list[asyncio.Task[None]] = []

    def watch(work: Coroutine[Any, Any, None], name: str) -> None:
        """Run what must not end before the gateway does."""
        task = asyncio.create_task(work, name=name)
        task.add_done_callback(failed)
        watching.append(task)

    def failed(task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            _log.critical(
                "%s failed permanently; draining and exiting: %s",
                task.get_name(),
                error,
                exc_info=error,
            )
            gateway.failed = f"{task.get_name()} has failed"
            stop.set()

    watch(bus_watch.watch(bus, metrics), "watch-bus")
    if settings.config_file:
        live = LiveConfig(
            Path(settings.config_file), pipeline, reconfigure, metrics, partial(check_pinned, settings)
        )
        watch(live.run(), "live-config")
    if spec.encoder is not None:
        watch(_watch_queue(EncodeQueue(bus), metrics, demand), "watch-queue")
    try:
        startup = Startup(metrics)
        with startup.phase("sandbox"):
            await sandbox.start()
        for layer, active in sandbox.layers.items():
            metrics.sandbox_layers.labels(layer).set(active)
        steps: dict[str, WarmUpStep] = {
            "tracing": partial(asyncio.to_thread, tracing.warm_up),
            **media_steps(sandbox, frontend, spec.gateway.media),
        }
        await warm_up(steps, startup, torch.device("cpu"))
        await directory.start()
        await dispatcher.start()
        await media_server.start()
        await admin.start()  # before heartbeats, which name its port
        await heartbeater.start()
        await server.start()
        where = settings.pod, ", ".join(gateway.models), settings.http_port, admin.port
        _log.info("gateway %s serving %s on port %d, metrics on port %d (startup: %s)", *where, startup)
        await stop.wait()
        await _drain(gateway, heartbeater, settings.grace_seconds)
    finally:
        for task in watching:
            task.cancel()
        ended = await asyncio.gather(*watching, return_exceptions=True)
        await close_each(
            server.stop,
            heartbeater.close,
            dispatcher.close,
            media_server.close,
            directory.close,
            sandbox.close,
            bus.close,
            admin.stop,
            partial(asyncio.to_thread, tracing.close),
        )
    for error in ended:
        if isinstance(error, Exception):
            raise error


def _check_memory(gateway: Gateway) -> None:
    """Warn where the bounds of what requests may hold add up to more than there is: the kernel would end the gateway first."""
    present = host_bytes() - resident_bytes()
    each = gateway.hold.allowance_bytes + gateway.answers.allowance_bytes
    shared = gateway.hold.budget_bytes + gateway.answers.budget_bytes
    most = gateway.max_concurrent_requests * each + shared
    if most > present:
        _log.warning(
            "%d concurrent requests may need %d MiB of memory, but this gateway has only %d MiB for them; raise "
            "spec.gateway.resources.memory, or lower spec.gateway.maxConcurrentRequests",
            gateway.max_concurrent_requests,
            most >> 20,
            present >> 20,
        )


def _hold_bytes(max_body_bytes: int) -> int:
    return max(HOLD_BODIES * max_body_bytes, MIN_HOLD_BYTES)


def run(settings: WorkerSettings) -> None:
    """Run the gateway as a process; the exit code shows whether it ended well."""
    configure(settings.pod, settings.pipeline.spec.observability.log_level)
    try:
        closing.run(serve(identified(settings)))
    except MmdError as error:
        _log.critical("cannot serve (%s): %s", error.code, error.message)
        raise SystemExit(1) from error


def _metrics(pipeline: PipelineConfig) -> Metrics:
    metrics = Metrics(("gateway",))
    metrics.build.info(
        {"version": version("multimodal-operator"), "revision": pipeline.revision, "roles": "gateway"}
    )
    _show_promises(metrics, pipeline.spec.slo)
    return metrics


def _show_promises(metrics: Metrics, slo: SloSpec) -> None:
    metrics.slo_target.clear()
    metrics.slo_objective.clear()
    for signal_name, milliseconds in (("ttft", slo.ttft_milliseconds), ("itl", slo.itl_milliseconds)):
        if milliseconds is not None:
            metrics.slo_target.labels(signal_name).set(milliseconds / 1000)
            metrics.slo_objective.labels(signal_name).set(slo.percentile / 100)


async def _watch_queue(queue: EncodeQueue, metrics: Metrics, demand: GatewayDemand) -> None:
    """Create the queue and report what waits in it, until cancelled. What cannot be read is absent, not zero.

    A server that lost its store has no queue any more: it is recreated within a period.
    """
    gauges = (metrics.queue_jobs, metrics.queue_work)
    limited = RateLimitedLog(_log)
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
        except Exception as error:  # noqa: BLE001 - logged; no reason to end the requests that the gateway serves
            limited.warning(
                "queue", f"reading the encode queue failed: {type(error).__name__}: {error}", error
            )
            demand.queue_unreadable()
        await asyncio.sleep(QUEUE_PERIOD_SECONDS)


async def _drain(gateway: Gateway, heartbeater: Heartbeater, grace_seconds: float) -> None:
    """Finish the requests in flight, and those that clients still send over kept connections: none is refused while draining.

    A request that comes now gets what is left of the grace period as its deadline, so that it ends with an answer and is not cut off.
    """
    seconds = max(1.0, grace_seconds - DRAIN_RESERVE_SECONDS)
    gateway.drained_at = time.time() + seconds - ANSWER_SECONDS
    gateway.draining = True
    await heartbeater.announce()
    if gateway.running:
        _log.info("draining: %d requests in flight", gateway.running)
    try:
        async with asyncio.timeout(seconds):
            while gateway.running or time.monotonic() - gateway.last_request < QUIET_SECONDS:
                await asyncio.sleep(DRAIN_CHECK_SECONDS)
    except TimeoutError:
        _log.warning("grace period expired with %d requests in flight; aborting them", gateway.running)


def _stop_on_signals() -> asyncio.Event:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    return stop
