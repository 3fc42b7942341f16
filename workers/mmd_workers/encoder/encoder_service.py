"""The encode role of an encoder pod: takes jobs from the queue, sends features to receivers, and only then acknowledges."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager

from mmd_api.contract.errors import (
    DeadlineError,
    DeviceLostError,
    FeatureLostError,
    MmdError,
    PeerLostError,
    ReceiverGoneError,
    UnprocessableMediumError,
)
from mmd_api.contract.pools import Modality
from mmd_workers.encoder.job_claims import (
    END_REPORT_SECONDS,
    Claim,
    JobClaims,
    RunsElsewhereError,
    RunUnclearError,
)
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
from mmd_workers.wire.messages.prefill import EncodeFailed

log = logging.getLogger(__name__)

PULL_WAIT_SECONDS = 1.0
RETRY_SECONDS = (0.1, 1.0)  # first and longest pause between two tries of one job
CRASH_RETRY_SECONDS = 0.5
UNKNOWN_RETRY_SECONDS = 1.0  # until a job is delivered again whose receiver or encoder does not answer
SUSPECT_RETRY_SECONDS = 0.1  # until a job is delivered again that met another one that has to run alone
CHECK_SECONDS = 1.0  # interval between checks whether a job is still wanted
ABANDON_REPORT_SECONDS = 2.0  # limit for reporting an end, so that time remains to give the job back
MOST_CACHED_JOBS = 256  # limit of jobs past the queue that wait for their turn or are served
MAX_MESSAGE_CHARACTERS = 4096


class EncoderService:
    """Pulls as many jobs as the tower can batch; everything else stays in the queue, where any encoder may take it.

    Features that this pod has, or is already making, are sent past the queue, without a wait for decoding or the tower, even while the
    pod drains.

    A job that is delivered while it is handled here is joined, and one that another encoder runs is left to it. A job that has failed,
    or ended an encoder, is handled with no other job in progress, so that neither can cost the other an attempt.

    `max_attempts`: runs that may fail before a job is given up.
    """

    def __init__(
        self,
        bus: Bus,
        queue: EncodeQueue,
        pipeline: EncodePipeline,
        modalities: list[Modality],
        claims: JobClaims,
        max_attempts: int,
        metrics: Metrics,
        tracing: Tracing,
    ) -> None:
        self._bus = bus
        self._queue = queue
        self._pipeline = pipeline
        self._modalities = modalities
        self._sender = EmbeddingSender(bus)
        self._reads = SharedReads(lambda *medium: read_medium(bus, *medium))
        self._claims = claims
        self._max_attempts = max_attempts
        self._metrics = metrics
        self._tracing = tracing
        self._max_jobs = pipeline.max_media
        self._slots = asyncio.Semaphore(self._max_jobs)
        self._takes_jobs = asyncio.Event()  # not while one job has all slots, or waits for them
        self._takes_jobs.set()
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
            await self._takes_jobs.wait()
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
                    await delivery.retry(0.0)
                break
            for delivery in deliveries:
                if (running := self._running(delivery.job)) is None:
                    self._start(delivery)
                else:
                    running.join(delivery)
                    self._slots.release()
        if remaining := {*self._jobs, *self._cached_jobs.values()}:
            await asyncio.wait(remaining)
        self.drained = True

    def _running(self, job: EncodeJob) -> Delivery | None:
        """The delivery of a job that is handled here, and is not leaving."""
        deliveries = self._jobs.values()
        return next((one for one in deliveries if one.job.job_id == job.job_id and not one.is_leaving), None)

    def _start(self, delivery: Delivery) -> None:
        """Handle a job that holds one of the slots."""
        task = asyncio.create_task(self._handle(delivery), name=f"job-{delivery.job.job_id}")
        self._jobs[task] = delivery
        task.add_done_callback(self._done)

    async def _give_back(
        self,
        delivery: Delivery,
        delay: float = 0.0,
        failed: bool = False,
        report_seconds: float = END_REPORT_SECONDS,
    ) -> None:
        """End the run of a job, and let any encoder take it. `failed`: the run counts as an attempt."""
        await self._claims.report_end(delivery.job, failed, report_seconds)
        await delivery.retry(delay)

    async def abandon(self) -> None:
        """Return all jobs to the queue now: this process can no longer encode."""
        self._abandoned = True
        self._draining.set()
        deliveries = dict(self._jobs)
        tasks = [*deliveries, *self._cached_jobs.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        on_device = self._pipeline.on_lost_device  # one of these may be the cause
        await asyncio.gather(
            *(
                self._give_back(
                    delivery,
                    failed=delivery.job.feature.feature_id in on_device,
                    report_seconds=ABANDON_REPORT_SECONDS,
                )
                for task, delivery in deliveries.items()
                if task.cancelled()
            )
        )

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
        if job.job_id in self._cached_jobs or self._running(job) is not None:
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
                    await self._while_wanted(job, self._serve(job), is_claimed=False)
            except RunUnclearError:
                log.info(
                    "%s, which asked for the cached feature for %s, is away", job.receiver, job.request_id
                )
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
        job, modality, claim = delivery.job, delivery.job.feature.modality, Claim(1)
        if time.time() > job.deadline:
            await delivery.terminate("deadline exceeded")
            return
        async with delivery.keep_alive():
            try:
                claim = await self._claim(job, delivery.is_first)
                if claim.attempt == 1:
                    await self._while_wanted(job, self._serve(job), checks_now=not claim.is_recorded)
                elif not self._takes_jobs.is_set():
                    await self._give_back(delivery, SUSPECT_RETRY_SECONDS)
                    return
                else:
                    async with self._alone(job):
                        claim = await self._claim(job, is_first=False)
                        self._metrics.redeliveries.labels(modality).inc()
                        await self._while_wanted(job, self._serve(job))
            except RunsElsewhereError:
                return  # its encoder keeps it alive; if that encoder ends, the job is delivered again
            except (
                RunUnclearError
            ):  # a run that began here is known at the receiver, and is found to have ended
                await delivery.retry(UNKNOWN_RETRY_SECONDS)
                return
            except ReceiverGoneError as error:
                self._metrics.encode_jobs.labels(modality, error.code).inc()
                await delivery.terminate(error.message)
            except DeviceLostError as error:
                self._metrics.encode_jobs.labels(modality, error.code).inc()
                self._abandoned = True  # otherwise this pod would be the first to take it again
                self._draining.set()
                await self._give_back(delivery, failed=True)
            except MmdError as error:
                await self._failed(delivery, error)
            except Exception as error:  # the model can raise anything; another encoder may succeed
                log.exception("encoding for request %s failed", job.request_id)
                await self._crashed(delivery, claim.attempt, error)
            else:
                await delivery.ack()
                self._metrics.encode_jobs.labels(modality, "ok").inc()

    async def _claim(self, job: EncodeJob, is_first: bool) -> Claim:
        """Claim a job that has attempts left.

        Raises:
            UnprocessableMediumError: it has none.
            MmdError, RunsElsewhereError, RunUnclearError: as in `JobClaims.claim`.
        """
        claim = await self._claims.claim(job, is_first)
        if claim.attempt > self._max_attempts:
            raise UnprocessableMediumError(
                f"{claim.attempt - 1} encoders failed or crashed while encoding this {job.feature.modality}: it may exceed their memory or "
                "break the model; send a smaller file or re-encode it"
            )
        return claim

    @asynccontextmanager
    async def _alone(self, job: EncodeJob) -> AsyncIterator[None]:
        """Wait for the jobs in progress, and hold all slots: `job` has one.

        The job has to be claimed afterwards: while it waits it is not recorded as running, since another job may end this process.

        Raises:
            ReceiverGoneError, DeadlineError: as in `_while_wanted`.
        """
        num_taken = 0

        async def take_slots() -> None:
            nonlocal num_taken
            while num_taken < self._max_jobs - 1:
                await self._slots.acquire()
                num_taken += 1

        self._takes_jobs.clear()
        try:
            await self._claims.report_end(job, failed=False)
            await self._while_wanted(job, take_slots(), is_claimed=False)
            yield
        finally:
            self._takes_jobs.set()
            for _ in range(num_taken):
                self._slots.release()

    async def _while_wanted(
        self,
        job: EncodeJob,
        work: Coroutine[None, None, None],
        is_claimed: bool = True,
        checks_now: bool = False,
    ) -> None:
        """Work on a job while its receiver waits for it, at most until its deadline.

        `is_claimed`: False for a job past the queue, or one that waits for its turn. `checks_now`: check with the receiver at once,
        instead of a second later.

        Raises:
            ReceiverGoneError: nobody waits for the feature any more.
            RunsElsewhereError: the run has become another encoder's.
            DeadlineError: the deadline passed, whatever the job waited for.
        """
        limit = asyncio.timeout(max(0.0, job.deadline - time.time()))
        try:
            async with limit:
                await self._confirm_during(job, work, is_claimed, checks_now)
        except TimeoutError as error:
            if not limit.expired():  # a timeout of the model or of a processor
                raise
            raise DeadlineError(
                f"feature {job.feature.feature_id[:16]} was not encoded and sent before its job's deadline; add encoders, or raise "
                "spec.encoder.jobTimeoutSeconds"
            ) from error

    async def _confirm_during(
        self, job: EncodeJob, work: Coroutine[None, None, None], is_claimed: bool, checks_now: bool
    ) -> None:
        working = asyncio.create_task(work, name=f"serve-{job.job_id}")
        pause = 0.0 if checks_now else CHECK_SECONDS
        try:
            while not (await asyncio.wait([working], timeout=pause))[0]:
                pause = CHECK_SECONDS
                await self._claims.confirm(job, is_claimed)
            await working
        finally:
            working.cancel()
            await asyncio.wait([working])

    async def _crashed(self, delivery: Delivery, attempt: int, error: Exception) -> None:
        """Retry or give up a job after the model failed on its medium alone."""
        if attempt >= self._max_attempts:
            await self._failed(delivery, unprocessable(delivery.job.feature, attempt, error))
            return
        self._metrics.encode_jobs.labels(delivery.job.feature.modality, MmdError.code).inc()
        await self._give_back(delivery, CRASH_RETRY_SECONDS, failed=True)

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
                self._claims.check_peers(job, error, needs_gateway=feature is None)
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
