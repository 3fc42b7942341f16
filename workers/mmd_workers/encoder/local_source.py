"""Features for the prefill role of the same pod. The tower is in this process, and a feature never leaves it."""

from __future__ import annotations

import asyncio
import logging
import time

from mmd_api.contract.errors import MmdError
from mmd_workers.encoder.pipeline import EncodePipeline
from mmd_workers.features.references import unprocessable
from mmd_workers.features.source import EncodeError
from mmd_workers.features.store import FeatureStore
from mmd_workers.features.times import FeatureTimes
from mmd_workers.wire.bus import Bus
from mmd_workers.wire.media import SharedReads, read_medium
from mmd_workers.wire.messages.message_parts import FeatureRef
from mmd_workers.wire.messages.prefill import GenerateRequest

log = logging.getLogger(__name__)


class LocalSource:
    """Encodes on this pod: the bytes come from the gateway, the feature never leaves the process."""

    def __init__(self, bus: Bus, pipeline: EncodePipeline, store: FeatureStore, max_attempts: int) -> None:
        """`max_attempts`: placements of a request that may fail on one of its media before it is rejected."""
        self._reads = SharedReads(lambda *medium: read_medium(bus, *medium))
        self._max_attempts = max_attempts
        self._pipeline = pipeline
        self._store = store
        self._times = FeatureTimes()
        self._tasks: set[asyncio.Task[None]] = set()

    def request(self, ref: FeatureRef, request: GenerateRequest) -> None:
        """Start encoding a feature; it is cancelled once nothing waits for the feature."""
        task = asyncio.create_task(self._encode(ref, request), name=f"feature-{ref.feature_id[:12]}")
        self._store.arrival(ref.feature_id).add_done_callback(
            lambda arrival: task.cancel() if arrival.cancelled() else None
        )
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _encode(self, ref: FeatureRef, request: GenerateRequest) -> None:
        try:
            feature = await self._pipeline.cached(ref.feature_id)
            if feature is None:
                feature, times = await self._pipeline.encode(
                    ref,
                    lambda: self._reads.read(request.gateway, ref.digest, ref.num_bytes, request.deadline),
                )
                self._times.add(ref.feature_id, {**times, "encoded": time.time()})
        except MmdError as error:
            self._store.fail(ref.feature_id, EncodeError(error, retryable=error.retryable))
        except Exception as error:  # the model can raise anything; waiters must be notified
            log.exception("encoding %s failed", ref.feature_id[:12])
            attempts = request.attempt - request.first_attempt + 1
            failure = unprocessable(ref, attempts, error)
            can_retry = attempts < self._max_attempts
            failed_feature_id = "" if can_retry else ref.feature_id
            self._store.fail(
                ref.feature_id, EncodeError(failure, retryable=can_retry, feature_id=failed_feature_id)
            )
        else:
            self._store.deliver(ref.feature_id, feature)

    def has(self, feature_id: str) -> bool:
        """Whether the tower's cache has the feature, or the tower is making it."""
        return self._pipeline.has(feature_id)

    def times(self, feature_id: str) -> dict[str, float]:
        """See `FeatureSource.times`."""
        return self._times.take(feature_id)
