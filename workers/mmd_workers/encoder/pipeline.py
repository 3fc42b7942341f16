"""From the bytes of a medium to its feature: decode in the sandbox, process on the CPU, batch by shape, run the tower.

Used by encoder pods for jobs from the queue and, in the same way, by prefill or decode pods that hold the encode role.
Knows no NATS.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from mmd_api.spec import EncoderBatching, MediaPolicy
from mmd_workers.encoder.cache import FeatureCache
from mmd_workers.encoder.refs import layout_of
from mmd_workers.errors import MmdError
from mmd_workers.media.sandbox import DecodePool
from mmd_workers.media.types import Decoded
from mmd_workers.model.types import EncoderModel, Feature, MediumLayout, ProcessedMedium
from mmd_workers.observe.metrics import Metrics
from mmd_workers.wire.messages import FeatureRef

BUSY_WINDOW_SECONDS = 10.0
THROUGHPUT_SMOOTHING = 0.2


@dataclass(slots=True, eq=False)
class _Waiting:
    medium: ProcessedMedium
    work: int
    done: asyncio.Future[tuple[Feature, float, float]]  # feature, tower start, tower end (Unix seconds)


def steps_of(times: dict[str, float]) -> dict[str, float]:
    """Milliseconds of the steps of an encode: read, decode, process, wait (for its batch), tower; none for what was cached."""
    marks = ("start", "read", "decoded", "processed", "tower_start", "tower_end")
    names = ("read_ms", "decode_ms", "process_ms", "wait_ms", "tower_ms")
    if not all(mark in times for mark in marks):
        return {}
    return {
        name: round(1000 * max(0.0, times[end] - times[begin]), 3)
        for name, begin, end in zip(names, marks, marks[1:], strict=False)
    }


class EncodePipeline:
    """Turns media into features; equal features asked for at the same time are encoded once."""

    def __init__(
        self,
        model: EncoderModel,
        decoders: DecodePool,
        policy: MediaPolicy,
        batching: EncoderBatching,
        cache: FeatureCache,
        metrics: Metrics,
    ) -> None:
        self._model = model
        self._decoders = decoders
        self._policy = policy
        self._batching = batching
        self._cache = cache
        self._metrics = metrics
        self._running: dict[str, asyncio.Task[tuple[Feature, dict[str, float]]]] = {}
        self._slots = asyncio.Semaphore(2 * batching.max_items)  # decoded pixels in memory at the same time
        self._processor = ThreadPoolExecutor(1, thread_name_prefix="process")
        self._tower = ThreadPoolExecutor(1, thread_name_prefix="tower")
        self._ready: deque[_Waiting] = deque()
        self._arrived = asyncio.Event()
        self._busy: deque[tuple[float, float]] = deque(maxlen=4096)  # monotonic (start, end) of tower runs
        self.work_per_second: dict[str, float] = {}
        self.queued_work: dict[str, int] = {}
        self.last_progress = time.monotonic()

    @property
    def running(self) -> int:
        """Media between arrival and feature."""
        return len(self._running)

    def cached(self, feature_id: str) -> Feature | None:
        """The feature, if it is kept."""
        feature = self._cache.get(feature_id)
        self._metrics.cache.labels("feature", "hit" if feature is not None else "miss").inc()
        return feature

    def newest(self, count: int) -> list[str]:
        """Up to `count` ids of kept features, most recently used first."""
        return self._cache.newest(count)

    def busy_fraction(self) -> float:
        """Share of the last ten seconds that the tower ran."""
        now = time.monotonic()
        begin = now - BUSY_WINDOW_SECONDS
        return sum(max(0.0, end - max(start, begin)) for start, end in self._busy) / BUSY_WINDOW_SECONDS

    async def encode(
        self, ref: FeatureRef, read: Callable[[], Coroutine[Any, Any, bytes]]
    ) -> tuple[Feature, dict[str, float]]:
        """The feature of a medium whose bytes `read` fetches, and the Unix times of its steps.

        Raises:
            BadMediaError: the bytes cannot be decoded within the policy's limits.
            CountMismatchError: the medium is not what its layout said.
        """
        task = self._running.get(ref.feature_id)
        if task is None:
            task = asyncio.create_task(self._encode(ref, read), name=f"encode-{ref.feature_id[:12]}")
            self._running[ref.feature_id] = task
            task.add_done_callback(lambda _: self._running.pop(ref.feature_id, None))
        return await asyncio.shield(task)

    async def _encode(
        self, ref: FeatureRef, read: Callable[[], Coroutine[Any, Any, bytes]]
    ) -> tuple[Feature, dict[str, float]]:
        self.queued_work[ref.modality] = self.queued_work.get(ref.modality, 0) + ref.work
        times = {"start": time.time()}
        try:
            async with self._slots:
                feature = await self._make(layout_of(ref), ref, read, times)
        finally:
            self.queued_work[ref.modality] -= ref.work
        self._metrics.cache_evictions.labels("feature").inc(self._cache.put(ref.feature_id, feature))
        self._metrics.cache_bytes.labels("feature").set(self._cache.used_bytes)
        return feature, times

    async def _make(
        self,
        layout: MediumLayout,
        ref: FeatureRef,
        read: Callable[[], Coroutine[Any, Any, bytes]],
        times: dict[str, float],
    ) -> Feature:
        data = await read()
        times["read"] = time.time()
        try:
            decoded = await self._decode(data, layout)
        except MmdError as error:
            self._metrics.decode_failures.labels(ref.modality, error.code).inc()
            raise
        times["decoded"] = time.time()
        loop = asyncio.get_running_loop()
        medium = await loop.run_in_executor(self._processor, self._model.process, decoded, layout)
        times["processed"] = time.time()
        waiting = _Waiting(medium, ref.work, loop.create_future())
        self._ready.append(waiting)
        self._arrived.set()
        feature, times["tower_start"], times["tower_end"] = await waiting.done
        return feature

    async def _decode(self, data: bytes, layout: MediumLayout) -> Decoded:
        info = await self._decoders.probe(data, layout.modality, self._policy)
        sampling = layout.sampling
        if layout.modality == "image":
            return await self._decoders.decode_image(data, info)
        if layout.modality == "video":
            return await self._decoders.decode_video(data, info, sampling.frame_indices)
        return await self._decoders.decode_audio(data, info, sampling.sample_rate_hz, sampling.num_samples)

    async def run(self) -> None:
        """Batch what is processed and run the tower, until cancelled."""
        loop = asyncio.get_running_loop()
        while True:
            while not self._ready:
                self._arrived.clear()
                self.last_progress = time.monotonic()
                try:
                    async with asyncio.timeout(1.0):
                        await self._arrived.wait()
                except TimeoutError:
                    continue
            if len(self._ready) < self._batching.max_items and len(self._running) > len(self._ready):
                await asyncio.sleep(self._batching.max_wait_milliseconds / 1000)
            batch = self._take_batch()
            start, started = time.time(), time.monotonic()
            try:
                features = await loop.run_in_executor(
                    self._tower, self._model.encode, [item.medium for item in batch]
                )
            except Exception as error:  # noqa: BLE001  the batch fails with whatever the tower raised
                for item in batch:
                    if not item.done.done():
                        item.done.set_exception(error)
                continue
            finally:
                self.last_progress = time.monotonic()
                self._busy.append((started, self.last_progress))
            self._calibrate(batch, self.last_progress - started)
            for item, feature in zip(batch, features, strict=True):
                if not item.done.done():
                    item.done.set_result((feature, start, time.time()))

    def _take_batch(self) -> list[_Waiting]:
        """The oldest medium and those behind it that may share its batch."""
        key = self._ready[0].medium.shape_key
        batch = [item for item in self._ready if item.medium.shape_key == key][: self._batching.max_items]
        for item in batch:
            self._ready.remove(item)
        return batch

    def _calibrate(self, batch: list[_Waiting], seconds: float) -> None:
        modality = batch[0].medium.modality
        work = sum(item.work for item in batch)
        self._metrics.encode_work.labels(modality).inc(work)
        self._metrics.encode_busy.inc(seconds)
        rate = work / max(seconds, 1e-6)
        old = self.work_per_second.get(modality, rate)
        self.work_per_second[modality] = old + THROUGHPUT_SMOOTHING * (rate - old)

    def close(self) -> None:
        """Stop the threads; what is running is abandoned."""
        self._processor.shutdown(wait=False, cancel_futures=True)
        self._tower.shutdown(wait=False, cancel_futures=True)
