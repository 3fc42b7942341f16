"""The encode role of a pod: the tower and, on an encoder pod, the service that takes jobs from the queue.

On a pod that also holds the prefill role, nothing comes from the queue. That role requests features through `local_source`: for all
media, or only for small ones if other pods encode the rest.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from pathlib import Path

import torch

from mmd_api.contract.errors import MmdError
from mmd_api.contract.load import PodLoad
from mmd_api.spec.deployment import MultimodalDeploymentSpec
from mmd_workers.basics import memory
from mmd_workers.basics.memory import MEBIBYTE
from mmd_workers.encoder.cache_handover import FeatureTaker, hand_over, seconds_of
from mmd_workers.encoder.encoder_service import EncoderService
from mmd_workers.encoder.job_claims import JobClaims
from mmd_workers.encoder.local_source import LocalSource
from mmd_workers.encoder.pipeline import EncodePipeline
from mmd_workers.encoder.profile import tower_memory
from mmd_workers.encoder.run_pace import RunPaces
from mmd_workers.encoder.stages import Servers, decoders_for, processors_beside, spare_servers
from mmd_workers.features.cache import FeatureCache
from mmd_workers.features.disk import DiskTier
from mmd_workers.features.store import FeatureStore
from mmd_workers.media.sandbox import DecodePool
from mmd_workers.model.encoder import load_encoder
from mmd_workers.model.interfaces import EncoderModel
from mmd_workers.observe.server import Progress
from mmd_workers.process.closing import close_each
from mmd_workers.process.pod import LIVENESS_SECONDS, Part, Pod
from mmd_workers.process.warmup import media_steps, warm_up

log = logging.getLogger(__name__)

STOP_SECONDS = 1.0  # limit for a hand-over and for transfers when the pod ends


class EncoderRole(Part):
    """Owns the tower, its decode processes and its service."""

    def __init__(self, pod: Pod, device: torch.device) -> None:
        self._pod = pod
        self._device = device
        self._takes_jobs = pod.roles == ("encode",)
        self._model: EncoderModel | None = None
        self._decoders: DecodePool | None = None
        self._pipeline: EncodePipeline | None = None
        self._service: EncoderService | None = None
        self._cache: FeatureCache | None = None
        self._taker: FeatureTaker | None = None
        self._disk: DiskTier | None = None
        self._handover: asyncio.Task[None] | None = None
        self.somebody_waits: Callable[[], bool] | None = None  # set if an engine steps in this process
        self.tower_bytes = 0  # bytes of activations, which a KV pool on the same device must leave

    async def load_weights(self) -> None:
        """Read only the tower's weights."""
        pod = self._pod
        with pod.startup.phase("load_encoder"):
            self._model = await asyncio.to_thread(load_encoder, pod.spec.model, self._device)
        pod.metrics.loaded_bytes.inc(self._model.loaded_bytes)
        log.info("encoder role loaded %d bytes", self._model.loaded_bytes)

    async def start(self) -> None:
        """Start the decode processes and the tower, and measure the tower's memory."""
        assert self._model is not None
        pod, media, spec = self._pod, self._pod.spec.gateway.media, self._pod.encoder_spec
        decoders = decoders_for(
            pod.settings.compute_threads, spec.media_mebibytes * MEBIBYTE, 2 * spec.batching.max_items
        )
        spare = spare_servers(len(self._model.modalities))
        self._decoders = DecodePool(decoders + spare, media.decode_timeout_seconds)
        with pod.startup.phase("sandbox"):
            await self._decoders.start()
        for layer, active in self._decoders.layers.items():
            pod.metrics.sandbox_layers.labels(layer).set(active)
        self._disk = self._disk_tier()
        self._cache = cache = FeatureCache(spec.cache_mebibytes * MEBIBYTE, pod.held, self._disk)
        paces = None
        if self.somebody_waits is not None:
            paces = RunPaces(pod.spec.engine.step_seconds, spec.batching.max_work, self.somebody_waits)
        self._pipeline = EncodePipeline(
            *(self._model, self._decoders, media, spec, cache, pod.metrics, paces),
            servers=Servers(processors_beside(decoders), spare),
        )
        pod.tasks.spawn(self._pipeline.run(), "tower")
        await self._measure_tower(self._model)

    def _disk_tier(self) -> DiskTier | None:
        """The disk tier below the cache, if spec.encoder.cache.disk is set."""
        pod, settings = self._pod, self._pod.settings
        if not settings.feature_disk:
            return None
        budget = settings.feature_disk_mebibytes * MEBIBYTE
        tier = DiskTier(Path(settings.feature_disk), settings.mesh, budget, pod.held, pod.metrics)
        pod.tasks.spawn(tier.run(), "feature-disk")
        return tier

    async def _measure_tower(self, model: EncoderModel) -> None:
        """Measure the memory that the KV pool must leave for encoding.

        On a CPU this is done only if it sizes a KV pool: otherwise it would only cost time. If the largest media do not fit, the pod logs
        a warning and encodes the smaller ones. `tower_memory` refuses a GPU that holds no medium, and the KV pool's budget refuses a pod
        that then holds no request.
        """
        pod = self._pod
        sizes_pool = not self._takes_jobs and not pod.kv_spec.kv_cache_mebibytes
        if model.device.type == "cpu" and not sizes_pool:
            return
        media, batching = pod.spec.gateway.media, pod.encoder_spec.batching
        with pod.startup.phase("memory_encoder"):
            tower = await asyncio.to_thread(tower_memory, model, media, batching)
        self.tower_bytes = tower.num_bytes
        total, used = memory.measure(model.device, pod.settings.memory_fraction)
        log.info("memory: %d bytes, %d in use, up to %d for the tower", total, used, self.tower_bytes)
        if used + self.tower_bytes > total:
            log.warning(
                "memory: the largest tower run needs %d MiB on top of the %d MiB in use, of %d MiB; such media will fail; lower the "
                "limits of spec.gateway.media or spec.encoder.batching.maxWork, or give the pod more memory",
                *(number // MEBIBYTE for number in (self.tower_bytes, used, total)),
            )

    async def warm_up(self) -> None:
        """Run a medium of each modality through decode processes and tower."""
        assert self._model is not None
        assert self._decoders is not None
        assert self._pipeline is not None
        frontend = await asyncio.to_thread(self._model.frontend)
        media = self._pod.spec.gateway.media
        steps = media_steps(self._decoders, frontend, media, self._pipeline.warm_up)
        await warm_up(steps, self._pod.startup, self._model.device)

    async def accept(self) -> None:
        """Accept jobs from the queue, on a pod that holds no other role."""
        if not self._takes_jobs:
            return
        assert self._model is not None
        assert self._pipeline is not None
        pod = self._pod
        self._service = EncoderService(
            pod.bus,
            pod.encode_queue(),
            self._pipeline,
            sorted(self._model.modalities),
            JobClaims(pod.bus, pod.settings.incarnation, self._incarnation_of, pod.directory.silent_seconds),
            max_attempts=pod.encoder_spec.max_deliveries,
            metrics=pod.metrics,
            tracing=pod.tracing,
        )
        pod.tasks.spawn(self._service.run(), "encoder")
        assert self._cache is not None
        self._taker = FeatureTaker(pod.bus, pod.name, self._cache, lambda: self._handover is not None)
        await self._taker.start()

    def _incarnation_of(self, pod: str) -> str | None:
        beat = self._pod.directory.get(pod)
        return None if beat is None else beat.incarnation

    def local_source(self, store: FeatureStore) -> LocalSource:
        """The source of this tower's features for the prefill role of this pod."""
        assert self._pipeline is not None
        pod = self._pod
        return LocalSource(pod.bus, self._pipeline, store, pod.encoder_spec.max_deliveries)

    def drain(self) -> None:
        """Accept no more jobs, and hand the cache over to the encoders that remain."""
        if self._service is not None:
            self._service.drain()
        if self._taker is not None and self._handover is None:
            self._handover = asyncio.create_task(self._hand_over(), name="cache-handover")

    async def _hand_over(self) -> None:
        pod, cache = self._pod, self._cache
        assert cache is not None
        encoders = [beat.pod for beat in pod.directory.pods("encode") if beat.roles == ["encode"]]
        others = [name for name in encoders if name != pod.name]
        try:
            await hand_over(pod.bus, cache, others, seconds_of(pod.drain_seconds), pod.metrics)
        except Exception:  # features not handed over are encoded again, and the drain goes on
            log.exception("handing over the cache failed")

    @property
    def drained(self) -> bool:
        """Whether the jobs in progress and the hand-over are done; media of this pod's own requests belong to the prefill role."""
        handed_over = self._handover is None or self._handover.done()
        return self._service is None or (self._service.drained and handed_over)

    async def surrender(self) -> None:
        """Return the jobs in progress to the queue, for other encoders."""
        if self._handover is not None:
            self._handover.cancel()
        if self._service is not None:
            await self._service.abandon()

    async def give_back(self, error: MmdError) -> None:
        """Return the jobs that a drain could not finish: their end is no crash."""
        await self.surrender()

    async def stop(self) -> None:
        """End the threads and the decode processes."""
        if self._handover is not None:
            self._handover.cancel()
            await asyncio.wait([self._handover], timeout=STOP_SECONDS)
        if self._taker is not None:
            await close_each(self._taker.close, seconds=STOP_SECONDS)
        if self._disk is not None:
            self._disk.close()
        if self._pipeline is not None:
            self._pipeline.close()
        if self._decoders is not None:
            await self._decoders.close()

    def load(self) -> PodLoad:
        """The work that waits for encoding, and the throughput."""
        if (pipeline := self._pipeline) is None:
            return PodLoad()
        return PodLoad(
            encode_queued_work=dict(pipeline.queued_work),
            encode_running=pipeline.running,
            encode_work_per_second=pipeline.stages.work_per_second(),
            encode_busy_fraction=pipeline.stages.busy_fraction(),
            media_bytes_used=pipeline.media_bytes_used,
            media_bytes_budget=pipeline.media_bytes_budget,
        )

    async def sample(self) -> None:
        """Rates of the stages, the backlog in seconds, and the size of the cache."""
        if (pipeline := self._pipeline) is None:
            return
        metrics = self._pod.metrics
        if self._cache is not None:
            metrics.cache_bytes.labels("feature").set(self._cache.used_bytes)
        backlog, rates = 0.0, pipeline.stages.work_per_second()
        for modality, rate in rates.items():
            metrics.encode_rate.labels(modality).set(rate)
        for stage in pipeline.stages.all:
            for modality, rate in stage.work_per_second.items():
                metrics.encode_stage_rate.labels(stage.name, modality).set(rate)
        for modality, work in pipeline.queued_work.items():
            metrics.encode_queued.labels(modality).set(work)
            if modality in rates:
                backlog += work / rates[modality]
        metrics.backlog.labels("encode").set(backlog)

    def progress(self) -> dict[str, Progress]:
        """The progress of the tower's loop and of the processors.

        A processor is stuck if it has had its medium for longer than the job timeout or `LIVENESS_SECONDS`, whichever is longer.
        """
        if (pipeline := self._pipeline) is None:
            return {}
        return {
            "encoder": Progress(lambda: time.monotonic() - pipeline.last_progress, LIVENESS_SECONDS),
            "processor": Progress(
                lambda: pipeline.processing_seconds, max(LIVENESS_SECONDS, pipeline.job_timeout_seconds)
            ),
        }

    def reconfigure(self, spec: MultimodalDeploymentSpec) -> None:
        """Apply the media limits and the job timeout."""
        if self._pipeline is not None:
            self._pipeline.policy = spec.gateway.media
            self._pipeline.job_timeout_seconds = self._pod.encoder_spec.job_timeout_seconds
        if self._decoders is not None:
            self._decoders.set_timeout(spec.gateway.media.decode_timeout_seconds)
