"""From the bytes of a medium to its feature: decode in the sandbox, process on the CPU, batch by work, run the tower.

A medium with more work than a run may have is divided between runs if its architecture allows it, and media that arrived meanwhile have
their turn in between. Encoder pods use this for jobs from the queue; prefill or decode pods that hold the encode role use it in the same
way. Independent of NATS.
"""

from __future__ import annotations

import asyncio
import time
from bisect import bisect_right
from collections import Counter, deque
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from mmd_api.contract.errors import DeviceLostError, MmdError
from mmd_api.contract.pools import Modality
from mmd_api.spec.media import MediaPolicy
from mmd_api.spec.pools import EncoderSpec
from mmd_workers.basics.device import run_isolating
from mmd_workers.encoder.budget import ByteBudget, Held
from mmd_workers.encoder.run_pace import RunPaces
from mmd_workers.encoder.stages import ONE_PROCESSOR, EncodeStage, Servers, Stages
from mmd_workers.features.cache import FeatureCache
from mmd_workers.features.references import layout_of
from mmd_workers.media.medium import Decoded
from mmd_workers.media.sandbox import DecodePool
from mmd_workers.model.frame_pooling import Mean, clips
from mmd_workers.model.interfaces import EncoderModel
from mmd_workers.model.prompt import Feature, MediumLayout, ProcessedMedium
from mmd_workers.observe.metrics import Metrics
from mmd_workers.wire.messages.message_parts import FeatureRef

SPARE_FRACTION = 8  # a modality leaves one part in so many of the media budget to the others

_Encoding = asyncio.Task[tuple[Feature, dict[str, float]]]


class _Waiting:
    """A medium that waits for the tower, and the rows already computed for it."""

    def __init__(self, feature_id: str, medium: ProcessedMedium, work: int) -> None:
        self.feature_id = feature_id
        self.medium = medium
        self.work = work
        self.started_parts = 0  # number of parts that are or were in a run
        # Feature, start of the first run, end of the last run (Unix seconds).
        self.done: asyncio.Future[tuple[Feature, float, float]] = asyncio.get_running_loop().create_future()
        self._start = 0.0
        self._rows = 0
        self._tensors: dict[str, torch.Tensor] = {}

    def work_of(self, first: int, last: int) -> int:
        """Work of the parts [first, last)."""
        parts = self.medium.parts
        return self.work * last // parts - self.work * first // parts

    @property
    def work_left(self) -> int:
        """Work of the parts that are in no run yet."""
        return self.work_of(self.started_parts, self.medium.parts)

    def parts_within(self, work: int) -> int:
        """The number of remaining parts that fit into this much work; at least one."""
        parts = range(self.started_parts + 1, self.medium.parts + 1)
        count = bisect_right(parts, work, key=lambda last: self.work_of(self.started_parts, last))
        return max(1, count)

    def abandon(self) -> None:
        """Discard the result or error, because nobody waits for it any more."""
        if not self.done.cancel() and not self.done.cancelled():
            self.done.exception()

    def add(self, feature: Feature, start: float, end: float) -> None:
        """Add the rows of the next parts; the last rows complete the feature."""
        self._start = self._start or start
        if feature.num_tokens < self.medium.num_tokens:
            for name, rows in feature.tensors.items():
                if name not in self._tensors:
                    self._tensors[name] = rows.new_empty(self.medium.num_tokens, *rows.shape[1:])
                self._tensors[name][self._rows : self._rows + feature.num_tokens] = rows
            self._rows += feature.num_tokens
            if self._rows < self.medium.num_tokens:
                return
            feature = Feature(feature.modality, self._tensors)
        self.done.set_result((feature, self._start, end))


