"""The encode pipeline and its service with a tower that breaks: only the culprit fails, dead devices keep no work, bytes are bounded."""

from __future__ import annotations

import asyncio
import hashlib
import io
import logging
import math
import threading
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from mmd_api.contract.errors import (
    BadMediaError,
    CapacityError,
    DeviceLostError,
    DrainedError,
    MediaGoneError,
    UnprocessableMediumError,
)
from mmd_api.contract.pools import Modality
from mmd_api.pipeline import PipelineConfig
from mmd_api.spec.deployment import MultimodalDeploymentSpec
from mmd_api.spec.media import AudioPolicy, MediaPolicy
from mmd_api.spec.pools import EncoderBatching, EncoderSpec
from mmd_workers.encoder.encoder_role import EncoderRole
from mmd_workers.encoder.encoder_service import EncoderService
from mmd_workers.encoder.job_claims import JobClaims
from mmd_workers.encoder.local_source import LocalSource
from mmd_workers.encoder.pipeline import EncodePipeline
from mmd_workers.encoder.run_pace import RunPaces
from mmd_workers.encoder.stages import Servers
from mmd_workers.features.cache import FeatureCache
from mmd_workers.features.source import EncodeError
from mmd_workers.features.store import FeatureStore
from mmd_workers.media import samples
from mmd_workers.media.medium import DecodedImage, DecodedVideo
from mmd_workers.media.sandbox import DecodePool
from mmd_workers.model.prompt import Feature, ProcessedMedium
from mmd_workers.observe.metrics import Metrics
from mmd_workers.observe.tracing import Tracing
from mmd_workers.process.settings import WorkerSettings
from mmd_workers.wire.bus import Bus
from mmd_workers.wire.job_runs import JobRuns
from mmd_workers.wire.jobs import EncodeQueue, QueueLimits
from mmd_workers.wire.media import MediaServer
from mmd_workers.wire.messages.encoder import EncodeJob
from mmd_workers.wire.messages.message_parts import Acknowledged, FeatureRef, Sampling
from mmd_workers.wire.messages.prefill import EncodeCheck, EncodeFailed, EncodeWanted, GenerateRequest
from mmd_workers.worker import Worker
from support.harness.waiting import DEADLINE_SECONDS, until
from support.oracles.films import film

Connect = Callable[[str], Awaitable[Bus]]
SIDE = 16
LIMITS = QueueLimits(memory_storage=True, ack_wait_seconds=2.0)
MAX_ATTEMPTS = 3


def png(shade: int) -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(np.full((SIDE, SIDE, 3), shade, np.uint8)).save(buffer, "PNG")
    return buffer.getvalue()


def ref(shade: int, work: int = 16) -> FeatureRef:
    data = png(shade)
    return FeatureRef(
        *(f"feature-{shade}", f"digest-{shade}", "image", len(data), 4, [[0, 4]], {}, {}, work),
        host_bytes=8192,
    )


class Tower:
    """An encoder model whose feature of a plain image is its shade. Raises `fault(shades)` where that returns an error."""

    modalities = frozenset({"image"})
    loaded_bytes = 0
    device = torch.device("cpu")

    def __init__(self, fault: Callable[[list[int]], Exception | None] = lambda _: None) -> None:
        self.batches: list[list[int]] = []
        self.fault = fault
        self.gate = asyncio.Event()

    def process(self, decoded: Any, layout: Any) -> ProcessedMedium:
        shade = torch.tensor([[float(decoded.pixels[0, 0, 0])]])
        return ProcessedMedium("image", {"pixel_values": shade}, {}, 4, ("image",))

    def part(self, medium: ProcessedMedium, first: int, last: int) -> ProcessedMedium:
        return medium

    def encode(self, batch: Any) -> list[Feature]:
        shades = [int(medium.tensors["pixel_values"]) for medium in batch]
        self.batches.append(shades)
        if (error := self.fault(shades)) is not None:
            raise error
        return [Feature("image", {"embeddings": torch.full((4, 8), float(shade))}) for shade in shades]


