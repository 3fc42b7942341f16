"""A worker process: loads what its roles need, joins the rooms to one service, says how it is, and drains when asked to go."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import time
from collections.abc import Coroutine
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any, get_args

import torch

from mmd_api.pipeline import PoolName, Role
from mmd_api.resource import DRAIN_ANNOTATION
from mmd_api.spec import EncoderSpec, PrefillSpec
from mmd_api.subjects import Subjects
from mmd_workers import closing
from mmd_workers.closing import close_each
from mmd_workers.decode.service import DecodeService
from mmd_workers.decode.tokens import SequenceBook
from mmd_workers.encoder.cache import FeatureCache
from mmd_workers.encoder.pipeline import EncodePipeline
from mmd_workers.encoder.service import EncoderService
from mmd_workers.engine.engine import Engine
from mmd_workers.engine.runner import EngineRunner
from mmd_workers.engine.types import EngineStats, StepOutput
from mmd_workers.errors import MmdError, PeerLostError
from mmd_workers.kv.links import LinkManager
from mmd_workers.media.sandbox import DecodePool
from mmd_workers.model.encoder import load_encoder
from mmd_workers.model.language import load_language_model
from mmd_workers.model.types import EncoderModel, LanguageModel
from mmd_workers.observe import bus as bus_watch
from mmd_workers.observe.logs import configure
from mmd_workers.observe.metrics import Metrics
from mmd_workers.observe.server import HttpServer, Progress, routes
from mmd_workers.observe.tracing import Tracing
from mmd_workers.prefill.features import FeatureState, FeatureStore
from mmd_workers.prefill.handoff import KvSender
from mmd_workers.prefill.service import FeatureSource, PrefillService
from mmd_workers.prefill.sources import LocalSource, QueueSource
from mmd_workers.settings import WorkerSettings
from mmd_workers.wire.bus import Bus
from mmd_workers.wire.jobs import EncodeQueue, QueueLimits
from mmd_workers.wire.messages import Cancel, Heartbeat, Load, PodState
from mmd_workers.wire.peers import Heartbeater, PeerDirectory, PeerEvent

log = logging.getLogger(__name__)

MEBIBYTE = 2**20
DEFAULT_KV_MEBIBYTES = 512
DECODE_PROCESSES = 2
DECODE_MEMORY_BYTES = 2 << 30
LIVENESS_SECONDS = 60.0
ADVERTISED_DIGESTS = 64
STATS_SECONDS = 0.25
DRAIN_CHECK_SECONDS = 0.05
ANNOTATIONS_SECONDS = 1.0
DRAIN_RESERVE_SECONDS = 5.0  # of the grace period: for the last messages and for closing
BLOCKING_THREADS = (
    64  # KV links wait in threads: one that waits for a lost peer must not keep others from theirs
)
ADVERTISED_BLOCKS = 64


class Worker:
    """One pod's process: roles out of encode, prefill and decode."""

    def __init__(self, settings: WorkerSettings, pool: PoolName, roles: tuple[Role, ...]) -> None:
        self.settings = settings
        self.spec = settings.pipeline.spec
        self.pool = pool
        self.roles = roles
        self.state: PodState = "loading"
        self.pipeline: EncodePipeline | None = None
        self.encoder: EncoderService | None = None
        self.runner: EngineRunner | None = None
        self.prefill: PrefillService | None = None
        self.decode: DecodeService | None = None
        self.store: FeatureStore | None = None
        self.source: FeatureSource | None = None
        self.links: LinkManager | None = None
        self.decoders: DecodePool | None = None
        self.encoder_model: EncoderModel | None = None
        self.language_model: LanguageModel | None = None
        self.failure: BaseException | None = None
        self.metrics = Metrics(roles)
        pipeline = settings.pipeline
        self.tracing = Tracing(
            settings.pod, pipeline.name, pipeline.namespace, self.spec.observability.otlp_endpoint
        )
        self.stopping = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []
        self._events: set[asyncio.Task[None]] = set()
        self._outputs: asyncio.Queue[StepOutput] = asyncio.Queue()  # bounded by the runner
        self._stats: EngineStats | None = None
        self._prefix_blocks: list[str] = []
        self._max_model_len = 0
        self._begun = time.monotonic()

    # --- start ----------------------------------------------------------------------------------------------------

    async def serve(self) -> None:
        """Run until asked to stop (SIGTERM, SIGINT) or until a part fails for good.

        Raises:
            MmdError: the model cannot be served here; the message says why.
        """
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self.stopping.set)
        loop.set_default_executor(ThreadPoolExecutor(BLOCKING_THREADS, thread_name_prefix="blocking"))
        pipeline = self.settings.pipeline
        self.metrics.build.info(
            {
                "version": version("multimodal-operator"),
                "revision": pipeline.revision,
                "roles": "+".join(self.roles),
            }
        )
        subjects = Subjects(pipeline.namespace, pipeline.name, pipeline.revision)
        status = HttpServer.of_routes(
            routes(self.metrics, self._progress(), self._not_ready_because, lambda: asdict(self.heartbeat())),
            "0.0.0.0",  # noqa: S104  a pod listens on its own address
            self.settings.http_port,
        )
        await status.start()
        self.bus = await Bus.connect(
            self.settings.nats_url, self.settings.pod, subjects, self.settings.nats_inbox
        )
        self._spawn(bus_watch.watch(self.bus, self.metrics), "watch-bus")
        self.book = SequenceBook(self.bus, self.settings.pod, self.metrics, self.tracing)
        observability = self.spec.observability
        self.directory = PeerDirectory(self.bus, observability.heartbeat_timeout_milliseconds / 1000)
        self.directory.on_event(self._peer_event)
        await self.directory.start()
        heartbeats = Heartbeater(self.bus, self.heartbeat, observability.heartbeat_milliseconds / 1000)
        await heartbeats.start()
        try:
            await self._load()
            if not self.stopping.is_set():
                await self._join()
                self.state = "ready"
                await heartbeats.beat()
                log.info("ready as %s after %.1f s", "+".join(self.roles), time.monotonic() - self._begun)
            asked = asyncio.create_task(self._asked_to_drain(), name="asked-to-drain")
            stopped = asyncio.create_task(self.stopping.wait(), name="stopping")
            await asyncio.wait({asked, stopped}, return_when=asyncio.FIRST_COMPLETED)
            asked.cancel()
            if self.failure is None:
                self.state = "draining"
                await heartbeats.beat()
                await self._drain()
                await heartbeats.beat()
            await stopped
        finally:
            await self._close(heartbeats)
            await status.stop()
        if self.failure is not None:
            raise self.failure

    async def _load(self) -> None:
        """Load what the roles need, and nothing else, in a thread: heartbeats go on."""
        torch.set_num_threads(self.settings.threads or os.cpu_count() or 1)
        device = torch.device("cuda") if torch.cuda.is_available() else torch.device("cpu")
        if "encode" in self.roles:
            self.encoder_model = await asyncio.to_thread(load_encoder, self.spec.model, device)
            self.metrics.loaded_bytes.inc(self.encoder_model.loaded_bytes)
            log.info("encoder role loaded %d bytes", self.encoder_model.loaded_bytes)
        if "prefill" in self.roles or "decode" in self.roles:
            self.language_model = await asyncio.to_thread(load_language_model, self.spec.model, device)
            self.metrics.loaded_bytes.inc(self.language_model.loaded_bytes)
            log.info("language role loaded %d bytes", self.language_model.loaded_bytes)

    async def _join(self) -> None:
        """Make the services of the roles, downstream first, so that nothing is accepted that cannot go on."""
        queue = EncodeQueue(self.bus, QueueLimits(max_attempts=self._encoder_spec.max_deliveries))
        if self.encoder_model is not None:
            await self._make_pipeline(self.encoder_model)
        if self.language_model is not None:
            await self._make_engine(self.language_model)
        if self.language_model is not None and "decode" in self.roles and self.spec.prefill is not None:
            self.decode = DecodeService(
                self.bus,
                self.settings.pod,
                self._engine,
                self.language_model,
                self._need_links(),
                self.book,
                self.metrics,
            )
            await self.decode.start()
            self._spawn(self.decode.run(), "decode")
        if self.language_model is not None and "prefill" in self.roles:
            await self._make_prefill(self.language_model, queue)
        if self.roles == ("encode",):
            assert self.pipeline is not None
            batching = self._encoder_spec.batching
            self.encoder = EncoderService(
                self.bus,
                queue,
                self.pipeline,
                sorted(self.encoder_model.modalities) if self.encoder_model else [],
                max_jobs=2 * batching.max_items,
                incarnation_of=self._incarnation_of,
                metrics=self.metrics,
                tracing=self.tracing,
            )
            self._spawn(self.encoder.run(), "encoder")
        await self.bus.subscribe(self.bus.subjects.cancel, Cancel, self._cancelled)
        self._spawn(self._observe(), "observe")

    def _incarnation_of(self, pod: str) -> str | None:
        beat = self.directory.get(pod)
        return None if beat is None else beat.incarnation

    @property
    def _encoder_spec(self) -> EncoderSpec:
        return self.spec.encoder or EncoderSpec()

    @property
    def _engine(self) -> EngineRunner:
        assert self.runner is not None
        return self.runner

    async def _make_pipeline(self, model: EncoderModel) -> None:
        media, spec = self.spec.gateway.media, self._encoder_spec
        self.decoders = DecodePool(DECODE_PROCESSES, media.decode_timeout_seconds, DECODE_MEMORY_BYTES)
        await self.decoders.start()
        self.pipeline = EncodePipeline(
            model,
            self.decoders,
            media,
            spec.batching,
            FeatureCache(spec.cache_mebibytes * MEBIBYTE),
            self.metrics,
        )
        self._spawn(self.pipeline.run(), "tower")

    async def _make_engine(self, model: LanguageModel) -> None:
        spec = self.spec
        pool = spec.prefill if self.pool == "prefill" and spec.prefill else spec.decode
        prefill = spec.prefill or PrefillSpec()
        max_model_len = model.max_model_len
        if spec.model.max_model_len is not None:
            max_model_len = min(max_model_len, spec.model.max_model_len)
        self._max_model_len = max_model_len
        engine = await asyncio.to_thread(
            Engine,
            model,
            kv_cache_bytes=(pool.kv_cache_mebibytes or DEFAULT_KV_MEBIBYTES) * MEBIBYTE,
            block_tokens=spec.decode.kv_block_tokens,
            max_sequences=spec.decode.max_sequences,
            chunk_tokens=prefill.chunk_tokens,
            prefix_cache=prefill.prefix_cache,
            max_model_len=max_model_len,
        )
        self.runner = EngineRunner(engine, self._outputs.put_nowait, self._failed)
        self.runner.start()
        self._spawn(self._take_outputs(self.runner), "outputs")

    async def _make_prefill(self, model: LanguageModel, queue: EncodeQueue) -> None:
        spec, prefill = self.spec, self.spec.prefill or PrefillSpec()
        transfer = spec.transfer
        self.store = FeatureStore(prefill.feature_budget_mebibytes * MEBIBYTE, self._count_transition)
        if self.pipeline is not None:
            self.source = LocalSource(self.bus, self.pipeline, self.store)
        else:
            self.source = source = QueueSource(
                self.bus,
                self.settings.pod,
                self.settings.incarnation,
                queue,
                self.store,
                window_bytes=transfer.embedding.window_kibibytes * 1024,
                chunk_bytes=transfer.embedding.chunk_kibibytes * 1024,
                job_timeout_seconds=float(self._encoder_spec.job_timeout_seconds),
                transfer_timeout_seconds=float(transfer.embedding.timeout_seconds),
                metrics=self.metrics,
            )
            await source.start()
        sender = None
        if "decode" not in self.roles:
            sender = KvSender(
                self.bus,
                self.settings.pod,
                self.settings.incarnation,
                self._engine,
                self._need_links(),
                model.kv_layout,
                float(transfer.kv.lease_seconds),
                lambda: {beat.pod: beat.incarnation for beat in self.directory.pods("decode")},
                self.metrics,
            )
        self.prefill = PrefillService(
            self.bus,
            self.settings.pod,
            self._engine,
            model,
            self.store,
            self.source,
            self.book,
            sender,
            max_waiting=prefill.max_waiting_requests,
            max_in_engine=spec.decode.max_sequences,
            overlap_tokens=prefill.chunk_tokens // 4,
            metrics=self.metrics,
        )
        await self.prefill.start()

    def _count_transition(self, _before: FeatureState | None, after: FeatureState) -> None:
        self.metrics.feature_transitions.labels(after).inc()

    def _need_links(self) -> LinkManager:
        if self.links is None:
            kv = self.spec.transfer.kv
            assert self.language_model is not None
            self.links = LinkManager(
                kv.backend,
                self.settings.pod,
                self.settings.incarnation,
                self.settings.pod_ip,
                chunk_timeout_seconds=kv.chunk_timeout_milliseconds / 1000,
                device=self.language_model.device,
            )
        return self.links

    def _spawn(self, work: Coroutine[Any, Any, None], name: str) -> None:
        task = asyncio.create_task(work, name=name)
        task.add_done_callback(self._ended)
        self._tasks.append(task)

    def _ended(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            self._failed(error)

    def _failed(self, error: BaseException) -> None:
        """A part that should run for ever has ended: without it this pod is of no use, so the process ends too."""
        log.critical("a part of this worker failed for good: %s", error, exc_info=error)
        self.failure = error
        self.stopping.set()

    # --- events ---------------------------------------------------------------------------------------------------

    async def _take_outputs(self, runner: EngineRunner) -> None:
        """What engine steps did, in order. A token is on its way to its gateway before anybody acts upon it, so that a
        sequence's book is never closed over an unsent token.
        """
        while True:
            output = await self._outputs.get()
            self._count(output)
            if self.prefill is not None:
                for sequence, cached_tokens in output.admitted.items():
                    self.prefill.on_admitted(sequence, cached_tokens)
                for ready in output.kv_ready:
                    self.prefill.on_kv_ready(ready)
            await self.book.publish(output)
            for token in output.tokens:
                handed_over = self.prefill is not None and self.prefill.hands_over(token.sequence_id)
                if self.prefill is not None:
                    self.prefill.on_token(token)
                if token.finish_reason is not None and not handed_over:
                    await self.book.finish(token.sequence_id)
            for sequence, error in output.failed:
                reported = error if isinstance(error, MmdError) else MmdError(str(error))
                if self.prefill is None or not self.prefill.on_failed(sequence, reported):
                    await self.book.fail(sequence, reported)
            runner.taken()

    def _count(self, output: StepOutput) -> None:
        self.metrics.prefill_tokens.inc(output.prefill_tokens)
        self.metrics.step.observe(output.duration_seconds)
        self.metrics.step_sequences.observe(max(output.decode_sequences, len(output.tokens)))

    async def _cancelled(self, cancel: Cancel) -> None:
        for sequence in self.book.cancel(cancel.request_id, cancel.attempt):
            await self._abandon(sequence)
        if self.decode is not None:
            await self.decode.cancel(cancel.request_id, cancel.attempt)

    def _peer_event(self, event: PeerEvent) -> None:
        """A pod is gone, or is another process now: nothing that it began will go on."""
        gone = event.before
        if event.kind not in ("lost", "reborn") or gone is None:
            return
        if self.links is not None:
            self.links.notify_lost(gone.pod)
        self._in_background(self._forget_peer(gone))

    async def _forget_peer(self, gone: Heartbeat) -> None:
        if self.decode is not None:
            await self.decode.peer_lost(gone.pod, gone.incarnation)
        for sequence in self.book.of_gateway(gone.pod):
            # Should it be there after all, it hears that it must place the request again.
            await self.book.fail(sequence, PeerLostError(f"{gone.pod} was not heard of for too long"))
            await self._abandon(sequence)

    async def _abandon(self, sequence: str) -> None:
        if self.prefill is not None:
            self.prefill.cancel(sequence)
        self.book.forget(sequence)
        if self.runner is not None:
            await self.runner.call(partial(Engine.abort, sequence_id=sequence))

    def _in_background(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._events.add(task)
        task.add_done_callback(self._events.discard)

    # --- how it is ------------------------------------------------------------------------------------------------

    def heartbeat(self) -> Heartbeat:
        """The state of this pod now."""
        for state in get_args(PodState):
            self.metrics.pod_state.labels(state).set(state == self.state)
        return Heartbeat(
            pod=self.settings.pod,
            pool=self.pool,
            roles=list(self.roles),
            incarnation=self.settings.incarnation,
            revision=self.settings.pipeline.revision,
            state=self.state,
            http_endpoint=f"{self.settings.pod_ip}:{self.settings.http_port}",
            sent=time.time(),
            load=self._load_now(),
            max_model_len=self._max_model_len,
            prefix_blocks=self._prefix_blocks,
            features=self._features(),
        )

    def _features(self) -> list[str]:
        held = self.store or self.pipeline
        return held.newest(ADVERTISED_DIGESTS) if held is not None else []

    def _load_now(self) -> Load:
        pipeline, store = self.pipeline, self.store
        facts: dict[str, Any] = {}
        if pipeline is not None:
            facts |= {
                "encode_queued_work": dict(pipeline.queued_work),
                "encode_running": pipeline.running,
                "encode_work_per_second": dict(pipeline.work_per_second),
                "encode_busy_fraction": pipeline.busy_fraction(),
            }
        if store is not None:
            facts |= {"feature_bytes_used": store.used_bytes, "feature_bytes_budget": store.budget_bytes}
        if (stats := self._stats) is not None:
            facts |= {
                "prefill_waiting_tokens": self._waiting_tokens(stats),
                "prefill_blocked_tokens": self._blocked_tokens(stats),
                "prefill_waiting_requests": self.prefill.active if self.prefill is not None else 0,
                "prefill_tokens_per_second": stats.prefill_tokens_per_second,
                "decode_running": stats.running_sequences,
                "decode_waiting": stats.waiting_sequences,
                "decode_max_sequences": stats.max_sequences,
                "kv_blocks_total": stats.blocks_total,
                "kv_blocks_free": stats.blocks_free,
                "kv_blocks_reserved": stats.blocks_reserved,
                "kv_block_tokens": stats.block_tokens,
                "itl_seconds": stats.step_seconds,
            }
        return Load(**facts)

    async def _observe(self) -> None:
        """Keep the figures fresh that heartbeats and scrapes read; the engine's are read on its own thread."""
        while True:
            if self.runner is not None:
                stats, self._prefix_blocks = await self.runner.call(
                    lambda engine: (engine.stats(), engine.prefix_blocks(ADVERTISED_BLOCKS))
                )
                before, self._stats = self._stats, stats
                self._observe_engine(stats, before)
            if self.store is not None:
                self.metrics.feature_budget.set(self.store.budget_bytes)
                for state, num_bytes in self.store.bytes_by_state().items():
                    self.metrics.feature_bytes.labels(state).set(num_bytes)
            if isinstance(self.source, QueueSource):
                self.metrics.credit.set(self.source.reserved_bytes)
            if self.decode is not None:
                self.metrics.inbound.set(self.decode.inbound)
            if self.pipeline is not None:
                self._observe_encoding(self.pipeline)
            await asyncio.sleep(STATS_SECONDS)

    def _observe_encoding(self, pipeline: EncodePipeline) -> None:
        backlog = 0.0
        for modality, work in pipeline.queued_work.items():
            self.metrics.encode_queued.labels(modality).set(work)
            if rate := pipeline.work_per_second.get(modality):
                self.metrics.encode_rate.labels(modality).set(rate)
                backlog += work / rate
        self.metrics.backlog.labels("encode").set(backlog)

    def _observe_engine(self, stats: EngineStats, before: EngineStats | None) -> None:
        used = stats.blocks_total - stats.blocks_free - stats.blocks_reserved
        blocks = {"free": stats.blocks_free, "reserved": stats.blocks_reserved, "used": used}
        for state, count in blocks.items():
            self.metrics.kv_blocks.labels(state).set(count)
        sequences = {
            "waiting": stats.waiting_sequences,
            "running": stats.running_sequences,
            "held": stats.held_sequences,
            "reserved": stats.reserved_sequences,
        }
        for state, count in sequences.items():
            self.metrics.sequences.labels(state).set(count)
        self.metrics.max_sequences.set(stats.max_sequences)
        metrics, blocked = self.metrics, self._blocked_tokens(stats)
        waiting = self._waiting_tokens(stats) - blocked
        metrics.prefill_waiting.labels("prefill").set(waiting)
        metrics.prefill_waiting.labels("encode").set(blocked)
        if "prefill" in self.roles and stats.prefill_tokens_per_second:
            metrics.prefill_rate.set(stats.prefill_tokens_per_second)
            metrics.backlog.labels("prefill").set(waiting / stats.prefill_tokens_per_second)
        for counter, name in (
            (metrics.preemptions, "preemptions"),
            (metrics.prefix_tokens.labels("hit"), "prefix_hit_tokens"),
            (metrics.prefix_tokens.labels("miss"), "prefix_miss_tokens"),
        ):
            counter.inc(getattr(stats, name) - (getattr(before, name) if before is not None else 0))

    def _waiting_tokens(self, stats: EngineStats) -> int:
        return stats.waiting_tokens + (self.prefill.waiting_tokens() if self.prefill is not None else 0)

    def _blocked_tokens(self, stats: EngineStats) -> int:
        return stats.blocked_tokens + (self.prefill.blocked_tokens() if self.prefill is not None else 0)

    def _progress(self) -> dict[str, Progress]:
        """What must move for this process to count as alive."""
        return {
            "engine": Progress(
                lambda: time.monotonic() - self.runner.last_progress if self.runner is not None else 0.0,
                LIVENESS_SECONDS,
            ),
            "encoder": Progress(
                lambda: time.monotonic() - self.pipeline.last_progress if self.pipeline is not None else 0.0,
                LIVENESS_SECONDS,
            ),
        }

    def _not_ready_because(self) -> str:
        return "" if self.state == "ready" else f"this pod is {self.state}"

    # --- end ------------------------------------------------------------------------------------------------------

    async def _asked_to_drain(self) -> None:
        """Return once whoever scales this pool asks for a drain: with an annotation, which Kubernetes shows in a file."""
        file = Path(self.settings.annotations)
        while not self.settings.annotations or not await asyncio.to_thread(_has_drain_annotation, file):
            await asyncio.sleep(ANNOTATIONS_SECONDS)

    async def _drain(self) -> None:
        """Take no more work, finish what is held, give back what cannot be finished in the grace period."""
        for service in (self.encoder, self.prefill, self.decode):
            if service is not None:
                service.drain()
        grace = self._grace_seconds()
        log.info("draining: %d sequences in hand, %.0f s at most", len(self.book), grace)
        deadline = time.monotonic() + grace
        while time.monotonic() < deadline and not self._empty():
            await asyncio.sleep(DRAIN_CHECK_SECONDS)
        for sequence in self.book.all():
            await self.book.fail(
                sequence, DrainedError("this pod is leaving; the rest is generated elsewhere")
            )
        self.state = "drained"

    def _grace_seconds(self) -> float:
        return max(1.0, self.settings.grace_seconds - DRAIN_RESERVE_SECONDS)

    def _empty(self) -> bool:
        encoding = self.encoder is not None and not self.encoder.drained
        handing_over = self.prefill is not None and self.prefill.active
        return not (len(self.book) or encoding or handing_over or (self.decode and self.decode.inbound))

    async def _close(self, heartbeats: Heartbeater) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await close_each(heartbeats.close)
        if self.runner is not None:
            await close_each(partial(self.runner.stop, 5.0))
        if self.links is not None:
            self.links.close()
        if self.pipeline is not None:
            self.pipeline.close()
        if self.decoders is not None:
            await close_each(self.decoders.close)
        await close_each(self.directory.close, self.bus.close, partial(asyncio.to_thread, self.tracing.close))


def _has_drain_annotation(file: Path) -> bool:
    try:
        return any(line.startswith(f"{DRAIN_ANNOTATION}=") for line in file.read_text().splitlines())
    except OSError:
        return False  # being replaced, or not there yet


class DrainedError(MmdError):
    """The pod that worked on this request is leaving: place it again, tokens so far included."""

    code = "drained"
    retryable = True


def run(settings: WorkerSettings, pool: PoolName, roles: tuple[Role, ...]) -> None:
    """Run a worker until it is asked to stop; the process's exit code says whether it ended well."""
    configure(settings.pod, settings.pipeline.spec.observability.log_level.upper())
    try:
        closing.run(Worker(settings, pool, roles).serve())
    except MmdError as error:
        log.critical("cannot serve (%s): %s", error.code, error.message)
        raise SystemExit(1) from error
