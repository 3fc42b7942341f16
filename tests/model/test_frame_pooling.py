"""Groups of frames whose embeddings are averaged: which frames, how many tokens, and that it is the mean of what the tower makes of each."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from bench import check_models
from mmd_api.contract.errors import UnsupportedModelError
from mmd_api.spec.media import MediaPolicy
from mmd_api.spec.model import ModelSpec
from mmd_workers.media.choice import SamplingChoice
from mmd_workers.model import frame_pooling
from mmd_workers.model.encoder import HfEncoderModel, load_encoder
from mmd_workers.model.frontend import load_frontend
from mmd_workers.model.prompt import Feature, MediumLayout, SamplingPlan
from support.oracles import model_zoo as zoo
from support.oracles import random_model

Checkpoint = Callable[[str], Path]
SINGLE_FRAMES = ("internvl", "llava_next_video", "llava_onevision", "smolvlm", "video_llava")
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _llava_next_video(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(
        random_model.ARCHITECTURES, "llava_next_video", check_models.BUILDERS["llava_next_video"]
    )


def encoder(folder: Path, frames: int) -> HfEncoderModel:
    return load_encoder(ModelSpec(id=str(folder), dtype="Float32", pooled_video_frames=frames), CPU)


def laid_out(model: HfEncoderModel, film: zoo.Medium, choice: SamplingChoice) -> MediumLayout:
    frontend = model.frontend(MediaPolicy())
    (laid,) = frontend.layout(zoo.conversation(film, "tell"), [film.info], choices=[choice]).media
    return laid


def feature(model: HfEncoderModel, film: zoo.Medium, laid: MediumLayout) -> Feature:
    taken = zoo.decoded(film, laid.sampling.frame_indices, 0)
    clips = [model.process(clip, laid) for clip in frame_pooling.clips(taken, laid.sampling)]
    mean = frame_pooling.Mean()
    *others, last = model.encode(clips)
    for one in others:
        mean.add(one)
    return mean.of_all(last)


@pytest.mark.parametrize("arch", SINGLE_FRAMES)
def test_a_feature_is_the_mean_of_each_group_of_frames(arch: str, checkpoint: Checkpoint) -> None:
    film, choice = zoo.video(60, 40, 12, 3.0), SamplingChoice(num_frames=8)
    plain, grouped = encoder(checkpoint(arch), 1), encoder(checkpoint(arch), 4)
    before, laid = (laid_out(model, film, choice) for model in (plain, grouped))
    assert laid.sampling.frame_indices == before.sampling.frame_indices
    assert len(laid.sampling.timed_indices) == 2
    assert (laid.work, laid.host_bytes) == (before.work, before.host_bytes)
    rows = feature(plain, film, before).tensors["embeddings"]
    made = feature(grouped, film, laid).tensors["embeddings"]
    closing = rows.shape[0] % 8  # a row that closes a video is none of a frame
    frames = rows[: rows.shape[0] - closing].view(2, 4, -1, rows.shape[1])
    expected = torch.cat([frames.mean(1).flatten(0, 1), rows[rows.shape[0] - closing :]])
    torch.testing.assert_close(made, expected)
    assert laid.num_tokens == made.shape[0] < before.num_tokens / 3


def test_frames_for_the_tower_match_the_times_for_the_model(checkpoint: Checkpoint) -> None:
    film = zoo.video(60, 40, 12, 3.0)
    model = encoder(checkpoint("smolvlm"), 2)
    laid = laid_out(model, film, SamplingChoice(num_frames=6))
    first, second = frame_pooling.clips(zoo.decoded(film, laid.sampling.frame_indices, 0), laid.sampling)
    assert second.indices == laid.sampling.timed_indices  # type: ignore[union-attr]
    assert sorted([*first.indices, *second.indices]) == laid.sampling.frame_indices  # type: ignore[union-attr]


@pytest.mark.parametrize("arch", ["qwen2_5_vl", "gemma3", "voxtral", "llama"])
def test_a_model_that_does_not_read_single_frames_refuses_pooling(arch: str, checkpoint: Checkpoint) -> None:
    spec = ModelSpec(id=str(checkpoint(arch)), pooled_video_frames=2)
    with pytest.raises(UnsupportedModelError, match=r"spec\.model\.pooledVideoFrames: .*; remove it"):
        load_frontend(spec, MediaPolicy())


@given(st.integers(1, 70), st.integers(2, 16), st.booleans())
def test_groups_are_whole_in_order_and_leave_out_fewer_than_one(
    count: int, frames: int, nominal: bool
) -> None:
    indices = list(range(0, 3 * count, 3))
    times = [index + 1 for index in indices] if nominal else []
    plan = frame_pooling.grouped(SamplingPlan(frame_indices=indices, nominal_indices=times), frames)
    kept = plan.frame_indices
    assert len(kept) % frames == 0
    assert kept == sorted(kept)
    assert set(kept) <= set(indices)
    assert max(frames, count - frames + 1) <= len(kept) < count + frames
    assert plan.nominal_indices == [index + 1 for index in kept] * nominal
    assert len(plan.timed_indices) == len(kept) // frames


@pytest.mark.parametrize(("most", "frames"), [(1, 3), (3, 3), (4, 3), (7, 6)])
def test_a_maximum_of_frames_holds_before_they_are_averaged(
    checkpoint: Checkpoint, most: int, frames: int
) -> None:
    model = encoder(checkpoint("llava_onevision"), 3)
    laid = laid_out(model, zoo.video(60, 40, 12, 3.0), SamplingChoice(max_frames=most))
    assert len(laid.sampling.frame_indices) == frames
