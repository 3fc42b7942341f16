"""Animated images sent as videos: the pictures that Pillow and FFmpeg compose, at the times that their headers have."""

from __future__ import annotations

import io
import struct
import zlib
from pathlib import Path

import av
import numpy as np
import pytest
from PIL import Image

from mmd_api.contract.errors import BadMediaError
from mmd_api.spec.media import MediaPolicy
from mmd_workers.gateway.intake.file_kind import HEAD_BYTES, kind_of
from mmd_workers.media.containers import sniff
from mmd_workers.media.decode import decode_image, decode_video
from mmd_workers.media.frames import find_frames
from mmd_workers.media.probe import probe
from mmd_workers.media.sandbox import DecodePool

from .hostile_files import chunk, u32
from .media_samples import frame_pixels, image_bytes, number_of, picture

FILES = Path(__file__).with_name("files")
POLICY = MediaPolicy()
FRAMES = 12
FORMATS = ["GIF", "PNG", "WEBP", "AVIF"]
OPTIONS = {"WEBP": {"lossless": True}, "AVIF": {"quality": 100, "speed": 10}}


def animation(fmt: str, durations: list[int] | int = 100, frames: int = FRAMES, **options: object) -> bytes:
    """An animation whose pictures spell their numbers."""
    images = [Image.fromarray(frame_pixels(number)) for number in range(frames)]
    out = io.BytesIO()
    images[0].save(
        out, fmt, save_all=True, append_images=images[1:], duration=durations, **OPTIONS.get(fmt, {}), **options
    )  # fmt: skip
    return out.getvalue()


def numbers(data: bytes, wanted: list[int]) -> list[int]:
    return [number_of(frame) for frame in decode_video(data, probe(data, "video", POLICY), wanted).frames]


@pytest.mark.parametrize("fmt", FORMATS)
def test_an_animation_sent_as_video_has_its_pictures_by_index(fmt: str) -> None:
    data = animation(fmt)
    info = probe(data, "video", POLICY)
    assert (info.modality, info.container, info.width, info.height) == ("video", fmt.lower(), 64, 48)
    assert (info.num_frames, info.fps) == (FRAMES, pytest.approx(10))
    assert info.duration_seconds == pytest.approx(1.2)
    assert not info.has_sound
    for wanted in (list(range(FRAMES)), [0, 5, 11], [11], [7, 7, 3]):
        assert numbers(data, wanted) == wanted


@pytest.mark.parametrize("fmt", FORMATS)
def test_pictures_of_an_animation_are_shown_at_their_own_times(fmt: str) -> None:
    data = animation(fmt, [100, 400, 50, 200], frames=4)
    info = probe(data, "video", POLICY)
    seconds = [0, 0.09, 0.1, 0.49, 0.5, 0.54, 0.55, 9]
    for second, index in zip(seconds, [0, 0, 1, 1, 2, 2, 3, 3], strict=True):
        found = find_frames(data, info, timestamps=[second])
        assert [frame.index for frame in found.frames] == [index], second


@pytest.mark.parametrize("name", ["animated.gif", "animated.png", "animated.avif"])
def test_pictures_of_an_animation_are_those_of_ffmpeg(name: str) -> None:
    data = (FILES / name).read_bytes()
    demuxer = {"gif": "gif", "png": "apng", "avif": "mov"}[name.rpartition(".")[2]]
    with av.open(io.BytesIO(data), format=demuxer) as opened:
        longest = max(opened.streams.video, key=lambda stream: stream.frames)
        shown = list(opened.decode(longest))
    info = probe(data, "video", POLICY)
    assert info.num_frames == len(shown) > 1
    frames = decode_video(data, info, list(range(info.num_frames))).frames
    np.testing.assert_array_equal(frames, [frame.to_ndarray(format="rgb24") for frame in shown])


def test_pictures_of_an_animated_webp_are_those_of_its_source() -> None:
    data = (FILES / "animated.webp").read_bytes()
    info = probe(data, "video", POLICY)
    assert info.num_frames == 2
    shown = decode_video(data, info, [0, 1]).frames
    np.testing.assert_allclose(shown.astype(int), [picture(), 255 - picture()], atol=2)


@pytest.mark.parametrize(
    ("fmt", "disposal"), [("GIF", 0), ("GIF", 1), ("GIF", 2), ("GIF", 3), ("PNG", 0), ("PNG", 1), ("PNG", 2)]
)
def test_parts_of_a_picture_are_drawn_over_what_the_one_before_left(fmt: str, disposal: int) -> None:
    data = animation(fmt, disposal=disposal)
    with av.open(io.BytesIO(data), format={"GIF": "gif", "PNG": "apng"}[fmt]) as opened:
        composed = [number_of(frame.to_ndarray(format="rgb24")) for frame in opened.decode(video=0)]
    assert len(set(composed)) > 1
    assert numbers(data, list(range(FRAMES))) == composed


