"""A worker process: connects to the bus, runs the parts of its pod from start to end, and drains when asked to stop."""

from __future__ import annotations

import asyncio
import logging
import signal
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any, get_args

import torch

from mmd_api.contract.annotations import DRAIN_ANNOTATION
from mmd_api.contract.errors import DrainedError, MmdError, PeerLostError
from mmd_api.contract.load import WorkerState
from mmd_api.contract.pools import PoolName, Role
from mmd_api.contract.subjects import Subjects
from mmd_api.spec.deployment import MultimodalDeploymentSpec
from mmd_workers.basics.device import chosen_device
from mmd_workers.basics.node import NODE
from mmd_workers.caches.reports import FeatureReports
from mmd_workers.decode.decode_role import DecodeRole
from mmd_workers.encoder.encoder_role import EncoderRole
from mmd_workers.features.source import NoMediaSource
from mmd_workers.model import encoder as towers
from mmd_workers.observe import bus as bus_watch
from mmd_workers.observe.logs import configure, set_level
from mmd_workers.observe.server import HttpServer, Progress, listen_address, routes
from mmd_workers.prefill.prefill_role import PrefillRole
from mmd_workers.process import closing
from mmd_workers.process.closing import close_each
from mmd_workers.process.identity import check_pinned, identified
from mmd_workers.process.live import LiveConfig
from mmd_workers.process.pod import LIVENESS_SECONDS, Part, Pod, merged, sum_of
from mmd_workers.process.settings import WorkerSettings
from mmd_workers.process.warmup import warm_up
from mmd_workers.sequences.engine import EngineHost
from mmd_workers.sequences.links import KvLinks
from mmd_workers.sequences.native import NativeHost
from mmd_workers.sequences.sequence_events import Sequences
from mmd_workers.vllm_engine.ranks.follower import FollowerProcess
from mmd_workers.wire import codec
from mmd_workers.wire.bus import Bus
from mmd_workers.wire.messages import MESSAGES
from mmd_workers.wire.messages.every_pod import Heartbeat
from mmd_workers.wire.peers import Heartbeater, PeerDirectory, sent_now

log = logging.getLogger(__name__)

SAMPLE_SECONDS = 0.25
DRAIN_CHECK_SECONDS = 0.05
ANNOTATIONS_SECONDS = 1.0
SURRENDER_SECONDS = 5.0  # limit for each step by which a failed process gives up its work
SWITCH_SECONDS = 0.0005
"""How long a thread keeps the interpreter while another waits for it. Towers and engine steps release it around every operation; with
Python's default of 5 ms, each wait to get it back would take a third of a step."""
# KV links block threads: a link that waits for a lost peer must not keep others from running.
BLOCKING_THREADS = 64


def parts_of(pod: Pod, device: torch.device, *, takes_media: bool = True) -> list[Part]:
    """The parts of a pod in order of dependency: each comes after the parts it builds on.

    `takes_media`: False for a model of text alone, whose pods have no tower.
    """
    parts: list[Part] = [FeatureReports(pod)] if "encode" in pod.roles or "prefill" in pod.roles else []
    encodes = takes_media and ("encode" in pod.roles or pod.encodes_small_media)
    encoder = EncoderRole(pod, device) if encodes else None
    if encoder is not None:
        parts.append(encoder)
    if "prefill" not in pod.roles and "decode" not in pod.roles:
        return parts
    decodes = "decode" in pod.roles
    links = KvLinks(pod, device) if not decodes or pod.spec.prefill is not None else None
    if links is not None:
        parts.append(links)
    engine = engine_host(pod, device, encoder)
    if encoder is not None and pod.spec.engine.type == "Native":
        encoder.somebody_waits = engine.somebody_waits
    sequences = Sequences(pod, engine)
    parts += [engine, sequences]
    if decodes and links is not None:
        parts.append(DecodeRole(pod, engine, sequences, links))
    if "prefill" in pod.roles:
        source = encoder.local_source if encoder is not None else None if takes_media else NoMediaSource
        parts.append(PrefillRole(pod, engine, sequences, None if decodes else links, source))
    return parts


def engine_host(pod: Pod, device: torch.device, encoder: EncoderRole | None) -> EngineHost:
    """The host of the engine named in the spec; vLLM's dependencies are imported only for vLLM."""

    def tower_bytes() -> int:
        return encoder.tower_bytes if encoder is not None else 0

    if pod.spec.engine.type == "VLLM":
        from mmd_workers.vllm_engine.host import VllmHost

        return VllmHost(pod, device, tower_bytes)
    return NativeHost(pod, device, tower_bytes)


