"""What `bench.media` measures, with the demo model and real decode processes."""

from __future__ import annotations

from pathlib import Path

import torch
import transformers

from bench import media
from mmd_api.spec.model import ModelSpec
from mmd_workers.media.sandbox import DecodePool
from mmd_workers.model.encoder import load_encoder
from mmd_workers.model.language import load_language_model

DEMO = ModelSpec(id="builtin/demo", dtype="Float32")
FILES = [
    media.File("image", "image", media._image(64, 48, "JPEG")),
    media.File("video", "video", media._video(64, 48, seconds=1), 4),
    media.File("sound", "audio", media._sound(1)),
]


async def test_every_stage_and_batch_size_of_media_is_timed() -> None:
    decoders = DecodePool(1, 60)
    await decoders.start()
    try:
        encoding = media.Encoding(load_encoder(DEMO, torch.device("cpu")), decoders, repeats=1)
        for file in FILES:
            found, processed = await encoding.stages(file)
            assert set(found["ms"]) == set(media.STAGES)
            assert min(found["ms"].values()) > 0
            assert found["tokens"] > 0
            assert (found["frames"] > 0) == (file.modality == "video")
            times = media.batches(encoding.model, [processed], repeats=1)
            assert min(min(curve.values()) for curve in times.values()) > 0
    finally:
        await decoders.close()


def test_images_of_mixed_sizes_share_a_run_and_clips_are_divided(tmp_path: Path) -> None:
    transformers.logging.set_verbosity_error()
    model = media.random_encoder(media.NATIVE, tmp_path)
    images = media.images_of_mixed_sizes(model)
    assert len({image.shape_key for image in images}) == 1
    assert len({image.num_tokens for image in images}) > 4
    held = media.clip_memory(model)
    assert held["one run"][64] > 10 * held["one run"][4]
    assert held["divided"][64] <= 1.01 * held["divided"][16] <= 1.1 * held["one run"][4]


async def test_a_burst_is_timed_by_the_number_of_servers() -> None:
    model = load_encoder(DEMO, torch.device("cpu"))
    assert await media.burst(model, FILES, decode=2, process=2) > 0


def test_a_merge_is_timed() -> None:
    assert media.merging(load_language_model(DEMO, torch.device("cpu")), repeats=1) > 0