class Encoding:
    """A pipeline with real decode processes."""

    def __init__(self, tower: Any, paces: RunPaces | None = None, processors: int = 1, **spec: Any) -> None:
        self.decoders = DecodePool(2, 20, 1 << 28)
        self.metrics = Metrics()
        self.spec = EncoderSpec(**spec)
        self.pipeline = EncodePipeline(
            *(tower, self.decoders, MediaPolicy(), self.spec, FeatureCache(0), self.metrics, paces),
            servers=Servers(processors),
        )

    async def __aenter__(self) -> Encoding:
        await self.decoders.start()
        self.running = asyncio.create_task(self.pipeline.run())
        return self

    async def __aexit__(self, *_: object) -> None:
        self.running.cancel()
        await asyncio.gather(self.running, return_exceptions=True)
        self.pipeline.close()
        await self.decoders.close()

    async def encode(self, *shades: int, work: int = 16) -> list[Any]:
        async def read(shade: int) -> bytes:
            return png(shade)

        async with asyncio.timeout(60):
            return await asyncio.gather(
                *(self.pipeline.encode(ref(s, work), lambda s=s: read(s)) for s in shades),  # type: ignore[misc]
                return_exceptions=True,
            )


def breaks_on(shade: int) -> Callable[[list[int]], Exception | None]:
    return lambda shades: RuntimeError(f"shape mismatch at {shade}") if shade in shades else None


async def test_a_medium_that_breaks_the_tower_fails_alone_and_its_batch_succeeds() -> None:
    tower = Tower(breaks_on(5))
    async with Encoding(tower, batching=EncoderBatching(max_wait_milliseconds=1000)) as encoding:
        results = await encoding.encode(*range(8))
    assert max(map(len, tower.batches)) > 1
    assert isinstance(results[5], RuntimeError)
    shades = [float(r[0].tensors["embeddings"][0, 0]) for n, r in enumerate(results) if n != 5]
    assert shades == [0.0, 1.0, 2.0, 3.0, 4.0, 6.0, 7.0]


class MixedTower(Tower):
    """Takes images and videos, no two in one batch. Its first run lasts until `go_on` is set."""

    modalities = frozenset({"image", "video"})

    def __init__(self) -> None:
        super().__init__()
        self.runs: list[str] = []
        self.go_on = threading.Event()

    def process(self, decoded: Any, layout: Any) -> ProcessedMedium:
        return ProcessedMedium(layout.modality, {}, {}, 4, (id(decoded), time.monotonic_ns()))

    def encode(self, batch: Any) -> list[Feature]:
        self.runs.append(batch[0].modality)
        assert self.go_on.wait(60)
        time.sleep(0.01)
        return [Feature("image", {"embeddings": torch.zeros(4, 8)})]


async def test_an_image_waits_only_for_the_video_already_in_the_tower() -> None:
    video, image = samples.sample("video"), png(1)
    tower = MixedTower()
    async with Encoding(tower) as encoding:

        async def encode(name: str, modality: Any, data: bytes, sampling: dict[str, Any]) -> None:
            wanted = FeatureRef(
                name, name, modality, len(data), 4, [[0, 4]], {}, sampling, 16, host_bytes=8192
            )

            async def read() -> bytes:
                return data

            await encoding.pipeline.encode(wanted, read)

        tasks = []
        for number in range(4):
            tasks.append(
                asyncio.create_task(encode(f"video {number}", "video", video, {"frame_indices": [0]}))
            )
            await until(lambda: tower.runs and len(encoding.pipeline._ready) == len(tasks) - 1)
        tasks.append(asyncio.create_task(encode("image", "image", image, {})))
        await until(lambda: len(encoding.pipeline._ready) == 4)
        tower.go_on.set()
        async with asyncio.timeout(60):
            await asyncio.gather(*tasks)
    assert tower.runs == ["video", "image", "video", "video", "video"]


class HeldDecoders:
    """In place of decode processes: two and a spare one. A video is decoded once `go_on` is set."""

    processes = 3

    def __init__(self) -> None:
        self.go_on = asyncio.Event()

    async def probe(self, *_: object) -> None: ...

    async def decode_image(self, *_: object) -> DecodedImage:
        return DecodedImage(np.zeros((1, 1, 3), np.uint8))

    async def decode_video(self, *_: object) -> DecodedVideo:
        await self.go_on.wait()
        return DecodedVideo(np.zeros((1, 1, 1, 3), np.uint8), [0], 1.0, 1)


