"""What an image says of itself besides its pixels: orientation behind them, grey of other depths, white that is zero, premultiplied colours;
and where in an H.264 recording a gradual refresh ends.
"""

from __future__ import annotations

import io
import struct
import zlib

import numpy as np
import pytest
from PIL import Image, ImageOps, PngImagePlugin

from mmd_api.contract.errors import BadMediaError
from mmd_api.spec.media import MediaPolicy
from mmd_workers.media.containers import MAX_DESCRIBING_CHUNKS, _recovery_frames
from mmd_workers.media.decode import decode_image
from mmd_workers.media.probe import probe

from .media_samples import image_bytes

POLICY = MediaPolicy()
WHITE_IS_ZERO, BITS, PHOTOMETRIC = 0, 258, 262


def decoded(data: bytes) -> np.ndarray:
    return decode_image(data, probe(data, "image", POLICY)).pixels


@pytest.mark.parametrize("frames", [1, 2, 3, 5])
def test_an_animated_png_is_turned_as_its_exif_says(frames: int) -> None:
    pictures = [Image.fromarray(np.full((4, 6, 3), 40 * number, np.uint8)) for number in range(frames)]
    exif, file = Image.Exif(), io.BytesIO()
    exif[0x0112] = 6
    pictures[0].save(file, "PNG", save_all=True, append_images=pictures[1:], exif=exif, duration=20)
    with Image.open(io.BytesIO(file.getvalue())) as expected:
        turned = np.asarray(ImageOps.exif_transpose(expected).convert("RGB"))
    assert turned.shape == (6, 4, 3)
    assert np.array_equal(decoded(file.getvalue()), turned)


XMP = b'<x:xmpmeta xmlns:x="adobe:ns:meta/"><rdf:Description tiff:Orientation="6"/></x:xmpmeta>'


def raw_profile(zipped: bool) -> PngImagePlugin.PngInfo:
    """EXIF as older releases of ImageMagick write it into a PNG."""
    exif, texts = Image.Exif(), PngImagePlugin.PngInfo()
    exif[0x0112] = 6
    body = exif.tobytes()
    texts.add_text("Raw profile type exif", f"\nexif\n{len(body):8d}\n{body.hex()}\n", zip=zipped)
    return texts


def exif_behind_pixels() -> bytes:
    data = image_bytes("PNG", orientation=6)
    at, end = data.index(b"eXIf") - 4, data.index(b"IEND") - 4
    after = at + 12 + int.from_bytes(data[at : at + 4], "big")
    return data[:at] + data[after:end] + data[at:after] + data[end:]


@pytest.mark.parametrize(
    "data",
    [
        pytest.param(image_bytes("JPEG", xmp=XMP), id="XMP of JPEG"),
        pytest.param(image_bytes("WEBP", xmp=XMP, lossless=True), id="XMP of WebP"),
        pytest.param(image_bytes("PNG", pnginfo=raw_profile(False)), id="raw profile"),
        pytest.param(image_bytes("PNG", pnginfo=raw_profile(True)), id="compressed raw profile"),
        pytest.param(exif_behind_pixels(), id="EXIF behind the pixels"),
    ],
)
def test_an_image_is_turned_wherever_its_orientation_is(data: bytes) -> None:
    info = probe(data, "image", POLICY)
    with Image.open(io.BytesIO(data)) as stored:
        expected = np.rot90(np.asarray(stored.convert("RGB")), k=-1)
    assert (info.width, info.height) == (48, 64)
    assert np.array_equal(decoded(data), expected)


def test_grey_of_16_bits_with_a_transparent_value_keeps_its_upper_8() -> None:
    grey, file = np.linspace(0, 65535, 256).astype(np.uint16)[None].repeat(4, 0), io.BytesIO()
    Image.fromarray(grey).save(file, "PNG", transparency=257)
    assert np.array_equal(decoded(file.getvalue())[..., 0], grey >> 8)


