"""Starts, maintains and drains the gateway. This is the only module that joins bus, media, model and HTTP."""

from __future__ import annotations

import asyncio
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

from mmd_api.contract.environment import KEYS_FILE, TLS_FOLDER
from mmd_api.contract.errors import MmdError
from mmd_api.contract.load import PodLoad
from mmd_api.contract.pools import Modality
from mmd_api.contract.subjects import Subjects
from mmd_api.pipeline import PipelineConfig
from mmd_api.spec.deployment import MultimodalDeploymentSpec
from mmd_api.spec.observability import SloSpec
from mmd_api.spec.quality import UnderLoad
from mmd_workers.basics.limited_log import RateLimitedLog
from mmd_workers.basics.memory import host_bytes, resident_bytes
from mmd_workers.basics.node import NODE
from mmd_workers.caches.feed import CacheFeed
from mmd_workers.caches.index import BYTES_PER_BLOCK, MOST_IN_ALL, CacheIndex
from mmd_workers.caches.kinds import FEATURES, PREFIXES
from mmd_workers.gateway.access.bearer_tokens import TokenVerifier
from mmd_workers.gateway.access.certificate import Certificate, LiveCertificate
from mmd_workers.gateway.access.daily_tokens import DailyTokens
from mmd_workers.gateway.access.keys import Access, LiveKeys
from mmd_workers.gateway.answers.answer_budget import answer_budget
from mmd_workers.gateway.api.app import build_app
from mmd_workers.gateway.api.audit_log import AuditLog
from mmd_workers.gateway.api.cors import with_cors
from mmd_workers.gateway.api.error_shapes import error_body
from mmd_workers.gateway.api.gateway import Gateway
from mmd_workers.gateway.api.gateway_settings import GatewaySettings
from mmd_workers.gateway.api.undelivered import undelivered_bytes
from mmd_workers.gateway.api.whole_requests import after_whole_requests
from mmd_workers.gateway.basics.media_hold import ALLOWANCE_BYTES, MediaHold
from mmd_workers.gateway.idempotency.answer_claims import AnswerClaims
from mmd_workers.gateway.idempotency.repeats import Repeats
from mmd_workers.gateway.idempotency.retained import BUDGET_DIVISOR, RetainedAnswers
from mmd_workers.gateway.intake.encode_on_upload import EncodeOnUpload
from mmd_workers.gateway.intake.intake import Intake
from mmd_workers.gateway.intake.media_tiers import MediaTiers, Pressure
from mmd_workers.gateway.intake.tenant_files import ENTRY_BYTES, Files
from mmd_workers.gateway.picker.endpoint_picker import EndpointPicker, loads_of
from mmd_workers.gateway.picker.pick_messages import Setup, View, picker_bytes
from mmd_workers.gateway.placement.admission import FairAdmission
from mmd_workers.gateway.placement.demand import GatewayDemand
from mmd_workers.gateway.placement.dispatcher import Dispatcher
from mmd_workers.gateway.placement.router import PlacementLimits, Router
from mmd_workers.gateway.placement.work import Capacity
from mmd_workers.gateway.process.admin import build_admin_app
from mmd_workers.gateway.process.leave import Leave, OtherGateways
from mmd_workers.media.sandbox import DecodePool
from mmd_workers.model.frontend import load_frontend
from mmd_workers.model.interfaces import Frontend
from mmd_workers.observe import bus as bus_watch
from mmd_workers.observe.logs import configure, set_level
from mmd_workers.observe.metrics import Metrics
from mmd_workers.observe.server import (
    HttpServer,
    host_and_port,
    is_loopback,
    listen_address,
    most_connections,
)
from mmd_workers.observe.startup import Startup
from mmd_workers.observe.tracing import Tracing
from mmd_workers.process import closing
from mmd_workers.process.closing import close_each
from mmd_workers.process.identity import check_pinned, identified
from mmd_workers.process.live import LiveConfig
from mmd_workers.process.settings import WorkerSettings
from mmd_workers.process.warmup import WarmUpStep, media_steps, warm_up
from mmd_workers.wire import codec
from mmd_workers.wire.bus import Bus
from mmd_workers.wire.jobs import EncodeQueue
from mmd_workers.wire.media import MediaServer
from mmd_workers.wire.messages import MESSAGES
from mmd_workers.wire.messages.every_pod import Heartbeat
from mmd_workers.wire.peers import Heartbeater, PeerDirectory, sent_now
from mmd_workers.wire.tenant_tokens import TokenRecords