@pytest.mark.parametrize(
    ("videos", "video_mebibytes"),
    [pytest.param(8, 1, id="decoders"), pytest.param(40, 1, id="places"), pytest.param(8, 32, id="memory")],
)
async def test_an_image_is_encoded_while_videos_of_any_number_decode(
    videos: int, video_mebibytes: int
) -> None:
    tower, decoders = MixedTower(), HeldDecoders()
    tower.go_on.set()
    parts: tuple[Any, ...] = (tower, decoders, MediaPolicy(), EncoderSpec(media_mebibytes=128))
    pipeline = EncodePipeline(*parts, FeatureCache(0), Metrics(), servers=Servers(spare=1))
    running = asyncio.create_task(pipeline.run())

    async def encode(name: str, modality: Modality, mebibytes: int) -> None:
        sampling = {"frame_indices": [0]} if modality == "video" else {}
        wanted = FeatureRef(
            *(name, name, modality, 1, 4, [[0, 4]], {}, sampling, 16), host_bytes=mebibytes << 20
        )

        async def read() -> bytes:
            return b"x"

        await pipeline.encode(wanted, read)

    waiting = [
        asyncio.create_task(encode(f"video {number}", "video", video_mebibytes)) for number in range(videos)
    ]
    await until(lambda: pipeline._decode._taken["video"] == 2)
    async with asyncio.timeout(DEADLINE_SECONDS):
        await encode("image", "image", 1)
    assert tower.runs == ["image"]
    decoders.go_on.set()
    await asyncio.wait(waiting)
    assert len(tower.runs) == 1 + videos
    assert pipeline.media_bytes_used == 0
    running.cancel()
    pipeline.close()


class LocalPod:
    """A pod that encodes and prefills, and the gateway that holds the bytes of its requests' media."""

    def __init__(self, bus: Bus, encoding: Encoding) -> None:
        self.held = {hashlib.sha256(png(shade)).hexdigest(): png(shade) for shade in range(8)}
        self.gateway = MediaServer(bus, "gateway-0", self.held.get)
        self.store = FeatureStore(1 << 20, lambda *_: None)
        self.source = LocalSource(bus, encoding.pipeline, self.store, encoding.spec.max_deliveries)

    async def feature(self, shade: int, attempt: int = 0, first_attempt: int = 0) -> Feature:
        """Of the only medium of a request, at this placement, where it has had its prompt since the first one."""
        name, now = f"request-{shade}", time.time()
        medium = replace(ref(shade), digest=hashlib.sha256(png(shade)).hexdigest())
        request = GenerateRequest(name, attempt, "gateway-0", [1], [medium], Sampling(1), [], now + 60, now)
        request = replace(request, first_attempt=first_attempt)
        admitted = await self.store.admit(
            name, {medium.feature_id: 1024}, lambda _: self.source.request(medium, request)
        )
        try:
            async with asyncio.timeout(60):
                return await admitted.arrivals[medium.feature_id]
        finally:
            self.store.release(name)


