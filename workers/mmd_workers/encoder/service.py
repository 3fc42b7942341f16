"""The encode role of an encoder pod: takes jobs from the queue, sends features to whoever asked, and only then acknowledges."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable

from mmd_workers.encoder.pipeline import EncodePipeline, steps_of
from mmd_workers.encoder.tensors import buffers_of
from mmd_workers.errors import DeadlineError, MmdError, PeerLostError
from mmd_workers.model.types import Feature
from mmd_workers.observe.metrics import Metrics
from mmd_workers.observe.tracing import Tracing
from mmd_workers.wire.bus import Bus
from mmd_workers.wire.embeddings import EmbeddingSender
from mmd_workers.wire.jobs import Delivery, EncodeQueue
from mmd_workers.wire.media import MediaGoneError, read_medium
from mmd_workers.wire.messages import EncodeFailed, EncodeJob, Modality, Phase, PhaseReport

log = logging.getLogger(__name__)

PULL_WAIT_SECONDS = 1.0
RETRY_SECONDS = (0.1, 1.0)  # first and longest pause between two tries of one job
CRASH_RETRY_SECONDS = 0.5


class ReceiverGoneError(MmdError):
    """Nobody waits for this feature any more."""

    code = "receiver_gone"


class EncoderService:
    """Pulls as many jobs as the tower can batch; everything else stays in the queue, where any encoder may take it.

    `incarnation_of(pod)` is that of a pod heard of lately, or None.
    """

    def __init__(
        self,
        bus: Bus,
        queue: EncodeQueue,
        pipeline: EncodePipeline,
        modalities: list[Modality],
        max_jobs: int,
        incarnation_of: Callable[[str], str | None],
        metrics: Metrics,
        tracing: Tracing,
    ) -> None:
        self._bus = bus
        self._queue = queue
        self._pipeline = pipeline
        self._modalities = modalities
        self._sender = EmbeddingSender(bus)
        self._incarnation_of = incarnation_of
        self._metrics = metrics
        self._tracing = tracing
        self._slots = asyncio.Semaphore(max_jobs)
        self._max_jobs = max_jobs
        self._jobs: set[asyncio.Task[None]] = set()
        self._draining = asyncio.Event()
        self.drained = False

    async def run(self) -> None:
        """Work until drained. Jobs already taken are finished."""
        while not self._draining.is_set():
            await self._slots.acquire()
            free = 1
            while free < self._max_jobs and not self._slots.locked():
                await self._slots.acquire()
                free += 1
            deliveries: list[Delivery] = []
            try:
                if not self._draining.is_set():
                    deliveries = await self._queue.pull(self._modalities, batch=free, wait=PULL_WAIT_SECONDS)
            finally:
                for _ in range(free - len(deliveries)):
                    self._slots.release()
            for delivery in deliveries:
                task = asyncio.create_task(self._handle(delivery), name=f"job-{delivery.job.job_id}")
                self._jobs.add(task)
                task.add_done_callback(self._done)
        if self._jobs:
            await asyncio.wait(self._jobs)
        self.drained = True

    def _done(self, task: asyncio.Task[None]) -> None:
        self._jobs.discard(task)
        self._slots.release()
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("encode job crashed; it will be redelivered", exc_info=error)

    def drain(self) -> None:
        """Take no more jobs; `drained` turns true when those in hand are done."""
        self._draining.set()

    async def _handle(self, delivery: Delivery) -> None:
        job, modality = delivery.job, delivery.job.feature.modality
        if delivery.attempt > 1:
            self._metrics.redeliveries.labels(modality).inc()
        if time.time() > job.deadline:
            await delivery.terminate("deadline passed")
            return
        async with delivery.keep_alive():
            try:
                await self._serve(job)
            except ReceiverGoneError as error:
                self._metrics.encode_jobs.labels(modality, error.code).inc()
                await delivery.terminate(error.message)
            except MmdError as error:
                await self._failed(delivery, error)
            except (
                Exception
            ):  # the tower can raise anything: another encoder may do better, the queue counts attempts
                log.exception("encoding for %s crashed", job.request_id)
                self._metrics.encode_jobs.labels(modality, MmdError.code).inc()
                await delivery.retry(CRASH_RETRY_SECONDS)
            else:
                await delivery.ack()
                self._metrics.encode_jobs.labels(modality, "ok").inc()

    async def _serve(self, job: EncodeJob) -> None:
        """Encode and hand over. What a lost message or a restarting server breaks is tried again here, with the feature in
        hand: the queue's attempts are for encoders that died.
        """
        feature: Feature | None = None
        times = {"start": time.time()}
        pause = RETRY_SECONDS[0]
        while True:
            try:
                if feature is None:
                    feature, times = await self._encode(job, times)
                    await self._report(job, times)
                sent = await self._sender.send(job, buffers_of(feature), timings=times)
                self._metrics.offers.labels(sent).inc()
                if sent == "sent":
                    self._metrics.transfer_bytes.labels("embedding", "sent").inc(feature.num_bytes)
                return
            except MmdError as error:
                if feature is not None:
                    self._metrics.transfer_failures.labels("embedding", error.code).inc()
                if not (error.retryable or isinstance(error, DeadlineError)):
                    raise
                if time.time() + pause > job.deadline:
                    raise
                if isinstance(error, PeerLostError):
                    self._check_peers(job, needs_gateway=feature is None)
                log.info("encode job of %s goes on in %.1f s: %s", job.request_id, pause, error.message)
            await asyncio.sleep(pause)
            pause = min(2 * pause, RETRY_SECONDS[1])

    async def _encode(self, job: EncodeJob, times: dict[str, float]) -> tuple[Feature, dict[str, float]]:
        feature = self._pipeline.cached(job.feature.feature_id)
        if feature is None:
            feature, times = await self._pipeline.encode(
                job.feature,
                lambda: read_medium(
                    self._bus, job.gateway, job.feature.digest, job.feature.num_bytes, job.deadline
                ),
            )
        return feature, times | {"encoded": time.time()}

    async def _report(self, job: EncodeJob, times: dict[str, float]) -> None:
        """Tell the gateway and the collector how long it took, and on which pod."""
        feature = job.feature
        facts = {
            "modality": feature.modality,
            "tokens": feature.num_tokens,
            "feature": feature.feature_id[:12],
        }
        phase = Phase("encode", times["start"], times["encoded"], facts | steps_of(times))
        self._metrics.phase.labels(phase.name, feature.modality).observe(max(0.0, phase.end - phase.start))
        self._tracing.record(job.trace, [phase])
        report = PhaseReport(job.request_id, job.attempt, self._bus.client_name, [phase])
        try:
            await self._bus.publish(self._bus.subjects.phases(job.gateway), report)
        except MmdError as error:
            log.debug("the times of %s were not reported: %s", job.job_id, error.message)

    def _check_peers(self, job: EncodeJob, needs_gateway: bool) -> None:
        """Somebody did not answer: a pod that has not been heard of either is gone, any other will come back."""
        if self._incarnation_of(job.receiver) != job.receiver_incarnation:
            raise ReceiverGoneError(f"{job.receiver}, which asked for the feature, is gone")
        if needs_gateway and self._incarnation_of(job.gateway) is None:
            raise MediaGoneError(f"{job.gateway}, which held the medium, is gone")

    async def _failed(self, delivery: Delivery, error: MmdError) -> None:
        job = delivery.job
        log.warning("encode job %s of %s failed: %s", job.job_id, job.request_id, error.message)
        self._metrics.encode_jobs.labels(job.feature.modality, error.code).inc()
        self._metrics.errors.labels(error.code).inc()
        await self._bus.publish(
            self._bus.subjects.encode_failed(job.receiver),
            EncodeFailed(
                feature_id=job.feature.feature_id,
                job_id=job.job_id,
                code=error.code,
                message=error.message,
                retryable=error.retryable,
            ),
        )
        await delivery.terminate(error.message)
