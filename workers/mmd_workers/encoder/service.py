"""The encode role of an encoder pod: takes jobs from the queue, sends features to whoever asked, and only then acknowledges."""

from __future__ import annotations

import asyncio
import logging
import time

from mmd_workers.encoder.pipeline import EncodePipeline
from mmd_workers.encoder.tensors import buffers_of
from mmd_workers.errors import MmdError
from mmd_workers.observe.metrics import Metrics
from mmd_workers.wire.bus import Bus
from mmd_workers.wire.embeddings import EmbeddingSender
from mmd_workers.wire.jobs import Delivery, EncodeQueue
from mmd_workers.wire.media import read_medium
from mmd_workers.wire.messages import EncodeFailed, Modality

log = logging.getLogger(__name__)

PULL_WAIT_SECONDS = 1.0
RETRY_SECONDS = 0.2


class EncoderService:
    """Pulls as many jobs as the tower can batch; everything else stays in the queue, where any encoder may take it."""

    def __init__(
        self,
        bus: Bus,
        queue: EncodeQueue,
        pipeline: EncodePipeline,
        modalities: list[Modality],
        max_jobs: int,
        metrics: Metrics,
    ) -> None:
        self._bus = bus
        self._queue = queue
        self._pipeline = pipeline
        self._modalities = modalities
        self._sender = EmbeddingSender(bus)
        self._metrics = metrics
        self._slots = asyncio.Semaphore(max_jobs)
        self._max_jobs = max_jobs
        self._jobs: set[asyncio.Task[None]] = set()
        self._draining = asyncio.Event()
        self.last_progress = time.monotonic()

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
                self.last_progress = time.monotonic()
            finally:
                for _ in range(free - len(deliveries)):
                    self._slots.release()
            for delivery in deliveries:
                task = asyncio.create_task(self._handle(delivery), name=f"job-{delivery.job.job_id}")
                self._jobs.add(task)
                task.add_done_callback(self._done)
        if self._jobs:
            await asyncio.wait(self._jobs)

    def _done(self, task: asyncio.Task[None]) -> None:
        self._jobs.discard(task)
        self._slots.release()
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("encode job crashed; it will be redelivered", exc_info=error)

    @property
    def active(self) -> int:
        """Jobs in hand."""
        return len(self._jobs)

    def drain(self) -> None:
        """Take no more jobs."""
        self._draining.set()

    async def _handle(self, delivery: Delivery) -> None:
        job = delivery.job
        if time.time() > job.deadline:
            await delivery.terminate("deadline passed")
            return
        async with delivery.keep_alive():
            try:
                times = {"start": time.time()}
                feature = self._pipeline.cached(job.feature.feature_id)
                if feature is None:
                    feature, times = await self._pipeline.encode(
                        job.feature,
                        lambda: read_medium(
                            self._bus, job.gateway, job.feature.digest, job.feature.num_bytes, job.deadline
                        ),
                    )
                times["encoded"] = time.time()
                await self._sender.send(job, buffers_of(feature), timings=times)
            except MmdError as error:
                await self._failed(delivery, error)
            else:
                await delivery.ack()
                self._metrics.encode_jobs.labels(job.feature.modality, "ok").inc()

    async def _failed(self, delivery: Delivery, error: MmdError) -> None:
        job = delivery.job
        log.warning("encode job %s of %s failed: %s", job.job_id, job.request_id, error.message)
        if error.retryable and time.time() < job.deadline:
            self._metrics.redeliveries.labels(job.feature.modality).inc()
            await delivery.retry(RETRY_SECONDS)
            return
        self._metrics.encode_jobs.labels(job.feature.modality, error.code).inc()
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