async def test_on_a_prefilling_pod_only_the_culprit_causes_a_client_error(
    connect: Connect,
) -> None:
    tower = Tower(breaks_on(5))
    batching = EncoderBatching(max_wait_milliseconds=1000)
    async with Encoding(tower, batching=batching, max_deliveries=3) as encoding:
        pod = LocalPod(await connect("pod-0"), encoding)
        await pod.gateway.start()
        results = await asyncio.gather(*(pod.feature(shade) for shade in range(8)), return_exceptions=True)
        failures = [results.pop(5)]
        failures += await asyncio.gather(pod.feature(5, attempt=1), return_exceptions=True)
        failures += await asyncio.gather(pod.feature(5, attempt=2), return_exceptions=True)
        (anew,) = await asyncio.gather(pod.feature(5, attempt=3, first_attempt=3), return_exceptions=True)
        await pod.gateway.close()
    assert isinstance(anew, EncodeError)
    assert anew.retryable, "another medium of the request that it fell back to has its own tries"
    assert max(map(len, tower.batches)) > 1
    assert [float(made.tensors["embeddings"][0, 0]) for made in results] == [
        0.0,
        1.0,
        2.0,
        3.0,
        4.0,
        6.0,
        7.0,
    ]
    codes = [(error.code, error.status, error.retryable) for error in failures]
    unprocessable = UnprocessableMediumError.code, UnprocessableMediumError.status
    assert codes == [(*unprocessable, True), (*unprocessable, True), (*unprocessable, False)]
    assert [error.feature_id != "" for error in failures] == [False, False, True], "given up with the last"
    assert "3 encoders failed on this image" in failures[-1].message
    assert "RuntimeError: shape mismatch at 5" in failures[-1].message


async def test_on_a_prefilling_pod_a_mediums_error_keeps_its_code(connect: Connect) -> None:
    async with Encoding(Tower()) as encoding:
        pod = LocalPod(await connect("pod-0"), encoding)
        await pod.gateway.start()
        pod.held.clear()
        (error,) = await asyncio.gather(pod.feature(1), return_exceptions=True)
        await pod.gateway.close()
    assert isinstance(error, EncodeError)
    assert error.code == MediaGoneError.code


async def test_a_batch_too_large_for_the_memory_runs_in_parts() -> None:
    tower = Tower(lambda shades: torch.OutOfMemoryError("60 GiB") if len(shades) > 2 else None)
    async with Encoding(tower, batching=EncoderBatching(max_wait_milliseconds=1000)) as encoding:
        results = await encoding.encode(*range(8))
    assert [float(r[0].tensors["embeddings"][0, 0]) for r in results] == [float(n) for n in range(8)]
    assert max(map(len, tower.batches)) > 2


async def test_batches_are_bounded_by_their_work() -> None:
    tower = Tower()
    batching = EncoderBatching(max_items=8, max_work=40, max_wait_milliseconds=1000)
    async with Encoding(tower, batching=batching) as encoding:
        await encoding.encode(*range(6), work=16)
        await encoding.encode(9, work=100)
    assert max(map(len, tower.batches)) == 2
    assert [9] in tower.batches, "a medium larger than a batch runs alone"


@pytest.mark.parametrize(
    ("max_seconds", "waits", "first"),
    [
        pytest.param(None, True, 6, id="a pod of its own"),
        pytest.param(1.0, True, 2, id="beside an engine"),
        pytest.param(1.0, False, 6, id="beside an engine for which nobody waits"),
        pytest.param(60.0, True, 6, id="no more than a batch"),
        pytest.param(0.01, True, 1, id="a medium alone is longer"),
    ],
)
async def test_a_tower_beside_an_engine_keeps_its_runs_within_a_step(
    max_seconds: float | None, waits: bool, first: int
) -> None:
    tower, paces = Tower(), None
    batching = EncoderBatching(max_items=6, max_wait_milliseconds=1000)
    if max_seconds is not None:
        paces = RunPaces(max_seconds, batching.max_work, lambda: waits)
        for media in (1, 2):
            paces.ran("image", 16 * media, media, 0.5 * media)
    async with Encoding(tower, paces, batching=batching) as encoding:
        await encoding.encode(*range(6), work=16)
    assert len(tower.batches[0]) == first


async def test_runs_are_measured_unless_a_medium_fails_in_them() -> None:
    paces = RunPaces(60.0, 1000, lambda: True)
    async with Encoding(Tower(breaks_on(3)), paces) as encoding:
        await encoding.encode(3)
        assert paces.max_work("image") == 1
        await encoding.encode(4)
        assert paces.max_work("image") >= 32, "the next run may have a medium more"