@pytest.mark.parametrize("fmt", ["GIF", "PNG", "WEBP"])
def test_pictures_without_a_duration_last_a_tenth_of_a_second_as_in_browsers(fmt: str) -> None:
    info = probe(animation(fmt, 0), "video", POLICY)
    assert (info.num_frames, info.fps) == (FRAMES, pytest.approx(10))


def test_the_default_picture_of_an_apng_may_be_no_part_of_its_animation() -> None:
    data = animation("PNG", default_image=True)
    info = probe(data, "video", POLICY)
    assert info.num_frames == FRAMES - 1
    assert numbers(data, [0, 4, 10]) == [1, 5, 11]
    still = probe(data, "image", POLICY)
    assert number_of(decode_image(data, still).pixels) == 0


@pytest.mark.parametrize("fmt", ["PNG", "WEBP"])
def test_an_animation_is_turned_as_its_exif_says(fmt: str) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    data = animation(fmt, frames=3, exif=exif)
    info = probe(data, "video", POLICY)
    assert (info.width, info.height) == (48, 64)
    frame = decode_video(data, info, [2]).frames[0]
    np.testing.assert_array_equal(frame, np.rot90(frame_pixels(2), k=-1))


@pytest.mark.parametrize("brand", [b"hevc", b"msf1"])
def test_a_sequence_of_heic_is_a_video(brand: bytes) -> None:
    film = (FILES / "hevc.mp4").read_bytes()
    data = film[:8] + brand + film[12:]
    assert sniff(data) == "heic"
    info, expected = probe(data, "video", POLICY), probe(film, "video", POLICY)
    assert (info.container, info.num_frames, info.fps) == ("heic", expected.num_frames, expected.fps)
    wanted = [0, 9, info.num_frames - 1]
    np.testing.assert_array_equal(
        decode_video(data, info, wanted).frames, decode_video(film, expected, wanted).frames
    )


@pytest.mark.parametrize("fmt", ["GIF", "PNG", "WEBP", "AVIF"])
def test_an_image_of_one_picture_is_no_video(fmt: str) -> None:
    with pytest.raises(BadMediaError, match=f"declared as video, but the bytes are {fmt.lower()}; use"):
        probe(image_bytes(fmt), "video", POLICY)