QUEUE_HOLD_DIVISOR = 2
"""Requests that wait for admission may hold the media budget divided by this; the rest is for those that arrive or run."""
HOLD_BODIES = 4  # the media budget has room for this many bodies of maximum size
PROBE_PROCESSES = 2
MIN_HOLD_BYTES = 64 << 20
DRAIN_RESERVE_SECONDS = 5  # the part of the grace period reserved for closing
PREFIX_INDEX_DIVISOR = 16  # the prefix index may take the memory divided by this
FEATURE_INDEX_DIVISOR = 64  # the feature index may take the memory divided by this
QUEUE_PERIOD_SECONDS = 0.5
ANSWER_SECONDS = 0.5  # the time from a request's deadline to the end of its answer
DRAIN_CHECK_SECONDS = 0.1

_log = logging.getLogger(__name__)


async def serve(settings: WorkerSettings, stop: asyncio.Event | None = None) -> None:
    """Run a gateway until SIGTERM, SIGINT or `stop`, and then until it has drained.

    Raises:
        UnsupportedModelError: the model's settings cannot be loaded.
        PeerLostError: no NATS server can be reached.
        RevisionMismatchError: the configuration names another model than this process runs.
    """
    stop = stop if stop is not None else _stop_on_signals()
    frontend = await asyncio.to_thread(
        load_frontend, settings.pipeline.spec.model, settings.pipeline.spec.gateway.media
    )
    await GatewayProcess(settings, frontend, await _connected(settings), stop).serve()


async def _connected(settings: WorkerSettings) -> Bus:
    pipeline = settings.pipeline
    subjects = Subjects(pipeline.namespace, pipeline.name, settings.mesh)
    return await Bus.connect(
        settings.nats_url,
        settings.pod,
        subjects,
        settings.nats_inbox,
        login=settings.nats_login,
        stream_replicas=pipeline.spec.nats.replicas,
    )