async def test_decoded_media_are_bounded_in_bytes_and_what_never_fits_is_refused() -> None:
    async with Encoding(Tower(), media_mebibytes=16) as encoding:
        pipeline, peak, active = encoding.pipeline, 0, 0
        gate = asyncio.Event()

        async def read(shade: int) -> bytes:
            nonlocal peak, active
            active += 1
            peak = max(peak, active)
            await gate.wait()
            active -= 1
            return png(shade)

        def large(shade: int, host_bytes: int) -> FeatureRef:
            return FeatureRef(*(f"f{shade}", "d", "image", 1, 4, [[0, 4]], {}, {}, 16), host_bytes=host_bytes)

        tasks = [
            asyncio.create_task(pipeline.encode(large(n, 6 << 20), lambda n=n: read(n))) for n in range(6)
        ]
        while active < 2:
            await asyncio.sleep(0)
        for _ in range(100):
            await asyncio.sleep(0)
        assert peak == 2, "two of six MiB each fit into 16 MiB"
        gate.set()
        async with asyncio.timeout(60):
            await asyncio.gather(*tasks)
        assert pipeline._memory.used_bytes == 0
        with pytest.raises(CapacityError, match=r"20 MiB of host memory.*spec\.encoder\.mediaMebibytes"):
            await pipeline.encode(large(9, 20 << 20), lambda: read(9))


async def test_the_byte_limit_of_sounds_does_not_bind_a_videos_sound() -> None:
    heard: list[int] = []

    class Hearing(Tower):
        def process(self, decoded: Any, layout: Any) -> ProcessedMedium:
            heard.append(len(decoded.waveform))
            return ProcessedMedium("audio", {"pixel_values": torch.tensor([[7.0]])}, {}, 4, ("audio",))

    data, plan = film(2, 1.5), {"sample_rate_hz": 16_000, "num_samples": 24_000}

    async def read() -> bytes:
        return data

    def sound(name: str, sampling: dict[str, Any]) -> FeatureRef:
        return FeatureRef(
            *(name, "d", "audio", len(data), 4, [[0, 4]], {}, sampling, 16),  # type: ignore[arg-type]
            host_bytes=1 << 20,
        )

    async with Encoding(Hearing()) as encoding, asyncio.timeout(60):
        encoding.pipeline.policy = MediaPolicy(audio=AudioPolicy(max_bytes=1024))
        await encoding.pipeline.encode(sound("of a video", {**plan, "of_video": True}), read)
        with pytest.raises(BadMediaError, match=r"spec\.gateway\.media\.audio\.maxBytes"):
            await encoding.pipeline.encode(sound("a sound", plan), read)
    assert heard == [24_000]


async def test_a_lost_device_fails_its_batch_and_ends_the_pipeline() -> None:
    tower = Tower(lambda _: torch.AcceleratorError("CUDA error: device-side assert triggered"))
    async with Encoding(tower) as encoding:
        (result,) = await encoding.encode(1)
        assert isinstance(result, DeviceLostError)
        with pytest.raises(DeviceLostError, match="device-side assert"):
            await asyncio.shield(encoding.running)
    assert len(tower.batches) == 1


class Pod:
    """An encoder pod over a real server, with a receiver that keeps what it hears of failures."""

    def __init__(self, bus: Bus, tower: Tower, alive: dict[str, str], incarnation: str = "i1") -> None:
        self.encoding = Encoding(tower, batching=EncoderBatching(max_wait_milliseconds=100))
        self.queue = EncodeQueue(bus, LIMITS)
        self.service = EncoderService(
            *(bus, self.queue, self.encoding.pipeline, ["image"]),
            JobClaims(bus, incarnation, alive.get, lambda _: math.inf),
            MAX_ATTEMPTS,
            metrics=self.encoding.metrics,
            tracing=Tracing("t", "t", "t", None),
        )
        self.sent: list[str] = []

        async def encode(job: EncodeJob, times: dict[str, float]) -> Any:
            async def read() -> bytes:
                return png(int(job.feature.feature_id.split("-")[1]))

            feature, steps = await self.encoding.pipeline.encode(job.feature, read)
            return feature, steps | {"encoded": time.time()}

        async def send(job: EncodeJob, *_: Any, **__: Any) -> str:
            self.sent.append(job.feature.feature_id)
            return "sent"

        self.service._encode = encode  # type: ignore[method-assign]  # no gateway holds the bytes
        self.service._sender.send = send  # type: ignore[method-assign,assignment]

    async def __aenter__(self) -> Pod:
        await self.encoding.__aenter__()
        self.running = asyncio.create_task(self.service.run())
        return self

    async def __aexit__(self, *_: object) -> None:
        self.running.cancel()
        await asyncio.gather(self.running, return_exceptions=True)
        await self.encoding.__aexit__()


