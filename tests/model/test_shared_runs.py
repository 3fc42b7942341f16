"""Media of any sizes share a run of the tower, and one medium is divided between runs: each feature is what its medium gives alone and whole."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch

from bench import check_models
from mmd_workers.model.encoder import HfEncoderModel
from mmd_workers.model.prompt import Feature, ProcessedMedium
from support.oracles import model_zoo as zoo
from support.oracles import random_model

Checkpoint = Callable[[str], Path]
MULTIMODAL = [arch for arch, modalities in zoo.MODALITIES.items() if modalities]
RELATIVES = (
    "glm4v",
    "llava_next_video",
    "qwen3_vl_moe",
)  # in no other test: they have an adapter for their runs
CASES = [(arch, modality) for arch in MULTIMODAL for modality in zoo.MODALITIES[arch]]
CASES += [(arch, modality) for arch in RELATIVES for modality in ("image", "video")]
OF_ONE_SIZE = ("llava", "paligemma", "gemma3", "video_llava", "voxtral")
OF_ONE_SHAPE = ("mistral3",)  # whose attention has a mask over all patches of a run
WINDOW = 48_000  # samples of 3 s
WITHOUT_WINDOWS = {"qwen2_audio"}  # one window is all that it takes


@pytest.fixture(autouse=True)
def _relatives(monkeypatch: pytest.MonkeyPatch) -> None:
    for arch in RELATIVES:
        monkeypatch.setitem(random_model.ARCHITECTURES, arch, check_models.BUILDERS[arch])


def media(modality: str, arch: str) -> list[zoo.Medium]:
    """Of sizes that become different grids, tiles, frames and windows wherever the architecture knows such."""
    if modality == "image":
        sizes = [(70, 50), (70, 50), (150, 60), (40, 150), (112, 112)]
        return [zoo.image(*size, seed) for seed, size in enumerate(sizes)]
    if modality == "video":
        clips = [(60, 40, 6), (60, 40, 6), (60, 40, 13), (80, 60, 20)]
        return [zoo.video(*clip, 3.0, seed) for seed, clip in enumerate(clips)]
    long = WINDOW if arch in WITHOUT_WINDOWS else 560_000
    return [zoo.audio(samples, seed) for seed, samples in enumerate((12_000, 12_000, 16_000, 36_000, long))]


def processed(served: zoo.Served, medium: zoo.Medium) -> ProcessedMedium:
    assert served.encoder is not None
    (laid,) = served.frontend.layout(zoo.conversation(medium, "tell"), [medium.info]).media
    taken = zoo.decoded(medium, laid.sampling.frame_indices, laid.sampling.num_samples)
    return served.encoder.process(taken, laid)


def in_parts(encoder: HfEncoderModel, medium: ProcessedMedium, at_once: int) -> Feature:
    """Of so many parts at a time."""
    runs = [(first, min(first + at_once, medium.parts)) for first in range(0, medium.parts, at_once)]
    features = [encoder.encode([encoder.part(medium, *run)])[0] for run in runs]
    names = features[0].tensors
    return Feature(medium.modality, {name: torch.cat([f.tensors[name] for f in features]) for name in names})


def assert_equal(ours: Feature, theirs: Feature) -> None:
    assert ours.tensors.keys() == theirs.tensors.keys()
    for name, tensor in ours.tensors.items():
        torch.testing.assert_close(tensor, theirs.tensors[name], rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize(("arch", "modality"), CASES)
def test_a_batch_of_media_gives_what_each_gives_alone(
    arch: str, modality: str, checkpoint: Checkpoint
) -> None:
    served = zoo.serve(checkpoint(arch))
    assert served.encoder is not None
    batch = [processed(served, medium) for medium in media(modality, arch)]
    if arch == "qwen3_omni_moe" and modality == "audio":
        batch = [medium for medium in batch if medium.num_tokens >= 13]  # see below
    if arch in OF_ONE_SHAPE:
        batch = [medium for medium in batch if medium.shape_key == batch[0].shape_key]
    assert len({medium.shape_key for medium in batch}) == 1
    assert len(batch) > 1
    sizes = {medium.num_tokens for medium in batch}
    assert len(sizes) > 1 or arch in (*OF_ONE_SHAPE, *OF_ONE_SIZE)
    together = served.encoder.encode(batch)
    for one, feature in zip(batch, together, strict=True):
        (alone,) = served.encoder.encode([one])
        headers = served.encoder.feature_headers(one.modality, one.num_tokens)
        assert {n: (str(t.dtype)[6:], list(t.shape)) for n, t in feature.tensors.items()} == headers
        assert_equal(feature, alone)
        for tensor in feature.tensors.values():
            assert tensor.is_contiguous()
            assert not tensor.requires_grad
    assert not torch.equal(together[0].tensors["embeddings"], together[1].tensors["embeddings"])


@pytest.mark.parametrize(("arch", "modality"), [case for case in CASES if case[1] != "image"])
def test_a_medium_in_parts_gives_what_it_gives_whole(
    arch: str, modality: str, checkpoint: Checkpoint
) -> None:
    served = zoo.serve(checkpoint(arch))
    assert served.encoder is not None
    for medium in [processed(served, medium) for medium in media(modality, arch)[2:]]:
        assert sum(medium.part_tokens) == medium.num_tokens
        (whole,) = served.encoder.encode([medium])
        for at_once in (1, 3):
            assert_equal(in_parts(served.encoder, medium, at_once), whole)
    assert medium.parts > 1 or arch in WITHOUT_WINDOWS


@pytest.mark.parametrize("arch", ["llava_onevision", "qwen3_vl", "smolvlm"])
def test_parts_of_one_video_share_a_run_with_other_videos(arch: str, checkpoint: Checkpoint) -> None:
    served = zoo.serve(checkpoint(arch))
    assert served.encoder is not None
    short, _, long, _ = (processed(served, medium) for medium in media("video", arch))
    first, rest = served.encoder.part(long, 0, 2), served.encoder.part(long, 2, long.parts)
    (whole,), (alone,) = (served.encoder.encode([medium]) for medium in (long, short))
    begin, other, end = served.encoder.encode([first, short, rest])
    assert_equal(other, alone)
    both = {n: torch.cat([begin.tensors[n], end.tensors[n]]) for n in whole.tensors}
    assert_equal(Feature("video", both), whole)


@pytest.mark.parametrize("arch", ["qwen2_5_omni", "qwen3_omni_moe"])
@pytest.mark.parametrize("rest", [0, 1, 2, 3, 4, 79, 99])
def test_a_last_window_too_short_alone_joins_the_part_before(
    arch: str, rest: int, checkpoint: Checkpoint
) -> None:
    served = zoo.serve(checkpoint(arch))
    assert served.encoder is not None
    frames = 400 + rest
    medium = processed(served, zoo.audio(160 * frames, rest))
    (whole,) = served.encoder.encode([medium])
    assert_equal(in_parts(served.encoder, medium, 1), whole)


def test_padded_sounds_share_a_run_where_padding_changes_nothing(checkpoint: Checkpoint) -> None:
    """Qwen 3 Omni convolves what it pads the last chunk with: one chunk of 1 s or more is padded alone as it is beside others."""
    served = zoo.serve(checkpoint("qwen3_omni_moe"))
    keys = [
        processed(served, zoo.audio(samples)).shape_key for samples in (8000, 8000, 12_000, 16_000, 40_000)
    ]
    assert keys[0] == keys[1]
    assert len({*keys[1:4]}) == 3
    assert keys[3] == keys[4]


def test_media_of_different_modalities_share_no_run(checkpoint: Checkpoint) -> None:
    served = zoo.serve(checkpoint("qwen2_5_vl"))
    assert served.encoder is not None
    batch: Sequence[ProcessedMedium] = [
        processed(served, medium) for medium in (zoo.image(56, 56), zoo.video(56, 56, 4, 3.0))
    ]
    with pytest.raises(ValueError, match="shape_key"):
        served.encoder.encode(batch)
