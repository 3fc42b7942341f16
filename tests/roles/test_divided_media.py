"""A clip with more work than a run of the tower may have is divided between runs: its memory has a bound, and other media their turn."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from mmd_api.spec.media import MediaPolicy
from mmd_api.spec.model import ModelSpec
from mmd_api.spec.pools import EncoderBatching, EncoderSpec
from mmd_cli import samples
from mmd_workers.encoder.pipeline import EncodePipeline
from mmd_workers.encoder.profile import tower_memory
from mmd_workers.encoder.run_pace import RunPaces
from mmd_workers.engine.profile import LiveBytes
from mmd_workers.features.cache import FeatureCache
from mmd_workers.media.choice import SamplingChoice
from mmd_workers.media.samples import sample
from mmd_workers.media.sandbox import DecodePool
from mmd_workers.model.encoder import HfEncoderModel, load_encoder
from mmd_workers.model.prompt import Feature, ProcessedMedium
from mmd_workers.observe.metrics import Metrics
from mmd_workers.wire.messages.message_parts import FeatureRef
from support.harness.waiting import until
from support.oracles import random_model

CPU = torch.device("cpu")
POLICY = MediaPolicy()
SECONDS = 60
Run = list[ProcessedMedium]


def clip(frames: int, seed: int = 0) -> bytes:
    pixels = np.random.default_rng(seed).integers(0, 256, (frames, 64, 64, 3), dtype=np.uint8)
    return samples.encode_video(pixels, crf=28)


class Encoding:
    """A real model's pipeline. `before`: called on the tower's thread with each run, before it."""

    def __init__(self, model: HfEncoderModel, max_work: int, paces: RunPaces | None = None) -> None:
        self.model = model
        self.runs: list[Run] = []
        self.peaks: list[int] = []
        self.before: Callable[[Run], None] = lambda _: None
        self._encode = model.encode
        model.encode = self._measured  # type: ignore[method-assign]
        self.decoders = DecodePool(1, 60)
        spec = EncoderSpec(batching=EncoderBatching(max_work=max_work, max_items=4))
        self.metrics = Metrics()
        self.pipeline = EncodePipeline(
            model, self.decoders, POLICY, spec, FeatureCache(0), self.metrics, paces
        )

    def _measured(self, batch: Any) -> list[Feature]:
        self.runs.append(list(batch))
        self.before(self.runs[-1])
        with LiveBytes() as live:
            features = self._encode(batch)
        self.peaks.append(live.peak)
        return features

    async def encode(self, data: bytes, frames: int | None = None) -> Feature:
        """Of a clip, by so many frames; of an image without."""
        modality: Any = "image" if frames is None else "video"
        info = await self.decoders.probe(data, modality, POLICY)
        message = {"role": "user", "content": [{"type": modality}]}
        choices = [SamplingChoice(num_frames=frames)]
        (laid,) = self.model.frontend(POLICY).layout([message], [info], choices=choices).media
        sampling = asdict(laid.sampling)
        del sampling["size"]
        digest = hashlib.sha256(data).hexdigest()
        ref = FeatureRef(
            *(digest, digest, modality, len(data), laid.num_tokens, [list(r) for r in laid.ranges]),
            *(laid.geometry, sampling, laid.work, laid.host_bytes),
        )

        async def read() -> bytes:
            return data

        async with asyncio.timeout(SECONDS):
            feature, times = await self.pipeline.encode(ref, read)
        assert times["tower_start"] <= times["tower_end"]
        return feature


@asynccontextmanager
async def running(
    model: HfEncoderModel, max_work: int, paces: RunPaces | None = None
) -> AsyncIterator[Encoding]:
    encode = model.encode
    encoding = Encoding(model, max_work, paces)
    await encoding.decoders.start()
    task = asyncio.create_task(encoding.pipeline.run())
    try:
        yield encoding
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        encoding.pipeline.close()
        await encoding.decoders.close()
        model.encode = encode  # type: ignore[method-assign]


@pytest.fixture
def demo() -> HfEncoderModel:
    return load_encoder(ModelSpec(id="builtin/demo", dtype="Float32"), CPU)


def small_media() -> MediaPolicy:
    """Whose largest are run in a moment."""
    image = POLICY.image.model_copy(update={"max_pixels": 500_000})
    return POLICY.model_copy(update={"image": image})


def frames_of(medium: ProcessedMedium) -> int:
    return int(medium.tensors["video_grid_thw"][0, 0])


def work_of(part: ProcessedMedium) -> int:
    """Patches of 8 x 8 pixels, of two frames."""
    return part.tensors["pixel_values_videos"].numel() // (3 * 8 * 8)


async def test_a_clip_divided_between_runs_has_the_feature_of_one_run(
    demo: HfEncoderModel,
) -> None:
    data = clip(32)
    async with running(demo, 1) as encoding:
        feature = await encoding.encode(data, 32)
    async with running(demo, 2**20) as undivided:
        whole = await undivided.encode(data, 32)
    assert len(undivided.runs) == 1
    assert [frames_of(run[0]) for run in encoding.runs] == [1] * 16
    assert feature.tensors.keys() == whole.tensors.keys()
    for name, rows in feature.tensors.items():
        torch.testing.assert_close(rows, whole.tensors[name])
    assert encoding.metrics.encode_work.labels("video")._value.get() == 16 * work_of(encoding.runs[0][0])


async def test_short_media_have_their_turn_between_the_runs_of_a_long_clip(demo: HfEncoderModel) -> None:
    """An image, which is of another modality, and a clip of two frames."""
    async with running(demo, 1) as encoding:
        came = asyncio.Event()
        loop, go_on = asyncio.get_running_loop(), asyncio.Event()

        def wait(run: Run) -> None:
            if len(encoding.runs) == 1:
                loop.call_soon_threadsafe(came.set)
                asyncio.run_coroutine_threadsafe(go_on.wait(), loop).result(SECONDS)

        encoding.before = wait
        long = asyncio.create_task(encoding.encode(clip(32), 32))
        await asyncio.wait_for(came.wait(), SECONDS)
        others = [
            asyncio.create_task(encoding.encode(clip(2, 1), 2)),
            asyncio.create_task(encoding.encode(sample("image"))),
        ]
        await until(lambda: len(encoding.pipeline._ready) == len(others))
        go_on.set()
        await asyncio.gather(long, *others)
    kinds = [
        "image" if run[0].modality == "image" else run[0].geometry["video_grid_thw"][0][0]
        for run in encoding.runs
    ]
    assert kinds[:1] == kinds[3:4] == [16]
    assert {*kinds[1:3]} == {1, "image"}


async def test_a_failed_part_fails_its_medium_and_stops_the_rest(demo: HfEncoderModel) -> None:
    async with running(demo, 1) as encoding:

        def fail(run: Run) -> None:
            if len(encoding.runs) == 3:
                raise RuntimeError("no kernel")

        encoding.before = fail
        with pytest.raises(RuntimeError, match="no kernel"):
            await encoding.encode(clip(32), 32)
        assert not encoding.pipeline._ready
        assert encoding.pipeline.running == 0
        assert len(encoding.runs) == 3
        await encoding.encode(clip(2, 1), 2)


async def test_parts_of_an_abandoned_clip_are_not_run(demo: HfEncoderModel) -> None:
    async with running(demo, 1) as encoding:
        loop, go_on, came = asyncio.get_running_loop(), asyncio.Event(), asyncio.Event()

        def wait(run: Run) -> None:
            loop.call_soon_threadsafe(came.set)
            asyncio.run_coroutine_threadsafe(go_on.wait(), loop).result(SECONDS)

        encoding.before = wait
        long = asyncio.create_task(encoding.encode(clip(32), 32))
        await asyncio.wait_for(came.wait(), SECONDS)
        long.cancel()
        await asyncio.gather(long, return_exceptions=True)
        await until(lambda: not encoding.pipeline._ready)
        go_on.set()
        await encoding.encode(clip(2, 1), 2)
    assert len(encoding.runs) == 2


async def test_beside_an_engine_a_clip_is_divided_by_what_runs_took(demo: HfEncoderModel) -> None:
    """From one part on, with more of them as the runs before were fast."""
    paces = RunPaces(60.0, 2**20, lambda: True)
    async with running(demo, 2**20, paces) as encoding:
        await encoding.encode(clip(32), 32)
    sizes = [frames_of(run[0]) for run in encoding.runs]
    assert sizes[:2] == [1, 2]
    assert sum(sizes) == 16
    assert len(sizes) < 16


@pytest.mark.models
@pytest.mark.parametrize("arch", ["llava_onevision", "internvl", "smolvlm", "qwen2_5_vl", "video_llama_3"])
async def test_a_towers_memory_does_not_grow_with_a_clips_length(arch: str, tmp_path: Path) -> None:
    transformers.logging.set_verbosity_error()
    model = load_encoder(ModelSpec(id=str(random_model.build(arch, tmp_path)), dtype="Float32"), CPU)
    peaks, batching = [], EncoderBatching(max_work=64, max_items=1)
    for frames in (16, 64):
        async with running(model, batching.max_work) as encoding:
            await encoding.encode(clip(frames), frames)
        peaks.append(max(encoding.peaks))
    assert len(encoding.runs) >= 4
    assert peaks[1] <= 1.01 * peaks[0]
    assert peaks[1] <= tower_memory(model, small_media(), batching).num_bytes


async def test_pooled_frames_go_through_the_tower_before_they_are_averaged(
    tmp_path: Path,
) -> None:
    spec = ModelSpec(id=str(random_model.build("internvl", tmp_path)), dtype="Float32")
    data, features = clip(8), []
    for frames in (1, 2):
        model = load_encoder(spec.model_copy(update={"pooled_video_frames": frames}), CPU)
        async with running(model, 2**20) as encoding:
            features.append((await encoding.encode(data, 8)).tensors["embeddings"])
            assert encoding.pipeline.queued_work == {"video": 0}
    whole, pooled = features
    torch.testing.assert_close(pooled, whole.view(4, 2, -1, whole.shape[1]).mean(1).flatten(0, 1))


async def test_when_one_clip_of_pooled_frames_fails_the_others_are_not_run(tmp_path: Path) -> None:
    spec = ModelSpec(id=str(random_model.build("internvl", tmp_path)), dtype="Float32", pooled_video_frames=4)
    async with running(load_encoder(spec, CPU), 1) as encoding:

        def fail(run: Run) -> None:
            raise ValueError("broken")

        encoding.before = fail
        with pytest.raises(ValueError, match="broken"):
            await encoding.encode(clip(8), 8)
        assert not encoding.pipeline._ready
        runs = len(encoding.runs)
        encoding.before = lambda _: None
        await encoding.encode(clip(8, 1), 8)
    assert runs < 4 * 2