def test_endless_png_texts_are_not_all_read_and_hide_no_exif() -> None:
    file, exif = io.BytesIO(), Image.Exif()
    exif[0x0112] = 6
    Image.new("RGB", (4, 6)).save(file, "PNG", exif=exif)
    chunk = b"tEXta\0b\0"
    data, text = file.getvalue(), struct.pack(">I", 4) + chunk + struct.pack(">I", zlib.crc32(chunk))
    end = data.rindex(b"IEND") - 4
    many = data[:end] + text * (4 * MAX_DESCRIBING_CHUNKS) + data[end:]
    assert decoded(many).shape == (4, 6, 3)


def test_the_preview_of_a_camera_raw_file_is_not_taken_for_its_picture() -> None:
    preview = image_bytes("TIFF", tiffinfo={254: 1, 330: 8})
    with pytest.raises(
        BadMediaError, match="the first page of the tiff is a preview, as in camera raw files; convert"
    ):
        probe(preview, "image", POLICY)
    assert probe(image_bytes("TIFF", tiffinfo={254: 1}), "image", POLICY).width == 64


def tiff(width: int, height: int, pixels: bytes, **tags: int) -> bytes:
    """Grey, uncompressed, one strip."""
    known = {
        256: width,
        257: height,
        BITS: 16,
        259: 1,
        PHOTOMETRIC: 1,
        273: 1024,
        277: 1,
        278: height,
        279: len(pixels),
    }
    known |= {int(name.removeprefix("tag")): value for name, value in tags.items()}
    entries = b"".join(struct.pack("<HHII", tag, 3, 1, value) for tag, value in sorted(known.items()))
    head = b"II*\0" + struct.pack("<IH", 8, len(known)) + entries + bytes(4)
    return head.ljust(1024, b"\0") + pixels


@pytest.mark.parametrize(
    ("bits", "pixels", "photometric", "expected"),
    [
        pytest.param(12, b"\xff" * 18, 1, 255, id="12 bits, white"),
        pytest.param(12, bytes(18), 1, 0, id="12 bits, black"),
        pytest.param(16, b"\x00\x80" * 12, 1, 128, id="16 bits, grey"),
        pytest.param(16, bytes(24), WHITE_IS_ZERO, 255, id="16 bits, 0 is white"),
        pytest.param(16, b"\xff" * 24, WHITE_IS_ZERO, 0, id="16 bits, most is black"),
        pytest.param(8, bytes(12), WHITE_IS_ZERO, 255, id="8 bits, 0 is white"),
    ],
)
def test_grey_of_a_tiff_is_as_bright_as_it_is_meant(
    bits: int, pixels: bytes, photometric: int, expected: int
) -> None:
    data = tiff(4, 3, pixels, **{f"tag{BITS}": bits, f"tag{PHOTOMETRIC}": photometric})
    assert np.unique(decoded(data)).tolist() == [expected]


def test_an_image_with_premultiplied_colours_is_what_transformers_loads() -> None:
    file = io.BytesIO()
    Image.new("RGBA", (64, 64), (200, 0, 0, 128)).convert("RGBa").save(file, "HEIF")
    with Image.open(io.BytesIO(file.getvalue())) as opened:
        expected = np.asarray(opened.convert("RGB"))
    assert np.array_equal(decoded(file.getvalue()), expected)


RECOVERY = bytes([6, 1, 0b00010010])  # a message of type 6 and size 1: Exp-Golomb 7, then other bits
FILLER = bytes([5, 24]) + bytes(range(1, 25))


@pytest.mark.parametrize(
    ("messages", "frames"),
    [
        pytest.param(RECOVERY, 8, id="alone"),
        pytest.param(FILLER + RECOVERY, 8, id="behind another message"),
        pytest.param(bytes([255, 1, 2, 9, 9]) + RECOVERY, 8, id="behind one of a type beyond 255"),
        pytest.param(bytes([5, 4, 0, 0, 3, 1, 7]) + RECOVERY, 8, id="behind one with an emulated start"),
        pytest.param(FILLER, 0, id="none"),
        pytest.param(bytes([5, 255]), 0, id="cut off"),
        pytest.param(b"\xff" * 40, 0, id="a type without end"),
    ],
)
def test_a_recordings_recovery_point_is_found_wherever_its_unit_has_it(messages: bytes, frames: int) -> None:
    assert _recovery_frames([bytes([0x67, 1, 2]), bytes([6]) + messages]) == frames