def job(shade: int) -> EncodeJob:
    now = time.time()
    return EncodeJob(f"job-{shade}", ref(shade), "gateway-0", "prefill-0", "i1", now + 60, now, "r")


async def listen(bus: Bus) -> list[EncodeFailed]:
    """Act as the receiver of every feature. Returns the failures that it hears of."""
    failures: list[EncodeFailed] = []
    runs: defaultdict[str, JobRuns] = defaultdict(JobRuns)

    async def check(asked: EncodeCheck) -> EncodeWanted:
        return runs[asked.job_id].answer(asked)

    async def keep(failure: EncodeFailed) -> Acknowledged:
        failures.append(failure)
        return Acknowledged()

    await bus.serve(bus.subjects.encode_failed("prefill-0"), EncodeFailed, keep)
    await bus.serve(bus.subjects.encode_wanted("prefill-0"), EncodeCheck, check)
    await bus.flush()
    return failures


async def test_only_a_medium_that_fails_on_every_encoder_is_given_up(
    connect: Connect,
) -> None:
    bus = await connect("prefill-0")
    failures, queue = await listen(bus), EncodeQueue(bus, LIMITS)
    await queue.ensure()
    for shade in range(8):
        await queue.publish(job(shade))
    towers = [Tower(breaks_on(3)), Tower(breaks_on(3))]
    alive = {"prefill-0": "i1"}
    async with (
        Pod(await connect("e-0"), towers[0], alive) as a,
        Pod(await connect("e-1"), towers[1], alive) as b,
    ):
        await until(lambda: failures and len(a.sent) + len(b.sent) >= 7)

        async def is_empty() -> bool:
            return not (await queue.depth())["image"].jobs

        await until(is_empty)
    (failure,) = failures
    assert (failure.job_id, failure.code, failure.retryable) == ("job-3", "unprocessable_medium", False)
    assert "3 encoders failed" in failure.message
    assert "shape mismatch at 3" in failure.message
    assert sorted(a.sent + b.sent) == [f"feature-{n}" for n in range(8) if n != 3]
    alone = [batch for tower in towers for batch in tower.batches if batch == [3]]
    assert len(alone) >= 3


async def test_jobs_of_a_lost_device_go_to_others_at_once_and_uncounted(
    connect: Connect,
) -> None:
    bus = await connect("prefill-0")
    failures, queue = await listen(bus), EncodeQueue(bus, LIMITS)
    await queue.ensure()
    alive = {"prefill-0": "i1"}
    dead = Tower(lambda shades: torch.AcceleratorError("CUDA error: unspecified launch failure"))
    dying = Pod(await connect("e-0"), dead, alive)
    for shade in range(8):
        await queue.publish(job(shade))
    async with dying:
        with pytest.raises(DeviceLostError):
            async with asyncio.timeout(30):
                await asyncio.shield(dying.encoding.running)
        await dying.service.abandon()
    assert dying.sent == []
    async with Pod(await connect("e-1"), Tower(), alive) as heir:
        await until(lambda: len(heir.sent) == 8)
        redelivered = heir.encoding.metrics.redeliveries.labels("image")._value.get()
    assert failures == []
    assert redelivered == sum(map(len, dead.batches)), "only the batch that was on the device counts"


class Stuck(Tower):
    """Processes nothing before `release` is set."""

    def __init__(self) -> None:
        super().__init__()
        self.release = threading.Event()

    def process(self, decoded: Any, layout: Any) -> ProcessedMedium:
        self.release.wait(120)
        return super().process(decoded, layout)