class GatewayProcess:
    """The process of a gateway: manages its parts, applies changed settings, and drains it when asked to stop.

    A part that must not end before the gateway is a watched task: if it fails, the gateway drains and exits with its error.
    """

    def __init__(self, settings: WorkerSettings, frontend: Frontend, bus: Bus, stop: asyncio.Event) -> None:
        self._settings = settings
        self._stop = stop
        self._watched: list[asyncio.Task[None]] = []
        pipeline, spec = settings.pipeline, settings.pipeline.spec
        self._metrics = _metrics(pipeline)
        self._tracing = Tracing(
            settings.pod, pipeline.name, pipeline.namespace, spec.observability.otlp_endpoint
        )
        self._sandbox = DecodePool(PROBE_PROCESSES, spec.gateway.media.decode_timeout_seconds)
        self._memory_bytes = host_bytes()
        if spec.gateway.inference_pool is not None:
            self._memory_bytes -= picker_bytes(self._memory_bytes)
        self._router = Router(
            pipeline.revision,
            PlacementLimits.of(spec),
            random.Random(settings.incarnation),  # noqa: S311 - spreads load, guards nothing
            CacheIndex(
                most_in_all=min(MOST_IN_ALL, self._memory_bytes // PREFIX_INDEX_DIVISOR // BYTES_PER_BLOCK)
            ),
            CacheIndex(
                most_in_all=min(MOST_IN_ALL, self._memory_bytes // FEATURE_INDEX_DIVISOR // BYTES_PER_BLOCK)
            ),
        )
        directory = PeerDirectory(bus, spec.observability.heartbeat_timeout_milliseconds / 1000)
        self._others = OtherGateways(settings.pod, spec.gateway.replicas)
        directory.on_event(self._others.note)
        self._access = self._access_of(settings)
        oidc = spec.gateway.auth.oidc if spec.gateway.auth is not None else None
        self._tokens = TokenVerifier(oidc, self._metrics) if oidc is not None else None
        self._certificate = self._certificate_of(settings)
        gateway_settings = GatewaySettings.of(spec)
        retained_answers = RetainedAnswers(self._memory_bytes // BUDGET_DIVISOR)
        self._claims = AnswerClaims(bus, settings.pod, self._others.names, retained_answers)
        hold = MediaHold(_hold_bytes(gateway_settings.max_body_bytes), allowance_bytes=ALLOWANCE_BYTES)
        self._admissions = self._admissions_of(directory, hold)
        self._files = Files(bus, spec.gateway.files) if spec.gateway.files is not None else None
        self._gateway = Gateway(
            pod=settings.pod,
            settings=gateway_settings,
            frontend=frontend,
            intake=Intake(pipeline, frontend, self._sandbox, self._metrics, self._files),
            hold=hold,
            answers=answer_budget(self._memory_bytes),
            repeats=Repeats(retained_answers, self._claims),
            dispatcher=Dispatcher(
                bus, directory, self._router, settings.pod, spec.gateway.max_retries, self._metrics
            ),
            directory=directory,
            bus=bus,
            metrics=self._metrics,
            tracing=self._tracing,
            demand=GatewayDemand(),
            prefix_index=self._router.index,
            feature_index=self._router.features,
            access=self._access,
            tokens=self._tokens,
            certificate=self._certificate,
            audit_log=AuditLog(self._metrics),
            admissions=self._admissions,
            files=self._files,
        )
        gateway = self._gateway
        gateway.dispatcher.on_first_token = gateway.demand.first_token
        gateway.picker = self._picker_of(settings, directory)
        self._set_tiers(spec.gateway.media.under_load)
        if spec.gateway.files is not None and spec.gateway.files.encode_on_upload:
            gateway.encode_on_upload = EncodeOnUpload(
                bus,
                settings.pod,
                settings.incarnation,
                gateway.intake,
                hold,
                lambda: any(self._router.waiting_encode_work.values()),
            )
        _check_memory(gateway, self._memory_bytes)
        self._feeds = [
            CacheFeed(bus, directory, index, settings.pod, self._metrics, kind)
            for kind, index in ((PREFIXES, self._router.index), (FEATURES, self._router.features))
        ]
        self._heartbeater = Heartbeater(bus, self.heartbeat, spec.observability.heartbeat_milliseconds / 1000)
        self._media_server = MediaServer(bus, settings.pod, gateway.hold.get)
        address, encrypted = listen_address(settings.pod_ip), self._certificate is not None
        app = with_cors(build_app(gateway), spec.gateway.cors)
        self._server = HttpServer(
            after_whole_requests(app) if gateway.picker is not None else app,
            address,
            settings.http_port,
            lambda: max(
                most_connections(self._memory_bytes, encrypted=encrypted),
                2 * gateway.settings.max_concurrent_requests,
            ),
            lambda: gateway.settings.request_timeout_seconds,
            self._certificate.context if self._certificate is not None else None,
            gateway.settings.allowed_origins,
            error_body,
        )
        self._admin = HttpServer(
            build_admin_app(gateway, self.heartbeat),
            address,
            settings.admin_port,
            answer_seconds=lambda: gateway.settings.request_timeout_seconds,
            error_body=error_body,
        )

    def _access_of(self, settings: WorkerSettings) -> Access | None:
        """The access control of the gateway; None if the spec sets no authentication.

        Raises:
            RuntimeError: the spec requires keys, and there is no key file: this gateway must not serve anyone.
        """
        if settings.pipeline.spec.gateway.auth is None:
            return None
        if not settings.keys_file:
            raise RuntimeError(
                f"spec.gateway.auth is set, but environment variable {KEYS_FILE} is not; the operator and `mmd up` set it"
            )
        return Access(self._metrics, lambda: 1 + self._others.count())

    def _certificate_of(self, settings: WorkerSettings) -> Certificate | None:
        """The certificate of the port for clients; None if the spec sets no TLS.

        Raises:
            RuntimeError: the spec requires TLS, and there is no certificate: this gateway must not serve without it.
        """
        if settings.pipeline.spec.gateway.tls is None:
            return None
        if not settings.tls_folder:
            raise RuntimeError(
                f"spec.gateway.tls is set, but environment variable {TLS_FOLDER} is not; the operator and `mmd up` set it"
            )
        return Certificate(self._metrics)

    def _picker_of(self, settings: WorkerSettings, directory: PeerDirectory) -> EndpointPicker | None:
        """The endpoint picker for the platform's Gateways; None if there is no InferencePool."""
        gateway, pool = self._gateway, settings.pipeline.spec.gateway.inference_pool
        if pool is None:
            return None

        def view() -> View:
            return View(
                loads_of(directory.pods(state=None)),
                gateway.settings.max_body_bytes,
                is_current=gateway.bus.is_connected,
            )

        setup = Setup(
            address=listen_address(settings.pod_ip),
            port=settings.picker_port,
            tls=pool.picker_tls,
            request_seconds=gateway.settings.request_timeout_seconds,
            memory_bytes=picker_bytes(host_bytes()),
        )
        return EndpointPicker(setup, view, self._metrics)

    def _set_tiers(self, spec: UnderLoad | None) -> None:
        """Apply the tiers of media quality under load; the current tier is kept only if they are unchanged."""
        intake = self._gateway.intake
        if spec is None or intake.tiers is None or intake.tiers.spec != spec:
            intake.tiers = None if spec is None else MediaTiers(spec)
        self._metrics.media_tier.set(intake.tiers.number if intake.tiers is not None else 0)

    async def _watch_load(self) -> None:
        """Follow the load of the pools, until cancelled, to choose the quality tier of new requests.

        While no pod is Ready, the load is unknown and the tier stays.
        """
        gateway = self._gateway
        while True:
            pods = [pod for pod in self._router.routable(gateway.directory.pods(state=None)) if pod.roles]
            if (tiers := gateway.intake.tiers) is not None and pods:
                previous_tier = tiers.number
                tiers.observe(pressure := Pressure.of(pods, self._waiting_work()), time.monotonic())
                if tiers.number != previous_tier:
                    self._metrics.media_tier.set(tiers.number)
                    _log.warning(
                        "quality of media: tier %d after tier %d, with %.0f%% of memory in use and %.1f s of backlog at encoders",
                        *(tiers.number, previous_tier, 100 * pressure.memory, pressure.backlog_seconds),
                    )
            await asyncio.sleep(QUEUE_PERIOD_SECONDS)

    def _waiting_work(self) -> dict[Modality, float]:
        """The waiting work for encoders: their queue, and the work waiting for admission here and, assumed equal, at each other gateway."""
        work = dict(self._router.waiting_encode_work)
        if self._admissions is not None:
            for modality, amount in self._admissions.demand().encode_work.items():
                work[modality] = work.get(modality, 0.0) + amount * (1 + self._others.count())
        return work

    def _admissions_of(self, directory: PeerDirectory, hold: MediaHold) -> FairAdmission | None:
        """The order in which requests of tenants start; None if there are no tenants."""
        if self._access is None:
            return None

        def capacity() -> Capacity:
            pods = self._router.routable(directory.pods(state=None))
            return Capacity.of(pods, self._router.limits.local_encode_tokens)

        gateway = self._settings.pipeline.spec.gateway
        return FairAdmission(
            self._access,
            capacity,
            hold.budget_bytes // QUEUE_HOLD_DIVISOR,
            gateway.request_timeout_seconds,
            self._metrics,
        )

    async def serve(self) -> None:
        """Run until the stop event, then serve until no new request arrives and those in flight are finished."""
        self._watch_parts()
        try:
            await self.start()
            await self._stop.wait()
            leave = self._leave()
            await _drain(self._gateway, self._heartbeater, leave, self._settings.grace_seconds)
            if unsent_bytes := self._undelivered_bytes():
                _log.warning(
                    "ending although clients have not received %d bytes of their answers", unsent_bytes
                )
        finally:
            results = await self.stop()
        for error in results:
            if isinstance(error, Exception):
                raise error

    def _leave(self) -> Leave:
        """The conditions for leaving. On a single machine no replacement starts, and a gateway with a failed part is restarted immediately."""
        is_replaced = not (is_loopback(self._settings.pod_ip) or self._gateway.failed)
        return Leave(self._gateway, self._others, self._undelivered_bytes, is_replaced)

    def _undelivered_bytes(self) -> int:
        """The bytes of finished answers that clients, or other gateways on behalf of theirs, have not received."""
        elsewhere = self._gateway.repeats.answers.unread_elsewhere_bytes()
        return undelivered_bytes(self._server.port) + elsewhere

    async def start(self) -> None:
        """Warm up all components that compute, then take requests."""
        settings, gateway = self._settings, self._gateway
        startup = Startup(self._metrics)
        with startup.phase("sandbox"):
            await self._sandbox.start()
        for layer, active in self._sandbox.layers.items():
            self._metrics.sandbox_layers.labels(layer).set(active)
        steps: dict[str, WarmUpStep] = {
            "messages": partial(asyncio.to_thread, codec.warm_up, MESSAGES),
            "tracing": partial(asyncio.to_thread, self._tracing.warm_up),
            **media_steps(self._sandbox, gateway.frontend, settings.pipeline.spec.gateway.media),
        }
        await warm_up(steps, startup, torch.device("cpu"))
        await gateway.directory.start()
        await gateway.dispatcher.start()
        await self._claims.start()
        for feed in self._feeds:
            await feed.start()
        await self._media_server.start()
        await self._admin.start()  # before heartbeats, because they name its port
        await self._heartbeater.start()
        await self._server.start()
        if gateway.picker is not None:
            await gateway.picker.start()
            await gateway.picker.until_it_answers()  # a Ready pod gets streams at once
        gateway.listening = True
        if gateway.picker is not None:
            # Pickers choose this gateway only once its heartbeat has an endpoint.
            await self._heartbeater.announce()
        names_and_ports = settings.pod, ", ".join(gateway.names), settings.http_port, self._admin.port
        _log.info(
            "gateway %s serving %s on port %d, metrics on port %d (startup: %s)", *names_and_ports, startup
        )

    def reconfigure(self, spec: MultimodalDeploymentSpec) -> None:
        """Apply settings that changed while this process runs; requests in flight keep their original settings."""
        gateway = self._gateway
        gateway.settings = GatewaySettings.of(spec)
        gateway.intake.policy = spec.gateway.media
        self._set_tiers(spec.gateway.media.under_load)
        self._sandbox.set_timeout(spec.gateway.media.decode_timeout_seconds)
        gateway.hold.resize(_hold_bytes(gateway.settings.max_body_bytes))
        if self._admissions is not None:
            self._admissions.max_bytes = gateway.hold.budget_bytes // QUEUE_HOLD_DIVISOR
        gateway.dispatcher.max_retries = spec.gateway.max_retries
        self._others.replicas = spec.gateway.replicas
        self._router.limits = PlacementLimits.of(spec)
        _show_promises(self._metrics, spec.slo)
        _check_memory(gateway, self._memory_bytes)
        set_level(spec.observability.log_level)

    def heartbeat(self) -> Heartbeat:
        """The current state of this gateway."""
        settings = self._settings
        return Heartbeat(
            pod=settings.pod,
            pool="gateway",
            roles=[],
            incarnation=settings.incarnation,
            revision=settings.pipeline.revision,
            state="draining" if self._gateway.draining else "ready",
            http_endpoint=f"{settings.pod_ip}:{self._admin.port}",
            sent=sent_now(),
            load=PodLoad(),
            identity=settings.identity,
            commit=settings.commit,
            adapter_commits=settings.adapter_commits,
            node=NODE,
            api_endpoint=host_and_port(settings.pod_ip, settings.http_port) if self._gateway.serves else "",
            requests=self._gateway.running,
            max_requests=self._gateway.settings.max_concurrent_requests,
        )

    async def stop(self) -> list[BaseException | None]:
        """Close everything, even after a partial start; returns the result of each watched task."""
        gateway = self._gateway
        for task in self._watched:
            task.cancel()
        results = await asyncio.gather(*self._watched, return_exceptions=True)
        await close_each(
            *([] if gateway.picker is None else [gateway.picker.stop]),
            self._server.stop,
            self._heartbeater.close,
            gateway.dispatcher.close,
            self._claims.close,
            *([] if self._admissions is None else [self._admissions.close]),
            *([] if self._files is None else [self._files.close]),
            *(feed.close for feed in self._feeds),
            self._media_server.close,
            gateway.directory.close,
            self._sandbox.close,
            gateway.bus.close,
            self._admin.stop,
            gateway.audit_log.close,  # after both servers, because requests on both ports write lines
            partial(asyncio.to_thread, self._tracing.close),
        )
        return results

    def _watch_parts(self) -> None:
        """Start the watched tasks, which must not end before the gateway."""
        settings, gateway = self._settings, self._gateway
        self._watch(bus_watch.watch(gateway.bus, self._metrics), "watch-bus")
        if settings.config_file:
            file, check = Path(settings.config_file), partial(check_pinned, settings)
            live = LiveConfig(file, settings.pipeline, self.reconfigure, self._metrics, check)
            self._watch(live.run(), "live-config")
        if self._access is not None:
            keys = LiveKeys(Path(settings.keys_file), self._access, self._metrics)
            self._watch(keys.run(), "live-keys")
            tokens = DailyTokens(TokenRecords(gateway.bus), self._access.tenants)
            self._watch(tokens.run(), "daily-tokens")
        if self._tokens is not None:
            self._watch(self._tokens.keys.run(), "issuer-keys")
        if self._certificate is not None:
            pair = LiveCertificate(Path(settings.tls_folder), self._certificate, self._metrics)
            self._watch(pair.run(), "live-certificate")
        if gateway.encode_on_upload is not None:
            self._watch(gateway.encode_on_upload.run(), "encode-on-upload")
        if self._files is not None:
            self._watch(self._files.run(), "files")
        if settings.pipeline.spec.encoder is not None:
            watch = _watch_queue(EncodeQueue(gateway.bus), self._metrics, gateway.demand, self._router)
            self._watch(watch, "watch-queue")
        self._watch(self._watch_load(), "watch-load")

    def _watch(self, work: Coroutine[Any, Any, None], name: str) -> None:
        task = asyncio.create_task(work, name=name)
        task.add_done_callback(self._ended)
        self._watched.append(task)

    def _ended(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            _log.critical(
                "%s failed permanently; draining and exiting: %s",
                task.get_name(),
                error,
                exc_info=error,
            )
            self._gateway.failed = f"{task.get_name()} has failed"
            self._stop.set()


def _check_memory(gateway: Gateway, memory_bytes: int) -> None:
    """Warn if the memory limits of requests and indexes add up to more than the available memory: the kernel would kill the gateway first.

    `memory_bytes`: memory of the container, without the part of its endpoint picker.
    """
    available_bytes = memory_bytes - resident_bytes()
    request_bytes = gateway.hold.allowance_bytes + gateway.answers.allowance_bytes
    shared_bytes = (
        gateway.hold.budget_bytes + gateway.answers.budget_bytes + gateway.repeats.answers.budget_bytes
    )
    max_bytes = gateway.settings.max_concurrent_requests * request_bytes + shared_bytes
    for index in (gateway.prefix_index, gateway.feature_index):  # `resident_bytes` includes existing blocks
        max_bytes += (index.most_in_all - index.num_blocks) * BYTES_PER_BLOCK
    if gateway.files is not None:
        max_bytes += gateway.files.spec.max_files * ENTRY_BYTES
    if max_bytes > available_bytes:
        _log.warning(
            "%d concurrent requests and the index of caches may need %d MiB of memory, but this gateway has only %d MiB for them%s; raise "
            "spec.gateway.resources.memory, or lower spec.gateway.maxConcurrentRequests",
            gateway.settings.max_concurrent_requests,
            max_bytes >> 20,
            available_bytes >> 20,
            " beside its endpoint picker (spec.gateway.inferencePool)" if gateway.picker is not None else "",
        )


def _hold_bytes(max_body_bytes: int) -> int:
    return max(HOLD_BODIES * max_body_bytes, MIN_HOLD_BYTES)


def run(settings: WorkerSettings) -> None:
    """Run the gateway as a process; the exit code tells whether it ended without an error."""
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


async def _watch_queue(queue: EncodeQueue, metrics: Metrics, demand: GatewayDemand, router: Router) -> None:
    """Create the encode queue and report its depth, until cancelled. A depth that cannot be read is absent, not zero.

    If the server has lost its store and thus the queue, the queue is recreated within a period.
    """
    gauges = (metrics.queue_jobs, metrics.queue_work)
    limited = RateLimitedLog(_log)
    is_ensured = False  # an existing queue may have other limits
    while True:
        try:
            if not is_ensured:
                await queue.ensure()
                is_ensured = True
            depths = await queue.depth()
            demand.queue_read(depths)
            router.waiting_encode_work = demand.waiting_work  # the last value while it cannot be read
            for modality, depth in depths.items():
                for gauge, value in zip(gauges, (depth.jobs, depth.work), strict=True):
                    gauge.labels(modality).set(value)
        except MmdError as error:
            limited.warning("unreadable", error.message)
            demand.queue_unreadable()
            for gauge in gauges:
                gauge.clear()
            is_ensured = False  # retried in the next period
        except Exception as error:  # noqa: BLE001 - logged; no reason to end the requests that the gateway serves
            limited.warning(
                "queue", f"reading the encode queue failed: {type(error).__name__}: {error}", error
            )
            demand.queue_unreadable()
        await asyncio.sleep(QUEUE_PERIOD_SECONDS)


async def _drain(gateway: Gateway, heartbeater: Heartbeater, leave: Leave, grace_seconds: float) -> None:
    """Finish the requests in flight and those that clients still send; none is refused during the drain.

    A new request gets the rest of the grace period as its deadline, so that it ends with an answer and is not cut off.
    """
    seconds = max(1.0, grace_seconds - DRAIN_RESERVE_SECONDS)
    gateway.drained_at = time.time() + seconds - ANSWER_SECONDS
    gateway.draining = True
    picker, drain_end = gateway.picker, time.monotonic() + seconds
    await heartbeater.announce()
    if gateway.running:
        _log.info("draining: %d requests in flight", gateway.running)
    try:
        async with asyncio.timeout(seconds):
            while not leave.may_end():
                await asyncio.sleep(DRAIN_CHECK_SECONDS)
            if picker is not None:
                picker.drain(drain_end - time.monotonic())
            while not leave.may_end() or (picker is not None and picker.pid):
                await asyncio.sleep(DRAIN_CHECK_SECONDS)
    except TimeoutError:
        _log.warning(
            "the grace period is over: ending with %d requests in flight, and %d that arrive through the endpoint picker",
            gateway.running,
            picker.streams if picker is not None else 0,
        )


def _stop_on_signals() -> asyncio.Event:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for signal_number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(signal_number, stop.set)
    return stop
