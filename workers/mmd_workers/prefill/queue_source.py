"""Features for the prefill role from encoder pods, through the job queue or from the cache of one of them."""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import Callable, Sequence
from typing import Any

from mmd_api.contract.errors import (
    DeadlineError,
    MmdError,
    OverloadedError,
    PeerLostError,
    UnprocessableMediumError,
    error_of,
)
from mmd_workers.basics.backoff import Backoff
from mmd_workers.features.source import EncodeError
from mmd_workers.features.store import FeatureStore
from mmd_workers.features.tensors import feature_of
from mmd_workers.features.times import FeatureTimes
from mmd_workers.model.prompt import Feature
from mmd_workers.observe.metrics import Metrics
from mmd_workers.wire.bus import Bus
from mmd_workers.wire.embedding_receiver import EmbeddingReceiver
from mmd_workers.wire.job_runs import JobRuns, unwanted
from mmd_workers.wire.jobs import EncodeQueue
from mmd_workers.wire.messages.encoder import EncodeJob, EncodeTaken
from mmd_workers.wire.messages.message_parts import Acknowledged, FeatureRef, TensorHeader
from mmd_workers.wire.messages.prefill import EncodeCheck, EncodeFailed, EncodeWanted, GenerateRequest

log = logging.getLogger(__name__)

PUBLISH_PAUSE_SECONDS = (0.5, 4.0)  # first and longest pause
HOLDER_REPLY_SECONDS = 1.0
# Interval between lookups of the encoders that have a feature, and between requests to the encoder that is to send it.
HOLDER_CHECK_SECONDS = 0.5
SENDING_SECONDS = 5.0  # limit for the first bytes from such an encoder; then any encoder may make the feature
MOST_HOLDERS = 8  # limit of encoders asked for one feature


