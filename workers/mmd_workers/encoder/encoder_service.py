"""The encode role of an encoder pod: takes jobs from the queue, sends features to receivers, and only then acknowledges."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable

from mmd_api.contract.errors import (
    DeadlineError,
    DeviceLostError,
    FeatureLostError,
    MediaGoneError,
    MmdError,
    PeerLostError,
    ReceiverGoneError,
)
from mmd_api.contract.pools import Modality
from mmd_workers.encoder.pipeline import EncodePipeline
from mmd_workers.features.references import unprocessable
from mmd_workers.features.tensors import buffers_of
from mmd_workers.features.times import steps_of
from mmd_workers.model.prompt import Feature
from mmd_workers.observe.metrics import Metrics
from mmd_workers.observe.tracing import Tracing
from mmd_workers.wire.bus import Bus
from mmd_workers.wire.embedding_sender import EmbeddingSender
from mmd_workers.wire.jobs import Delivery, EncodeQueue, report_failure
from mmd_workers.wire.media import SharedReads, read_medium
from mmd_workers.wire.messages.encoder import EncodeJob, EncodeTaken
from mmd_workers.wire.messages.gateway import PhaseReport
from mmd_workers.wire.messages.message_parts import Phase
from mmd_workers.wire.messages.prefill import EncodeCheck, EncodeFailed, EncodeWanted

log = logging.getLogger(__name__)

PULL_WAIT_SECONDS = 1.0
RETRY_SECONDS = (0.1, 1.0)  # first and longest pause between two tries of one job
CRASH_RETRY_SECONDS = 0.5
CHECK_SECONDS = 1.0  # interval between checks whether a job is still wanted
WAITED_SECONDS = 0.3  # a job that was in the queue for longer is checked before it is begun
MOST_CACHED_JOBS = 256  # limit of jobs past the queue that wait for their turn or are served
CHECK_TIMEOUT_SECONDS = 1.0
MAX_MESSAGE_CHARACTERS = 4096


class EncoderService:
    """Pulls as many jobs as the tower can batch; everything else stays in the queue, where any encoder may take it.

    Features that this pod has, or is already making, are sent past the queue, without a wait for decoding or the tower, even while the
    pod drains.

    A redelivered job may have ended the encoder that had it: it is handled with no other job in progress, so that neither can
    cost the other an attempt.

    `incarnation_of(pod)` returns the incarnation of a pod with recent heartbeats, or None.
    """

    def __init__(
        self,
        bus: Bus,
        queue: EncodeQueue,
        pipeline: EncodePipeline,
        modalities: list[Modality],
        incarnation_of: Callable[[str], str | None],
        metrics: Metrics,
        tracing: Tracing,
    ) -> None:
        self._bus = bus
        self._queue = queue
        self._pipeline = pipeline
        self._modalities = modalities
        self._sender = EmbeddingSender(bus)
        self._reads = SharedReads(lambda *medium: read_medium(bus, *medium))
        self._incarnation_of = incarnation_of
        self._metrics = metrics
        self._tracing = tracing
        self._max_jobs = pipeline.max_media
        self._slots = asyncio.Semaphore(self._max_jobs)
        self._sending = pipeline.stages.add("send", self._max_jobs)
        self._jobs: dict[asyncio.Task[None], Delivery] = {}
        self._cached_jobs: dict[str, asyncio.Task[None]] = {}  # served past the queue, by job id
        self._cached_slots = asyncio.Semaphore(self._max_jobs)  # a job that waits for a slot holds no feature
        self._draining = asyncio.Event()
        self._abandoned = False
        self.drained = False

    async def run(self) -> None:
        """Work until drained. Jobs already taken are finished."""
        subject = self._bus.subjects.encode_cached(self._bus.client_name)
        await self._bus.serve(subject, EncodeJob, self._take_cached)
        with contextlib.suppress(PeerLostError):  # the next use connects it, too
            await self._bus.bulk()  # so that the first job does not wait for the connection
        while not self._draining.is_set():
            await self._slots.acquire()
            free_slots = 1
            while free_slots < self._max_jobs and not self._slots.locked():
                await self._slots.acquire()
                free_slots += 1
            deliveries: list[Delivery] = []
            try:
                if not self._draining.is_set():
                    deliveries = await self._queue.pull(
                        self._modalities, batch=free_slots, wait=PULL_WAIT_SECONDS
                    )
            finally:
                for _ in range(free_slots - len(deliveries)):
                    self._slots.release()
            if self._abandoned:
                for delivery in deliveries:
                    await self._give_back(delivery)
                break
            suspects = [delivery for delivery in deliveries if delivery.attempt > 1]
            for delivery in deliveries:
                if delivery.attempt == 1:
                    self._start(delivery)
            if suspects:
                await self._handle_alone(*suspects)
        if remaining := {*self._jobs, *self._cached_jobs.values()}:
            await asyncio.wait(remaining)
        self.drained = True

    def _start(self, delivery: Delivery) -> asyncio.Task[None]:
        """Handle a job that holds one of the slots."""
        task = asyncio.create_task(self._handle(delivery), name=f"job-{delivery.job.job_id}")
        self._jobs[task] = delivery
        task.add_done_callback(self._done)
        return task

    async def _handle_alone(self, delivery: Delivery, *others: Delivery) -> None:
        for other in others:
            await self._give_back(other)
            self._slots.release()
        async with delivery.keep_alive():
            if self._jobs:
                await asyncio.wait(self._jobs)
            if self._abandoned:
                await self._give_back(delivery)
            else:
                await asyncio.wait([self._start(delivery)])

    async def _give_back(self, delivery: Delivery) -> None:
        try:
            await self._queue.give_back(delivery)
        except MmdError as error:
            log.warning(
                "failed to return job %s to the queue; it will be redelivered after its acknowledgement wait: %s",
                delivery.job.job_id,
                error.message,
            )

    async def abandon(self) -> None:
        """Return all jobs to the queue now: this process can no longer encode."""
        self._abandoned = True
        self._draining.set()
        deliveries = dict(self._jobs)
        tasks = [*deliveries, *self._cached_jobs.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for task, delivery in deliveries.items():
            if not task.cancelled():
                continue
            if delivery.job.feature.feature_id in self._pipeline.on_lost_device:
                await delivery.retry(0.0)  # this medium may be the cause, so this counts as an attempt
            else:
                await self._give_back(delivery)

    def _done(self, task: asyncio.Task[None]) -> None:
        self._jobs.pop(task, None)
        self._slots.release()
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("encode job crashed; it will be redelivered", exc_info=error)

    def drain(self) -> None:
        """Accept no more jobs; `drained` turns true when those in progress are done."""
        self._draining.set()

    async def _take_cached(self, job: EncodeJob) -> EncodeTaken:
        """Send a feature that this pod has or is making; a job in progress counts as taken. If this fails, the receiver queues the job."""
        feature_id, modality = job.feature.feature_id, job.feature.modality
        queued_ids = (delivery.job.job_id for delivery in self._jobs.values())
        if job.job_id in self._cached_jobs or job.job_id in queued_ids:
            return EncodeTaken(job.job_id, taken=True, making=self._pipeline.is_making(feature_id))
        full = len(self._cached_jobs) >= MOST_CACHED_JOBS
        if full or self._abandoned or not self._pipeline.has(feature_id):
            return EncodeTaken(job.job_id, taken=False)

        async def serve() -> None:
            try:
                # Making a feature takes long, and must not hold up features that are ready.
                making = self._pipeline.is_making(feature_id)
                async with contextlib.nullcontext() if making else self._cached_slots:
                    if not self._pipeline.has(feature_id):
                        raise FeatureLostError(
                            f"feature {feature_id[:16]} was evicted before its turn to be sent"
                        )
                    await self._while_wanted(job)
            except MmdError as error:
                log.info("failed to deliver the cached feature for %s: %s", job.request_id, error.message)
                self._metrics.encode_jobs.labels(modality, error.code).inc()
            except Exception:  # the model can raise anything in the encode that this job joined
                log.exception("making the feature for %s failed", job.request_id)
                self._metrics.encode_jobs.labels(modality, MmdError.code).inc()
            else:
                self._metrics.encode_jobs.labels(modality, "ok").inc()

        task = asyncio.create_task(serve(), name=f"cached-{job.job_id}")
        self._cached_jobs[job.job_id] = task
        task.add_done_callback(lambda _: self._cached_jobs.pop(job.job_id))
        return EncodeTaken(job.job_id, taken=True, making=self._pipeline.is_making(feature_id))

    async def _handle(self, delivery: Delivery) -> None:
        job, modality = delivery.job, delivery.job.feature.modality
        if delivery.attempt > 1:
            self._metrics.redeliveries.labels(modality).inc()
        if time.time() > job.deadline:
            await delivery.terminate("deadline exceeded")
            return
        async with delivery.keep_alive():
            try:
                await self._while_wanted(job)
            except ReceiverGoneError as error:
                self._metrics.encode_jobs.labels(modality, error.code).inc()
                await delivery.terminate(error.message)
            except DeviceLostError as error:
                self._metrics.encode_jobs.labels(modality, error.code).inc()
                self._abandoned = True  # otherwise this pod would be the first to take it again
                self._draining.set()
                await delivery.retry(0.0)
            except MmdError as error:
                await self._failed(delivery, error)
            except Exception as error:  # the model can raise anything; another encoder may succeed
                log.exception("encoding for request %s failed", job.request_id)
                await self._crashed(delivery, error)
            else:
                await delivery.ack()
                self._metrics.encode_jobs.labels(modality, "ok").inc()

    async def _while_wanted(self, job: EncodeJob) -> None:
        """Serve a job while its receiver waits for it, at most until its deadline.

        Raises:
            ReceiverGoneError: nobody waits for the feature any more.
            DeadlineError: the deadline passed, whatever the job waited for.
        """
        limit = asyncio.timeout(max(0.0, job.deadline - time.time()))
        try:
            async with limit:
                await self._serve_while_wanted(job)
        except TimeoutError as error:
            if not limit.expired():  # a timeout of the model or of a processor
                raise
            raise DeadlineError(
                f"feature {job.feature.feature_id[:16]} was not encoded and sent before its job's deadline; add encoders, or raise "
                "spec.encoder.jobTimeoutSeconds"
            ) from error

    async def _serve_while_wanted(self, job: EncodeJob) -> None:
        waited_long = time.time() - job.published > WAITED_SECONDS
        if waited_long and not await self._is_wanted(job):
            raise ReceiverGoneError("the feature is no longer needed")
        serving = asyncio.create_task(self._serve(job), name=f"serve-{job.job_id}")
        try:
            while not (await asyncio.wait([serving], timeout=CHECK_SECONDS))[0]:
                if not await self._is_wanted(job):
                    raise ReceiverGoneError("the feature is no longer needed")
            await serving
        finally:
            serving.cancel()
            await asyncio.wait([serving])

    async def _is_wanted(self, job: EncodeJob) -> bool:
        """Whether the receiver still waits for the feature; True if it does not answer."""
        check = EncodeCheck(job.feature.feature_id, job.job_id)
        try:
            subject = self._bus.subjects.encode_wanted(job.receiver)
            answer = await self._bus.request(subject, check, EncodeWanted, timeout=CHECK_TIMEOUT_SECONDS)
        except MmdError:
            return True
        return answer.wanted

    async def _crashed(self, delivery: Delivery, error: Exception) -> None:
        """Retry or give up a job after the model failed on its medium alone."""
        if delivery.last:
            await self._failed(delivery, unprocessable(delivery.job.feature, delivery.attempt, error))
            return
        self._metrics.encode_jobs.labels(delivery.job.feature.modality, MmdError.code).inc()
        await delivery.retry(CRASH_RETRY_SECONDS)

    async def _serve(self, job: EncodeJob) -> None:
        """Encode and send a feature.

        Failures caused by a lost message or a restarting server are retried here, with the feature in memory: the queue's attempts
        are for encoders that died.
        """
        feature: Feature | None = None
        times = {"start": time.time()}
        pause = RETRY_SECONDS[0]
        while True:
            try:
                if feature is None:
                    feature, times = await self._encode(job, times)
                    await self._report(job, times)
                spans: list[tuple[float, float]] = []
                outcome = await self._sender.send(job, buffers_of(feature), timings=times, spans=spans)
                for start, end in spans:
                    self._sending.record(job.feature.modality, job.feature.work, start, end)
                self._metrics.offers.labels(outcome).inc()
                if outcome == "sent":
                    self._metrics.transfer_bytes.labels("embedding", "sent").inc(feature.num_bytes)
                return
            except MmdError as error:
                if feature is not None:
                    self._metrics.transfer_failures.labels("embedding", error.code).inc()
                can_retry = error.retryable or isinstance(error, DeadlineError)
                if isinstance(error, DeviceLostError) or not can_retry:
                    raise
                if time.time() + pause > job.deadline:
                    raise
                if isinstance(error, PeerLostError):
                    self._check_peers(job, needs_gateway=feature is None)
                log.info(
                    "encode job of %s failed, retrying in %.1f s: %s", job.request_id, pause, error.message
                )
            await asyncio.sleep(pause)
            pause = min(2 * pause, RETRY_SECONDS[1])

    async def _encode(self, job: EncodeJob, times: dict[str, float]) -> tuple[Feature, dict[str, float]]:
        feature = await self._pipeline.cached(job.feature.feature_id)
        if feature is None:
            feature, times = await self._pipeline.encode(
                job.feature,
                lambda: self._reads.read(
                    job.gateway, job.feature.digest, job.feature.num_bytes, job.deadline
                ),
            )
        return feature, times | {"encoded": time.time()}

    async def _report(self, job: EncodeJob, times: dict[str, float]) -> None:
        """Report to the gateway and the collector how long encoding took, and on which pod."""
        feature = job.feature
        facts = {
            "modality": feature.modality,
            "tokens": feature.num_tokens,
            "work": feature.work,
            "feature": feature.feature_id[:12],
        }
        phase = Phase("encode", times["start"], times["encoded"], facts | steps_of(times))
        self._metrics.phase.labels(phase.name, feature.modality).observe(max(0.0, phase.end - phase.start))
        self._tracing.record(job.trace, [phase])
        report = PhaseReport(job.request_id, job.attempt, self._bus.client_name, [phase])
        try:
            await self._bus.publish(self._bus.subjects.phases(job.gateway), report)
        except MmdError as error:
            log.debug("failed to report the timings of job %s: %s", job.job_id, error.message)

    def _check_peers(self, job: EncodeJob, needs_gateway: bool) -> None:
        """Raise an error if a peer that did not reply is lost; with recent heartbeats, it will recover."""
        if self._incarnation_of(job.receiver) != job.receiver_incarnation:
            raise ReceiverGoneError(f"{job.receiver}, which requested the feature, is lost")
        if needs_gateway and self._incarnation_of(job.gateway) is None:
            raise MediaGoneError(f"{job.gateway}, which held the medium, is lost")

    async def _failed(self, delivery: Delivery, error: MmdError) -> None:
        job = delivery.job
        log.warning("encode job %s of %s failed: %s", job.job_id, job.request_id, error.message)
        self._metrics.encode_jobs.labels(job.feature.modality, error.code).inc()
        self._metrics.errors.labels(error.code).inc()
        failure = EncodeFailed(
            feature_id=job.feature.feature_id,
            job_id=job.job_id,
            code=error.code,
            message=error.message[:MAX_MESSAGE_CHARACTERS],
            retryable=error.retryable,
        )
        await report_failure(self._bus, delivery, failure, error.message)
