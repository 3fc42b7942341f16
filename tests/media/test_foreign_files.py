"""Images, videos and sounds made by other programs than the libraries that decode them here, compared with what their own programs read;
files/README.md says how.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest
from transformers.image_utils import load_image

from mmd_api.contract.errors import BadMediaError
from mmd_api.spec.media import MediaPolicy
from mmd_workers.media.containers import sniff
from mmd_workers.media.decode import decode_audio, decode_image, decode_video
from mmd_workers.media.probe import probe
from mmd_workers.media.sandbox import DecodePool

FILES = Path(__file__).with_name("files")
POLICY = MediaPolicy()
EXPECTED: dict[str, dict[str, Any]] = json.loads((FILES / "expected.json").read_text())
IMAGES, VIDEOS, SOUNDS = (sorted(EXPECTED[modality]) for modality in ("image", "video", "audio"))
COMPRESSED_WITH_LOSS = {"jpg", "avif", "heic"}
SIXTEEN_BITS_OF_GREY = {"grey16.png", "grey16.tiff"}
SITED = {"ten-bit.mp4", "ten-bit.mkv"}
"""Whose chroma FFmpeg 8 puts where it belongs between pixels, and FFmpeg 5 does not."""
BRIGHTNESS = np.array([0.299, 0.587, 0.114])
LOSSLESS_SOUND = {name for name in SOUNDS if name.endswith((".wav", ".flac", ".w64", ".caf", ".au"))} | {
    "lossless.m4a"
}
LOSSLESS_SOUND -= {"adpcm.wav", "ms-adpcm.wav", "ima4.caf", "gsm.wav"}


def read(name: str) -> bytes:
    return (FILES / name).read_bytes()


def corners(pixels: np.ndarray) -> str:
    """Colours of the four quadrants, row by row."""
    height, width, _ = pixels.shape
    names = {(1, 0, 0): "r", (0, 1, 0): "g", (0, 0, 1): "b", (1, 1, 1): "w"}
    spots = [(y, x) for y in (height // 4, 3 * height // 4) for x in (width // 4, 3 * width // 4)]
    return "".join(names[tuple(int(v > 128) for v in pixels[spot])] for spot in spots)


def cells(pixels: np.ndarray) -> np.ndarray:
    """Mean colours of 4 x 3 cells, [12, 3]."""
    rows = (np.array_split(row, 4, axis=1) for row in np.array_split(pixels, 3, axis=0))
    return np.array([cell.mean((0, 1)) for row in rows for cell in row])


def suffix(name: str) -> str:
    return name.rpartition(".")[2]


@pytest.mark.parametrize("name", IMAGES)
def test_an_image_has_the_size_and_colours_its_own_program_reads(name: str) -> None:
    expected = EXPECTED["image"][name]
    info = probe(read(name), "image", POLICY)
    assert [info.width, info.height] == expected["size"]
    tolerance = 3 if suffix(name) in COMPRESSED_WITH_LOSS else 2
    np.testing.assert_allclose(
        cells(decode_image(read(name), info).pixels), expected["cells"], atol=tolerance
    )


@pytest.mark.parametrize("name", sorted(set(IMAGES) - SIXTEEN_BITS_OF_GREY))
def test_an_image_is_what_transformers_loads(name: str) -> None:
    loaded = np.asarray(load_image(str(FILES / name)))
    np.testing.assert_array_equal(decode_image(read(name), probe(read(name), "image", POLICY)).pixels, loaded)


@pytest.mark.parametrize("name", sorted(SIXTEEN_BITS_OF_GREY))
def test_grey_of_16_bits_keeps_its_upper_8_where_transformers_has_white(name: str) -> None:
    pixels = decode_image(read(name), probe(read(name), "image", POLICY)).pixels
    loaded = np.asarray(load_image(str(FILES / name)))
    assert (loaded[1:-1] == 255).mean() > 0.9
    assert len(np.unique(pixels)) >= pixels.shape[0] - 1
    assert (np.diff(pixels[:, 0, 0].astype(int)) >= 0).all()


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


@pytest.mark.parametrize("name", [name for name in IMAGES if not name.startswith("animated")])
def test_refusing_an_image_sent_as_video_names_its_format(name: str) -> None:
    format_ = suffix(name).replace("jpg", "jpeg")
    with pytest.raises(BadMediaError, match=f"declared as video, but the bytes are {format_}"):
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


def plain_decode(name: str) -> list[np.ndarray]:
    """All frames, as FFmpeg shows them from the first to the last."""
    with av.open(str(FILES / name)) as opened:
        return [frame.to_ndarray(format="rgb24") for frame in opened.decode(video=0)]


@pytest.mark.parametrize("name", VIDEOS)
def test_a_video_has_the_frames_and_the_colours_that_ffmpeg_reads(name: str) -> None:
    expected = EXPECTED["video"][name]
    info = probe(read(name), "video", POLICY)
    assert ([info.width, info.height], info.num_frames) == (expected["size"], expected["frames"])
    for number, colours in expected["cells"].items():
        ours, theirs = cells(decode_video(read(name), info, [int(number)]).frames[0]), np.array(colours)
        if name in SITED:
            ours, theirs = ours @ BRIGHTNESS, theirs @ BRIGHTNESS
        np.testing.assert_allclose(ours, theirs, atol=2, err_msg=f"frame {number}")


@pytest.mark.parametrize("name", VIDEOS)
def test_frames_are_those_of_a_plain_decode_one_by_one_and_together(name: str) -> None:
    data = read(name)
    info = probe(data, "video", POLICY)
    together = decode_video(data, info, list(range(info.num_frames))).frames
    if "turned" not in name:
        assert (together == np.stack(plain_decode(name))).all()
    for index in range(info.num_frames):
        assert (decode_video(data, info, [index]).frames[0] == together[index]).all(), index


@pytest.mark.parametrize("name", SOUNDS)
def test_a_sound_has_the_samples_that_ffmpeg_reads(name: str) -> None:
    expected = EXPECTED["audio"][name]
    info = probe(read(name), "audio", POLICY)
    assert info.sample_rate_hz == expected["rate"]
    rounded = (
        info.sample_rate_hz // 1000 if suffix(name) in ("m4a", "mp4") else 0
    )  # its edit list may count milliseconds
    assert 0 <= info.num_samples - expected["samples"] <= rounded
    waveform = decode_audio(read(name), info, info.sample_rate_hz, info.num_samples).waveform
    at = np.linspace(0, expected["samples"] - 1, len(expected["points"])).astype(int)
    tolerance = 1.01 / 32768 if name in LOSSLESS_SOUND else 0.004
    np.testing.assert_allclose(waveform[at], np.array(expected["points"]) / 32768, atol=tolerance)
    assert np.abs(waveform).max() > 0.03


async def test_foreign_files_decode_in_the_sandbox() -> None:
    pool = DecodePool(processes=1, decode_timeout_seconds=60)
    await pool.start()
    first = pool.process_ids
    try:
        for name in IMAGES:
            info = await pool.probe(read(name), "image", POLICY)
            assert info == probe(read(name), "image", POLICY)
            image = await pool.decode_image(read(name), info)
            assert (image.pixels == decode_image(read(name), info).pixels).all(), name
        for name in VIDEOS:
            info = await pool.probe(read(name), "video", POLICY)
            assert info == probe(read(name), "video", POLICY)
            wanted = [0, info.num_frames - 1]
            clip = await pool.decode_video(read(name), info, wanted)
            assert (clip.frames == decode_video(read(name), info, wanted).frames).all(), name
        for name in SOUNDS:
            info = await pool.probe(read(name), "audio", POLICY)
            assert info == probe(read(name), "audio", POLICY)
            heard = await pool.decode_audio(read(name), info, 16_000, 16_000)
            assert (heard.waveform == decode_audio(read(name), info, 16_000, 16_000).waveform).all(), name
        assert pool.process_ids == first
    finally:
        await pool.close()