@pytest.mark.parametrize("fmt", FORMATS)
def test_an_animation_cut_off_anywhere_is_refused_or_gives_what_is_left(fmt: str) -> None:
    data = animation(fmt)
    for at in range(1, len(data), max(1, len(data) // 40)):
        try:
            info = probe(data[:at], "video", POLICY)
            assert 1 < info.num_frames <= FRAMES
            shown = numbers(data[:at], list(range(info.num_frames)))
        except BadMediaError:
            continue
        assert shown[:-1] == list(range(len(shown) - 1))


def test_an_apng_with_fewer_pictures_than_it_declares_is_refused() -> None:
    data = animation("PNG")
    at = data.index(b"acTL") - 4
    data = data[:at] + chunk(b"acTL", u32(2**31 - 1, 0)) + data[at + 20 :]
    with pytest.raises(BadMediaError, match=r"declares 2147483647 pictures, but has 12; send a complete"):
        probe(data, "video", POLICY)


def test_a_later_picture_of_a_gif_does_not_enlarge_it() -> None:
    data = animation("GIF", frames=2)
    second = data.rindex(b"\x2c\0\0\0\0")
    size = struct.pack("<HH", 65535, 65535)
    with pytest.raises(BadMediaError, match="reaches beyond its 64x48 pixels; re-encode"):
        probe(data[: second + 5] + size + data[second + 9 :], "video", POLICY)


def test_limits_of_a_video_hold_for_an_animation() -> None:
    with pytest.raises(BadMediaError, match=r"video\.maxDurationSeconds"):
        probe(animation("GIF", 60_000), "video", POLICY)
    frame = b"\x2c\0\0\0\0\x01\0\x01\0\0\x02\x02\x4c\x01\0"
    many = b"GIF89a\x01\0\x01\0\x80\0\0\0\0\0\xff\xff\xff" + frame * 150_000 + b";"
    with pytest.raises(BadMediaError, match=r"144001 or more frames, more than the limit of 144000"):
        probe(many, "video", POLICY)
    large = many[:6] + struct.pack("<HH", 10_000, 6_000) + many[10:19] + frame * 2 + b";"
    with pytest.raises(BadMediaError, match=r"10000x6000.*maxPixels"):
        probe(large, "video", POLICY)


async def test_animations_decode_in_the_sandbox() -> None:
    pool = DecodePool(processes=1, decode_timeout_seconds=60)
    await pool.start()
    try:
        for fmt in FORMATS:
            data = animation(fmt)
            info = await pool.probe(data, "video", POLICY)
            assert info == probe(data, "video", POLICY)
            clip = await pool.decode_video(data, info, [0, 11])
            assert [number_of(frame) for frame in clip.frames] == [0, 11]
    finally:
        await pool.close()


def test_an_uploaded_animation_is_an_image_unless_its_content_type_says_video() -> None:
    for fmt in FORMATS:
        head = animation(fmt)[:HEAD_BYTES]
        assert kind_of(head, "", f"a.{fmt.lower()}") == kind_of(head, "", "") == "image"
        assert kind_of(head, f"video/{fmt.lower()}", "") == "video"


def apng(*pictures: tuple[int, int, int, bytes, int, int]) -> bytes:
    """Of 4x4 RGBA pixels. Each picture: left, top, side, its colour, dispose_op, blend_op."""
    header = chunk(b"IHDR", u32(4, 4) + bytes([8, 6, 0, 0, 0])) + chunk(b"acTL", u32(len(pictures), 0))
    out, number = [b"\x89PNG\r\n\x1a\n", header], 0
    for index, (left, top, side, colour, dispose, blend) in enumerate(pictures):
        control = u32(number, side, side, left, top) + struct.pack(">HHBB", 1, 10, dispose, blend)
        pixels = zlib.compress((b"\0" + colour * side) * side)
        body = chunk(b"fdAT", u32(number + 1) + pixels) if index else chunk(b"IDAT", pixels)
        out += [chunk(b"fcTL", control), body]
        number += 2 if index else 1
    return b"".join([*out, chunk(b"IEND", b"")])


def gif(*pictures: tuple[int, int, int, int, int]) -> bytes:
    """Of 4x4 pixels in red, green, blue and white. Each picture: left, top, side, its colour, disposal."""
    colours = b"\xff\0\0\0\xff\0\0\0\xff\xff\xff\xff"
    out = [b"GIF89a", struct.pack("<HHBBB", 4, 4, 0x81, 0, 0), colours]
    for left, top, side, colour, disposal in pictures:
        out.append(b"\x21\xf9\x04" + struct.pack("<BHB", disposal << 2, 10, 0) + b"\0")
        out.append(b"\x2c" + struct.pack("<4HB", left, top, side, side, 0) + b"\x02")
        codes = [code for _ in range(side * side) for code in (4, colour)] + [
            5
        ]  # clear before each: always 3 bits
        bits = sum(code << 3 * place for place, code in enumerate(codes))
        data = bits.to_bytes((3 * len(codes) + 7) // 8, "little")
        out.append(bytes([len(data)]) + data + b"\0")
    return b"".join([*out, b";"])


RED, GREEN, WHITE = b"\xff\0\0\xff", b"\0\xff\0\xff", b"\xff\xff\xff\xff"


@pytest.mark.parametrize(
    ("data", "demuxer"),
    [
        (apng((0, 0, 4, RED, 0, 0), (0, 0, 2, WHITE, 2, 1), (3, 3, 1, GREEN, 0, 1)), "apng"),
        (apng((0, 0, 4, RED, 0, 0), (0, 0, 2, WHITE, 2, 0), (3, 3, 1, GREEN, 0, 1)), "apng"),
        (gif((0, 0, 4, 0, 1), (0, 0, 2, 3, 2), (2, 2, 1, 1, 0), (3, 3, 1, 2, 1)), "gif"),
        (gif((0, 0, 4, 0, 1), (0, 0, 2, 3, 3), (2, 2, 1, 1, 0), (3, 3, 1, 2, 1)), "gif"),
    ],
    ids=["png-over", "png-source", "gif-background", "gif-previous"],
)
def test_what_a_picture_leaves_behind_is_as_its_own_disposal_says(data: bytes, demuxer: str) -> None:
    with av.open(io.BytesIO(data), format=demuxer) as opened:
        shown = [frame.to_ndarray(format="rgba") for frame in opened.decode(video=0)]
    frames = decode_video(data, probe(data, "video", POLICY), list(range(len(shown)))).frames
    for frame, expected in zip(frames, shown, strict=True):
        is_opaque = expected[..., 3] == 255
        np.testing.assert_array_equal(frame[is_opaque], expected[is_opaque][:, :3])
