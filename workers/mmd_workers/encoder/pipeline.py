"""From the bytes of a medium to its feature: decode in the sandbox, process on the CPU, batch by shape, run the tower.

Used by encoder pods for jobs from the queue and, in the same way, by prefill or decode pods that hold the encode role.
Independent of NATS.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter, deque
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any

from mmd_api.contract.errors import DeviceLostError, MmdError
from mmd_api.contract.pools import Modality
from mmd_api.spec.media import MediaPolicy
from mmd_api.spec.pools import EncoderSpec
from mmd_workers.device import run_isolating
from mmd_workers.encoder.budget import ByteBudget, Held
from mmd_workers.encoder.stages import EncodeStage, Stages
from mmd_workers.features.cache import FeatureCache
from mmd_workers.features.references import layout_of
from mmd_workers.media.medium import Decoded
from mmd_workers.media.sandbox import DecodePool
from mmd_workers.model.interfaces import EncoderModel
from mmd_workers.model.prompt import Feature, MediumLayout, ProcessedMedium
from mmd_workers.observe.metrics import Metrics
from mmd_workers.wire.messages import FeatureRef

_Encoding = asyncio.Task[tuple[Feature, dict[str, float]]]


@dataclass(slots=True, eq=False)
class _Waiting:
    feature_id: str
    medium: ProcessedMedium
    work: int
    done: asyncio.Future[tuple[Feature, float, float]]  # feature, tower start, tower end (Unix seconds)


class EncodePipeline:
    """Turns media into features; equal features requested at the same time are encoded once."""

    def __init__(
        self,
        model: EncoderModel,
        decoders: DecodePool,
        policy: MediaPolicy,
        spec: EncoderSpec,
        cache: FeatureCache,
        metrics: Metrics,
    ) -> None:
        self._model = model
        self._decoders = decoders
        self.policy = policy
        self._batching = spec.batching
        self._cache = cache
        self._metrics = metrics
        self._running: dict[str, _Encoding] = {}
        self._users: Counter[_Encoding] = Counter()
        self.max_media = 2 * spec.batching.max_items  # between arrival and feature
        self._slots = asyncio.Semaphore(self.max_media)
        self._memory = ByteBudget(spec.media_mebibytes << 20, "spec.encoder.mediaMebibytes")
        self.stages = Stages(self._count_busy)
        self._fetch = self.stages.add("fetch", self.max_media)
        self._decode = self.stages.add("decode", decoders.processes)
        self._process = self.stages.add("process", 1)
        self._tower = self.stages.add("tower", 1)
        self._processor = ThreadPoolExecutor(1, thread_name_prefix="process")
        self._tower_thread = ThreadPoolExecutor(1, thread_name_prefix="tower")
        self._ready: deque[_Waiting] = deque()
        self._arrived = asyncio.Event()
        self.on_lost_device: set[str] = set()  # features of the batch that ran when the device failed
        self.queued_work: dict[Modality, int] = {}
        self.last_progress = time.monotonic()  # of the tower
        self.job_timeout_seconds = spec.job_timeout_seconds
        self._processing_since: float | None = None  # time.monotonic

    def _count_busy(self, stage: EncodeStage, seconds: float) -> None:
        self._metrics.encode_busy.labels(stage.name).inc(seconds / stage.servers)

    @property
    def processing_seconds(self) -> float:
        """Time since the processor started on its current medium."""
        begun = self._processing_since  # read once: the processor's thread sets it
        return 0.0 if begun is None else time.monotonic() - begun

    @property
    def running(self) -> int:
        """Media between arrival and feature."""
        return len(self._running)

    def cached(self, feature_id: str) -> Feature | None:
        """The feature, if it is in the cache."""
        feature = self._cache.get(feature_id)
        self._metrics.cache.labels("feature", "hit" if feature is not None else "miss").inc()
        return feature

    def newest(self, count: int) -> list[str]:
        """Up to `count` ids of kept features, most recently used first."""
        return self._cache.newest(count)

    async def encode(
        self, ref: FeatureRef, read: Callable[[], Coroutine[Any, Any, bytes]]
    ) -> tuple[Feature, dict[str, float]]:
        """The feature of a medium whose bytes `read` fetches, and the Unix times of its steps.

        Any other exception that the model raises for this medium alone is propagated.

        Raises:
            BadMediaError: the bytes cannot be decoded within the policy's limits.
            CapacityError: the medium needs more memory than all media may use.
            CountMismatchError: the medium is not what its layout said.
            DeviceLostError: the accelerator failed while it ran this medium.
        """
        task = self._running.get(ref.feature_id)
        if task is None:
            task = asyncio.create_task(self._encode(ref, read), name=f"encode-{ref.feature_id[:12]}")
            self._running[ref.feature_id] = task
            task.add_done_callback(partial(self._ended, ref.feature_id))
        self._users[task] += 1
        try:
            return await asyncio.shield(task)
        finally:
            self._users[task] -= 1
            if not self._users[task]:
                del self._users[task]
                if not task.done():  # everybody has left
                    self._ended(ref.feature_id, task)
                    task.cancel()

    def _ended(self, feature_id: str, task: _Encoding) -> None:
        if self._running.get(feature_id) is task:
            del self._running[feature_id]

    async def _encode(
        self, ref: FeatureRef, read: Callable[[], Coroutine[Any, Any, bytes]]
    ) -> tuple[Feature, dict[str, float]]:
        self.queued_work[ref.modality] = self.queued_work.get(ref.modality, 0) + ref.work
        times = {"start": time.time()}
        what = f"this {ref.modality} of {ref.num_tokens} tokens"
        try:
            async with self._slots, self._memory.hold(ref.num_bytes + ref.host_bytes, what) as memory:
                feature = await self._make(layout_of(ref), ref, read, times, memory)
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
        memory: Held,
    ) -> Feature:
        loop = asyncio.get_running_loop()
        async with self._fetch.run(ref.modality, ref.work):
            data = await read()
        times["read"] = time.time()
        try:
            async with self._decode.run(ref.modality, ref.work):
                decoded = await self._decoded(data, layout)
        except MmdError as error:
            self._metrics.decode_failures.labels(ref.modality, error.code).inc()
            raise
        times["decoded"] = time.time()
        del data
        memory.shrink(ref.host_bytes)
        async with self._process.run(ref.modality, ref.work):
            medium = await loop.run_in_executor(self._processor, self._processed, decoded, layout)
        times["processed"] = time.time()
        del decoded
        memory.shrink(sum(t.numel() * t.element_size() for t in medium.tensors.values()))
        waiting = _Waiting(ref.feature_id, medium, ref.work, loop.create_future())
        self._ready.append(waiting)
        self._arrived.set()
        try:
            feature, times["tower_start"], times["tower_end"] = await waiting.done
        except asyncio.CancelledError:
            if waiting in self._ready:
                self._ready.remove(waiting)
            raise
        return feature

    def _processed(self, decoded: Decoded, layout: MediumLayout) -> ProcessedMedium:
        """Runs on the processor's thread: a medium that hangs here blocks those behind it until a restart."""
        self._processing_since = time.monotonic()
        try:
            return self._model.process(decoded, layout)
        finally:
            self._processing_since = None

    async def _decoded(self, data: bytes, layout: MediumLayout) -> Decoded:
        info = await self._decoders.probe(data, layout.modality, self.policy)
        sampling = layout.sampling
        if layout.modality == "image":
            return await self._decoders.decode_image(data, info)
        if layout.modality == "video":
            return await self._decoders.decode_video(data, info, sampling.frame_indices)
        return await self._decoders.decode_audio(data, info, sampling.sample_rate_hz, sampling.num_samples)

    async def warm_up(self, data: bytes, layout: MediumLayout) -> None:
        """Send a medium along the request path, through every decode process and the threads of processor and tower, before there
        are requests. It is neither counted nor cached, and no stage updates its speed from it.
        """
        loop = asyncio.get_running_loop()
        decodes = (self._decoded(data, layout) for _ in range(self._decoders.processes))
        decoded, *_ = await asyncio.gather(*decodes)
        medium = await loop.run_in_executor(self._processor, self._model.process, decoded, layout)
        await loop.run_in_executor(self._tower_thread, self._model.encode, [medium])

    async def run(self) -> None:
        """Batch what is processed and run the tower, until cancelled.

        Raises:
            DeviceLostError: the accelerator failed; this process can no longer encode.
        """
        while True:
            while not self._ready:
                self._arrived.clear()
                self.last_progress = time.monotonic()
                try:
                    async with asyncio.timeout(1.0):
                        await self._arrived.wait()
                except TimeoutError:
                    continue
            if not self._batch_is_full() and len(self._running) > len(self._ready):
                await asyncio.sleep(self._batching.max_wait_milliseconds / 1000)
            if self._ready:  # not cancelled meanwhile
                await self._run_tower(self._take_batch())

    async def _run_tower(self, batch: list[_Waiting]) -> None:
        modality, work = batch[0].medium.modality, sum(item.work for item in batch)
        loop, start = asyncio.get_running_loop(), time.time()
        media = [item.medium for item in batch]
        try:
            async with self._tower.run(modality, work):
                results = await loop.run_in_executor(
                    self._tower_thread, run_isolating, media, self._model.encode, self._model.device
                )
        except DeviceLostError as lost:
            self.on_lost_device = {item.feature_id for item in batch}
            for item in batch:
                if not item.done.done():
                    item.done.set_exception(lost)
            raise
        finally:
            self.last_progress = time.monotonic()
        for item, result in zip(batch, results, strict=True):
            if not isinstance(result, Exception):
                self._metrics.encode_work.labels(modality).inc(item.work)
            if item.done.done():
                continue
            if isinstance(result, Exception):
                item.done.set_exception(result)
            else:
                item.done.set_result((result, start, time.time()))

    def _batch_is_full(self) -> bool:
        """Whether waiting for more media would not make the next batch larger."""
        waiting, batching = self._ready, self._batching
        return len(waiting) >= batching.max_items or sum(item.work for item in waiting) >= batching.max_work

    def _take_batch(self) -> list[_Waiting]:
        """The oldest medium and those behind it that may share its batch."""
        key, work = self._ready[0].medium.shape_key, 0
        batch: list[_Waiting] = []
        for item in self._ready:
            if item.medium.shape_key != key:
                continue
            if batch and work + item.work > self._batching.max_work:
                break
            batch.append(item)
            work += item.work
            if len(batch) == self._batching.max_items:
                break
        for item in batch:
            self._ready.remove(item)
        return batch

    def close(self) -> None:
        """Stop the threads; what is running is abandoned."""
        self._processor.shutdown(wait=False, cancel_futures=True)
        self._tower_thread.shutdown(wait=False, cancel_futures=True)