async def test_jobs_that_a_drain_could_not_finish_go_on_elsewhere_uncounted(connect: Connect) -> None:
    bus, tower = await connect("prefill-0"), Stuck()
    failures, queue = await listen(bus), EncodeQueue(bus, LIMITS)
    await queue.ensure()
    await queue.publish(job(1))
    alive = {"prefill-0": "i1"}
    async with Pod(await connect("e-0"), tower, alive) as drained:
        try:
            await until(lambda: drained.service._jobs)
            role = EncoderRole(worker_of_an_encoder().pod, torch.device("cpu"))
            role._service = drained.service
            role.drain()
            await role.give_back(DrainedError("this pod is draining"))
            async with Pod(await connect("e-1"), Tower(), alive) as heir:
                await until(lambda: heir.sent)
        finally:
            tower.release.set()
    assert heir.encoding.metrics.redeliveries.labels("image")._value.get() == 0
    assert not failures


async def test_a_job_stuck_behind_another_ends_at_its_deadline(
    connect: Connect,
) -> None:
    """Nobody answers whether it is still wanted, so it counts as wanted; what it waits for has no end of its own."""
    queue, tower = EncodeQueue(await connect("prefill-0"), LIMITS), Stuck()
    await queue.ensure()
    async with Pod(await connect("e-0"), tower, {"prefill-0": "i1"}) as pod:
        try:
            await queue.publish(job(1))
            await until(lambda: pod.service._jobs)
            soon = time.time() + 5
            await queue.publish(replace(job(2), deadline=soon))
            await until(lambda: len(pod.service._jobs) == 2)
            await until(lambda: len(pod.service._jobs) == 1 and time.time() > soon)
        finally:
            tower.release.set()
    jobs = pod.encoding.metrics.encode_jobs
    assert jobs.labels("image", "deadline_exceeded")._value.get() == 1


@pytest.mark.parametrize("restarts", [False, True], ids=["others take over", "it restarts under its name"])
async def test_after_crashes_jobs_are_taken_singly_until_the_culprit_is_found(
    connect: Connect, restarts: bool
) -> None:
    """Processes that end without a word: everything in hand is delivered again, and counted. Only the culprit is given up."""
    bus = await connect("prefill-0")
    failures, queue = await listen(bus), EncodeQueue(bus, LIMITS)
    await queue.ensure()
    for shade in range(6):
        await queue.publish(job(shade))
    alive, sent, deaths = {"prefill-0": "i1"}, [], 0
    loop = asyncio.get_running_loop()
    while len(sent) < 5 or not failures:
        died, ended = asyncio.Event(), threading.Event()

        def fatal(shades: list[int], died: asyncio.Event = died, ended: threading.Event = ended) -> None:
            if 2 in shades:
                loop.call_soon_threadsafe(died.set)
                ended.wait(DEADLINE_SECONDS)  # the event loop ends this pod meanwhile, as a signal would

        name, incarnation = ("e-0", f"i{deaths}") if restarts else (f"e-{deaths}", "i1")
        encoder = await connect(name)
        alive[name] = incarnation
        pod = Pod(encoder, Tower(fatal), alive, incarnation)
        async with pod:
            await until(
                lambda died=died, sent=sent, pod=pod: (
                    died.is_set() or (len(sent) + len(pod.sent) >= 5 and failures)
                )
            )
            deaths += died.is_set()
            pod.running.cancel()
            for task in pod.service._jobs:
                task.cancel()  # no acknowledgement, no give-back
            ended.set()
            await encoder.close()
            del alive[name]
        sent += pod.sent
        assert deaths <= 3
    (failure,) = failures
    assert (failure.job_id, failure.code) == ("job-2", "unprocessable_medium")
    assert sorted(set(sent)) == [f"feature-{n}" for n in range(6) if n != 2]
    assert deaths == 3


