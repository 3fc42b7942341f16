"""Key frames, scene changes and frames at given seconds: those that FFmpeg's own programs read, at a bounded cost."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import pytest_asyncio
from PIL import Image, ImageDraw

from mmd_api.contract.errors import BadMediaError
from mmd_api.spec.media import MediaPolicy
from mmd_workers.media import decode, frames
from mmd_workers.media.choice import FoundFrame, FoundFrames, SamplingChoice
from mmd_workers.media.decode import decode_video
from mmd_workers.media.frames import find_frames
from mmd_workers.media.medium import MediumInfo
from mmd_workers.media.probe import probe
from mmd_workers.media.sandbox import DecodePool

from .media_samples import number_of, video_bytes

FILES = Path(__file__).with_name("files")
EXPECTED: dict[str, dict[str, Any]] = json.loads((FILES / "expected.json").read_text())["video"]
SCENES = sorted(name for name in EXPECTED if name.startswith("scenes"))


def read(name: str) -> tuple[bytes, MediumInfo]:
    data = (FILES / name).read_bytes()
    return data, probe(data, "video", MediaPolicy())


def indices(found: FoundFrames) -> list[int]:
    return [one.index for one in found.frames]


@pytest.mark.parametrize("name", sorted(set(EXPECTED) - {"packed.mkv", "unpacked.mp4"}))
def test_key_frames_are_those_that_ffprobe_reads(name: str) -> None:
    assert indices(find_frames(*read(name), "keyframes")) == EXPECTED[name]["keys"]


@pytest.mark.parametrize("name", [name for name in EXPECTED if "seconds" in EXPECTED[name]])
def test_a_second_is_the_frame_that_is_shown_then(name: str) -> None:
    data, info = read(name)
    seconds = EXPECTED[name]["seconds"]
    assert indices(find_frames(data, info, timestamps=seconds)) == list(range(len(seconds)))
    between = [(a + b) / 2 for a, b in zip(seconds, [*seconds[1:], info.duration_seconds], strict=True)]
    for index, second in enumerate(between):
        assert indices(find_frames(data, info, timestamps=[second])) == [index]
    assert indices(find_frames(data, info, timestamps=[0, 0, 1e5])) == [0, len(seconds) - 1], "once each"


@pytest.mark.parametrize("name", [name for name in EXPECTED if "seconds" in EXPECTED[name]])
def test_the_nominal_index_of_a_frame_stands_for_its_time(name: str) -> None:
    data, info = read(name)
    seconds = EXPECTED[name]["seconds"]
    for frame in find_frames(data, info, timestamps=seconds).frames:
        assert frame.nominal / info.fps == pytest.approx(seconds[frame.index], abs=0.5 / info.fps + 0.001)
        if "variable" not in name:
            assert frame.nominal == frame.index


@pytest.mark.parametrize("name", SCENES)
def test_a_scene_begins_where_another_picture_does_and_not_with_noise(name: str) -> None:
    data, info = read(name)
    assert indices(find_frames(data, info, "scene_changes")) == [0, 20, 40, 60]
    shown = decode_video(data, info, [0, 19, 20, 39, 40, 59, 60, 79]).frames.astype(int)
    difference = [np.abs(a - b).mean() for a, b in pairwise(shown)]
    assert min(difference[1::2]) > max(difference[::2]), "what is decoded later are these scenes"


def test_frames_of_avi_are_timed_by_its_rate() -> None:
    found = find_frames(*read("scenes.avi"), timestamps=[0.0, 1.95, 2.0, 7.999])
    assert found.frames == tuple(FoundFrame(at, at) for at in (0, 19, 20, 79))


def slides(dark: bool) -> bytes:
    """Ten slides with a few words each, two seconds of each."""
    paper, ink = ((20, 22, 30), (230, 230, 230)) if dark else ((255, 255, 255), (0, 0, 0))

    def draw(number: int, width: int, height: int) -> np.ndarray:
        words = np.random.default_rng(number // 20).integers(97, 123, (6, 9, 6), dtype=np.uint8)
        image = Image.new("RGB", (width, height), paper)
        for row, line in enumerate(words):
            text = " ".join(bytes(word).decode() for word in line)
            ImageDraw.Draw(image).text((30, 40 + 50 * row), text, ink, font_size=22)
        return np.asarray(image)

    return video_bytes(frames=200, fps=10, width=640, height=360, draw=draw)


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_every_slide_is_a_scene_though_most_of_the_paper_stays(dark: bool) -> None:
    data = slides(dark)
    assert indices(find_frames(data, probe(data, "video", MediaPolicy()), "scene_changes")) == list(
        range(0, 200, 20)
    )


def test_movement_is_a_scene_change_now_and_then_only() -> None:
    wide = np.asarray(
        Image.fromarray(np.random.default_rng(1).integers(0, 256, (6, 24, 3), np.uint8)).resize((1200, 96))
    )
    data = video_bytes(frames=100, width=128, height=96, draw=lambda n, w, h: wide[:, 10 * n : 10 * n + w])
    found = indices(find_frames(data, probe(data, "video", MediaPolicy()), "scene_changes"))
    assert 2 <= len(found) <= 34


def test_a_slow_fade_is_a_scene_change_though_no_step_is() -> None:
    data = video_bytes(frames=100, draw=lambda n, w, h: np.full((h, w, 3), 40 + 2 * max(0, n - 60), np.uint8))
    found = indices(find_frames(data, probe(data, "video", MediaPolicy()), "scene_changes"))
    assert found[0] == 0
    assert found[1] > 60
    assert len(found) > 3


def test_looks_are_bounded_and_spread_over_a_long_video(monkeypatch: pytest.MonkeyPatch) -> None:
    data = video_bytes(frames=255, options={"preset": "ultrafast"})
    info = probe(data, "video", MediaPolicy())
    monkeypatch.setattr(frames, "MAX_LOOKS", 5)
    asked: list[list[int]] = []
    deliver = decode.deliver

    def noted(*args: Any, **more: Any) -> None:
        asked.append(sorted(args[3].missing))
        deliver(*args, **more)

    monkeypatch.setattr(decode, "deliver", noted)
    found = indices(find_frames(data, info, "scene_changes"))
    assert asked == [[0, 64, 127, 190, 254]]
    assert set(found) <= set(asked[0])


def test_a_video_too_large_to_decode_is_sampled_at_key_frames(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    data = video_bytes(frames=120, options={"g": "30", "sc_threshold": "0"})
    info = probe(data, "video", MediaPolicy())
    monkeypatch.setattr(frames, "MAX_DECODED_PIXELS", 100 * 64 * 48)
    assert indices(find_frames(data, info, "scene_changes")) == [0, 30, 60, 90]
    monkeypatch.setattr(frames, "MAX_DECODED_PIXELS", 3 * 64 * 48)
    assert indices(find_frames(data, info, "scene_changes")) == [0, 60, 90], "fewer of them"


def test_scenes_of_a_large_video_that_must_be_decoded_whole_are_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    data, info = read("scenes.avi")
    monkeypatch.setattr(frames, "MAX_DECODED_PIXELS", 79 * info.width * info.height)
    assert indices(find_frames(data, info, "scene_changes")) == [0], "its only key frame"
    cut, cut_info = read("edited.mp4")  # whose first frame is none
    monkeypatch.setattr(frames, "MAX_DECODED_PIXELS", 1)
    with pytest.raises(BadMediaError, match=r"has too few key frames .*; use sampling keyframes or uniform"):
        find_frames(cut, cut_info, "scene_changes")


def test_misplaced_frames_are_not_searched_for_beyond_the_bound(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    data = video_bytes(frames=120, options={"g": "30", "sc_threshold": "0"})
    info = probe(data, "video", MediaPolicy())
    whole = indices(find_frames(data, info, "scene_changes"))
    monkeypatch.setattr(decode, "_decode_needed", lambda *_: False)
    assert indices(find_frames(data, info, "scene_changes")) == whole, "within it they are"
    monkeypatch.setattr(frames, "MAX_DECODED_PIXELS", 60 * 64 * 48)
    with pytest.raises(BadMediaError, match="not where its container has them"):
        find_frames(data, info, "scene_changes")


def test_no_more_key_frames_are_found_than_a_resource_can_allow(monkeypatch: pytest.MonkeyPatch) -> None:
    data = video_bytes(frames=60, options={"g": "1"})
    info = probe(data, "video", MediaPolicy())
    assert indices(find_frames(data, info, "keyframes")) == list(range(60))
    monkeypatch.setattr(frames, "MAX_FOUND", 4)
    assert indices(find_frames(data, info, "keyframes")) == [0, 20, 39, 59]


def test_spare_frames_complete_the_found_ones_as_far_apart_as_possible() -> None:
    found = find_frames(*read("scenes-variable.webm"), "keyframes")
    filled = found.filled(found.frames, 6)
    assert [one.index for one in filled] == [0, 16, 30, 47, 60, 79]
    (last,) = (one for one in filled if one.index == 79)
    assert last.nominal == 79
    short = FoundFrames((), (FoundFrame(0, 0), FoundFrame(1, 1)))
    assert short.filled((), 4) == list(short.spare)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def pool() -> AsyncIterator[DecodePool]:
    pool = DecodePool(processes=1, decode_timeout_seconds=60)
    await pool.start()
    yield pool
    await pool.close()


CHOICES = [
    SamplingChoice(sampling="keyframes"),
    SamplingChoice(sampling="scene_changes"),
    SamplingChoice(timestamps=(0.1, 0.2)),
]


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("choice", CHOICES, ids=["keyframes", "scene_changes", "timestamps"])
async def test_the_sandbox_finds_the_same(pool: DecodePool, choice: SamplingChoice) -> None:
    before = pool.process_ids
    for name in EXPECTED:
        data, info = read(name)
        found = await pool.find_frames(data, info, choice)
        assert found == find_frames(data, info, choice.sampling, choice.timestamps), name
        if found.frames:
            clip = await pool.decode_video(data, info, indices(found))
            assert len(clip.frames) == len(found.frames)
    assert pool.process_ids == before


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize(
    "pairs", [[[0, 0], [0, 0]], [[3, 3], [2, 2]], [[80, 80]], [[-1, 0]], [[0]], [[0, 5], [1, 4]], [[True, 0]]]
)
async def test_frames_that_are_not_of_the_video_are_not_believed(
    pairs: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    pool, (data, info) = DecodePool(1, 10), read("scenes.mp4")

    async def taken_over(*_: Any) -> tuple[dict[str, Any], None]:
        return {"frames": pairs, "spare": []}, None

    monkeypatch.setattr(pool, "_run", taken_over)
    with pytest.raises(BadMediaError, match="inconsistent"):
        await pool.find_frames(data, info, CHOICES[0])


@pytest.mark.parametrize("sampling", ["keyframes", "scene_changes"])
def test_a_frame_found_is_the_frame_decoded(sampling: Any) -> None:
    data = video_bytes(frames=90, options={"g": "12", "bf": "3"})
    info = probe(data, "video", MediaPolicy())
    found = indices(find_frames(data, info, sampling))
    assert len(found) > 3
    assert [number_of(one) for one in decode_video(data, info, found).frames] == found


LYING = {
    "every frame of HEVC a key frame": ("hevc.mp4", b"stss", b"free"),
    "every frame of MPEG-4 a key frame": ("mpeg4.mp4", b"stss", b"free"),
    "every frame of AV1 a key frame": ("av1.mp4", b"stss", b"free"),
    "key frames beyond the end": (
        "hevc.mp4",
        b"stss\0\0\0\0\0\0\0\x04\0\0\0\x01",
        b"stss\0\0\0\0\0\0\0\x04\x7f\xff\xff\xff",
    ),
}


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize(("name", "honest", "lie"), LYING.values(), ids=LYING)
@pytest.mark.parametrize("choice", CHOICES[:2], ids=["keyframes", "scene_changes"])
async def test_key_frames_that_are_none_cost_no_more_than_a_decode(
    pool: DecodePool, name: str, honest: bytes, lie: bytes, choice: SamplingChoice
) -> None:
    data = (FILES / name).read_bytes()
    assert honest in data
    data = data.replace(honest, lie)
    info = await pool.probe(data, "video", MediaPolicy())
    found = await pool.find_frames(data, info, choice)
    assert len(found.frames) <= info.num_frames
    assert len(found.spare) == min(info.num_frames, frames.SPARE_FRAMES)
    plain = decode_video((FILES / name).read_bytes(), info, indices(found) or [0]).frames
    clip = await pool.decode_video(data, info, indices(found) or [0])
    assert (clip.frames == plain).all(), "the same pictures, whatever the flags"
