"""Where the prefill role gets features from: encoder pods through the job queue, or the tower of its own process."""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections import OrderedDict

from mmd_workers.encoder.pipeline import EncodePipeline
from mmd_workers.encoder.tensors import feature_of
from mmd_workers.errors import DeadlineError, MmdError, PeerLostError
from mmd_workers.model.types import Feature
from mmd_workers.observe.metrics import Metrics
from mmd_workers.prefill.features import FeatureStore
from mmd_workers.wire.bus import Bus
from mmd_workers.wire.embeddings import EmbeddingReceiver
from mmd_workers.wire.jobs import EncodeQueue
from mmd_workers.wire.media import MediaGoneError, read_medium
from mmd_workers.wire.messages import (
    EncodeFailed,
    EncodeJob,
    FeatureRef,
    GenerateRequest,
    TensorHeader,
)

log = logging.getLogger(__name__)

MAX_REMEMBERED_TIMES = 4096
PUBLISH_PAUSE_SECONDS = 0.5


class EncodeError(MmdError):
    """A medium was given up; code and remedy are the encoder's. `retryable` is about the request, placed anew as a whole.

    When the gateway that held the bytes is done with them the request can still be served: placed again, it brings its own.
    A deadline here is that of a job or of another request that shares the feature; the request's own is watched elsewhere.
    """

    def __init__(self, message: str, code: str, retryable: bool) -> None:
        super().__init__(message)
        self.code = code
        self.retryable = retryable or code in (MediaGoneError.code, DeadlineError.code)


class FeatureTimes:
    """Unix times of the steps of recent features; a bounded memory, for timelines only."""

    def __init__(self) -> None:
        self._times: OrderedDict[str, dict[str, float]] = OrderedDict()

    def add(self, feature_id: str, times: dict[str, float]) -> None:
        """Note times of a feature."""
        self._times.setdefault(feature_id, {}).update(times)
        self._times.move_to_end(feature_id)
        while len(self._times) > MAX_REMEMBERED_TIMES:
            self._times.popitem(last=False)

    def take(self, feature_id: str) -> dict[str, float]:
        """The times of a feature, once: later users found it here and did not wait."""
        return self._times.pop(feature_id, {})


class QueueSource:
    """Publishes an encode job for every feature that is wanted, and takes what encoders offer."""

    encodes_here = False

    def __init__(
        self,
        bus: Bus,
        pod: str,
        incarnation: str,
        queue: EncodeQueue,
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
        self._store = store
        self._job_timeout = job_timeout_seconds
        self._metrics = metrics
        self._wanted: dict[str, EncodeJob] = {}  # by feature: the job whose outcome counts
        self._tasks: set[asyncio.Task[None]] = set()
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
        await self._bus.subscribe(self._bus.subjects.encode_failed(self._pod), EncodeFailed, self._failed)

    def request(self, ref: FeatureRef, request: GenerateRequest) -> None:
        """Publish the encode job of a feature and see to its end: it arrives in the store, or a failure does, by the job's
        deadline (the request's, or the pool's job timeout if that is sooner).
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
        task = asyncio.create_task(self._see_to(job, arrival), name=f"feature-{ref.feature_id[:12]}")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _see_to(self, job: EncodeJob, arrival: asyncio.Future[Feature]) -> None:
        feature_id = job.feature.feature_id
        try:
            await self._publish(job, arrival)
            await asyncio.wait([arrival], timeout=max(0.0, job.deadline - time.time()))
            if not arrival.done():
                raise DeadlineError(
                    f"no encoder delivered the feature within {job.deadline - job.published:.0f} s: are encoders "
                    "ready, and is jobTimeoutSeconds enough for this medium?"
                )
        except MmdError as error:
            if self._wanted.get(feature_id) is job:
                self._store.fail(feature_id, EncodeError(error.message, error.code, error.retryable))
        finally:
            if self._wanted.get(feature_id) is job:
                del self._wanted[feature_id]

    async def _publish(self, job: EncodeJob, arrival: asyncio.Future[Feature]) -> None:
        """Until the queue has confirmed it; publishing again is safe. A full queue is the request's to retry."""
        while not arrival.done():
            try:
                await self._queue.publish(job)
                return
            except (DeadlineError, PeerLostError) as error:
                if time.time() + PUBLISH_PAUSE_SECONDS > job.deadline:
                    raise
                log.warning("encode job of %s is published again: %s", job.request_id, error.message)
                await asyncio.wait([arrival], timeout=PUBLISH_PAUSE_SECONDS)

    @property
    def reserved_bytes(self) -> int:
        """Room granted to transfers under way."""
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

    async def _failed(self, failure: EncodeFailed) -> None:
        job = self._wanted.get(failure.feature_id)
        if job is not None and job.job_id == failure.job_id:
            self._store.fail(
                failure.feature_id, EncodeError(failure.message, failure.code, failure.retryable)
            )


class LocalSource:
    """Encodes on this pod: the bytes come from the gateway, the feature never leaves the process."""

    encodes_here = True

    def __init__(self, bus: Bus, pipeline: EncodePipeline, store: FeatureStore) -> None:
        self._bus = bus
        self._pipeline = pipeline
        self._store = store
        self._times = FeatureTimes()
        self._tasks: set[asyncio.Task[None]] = set()

    def request(self, ref: FeatureRef, request: GenerateRequest) -> None:
        """Start to encode a feature."""
        task = asyncio.create_task(self._encode(ref, request), name=f"feature-{ref.feature_id[:12]}")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _encode(self, ref: FeatureRef, request: GenerateRequest) -> None:
        try:
            feature = self._pipeline.cached(ref.feature_id)
            if feature is None:
                feature, times = await self._pipeline.encode(
                    ref,
                    lambda: read_medium(
                        self._bus, request.gateway, ref.digest, ref.num_bytes, request.deadline
                    ),
                )
                self._times.add(ref.feature_id, {**times, "encoded": time.time()})
        except MmdError as error:
            self._store.fail(ref.feature_id, EncodeError(error.message, error.code, error.retryable))
        except Exception as error:  # the tower can raise anything; whoever waits must learn of it
            log.exception("encoding %s failed", ref.feature_id[:12])
            self._store.fail(ref.feature_id, MmdError(f"the encoder failed: {type(error).__name__}: {error}"))
        else:
            self._store.deliver(ref.feature_id, feature)

    def times(self, feature_id: str) -> dict[str, float]:
        """See `FeatureSource.times`."""
        return self._times.take(feature_id)