@dataclass(frozen=True, slots=True)
class _Share:
    """The parts of one medium in a run: some of them, or all."""

    item: _Waiting
    medium: ProcessedMedium
    work: int


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
        paces: RunPaces | None = None,
        servers: Servers = ONE_PROCESSOR,
    ) -> None:
        """`paces`: paces of the tower's runs, if an engine steps beside it."""
        processors, spare = servers.processors, servers.spare
        self._model = model
        self._paces = paces
        self._decoders = decoders
        self.policy = policy
        self._batching = spec.batching
        self._cache = cache
        self._metrics = metrics
        self._running: dict[str, _Encoding] = {}
        self._users: Counter[_Encoding] = Counter()
        self.max_media = (
            2 * spec.batching.max_items
        )  # limit of media of one modality between arrival and feature
        self._places = EncodeStage("pipeline", self.max_media, lambda *_: None, spare=spare)
        media_bytes = spec.media_mebibytes << 20
        spare_bytes = media_bytes // SPARE_FRACTION if spare else 0
        self._memory = ByteBudget(media_bytes, "spec.encoder.mediaMebibytes", spare_bytes)
        self.stages = Stages(self._count_busy)
        self._fetch = self.stages.add("fetch", self.max_media, spare)
        self._decode = self.stages.add("decode", decoders.processes - spare, spare)
        self._process = self.stages.add("process", processors, spare)
        self._tower = self.stages.add("tower", 1)
        self._processors = ThreadPoolExecutor(processors + spare, thread_name_prefix="process")
        self._tower_thread = ThreadPoolExecutor(1, thread_name_prefix="tower")
        self._ready: deque[_Waiting] = deque()
        self._arrived = asyncio.Event()
        self.on_lost_device: set[str] = set()  # features of the batch that ran when the device failed
        self.queued_work: dict[Modality, int] = {}
        self.last_progress = time.monotonic()  # the tower's
        self.job_timeout_seconds = spec.job_timeout_seconds
        self._processing: dict[object, float] = {}  # start by medium (time.monotonic)

    def _count_busy(self, stage: EncodeStage, seconds: float) -> None:
        self._metrics.encode_busy.labels(stage.name).inc(seconds / (stage.servers + stage.spare))

    @property
    def processing_seconds(self) -> float:
        """Seconds since the start of the medium that has occupied a processor for longest."""
        now = time.monotonic()
        return now - min([*self._processing.values()], default=now)  # copied at once: the threads change it

    @property
    def media_bytes_used(self) -> int:
        """Host memory of the media in progress."""
        return self._memory.used_bytes

    @property
    def media_bytes_budget(self) -> int:
        """Maximum of `media_bytes_used`."""
        return self._memory.budget_bytes

    @property
    def running(self) -> int:
        """Media between arrival and feature."""
        return len(self._running)

    async def cached(self, feature_id: str) -> Feature | None:
        """The feature, if it is cached in memory or on disk."""
        feature = self._cache.get(feature_id)
        self._metrics.cache.labels("feature", "hit" if feature is not None else "miss").inc()
        if feature is None and (feature := await self._cache.read_below(feature_id)) is not None:
            self._keep(feature_id, feature)
        return feature

    def has(self, feature_id: str) -> bool:
        """Whether the feature is in the cache, or is being made."""
        return feature_id in self._cache or self.is_making(feature_id)

    def is_making(self, feature_id: str) -> bool:
        """Whether the feature is being made."""
        return feature_id in self._running

    async def encode(
        self, ref: FeatureRef, read: Callable[[], Coroutine[Any, Any, bytes]]
    ) -> tuple[Feature, dict[str, float]]:
        """Encode a medium, whose bytes `read` fetches; returns its feature and the Unix times of the steps.

        Any other exception that the model raises for this medium alone is propagated.

        Raises:
            BadMediaError: the bytes cannot be decoded within the policy's limits.
            CapacityError: the medium needs more memory than all media may use.
            CountMismatchError: the medium does not match its layout.
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
        self._cache.held.add(ref.feature_id)  # so that a second job for this feature comes here
        times = {"start": time.time()}
        what = f"this {ref.modality} of {ref.num_tokens} tokens"
        try:
            async with (
                self._places.run(ref.modality, ref.work),
                self._memory.hold(ref.num_bytes + ref.host_bytes, what, ref.modality) as memory,
            ):
                feature = await self._make(layout_of(ref), ref, read, times, memory)
            self._keep(ref.feature_id, feature)
        finally:
            self.queued_work[ref.modality] -= ref.work
            self._cache.held.remove(ref.feature_id)
        return feature, times

    def _keep(self, feature_id: str, feature: Feature) -> None:
        self._metrics.cache_evictions.labels("feature").inc(self._cache.put(feature_id, feature))

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
            media = await loop.run_in_executor(self._processors, self._processed, decoded, layout)
        times["processed"] = time.time()
        del decoded
        memory.shrink(
            sum(
                tensor.numel() * tensor.element_size()
                for medium in media
                for tensor in medium.tensors.values()
            )
        )
        work = ref.work // len(media)
        waiting = deque(_Waiting(ref.feature_id, medium, work) for medium in media)
        del media
        self._ready.extend(waiting)
        self._arrived.set()
        mean, count = Mean(), len(waiting)
        try:
            while waiting:  # the tower runs them in this order
                feature, start, times["tower_end"] = await waiting[0].done
                waiting.popleft()
                times.setdefault("tower_start", start)
                if waiting:
                    await loop.run_in_executor(self._processors, mean.add, feature)
                elif count > 1:
                    feature = await loop.run_in_executor(self._processors, mean.of_all, feature)
        finally:
            for item in waiting:  # the medium failed, or nobody wants it any more
                item.abandon()
                if item in self._ready:
                    self._ready.remove(item)
        return feature

    def _processed(self, decoded: Decoded, layout: MediumLayout) -> list[ProcessedMedium]:
        """Runs on a processor's thread: a medium that hangs here keeps the thread until a restart."""
        medium = object()
        self._processing[medium] = time.monotonic()
        try:
            return self._inputs(decoded, layout)
        finally:
            del self._processing[medium]

    def _inputs(self, decoded: Decoded, layout: MediumLayout) -> list[ProcessedMedium]:
        return [self._model.process(clip, layout) for clip in clips(decoded, layout.sampling)]

    async def _decoded(self, data: bytes, layout: MediumLayout) -> Decoded:
        sampling = layout.sampling
        info = await self._decoders.probe(
            data, layout.modality, self.policy, sampling.page, sampling.of_video
        )
        if layout.modality == "image":
            return await self._decoders.decode_image(data, info)
        if layout.modality == "video":
            return await self._decoders.decode_video(data, info, sampling.frame_indices)
        return await self._decoders.decode_audio(data, info, sampling.sample_rate_hz, sampling.num_samples)

    async def warm_up(self, data: bytes, layout: MediumLayout) -> None:
        """Send a medium along the request path before there are requests: through every decode process, processor and the tower.

        The medium is neither counted nor cached, and no stage updates its throughput from it.
        """
        loop = asyncio.get_running_loop()
        decodes = (self._decoded(data, layout) for _ in range(self._decoders.processes))
        decoded, *_ = await asyncio.gather(*decodes)
        processes = (
            loop.run_in_executor(self._processors, self._inputs, decoded, layout)
            for _ in range(self._process.servers + self._process.spare)
        )
        media, *_ = await asyncio.gather(*processes)
        await loop.run_in_executor(self._tower_thread, self._model.encode, media[:1])

    async def run(self) -> None:
        """Batch processed media and run the tower, until cancelled.

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
            ready = {item.feature_id for item in self._ready}
            if not self._batch_is_full() and len(self._running) > len(ready):
                await asyncio.sleep(self._batching.max_wait_milliseconds / 1000)
            if self._ready:  # otherwise all were cancelled meanwhile
                await self._run_tower(self._take_batch())

    async def _run_tower(self, batch: list[_Share]) -> None:
        modality, work = batch[0].medium.modality, sum(share.work for share in batch)
        loop, start = asyncio.get_running_loop(), time.time()
        media = [share.medium for share in batch]
        monotonic_start = time.monotonic()
        try:
            async with self._tower.run(modality, work):
                results = await loop.run_in_executor(
                    self._tower_thread, run_isolating, media, self._model.encode, self._model.device
                )
        except DeviceLostError as lost:
            self.on_lost_device = {share.item.feature_id for share in batch}
            for share in batch:
                if not share.item.done.done():
                    share.item.done.set_exception(lost)
            raise
        finally:
            self.last_progress = time.monotonic()
        if self._paces is not None and not any(isinstance(result, Exception) for result in results):
            parts = sum(medium.parts for medium in media)
            self._paces.ran(modality, work, parts, self.last_progress - monotonic_start)
        for share, result in zip(batch, results, strict=True):
            self._ended_run(share, result, start)

    def _ended_run(self, share: _Share, result: Feature | Exception, start: float) -> None:
        item = share.item
        if not isinstance(result, Exception):
            self._metrics.encode_work.labels(share.medium.modality).inc(share.work)
        if item.done.done():
            return
        if isinstance(result, Exception):
            item.done.set_exception(result)
            return
        item.add(result, start, time.time())
        if not item.done.done():
            self._ready.append(item)  # behind the media that arrived meanwhile

    def _batch_is_full(self) -> bool:
        """Whether waiting for more media would not make the next batch larger."""
        waiting, max_work = self._ready, self._max_work(self._ready[0].medium.modality)
        return len(waiting) >= self._batching.max_items or sum(item.work_left for item in waiting) >= max_work

    def _max_work(self, modality: Modality) -> int:
        """The maximum work of a run, unless one part has more."""
        return self._batching.max_work if self._paces is None else self._paces.max_work(modality)

    def _take_batch(self) -> list[_Share]:
        """Take the oldest medium of the next modality, and the media behind it that may share its run.

        Of a medium with more work than a run may have, take as many parts as fit.
        """
        modality, *_ = self._tower.shares.in_turn({item.medium.modality for item in self._ready})
        key = next(item.medium.shape_key for item in self._ready if item.medium.modality == modality)
        work, max_work = 0, self._max_work(modality)
        batch: list[_Share] = []
        for item in [item for item in self._ready if item.medium.shape_key == key]:
            if batch and work + item.work_left > max_work:
                break
            batch.append(self._share(item, max_work))
            work += batch[-1].work
            if len(batch) == self._batching.max_items:
                break
        return batch

    def _share(self, item: _Waiting, max_work: int) -> _Share:
        first, last = item.started_parts, item.started_parts + item.parts_within(max_work)
        item.started_parts = last
        self._ready.remove(item)
        return _Share(item, self._model.part(item.medium, first, last), item.work_of(first, last))

    def close(self) -> None:
        """Stop the threads; running work is abandoned."""
        self._processors.shutdown(wait=False, cancel_futures=True)
        self._tower_thread.shutdown(wait=False, cancel_futures=True)