class Worker:
    """One pod's process: roles out of encode, prefill and decode."""

    def __init__(self, settings: WorkerSettings, pool: PoolName, roles: tuple[Role, ...]) -> None:
        self.settings = settings
        self.pod = Pod.of(settings, pool, roles)
        self.state: WorkerState = "loading"
        self.stopping = self.pod.tasks.stopping
        self._parts: list[Part] = []
        self._heartbeats: Heartbeater | None = None
        self._started_at = time.monotonic()

    # --- start ----------------------------------------------------------------------------------------------------

    async def serve(self) -> None:
        """Run until asked to stop (SIGTERM, SIGINT) or until a component fails permanently.

        Raises:
            MmdError: the model cannot be served here; the message has the reason.
        """
        loop, pod = asyncio.get_running_loop(), self.pod
        for signal_number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(signal_number, self.stopping.set)
        loop.set_default_executor(ThreadPoolExecutor(BLOCKING_THREADS, thread_name_prefix="blocking"))
        status = await self._start_status_server()
        heartbeats = await self._connect()
        try:
            await self._load()
            if not self.stopping.is_set():
                await self._join()
                self.state = "ready"
                await heartbeats.announce()
                roles, seconds = "+".join(pod.roles), time.monotonic() - self._started_at
                log.info("ready as %s after %.1f s (%s)", roles, seconds, pod.startup)
            drain_request = pod.tasks.spawn(self._drain_requested(), "drain-requested")
            stopped = asyncio.create_task(self.stopping.wait(), name="stopping")
            await asyncio.wait({drain_request, stopped}, return_when=asyncio.FIRST_COMPLETED)
            drain_request.cancel()
            if pod.tasks.failure is None:
                self.state = "draining"
                await heartbeats.announce()
                await self._drain()
                await heartbeats.announce()
            else:
                await close_each(self._surrender, heartbeats.beat, seconds=SURRENDER_SECONDS)
            await stopped
        finally:
            await self._close(heartbeats)
            await status.stop()
        if pod.tasks.failure is not None:
            raise pod.tasks.failure

    async def _start_status_server(self) -> HttpServer:
        metrics, pipeline = self.pod.metrics, self.settings.pipeline
        build = {"version": version("multimodal-operator"), "revision": pipeline.revision}
        metrics.build.info(build | {"roles": "+".join(self.pod.roles)})
        status = HttpServer.of_routes(
            routes(metrics, self._progress, self._not_ready_because, self._described),
            listen_address(self.settings.pod_ip),
            self.settings.http_port,
        )
        await status.start()
        return status

    async def _connect(self) -> Heartbeater:
        """Connect to the bus, follow live settings and peers, and start heartbeats."""
        pod, settings, pipeline = self.pod, self.settings, self.settings.pipeline
        with pod.startup.phase("connect"):
            pod.bus = await Bus.connect(
                settings.nats_url,
                settings.pod,
                Subjects(pipeline.namespace, pipeline.name, settings.mesh),
                settings.nats_inbox,
                login=settings.nats_login,
            )
        pod.tasks.spawn(bus_watch.watch(pod.bus, pod.metrics), "watch-bus")
        if settings.config_file:
            check = partial(check_pinned, settings)
            file = Path(settings.config_file)
            live = LiveConfig(file, pipeline, self._reconfigure, pod.metrics, check)
            pod.tasks.spawn(live.run(), "live-config")
        observability = pod.spec.observability
        pod.directory = PeerDirectory(pod.bus, observability.heartbeat_timeout_milliseconds / 1000)
        await pod.directory.start()
        seconds = observability.heartbeat_milliseconds / 1000
        self._heartbeats = heartbeats = Heartbeater(pod.bus, self.heartbeat, seconds)
        await heartbeats.start()
        return heartbeats

    def _reconfigure(self, spec: MultimodalDeploymentSpec) -> None:
        """Apply settings that changed while this process runs."""
        self.pod.spec = spec
        set_level(spec.observability.log_level)
        for part in self._parts:
            part.reconfigure(spec)

    async def _load(self) -> None:
        """Load only the weights that these roles need."""
        torch.set_num_threads(self.settings.compute_threads)
        device, roles = chosen_device(self.settings.gpus, self.pod.pool), self.pod.roles
        needs_no_tower = False
        if "encode" in roles and roles != ("encode",):  # a model of text alone needs no encoder pool
            needs_no_tower = not await asyncio.to_thread(towers.takes_media, self.pod.spec.model)
        self._parts = parts_of(self.pod, device, takes_media=not needs_no_tower)
        for part in self._parts:
            await part.load_weights()

    async def _join(self) -> None:
        """Start and warm up the parts, then accept work: none is accepted before it can run."""
        for part in self._parts:
            await part.start()
        messages = partial(asyncio.to_thread, codec.warm_up, MESSAGES)
        await warm_up({"messages": messages}, self.pod.startup, torch.device("cpu"))
        for part in self._parts:
            await part.warm_up()
        with self.pod.startup.phase("services"):
            for part in self._parts:
                await part.accept()
            self.pod.tasks.spawn(self._sample(), "sample")
        for part in self._parts:
            await part.connect()

    async def _sample(self) -> None:
        """Refresh the figures that heartbeats and scrapes read, until cancelled."""
        while True:
            for part in self._parts:
                await part.sample()
            await asyncio.sleep(SAMPLE_SECONDS)

    # --- report ---------------------------------------------------------------------------------------------------

    def heartbeat(self) -> Heartbeat:
        """The current state of this pod."""
        pod, settings = self.pod, self.settings
        for state in get_args(WorkerState):
            pod.metrics.pod_state.labels(state).set(state == self.state)
        advertised = merged(part.advertised() for part in self._parts)
        return Heartbeat(
            pod=settings.pod,
            pool=pod.pool,
            roles=list(pod.roles),
            incarnation=settings.incarnation,
            revision=settings.pipeline.revision,
            state=self.state,
            http_endpoint=f"{settings.pod_ip}:{settings.http_port}",
            sent=sent_now(),
            load=sum_of(part.load() for part in self._parts),
            identity=settings.identity,
            commit=settings.commit,
            adapter_commits=settings.adapter_commits,
            max_model_len=advertised.max_model_len or 0,
            prefix_number=advertised.prefix_number or 0,
            feature_number=advertised.feature_number or 0,
            node=NODE,
            takes_prompts=bool(advertised.takes_prompts),
            encodes_small_media=bool(advertised.encodes_small_media),
        )

    def _described(self) -> dict[str, Any]:
        """This pod's state and the durations of its startup phases, for `/state`."""
        return asdict(self.heartbeat()) | {"startup_seconds": self.pod.startup.seconds()}

    def _progress(self) -> dict[str, Progress]:
        """The progress checks that decide whether this process counts as alive."""
        checks: dict[str, Progress] = {}
        for part in self._parts:
            checks |= part.progress()
        if (heartbeats := self._heartbeats) is not None:
            checks["heartbeat"] = Progress(
                lambda: time.monotonic() - heartbeats.last_progress, LIVENESS_SECONDS
            )
        return checks

    def _not_ready_because(self) -> str:
        return "" if self.state == "ready" else f"this pod is {self.state}"

    # --- end ------------------------------------------------------------------------------------------------------

    async def _drain_requested(self) -> None:
        """Return once the pod has a drain annotation; Kubernetes exposes annotations in a file."""
        file = Path(self.settings.annotations)
        while not self.settings.annotations or not await asyncio.to_thread(_has_drain_annotation, file):
            await asyncio.sleep(ANNOTATIONS_SECONDS)

    async def _drain(self) -> None:
        """Accept no more work, finish the work in progress, and give back the rest at the end of the grace period."""
        grace = self.pod.drain_seconds
        log.info("draining for at most %.0f s", grace)
        for part in self._parts:
            part.drain()
        deadline = time.monotonic() + grace
        while time.monotonic() < deadline and not all(part.drained for part in self._parts):
            await asyncio.sleep(DRAIN_CHECK_SECONDS)
        for part in self._parts:
            await part.give_back(DrainedError("this pod is draining; the rest is generated on another pod"))
        self.state = "drained"

    async def _surrender(self) -> None:
        """Give up after a failure: accept nothing, and hand the work to other pods now instead of at a timeout."""
        for part in self._parts:
            part.drain()
        for part in self._parts:
            await part.surrender()
        failure = PeerLostError(f"{self.settings.pod} failed; the rest is generated on another pod")
        for part in self._parts:
            await part.give_back(failure)
        self.state = "drained"

    async def _close(self, heartbeats: Heartbeater) -> None:
        pod = self.pod
        await pod.tasks.cancel()
        await close_each(heartbeats.close)
        await close_each(*(part.stop for part in reversed(self._parts)))
        await close_each(pod.directory.close, pod.bus.close, partial(asyncio.to_thread, pod.tracing.close))


def _has_drain_annotation(file: Path) -> bool:
    try:
        return any(line.startswith(f"{DRAIN_ANNOTATION}=") for line in file.read_text().splitlines())
    except OSError:
        return False  # the file is being replaced or does not exist yet


def _process(settings: WorkerSettings, pool: PoolName, roles: tuple[Role, ...]) -> Worker | FollowerProcess:
    """The process of this pod: a worker that serves, or a follower that computes for its group's leader."""
    if settings.group is not None and settings.group.rank > 0:
        return FollowerProcess(settings, pool, roles)
    return Worker(settings, pool, roles)


def run(settings: WorkerSettings, pool: PoolName, roles: tuple[Role, ...]) -> None:
    """Run a worker until it is asked to stop; the exit code shows whether it ended cleanly."""
    configure(settings.pod, settings.pipeline.spec.observability.log_level.upper())
    sys.setswitchinterval(SWITCH_SECONDS)
    try:
        closing.run(_process(identified(settings), pool, roles).serve())
    except MmdError as error:
        log.critical("cannot serve (%s): %s", error.code, error.message)
        raise SystemExit(1) from error
