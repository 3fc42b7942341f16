"""Where the prefill role gets features from: encoder pods through the job queue, or the tower of its own process."""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections import OrderedDict

from mmd_workers.encoder.pipeline import EncodePipeline
from mmd_workers.encoder.tensors import feature_of
from mmd_workers.errors import DeadlineError, MmdError
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
    Modality,
    TensorHeader,
)

log = logging.getLogger(__name__)

MAX_REMEMBERED_TIMES = 4096


class EncodeError(MmdError):
    """An encoder gave a medium up; code and remedy are the encoder's.

    When the gateway that held the bytes is done with them the request can still be served: placed again, it brings its own.
    """

    def __init__(self, message: str, code: str, retryable: bool) -> None:
        super().__init__(message)
        self.code = code
        self.retryable = retryable


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
        self._modality: dict[str, Modality] = {}
        self._watches: set[asyncio.Task[None]] = set()
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

    async def request(self, ref: FeatureRef, request: GenerateRequest) -> None:
        """Publish the encode job of a feature; its deadline is the request's, or the pool's job timeout if that is sooner."""
        now = time.time()
        deadline = min(request.deadline, now + self._job_timeout)
        self._modality[ref.feature_id] = ref.modality
        await self._queue.publish(
            EncodeJob(
                job_id=uuid.uuid4().hex,
                feature=ref,
                gateway=request.gateway,
                receiver=self._pod,
                receiver_incarnation=self._incarnation,
                deadline=deadline,
                published=now,
                request_id=request.request_id,
                trace=request.trace,
            )
        )
        watch = asyncio.create_task(self._watch(ref.feature_id, deadline))
        self._watches.add(watch)
        watch.add_done_callback(self._watches.discard)

    async def _watch(self, feature_id: str, deadline: float) -> None:
        """End the wait for a feature at its deadline, whatever became of the job."""
        try:
            arrival = self._store.arrival(feature_id)
        except KeyError:
            return
        await asyncio.wait([arrival], timeout=max(0.0, deadline - time.time()))
        if not arrival.done():
            self._store.fail(
                feature_id,
                DeadlineError(f"no encoder delivered the feature within {self._job_timeout:.0f} s"),
            )
        self._modality.pop(feature_id, None)

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
        modality = self._modality.get(feature_id)
        if modality is not None:
            now = time.time()
            self._times.add(feature_id, {**timings, "arrived": now})
            self._metrics.transfer_bytes.labels("embedding", "received").inc(len(data))
            self._metrics.transfer.labels("embedding").observe(max(0.0, now - timings.get("encoded", now)))
            self._store.deliver(feature_id, feature_of(modality, headers, data))

    async def _failed(self, failure: EncodeFailed) -> None:
        self._store.fail(
            failure.feature_id,
            EncodeError(
                failure.message, failure.code, failure.retryable or failure.code == MediaGoneError.code
            ),
        )


class LocalSource:
    """Encodes on this pod: the bytes come from the gateway, the feature never leaves the process."""

    def __init__(self, bus: Bus, pipeline: EncodePipeline, store: FeatureStore) -> None:
        self._bus = bus
        self._pipeline = pipeline
        self._store = store
        self._times = FeatureTimes()
        self._tasks: set[asyncio.Task[None]] = set()

    async def request(self, ref: FeatureRef, request: GenerateRequest) -> None:
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
            self._store.fail(ref.feature_id, error)
        except Exception as error:  # the tower can raise anything; whoever waits must learn of it
            log.exception("encoding %s failed", ref.feature_id[:12])
            self._store.fail(ref.feature_id, MmdError(f"the encoder failed: {type(error).__name__}: {error}"))
        else:
            self._store.deliver(ref.feature_id, feature)

    def times(self, feature_id: str) -> dict[str, float]:
        """See `FeatureSource.times`."""
        return self._times.take(feature_id)
