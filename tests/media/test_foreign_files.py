"""Images and videos made by other programs than the libraries that decode them here; files/README.md says how."""

from __future__ import annotations

from pathlib import Path

import av
import numpy as np
import pytest

from mmd_api.contract.errors import BadMediaError
from mmd_api.spec.media import MediaPolicy
from mmd_workers.media.containers import sniff
from mmd_workers.media.decode import decode_image, decode_video
from mmd_workers.media.probe import probe
from mmd_workers.media.sandbox import DecodePool

FILES = Path(__file__).with_name("files")
POLICY = MediaPolicy()
IMAGES = ["corners.avif", "corners.heic", "turned.avif", "animated.avif"]
VIDEOS = ["hevc.mp4", "hevc.mkv", "av1.mp4", "av1.webm"]


def read(name: str) -> bytes:
    return (FILES / name).read_bytes()


def corners(pixels: np.ndarray) -> str:
    """Colours of the four quadrants, row by row."""
    height, width, _ = pixels.shape
    names = {(1, 0, 0): "r", (0, 1, 0): "g", (0, 0, 1): "b", (1, 1, 1): "w"}
    spots = [(y, x) for y in (height // 4, 3 * height // 4) for x in (width // 4, 3 * width // 4)]
    return "".join(names[tuple(int(v > 128) for v in pixels[spot])] for spot in spots)


@pytest.mark.parametrize("name", ["corners.avif", "corners.heic"])
def test_avif_and_heic_are_images_with_the_pixels_of_their_source(name: str) -> None:
    info = probe(read(name), "image", POLICY)
    assert (info.container, info.width, info.height) == (name.split(".")[1], 64, 48)
    assert corners(decode_image(read(name), info).pixels) == "rgbw"


def test_an_avif_that_is_turned_is_measured_and_decoded_as_shown() -> None:
    info = probe(read("turned.avif"), "image", POLICY)
    assert (info.width, info.height) == (48, 64)
    assert corners(decode_image(read("turned.avif"), info).pixels) == "brwg"  # a quarter turn clockwise


def test_of_an_animated_avif_the_first_frame_counts_as_of_a_gif() -> None:
    info = probe(read("animated.avif"), "image", POLICY)
    assert decode_image(read("animated.avif"), info).pixels.shape == (48, 64, 3)


@pytest.mark.parametrize("name", IMAGES)
def test_an_image_that_is_sent_as_a_video_is_refused_by_the_name_of_its_format(name: str) -> None:
    with pytest.raises(BadMediaError, match=f"declared as video, but the bytes are {name.split('.')[1]}"):
        probe(read(name), "video", POLICY)


@pytest.mark.parametrize("name", ["corners.avif", "corners.heic"])
@pytest.mark.parametrize("part", [40, 200, 300])
def test_an_image_that_is_cut_off_is_refused(name: str, part: int) -> None:
    with pytest.raises(BadMediaError, match=r"send a complete"):
        decode_image(read(name)[:part], probe(read(name)[:part], "image", POLICY))


def test_brands_decide_where_the_major_one_names_no_codec() -> None:
    box = b"\0\0\0\x1cftypmif1\0\0\0\0mif1%smiaf"
    assert sniff(box % b"avif") == "avif"
    assert sniff(box % b"heic") == "heic"
    assert sniff(b"\0\0\0\x1cftypisom\0\0\0\0isomiso2avc1") == "mp4"


@pytest.mark.parametrize("name", VIDEOS)
def test_hevc_and_av1_have_the_frames_of_a_plain_decode_one_by_one_and_together(name: str) -> None:
    data = read(name)
    with av.open(str(FILES / name)) as opened:
        expected = [frame.to_ndarray(format="rgb24") for frame in opened.decode(video=0)]
    assert len(expected) == 20
    info = probe(data, "video", POLICY)
    assert (info.width, info.height, info.num_frames, info.fps) == (64, 48, 20, pytest.approx(10))
    assert (decode_video(data, info, list(range(20))).frames == np.stack(expected)).all()
    for index in (0, 3, 6, 7, 9, 13, 16, 19):
        assert (decode_video(data, info, [index]).frames[0] == expected[index]).all(), index


@pytest.mark.parametrize("name", VIDEOS)
def test_frames_of_foreign_videos_show_what_was_drawn(name: str) -> None:
    """testsrc counts seconds and moves: later frames differ from the first by more than coding noise."""
    info = probe(read(name), "video", POLICY)
    frames = decode_video(read(name), info, [0, 19]).frames.astype(int)
    assert np.abs(frames[0] - frames[1]).max() > 100


async def test_foreign_files_decode_in_the_sandbox() -> None:
    pool = DecodePool(processes=1, decode_timeout_seconds=60)
    await pool.start()
    first = pool.process_ids
    try:
        for name in IMAGES:
            info = await pool.probe(read(name), "image", POLICY)
            image = await pool.decode_image(read(name), info)
            assert (image.pixels == decode_image(read(name), info).pixels).all(), name
        for name in VIDEOS:
            info = await pool.probe(read(name), "video", POLICY)
            clip = await pool.decode_video(read(name), info, [2, 17])
            assert (clip.frames == decode_video(read(name), info, [2, 17]).frames).all(), name
        assert pool.process_ids == first
    finally:
        await pool.close()