class QueueSource:
    """Publishes an encode job for every requested feature, and receives the features that encoders offer.

    `holders(feature_id)`: encoder pods that report that they have the feature or are making it, in the order in which to ask
    them. `absences()`: how often this pod was out of contact for so long that encoders may have dropped its jobs.
    """

    def __init__(
        self,
        bus: Bus,
        pod: str,
        incarnation: str,
        queue: EncodeQueue,
        holders: Callable[[str], Sequence[str]],
        absences: Callable[[], int],
        store: FeatureStore,
        window_bytes: int,
        chunk_bytes: int,
        job_timeout_seconds: float,
        transfer_timeout_seconds: float,
        metrics: Metrics,
    ) -> None:
        self._bus = bus
        self._pod = pod
        self._incarnation = incarnation
        self._queue = queue
        self._holders = holders
        self._absences = absences
        self._store = store
        self._job_timeout = job_timeout_seconds
        self._metrics = metrics
        self._wanted: dict[str, EncodeJob] = {}  # by feature id: the job whose outcome counts
        self._runs: dict[str, JobRuns] = {}  # by job id
        self._tasks: set[asyncio.Task[None]] = set()
        # Resolves when the server is connected again.
        self._reconnection: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._times = FeatureTimes()
        self._receiver = EmbeddingReceiver(
            bus,
            pod,
            budget_bytes=store.budget_bytes,
            wants=store.verdict,
            on_feature=self._arrived,
            window_bytes=window_bytes,
            chunk_bytes=chunk_bytes,
            timeout_seconds=transfer_timeout_seconds,
        )

    async def start(self) -> None:
        """Listen for offers and failures."""
        await self._receiver.start()
        self._bus.on_reconnect(self._reconnected)
        await self._bus.serve(self._bus.subjects.encode_failed(self._pod), EncodeFailed, self._failed)
        await self._bus.serve(self._bus.subjects.encode_wanted(self._pod), EncodeCheck, self._checked)

    def request(self, ref: FeatureRef, request: GenerateRequest) -> None:
        """Publish the encode job of a feature and follow it.

        The feature or a failure arrives in the store by the job's deadline: the request's, or the pool's job timeout if that is
        sooner.
        """
        now = time.time()
        job = EncodeJob(
            job_id=uuid.uuid4().hex,
            feature=ref,
            gateway=request.gateway,
            receiver=self._pod,
            receiver_incarnation=self._incarnation,
            deadline=min(request.deadline, now + self._job_timeout),
            published=now,
            request_id=request.request_id,
            trace=request.trace,
            attempt=request.attempt,
        )
        arrival = self._store.arrival(ref.feature_id)
        self._wanted[ref.feature_id] = job
        self._runs[job.job_id] = JobRuns()
        task = asyncio.create_task(self._see_to(job, arrival), name=f"feature-{ref.feature_id[:12]}")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _see_to(self, job: EncodeJob, arrival: asyncio.Future[Feature]) -> None:
        feature_id = job.feature.feature_id
        asked_pods: set[str] = set()
        try:
            await self._from_holders(job, arrival, asked_pods)
            await self._queued_until(job, arrival, asked_pods)
            if not arrival.done():
                raise DeadlineError(
                    f"no encoder delivered the feature within {job.deadline - job.published:.0f} s; check that encoders are "
                    "Ready and that jobTimeoutSeconds is enough for this medium"
                )
        except MmdError as error:
            self._give_up(job, self._encode_error(job, error, error.retryable))
        except Exception as error:  # waiters must be notified
            log.exception("requesting feature %s failed", feature_id[:12])
            message = (
                f"requesting the feature failed ({type(error).__name__}); check the log of pod {self._pod}"
            )
            self._give_up(job, EncodeError(MmdError(message), retryable=True))
        finally:
            del self._runs[job.job_id]
            if self._wanted.get(feature_id) is job:
                del self._wanted[feature_id]

    async def _queued_until(
        self, job: EncodeJob, arrival: asyncio.Future[Feature], asked_pods: set[str]
    ) -> None:
        """Keep the job in the queue until the feature has arrived or the job's deadline has passed.

        An encoder that turns out to have the feature, or to be making it for another pod, is asked for it meanwhile. A server that
        comes back may have lost its stored messages, so the job is published again: a copy that is still stored, or was stored
        within the last two minutes, is not queued twice. After an absence of this pod encoders may have dropped the job: it is
        published as another copy.
        """
        is_published, first_absence = False, self._absences()
        while not arrival.done() and time.time() < job.deadline:
            reconnection, absences = self._reconnection, self._absences()
            try:
                await self._publish(job, absences - first_absence, arrival)
            except OverloadedError:
                if not is_published:
                    raise
                # The first copy may still be queued.
                await asyncio.wait([arrival], timeout=PUBLISH_PAUSE_SECONDS[1])
                continue
            is_published = True
            while (
                reconnection is self._reconnection
                and absences == self._absences()
                and not arrival.done()
                and (remaining_seconds := job.deadline - time.time()) > 0
            ):
                wakers: set[asyncio.Future[Any]] = {arrival, reconnection}
                pause = min(remaining_seconds, HOLDER_CHECK_SECONDS)
                await asyncio.wait(wakers, timeout=pause, return_when=asyncio.FIRST_COMPLETED)
                await self._from_holders(job, arrival, asked_pods)

    async def _reconnected(self) -> None:
        reconnection, self._reconnection = self._reconnection, asyncio.get_running_loop().create_future()
        reconnection.set_result(None)

    def _give_up(self, job: EncodeJob, error: EncodeError) -> None:
        feature_id = job.feature.feature_id
        if self._wanted.get(feature_id) is job:
            self._store.fail(feature_id, error)

    async def _from_holders(
        self, job: EncodeJob, arrival: asyncio.Future[Feature], asked_pods: set[str]
    ) -> None:
        """Ask the encoders that report the feature to send it, each once, one after the other.

        From the queue, an encoder without the feature might take the job and encode it again. Returns when the feature has arrived,
        or has to come from the queue after all.
        """
        while not arrival.done() and len(asked_pods) < MOST_HOLDERS:
            pod = next((pod for pod in self._holders(job.feature.feature_id) if pod not in asked_pods), None)
            if pod is None:
                return
            asked_pods.add(pod)
            await self._from_holder(pod, job, arrival)

    async def _from_holder(self, pod: str, job: EncodeJob, arrival: asyncio.Future[Feature]) -> None:
        """Wait for an encoder while it confirms that it is making the feature, or while bytes arrive.

        An encoder that has lost the feature, or dies, is noticed at the next request.
        """
        subject, last_progress = self._bus.subjects.encode_cached(pod), time.time()
        while not arrival.done() and time.time() < job.deadline:
            try:
                answer = await self._bus.request(subject, job, EncodeTaken, timeout=HOLDER_REPLY_SECONDS)
            except MmdError as error:
                log.info("%s does not send the feature that it reported: %s", pod, error.message)
                return
            if not answer.taken:
                return
            if answer.making or self._receiver.receives(job.feature.feature_id):
                last_progress = time.time()
            elif time.time() - last_progress > SENDING_SECONDS:
                return
            await asyncio.wait([arrival], timeout=HOLDER_CHECK_SECONDS)

    async def _publish(self, job: EncodeJob, copy: int, arrival: asyncio.Future[Feature]) -> None:
        """Publish a job until the queue confirms it; repeating is safe. A full queue raises an error: the request retries."""
        pauses = Backoff(*PUBLISH_PAUSE_SECONDS)
        while not arrival.done():
            try:
                await self._queue.publish(job, copy)
                return
            except (DeadlineError, PeerLostError) as error:
                if time.time() + (pause := pauses.next()) > job.deadline:
                    raise
                log.warning(
                    "publishing the encode job of %s failed, retrying: %s", job.request_id, error.message
                )
                await asyncio.wait([arrival], timeout=pause)

    @property
    def reserved_bytes(self) -> int:
        """Bytes granted to transfers in flight."""
        return self._receiver.reserved_bytes

    def times(self, feature_id: str) -> dict[str, float]:
        """See `FeatureSource.times`."""
        return self._times.take(feature_id)

    def _arrived(
        self,
        feature_id: str,
        headers: list[TensorHeader],
        data: memoryview,
        timings: dict[str, float],
    ) -> None:
        if (job := self._wanted.get(feature_id)) is None:
            return
        now = time.time()
        self._times.add(feature_id, {**timings, "arrived": now})
        self._metrics.transfer_bytes.labels("embedding", "received").inc(len(data))
        self._metrics.transfer.labels("embedding").observe(max(0.0, now - timings.get("encoded", now)))
        self._store.deliver(feature_id, feature_of(job.feature.modality, headers, data))

    async def _checked(self, check: EncodeCheck) -> EncodeWanted:
        job = self._wanted.get(check.feature_id)
        if job is None or job.job_id != check.job_id:
            return unwanted(check)
        return self._runs[job.job_id].answer(check)

    async def _failed(self, failure: EncodeFailed) -> Acknowledged:
        job = self._wanted.get(failure.feature_id)
        if job is not None and job.job_id == failure.job_id:
            error = error_of(failure.code, failure.message)
            self._store.fail(failure.feature_id, self._encode_error(job, error, failure.retryable))
        return Acknowledged()

    def _encode_error(self, job: EncodeJob, error: MmdError, retryable: bool) -> EncodeError:
        """The error of a failed job.

        It names the medium if all encoders failed on it, or if the job used up the whole job timeout.
        """
        used_whole_timeout = (
            isinstance(error, DeadlineError) and job.deadline >= job.published + self._job_timeout
        )
        medium_failed = used_whole_timeout or (isinstance(error, UnprocessableMediumError) and not retryable)
        return EncodeError(
            error, retryable=retryable, feature_id=job.feature.feature_id if medium_failed else ""
        )