async def test_throughput_and_busy_time_come_from_the_slowest_stage() -> None:
    class SlowPreprocessing(Tower):
        def process(self, decoded: Any, layout: Any) -> ProcessedMedium:
            time.sleep(0.05)
            return super().process(decoded, layout)

    async with Encoding(SlowPreprocessing()) as encoding:
        await encoding.encode(*range(6), work=1000)
        stages = {stage.name: stage for stage in encoding.pipeline.stages.all}
        slowest = encoding.pipeline.stages.work_per_second()["image"]
        assert slowest <= 1000 / 0.05
        assert slowest < stages["tower"].work_per_second["image"]
        assert encoding.pipeline.stages.busy_fraction() > stages["tower"].busy_fraction()
    exposed = encoding.metrics.expose()[0].decode()
    for stage in ("fetch", "decode", "process", "tower"):
        assert f'mmd_encode_busy_seconds_total{{stage="{stage}"}}' in exposed


def worker_of_an_encoder() -> Worker:
    spec = {"model": {"id": "builtin/demo"}, "encoder": {}, "decode": {}}
    config = {"namespace": "test", "name": "encoding", "revision": "r1", "spec": spec}
    pipeline = PipelineConfig.model_validate(config)
    settings = WorkerSettings(pipeline, "encoder-0", "127.0.0.1", 0, "nats://unused", threads=1)
    return Worker(settings, "encoder", ("encode",))


def role_in(worker: Worker, encoding: Encoding) -> EncoderRole:
    """The encode role of this worker, which has started with this pipeline."""
    role = EncoderRole(worker.pod, torch.device("cpu"))
    role._pipeline = encoding.pipeline
    worker._parts = [role]
    return role


async def test_a_hanging_processor_counts_as_no_progress(monkeypatch: pytest.MonkeyPatch) -> None:
    entered, release = threading.Event(), threading.Event()

    class Hangs(Tower):
        def process(self, decoded: Any, layout: Any) -> ProcessedMedium:
            entered.set()
            release.wait(120)
            return super().process(decoded, layout)

    async with Encoding(Hangs()) as encoding:
        age = role_in(worker_of_an_encoder(), encoding).progress()["processor"].age_seconds
        encoded = asyncio.create_task(encoding.encode(7))
        try:
            await until(entered.is_set)
            await until(lambda: age() > 3)
        finally:
            release.set()
        (outcome,) = await encoded
        assert not isinstance(outcome, BaseException)
        await until(lambda: age() < 3)


async def test_a_hanging_mediums_processing_time_counts_while_others_pass() -> None:
    entered, release = threading.Event(), threading.Event()

    class HangsOnSeven(Tower):
        def process(self, decoded: Any, layout: Any) -> ProcessedMedium:
            if decoded.pixels[0, 0, 0] == 7:
                entered.set()
                release.wait(120)
            return super().process(decoded, layout)

    async with Encoding(HangsOnSeven(), processors=2) as encoding:
        stuck = asyncio.create_task(encoding.encode(7))
        try:
            await until(entered.is_set)
            begun = time.monotonic()
            for outcome in await encoding.encode(*range(4)):
                assert not isinstance(outcome, BaseException)
            assert encoding.pipeline.processing_seconds >= time.monotonic() - begun - 1e-3
        finally:
            release.set()
        await stuck
        assert encoding.pipeline.processing_seconds == 0


@pytest.mark.parametrize(("timeout", "limit"), [(600, 600), (30, 60)])
async def test_a_medium_may_be_processed_for_its_jobs_whole_time(timeout: int, limit: int) -> None:
    """A large one on a busy CPU takes minutes; a restart would only bring it to the next encoder."""
    encoding = Encoding(Tower(), job_timeout_seconds=timeout)
    role = role_in(worker_of_an_encoder(), encoding)
    assert role.progress()["processor"].limit_seconds == limit
    encoding.pipeline.close()


async def test_a_changed_job_timeout_holds_for_what_is_being_processed(
    caplog: pytest.LogCaptureFixture,
) -> None:
    encoding = Encoding(Tower())
    worker = worker_of_an_encoder()
    role_in(worker, encoding)
    spec = MultimodalDeploymentSpec.model_validate(
        {"model": {"id": "a"}, "encoder": {"jobTimeoutSeconds": 900}, "decode": {}}
    )
    with caplog.at_level(logging.INFO):  # puts the level back that this sets
        worker._reconfigure(spec)
    assert worker._progress()["processor"].limit_seconds == 900
    encoding.pipeline.close()
