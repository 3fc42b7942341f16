"""Files made to mislead, to grow or to last: each gets what it holds, or an error with a remedy, from a decode process that lives on."""

from __future__ import annotations

import io
import re
import struct
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from functools import cache

import av
import numpy as np
import pytest
import pytest_asyncio
from PIL import Image

from mmd_api.contract.errors import BadMediaError
from mmd_api.contract.pools import Modality
from mmd_workers.media.medium import MediumInfo
from mmd_workers.media.sandbox import DecodePool
from support.serving.mutations import FAULTS, check, opened, originals

from .hostile_files import (
    CHAPTER,
    CUE,
    FONT,
    HUGE,
    LAUGHS,
    LOOP,
    MIB,
    TAG,
    box,
    chunk,
    compressed_header,
    element,
    exif,
    file,
    filled,
    flac,
    heif_grid,
    jpeg_of_hidden_scans,
    jpeg_of_scans,
    jpeg_with,
    jpeg_with_profile,
    matroska_with,
    nested,
    opus,
    patched,
    pcm,
    png,
    put,
    saved,
    subtitle_track,
    tiff,
    u32,
    wav,
    webp,
    webp_animation,
    with_cover,
    with_subtitles,
    zeros,
)
from .layouts import parts
from .media_samples import audio_bytes, image_bytes, png_claiming, video_bytes

pytestmark = pytest.mark.asyncio(loop_scope="module")
EVEN_CUTS = 8
CUTS_AT_PARTS = 60
FILES_CUT_ALIKE = 2


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def pool() -> AsyncIterator[DecodePool]:
    pool = DecodePool(processes=1, decode_timeout_seconds=60, memory_bytes=1024 * MIB)
    await pool.start()
    yield pool
    await pool.close()


async def sent(pool: DecodePool, data: bytes, modality: Modality) -> MediumInfo | str:
    """What is known of a medium that was decoded as promised, or why it was refused, by a process that lives on."""
    before = pool.process_ids
    try:
        result: MediumInfo | str = await check(pool, data, modality)
    except BadMediaError as error:
        result = error.message
        assert not FAULTS.search(result)
        assert "; " in result, f"no remedy: {result}"
    assert pool.process_ids == before
    held = [link for pid in before for link in opened(pid) if "mmd-media" in link]
    assert not held, "the decode process still has the medium"
    return result


GIF_FRAME = b"\x2c\0\0\0\0" + struct.pack("<HH", 65535, 65535) + b"\0\x02\x02\x4c\x01\0\x3b"
REFUSED: dict[str, tuple[Modality, Callable[[], bytes], str]] = {
    "png of 0 x 0": ("image", lambda: png_claiming(0, 0), "header cannot be read"),
    "png of 2^31 - 1 pixels a side": ("image", lambda: png_claiming(2**31 - 1, 2**31 - 1), "maxPixels"),
    "tiff of 2^32 - 1 pixels a side": ("image", lambda: tiff((256, 4, 1, 2**32 - 1), (257, 4, 1, 2**32 - 1)), "maxPixels"),
    "tiff with 65,535 samples a pixel": ("image", lambda: tiff((277, 3, 1, 65535)), "header cannot be read"),
    "tiff of 32-bit floats": ("image", lambda: tiff((258, 3, 1, 32), (339, 3, 1, 3), (279, 4, 1, 48), data=bytes(48)), "8 or 16 bits"),
    "tiff with strips beyond its end": ("image", lambda: tiff((273, 4, 1, 2**32 - 2)), "cannot be decoded"),
    "tiff with a fraction for the place of its strip": ("image", lambda: tiff((273, 5, 1, 1024), data=struct.pack("<II", 7, 2) + bytes(8)), "header cannot be read|cannot be decoded"),
    "tiff without a size": ("image", lambda: b"II*\0\x08\0\0\0\0\0\0\0\0\0", "header cannot be read"),
    "tiff with tiles of 2^32 pixels": ("image", lambda: tiff((322, 4, 1, 65536), (323, 4, 1, 65536), (324, 4, 1, 1024), (325, 4, 1, 2**32 - 1), (259, 3, 1, 8), data=zeros()), "image"),
    "bigtiff with 2^62 entries": ("image", lambda: b"II+\0\x08\0\0\0" + struct.pack("<QQ", 16, 2**62) + bytes(64), "header cannot be read"),
    "gif of 65,535 pixels a side": ("image", lambda: b"GIF89a" + struct.pack("<HH", 65535, 65535) + b"\0\0\0" + GIF_FRAME, "maxPixels"),
    "gif with a frame larger than itself": ("image", lambda: b"GIF89a" + struct.pack("<HH", 1, 1) + b"\x80\0\0\0\0\0\xff\xff\xff" + GIF_FRAME, "maxPixels"),
    "bmp of 2^31 - 1 pixels a side": ("image", lambda: b"BM" + bytes(8) + struct.pack("<IIiiHHI", 54, 40, 2**31 - 1, -(2**31) + 1, 1, 24, 0) + bytes(60), "maxPixels"),
    "jpeg of 65,535 pixels a side": ("image", lambda: re.sub(rb"\xff\xc0\x00\x11\x08....", b"\xff\xc0\x00\x11\x08\xff\xff\xff\xff", image_bytes("JPEG"), count=1, flags=re.DOTALL), "maxPixels"),
    "avif that claims 60,000 pixels a side": ("image", lambda: patched(file("corners.avif"), b"ispe", 4, u32(60_000, 60_000)), "avif|maxPixels"),
    "heic that claims 60,000 pixels a side": ("image", lambda: patched(file("corners.heic"), b"ispe", 4, u32(60_000, 60_000)), "heic|maxPixels"),
    "mp4 of 10^6 frames a second": ("video", lambda: patched(patched(video_bytes(options={"bf": "0"}), b"mdhd", 12, u32(10**6)), b"stts", 8, u32(60, 1)), "frame rate"),
    "mp4 that claims 2^31 frames": ("video", lambda: patched(video_bytes(), b"stsz", 8, u32(2**31)), "video|mp4"),
    "mp4 that claims a day": ("video", lambda: patched(video_bytes(options={"bf": "0"}), b"stts", 8, u32(60, 2**30)), "maxDurationSeconds|truncated"),
    "wav without channels": ("audio", lambda: wav(pcm(channels=0)), "audio|wav"),
    "wav of no hertz": ("audio", lambda: wav(pcm(rate=0)), "audio|wav"),
    "wav of four gigahertz": ("audio", lambda: wav(pcm(rate=4 * 10**9)), "sample rate|cannot be read"),
    "wav of no bits": ("audio", lambda: wav(pcm(bits=0, align=0)), "audio|wav"),
    "wav of an unknown codec": ("audio", lambda: wav(pcm(tag=0x7777)), "no audio stream|audio"),
    "wav that lacks most of its samples": ("audio", lambda: wav(pcm(), declared=10**6), "truncated.*bytes"),
    "flac that claims 2^36 - 1 samples": ("audio", lambda: patched(audio_bytes("flac", "s16", "flac"), b"fLaC", 17, b"\xff" * 5), "maxDurationSeconds"),
    "amr without a frame": ("audio", lambda: b"#!AMR\n", "audio|amr"),
    "amr of reserved frame types": ("audio", lambda: b"#!AMR\n" + b"\x7c" * 5000, "audio|amr"),
    "jpeg of hidden scans": ("image", lambda: jpeg_of_hidden_scans(200), "more than 100 scans; re-encode"),
    "jpeg of 101 scans": ("image", lambda: jpeg_of_scans(101), "more than 100 scans; re-encode"),
    "webp with a canvas of 2^24 pixels a side": ("image", lambda: webp(size=(2**24, 2**24)), "webp header cannot be read|maxPixels"),
    "webp with frames of 2^24 pixels a side": ("image", lambda: webp_animation(3, (2**24, 2**24)), "webp header cannot be read"),
    "heic with a grid of 60,000 pixels a side": ("image", lambda: heif_grid("HEIF", 2, 2, 60_000, 60_000), "maxPixels"),
    "avif with a grid of 60,000 pixels a side": ("image", lambda: heif_grid("AVIF", 2, 2, 60_000, 60_000), "avif header cannot be read|maxPixels"),
    "heic with a grid of 2^32 - 1 pixels a side": ("image", lambda: heif_grid("HEIF", 2, 2, 2**32 - 1, 2**32 - 1), "heic header cannot be read"),
    "avif with a grid of 2^32 - 1 pixels a side": ("image", lambda: heif_grid("AVIF", 2, 2, 2**32 - 1, 2**32 - 1), "avif header cannot be read"),
    "heic with a grid that is larger than its cells": ("image", lambda: heif_grid("HEIF", 2, 2, 1000, 1000), "Grid tiles do not cover"),
    "avif with a grid that is larger than its cells": ("image", lambda: heif_grid("AVIF", 2, 2, 1000, 1000), "Invalid image grid"),
    "heic with a grid of cells that are missing": ("image", lambda: heif_grid("HEIF", 2, 2, 128, 128, cells=[2, 3, 98, 99]), "Missing grid images"),
    "avif with a grid of cells that are missing": ("image", lambda: heif_grid("AVIF", 2, 2, 128, 128, cells=[2, 3, 98, 99]), "Invalid image grid"),
    "avif with a grid that is its own cell": ("image", lambda: heif_grid("AVIF", 2, 2, 128, 128, cells=[1, 1, 1, 1]), "Invalid image grid"),
    "heic with a grid of 65,025 cells": ("image", lambda: heif_grid("HEIF", 255, 255, 64, 64), "heic header cannot be read"),
    "avif with a grid of 65,025 cells": ("image", lambda: heif_grid("AVIF", 255, 255, 64, 64), "65026 items, more than 1000; re-encode"),
    "mp4 without a timescale": ("video", lambda: put(file("h264.mp4"), "mdhd", 12, u32(0)), "truncated: its index"),
    "mp4 of 2^31 - 1 ticks a second": ("video", lambda: put(file("h264.mp4"), "mdhd", 12, u32(2**31 - 1)), "yield no frame rate; re-encode"),
    "mp4 that claims 2^31 - 1 times": ("video", lambda: put(file("h264.mp4"), "stts", 8, u32(2**31 - 1, 1)), "declares 2147483647 frames, but only 12"),
    "mp4 with 2^32 - 1 entries of times": ("video", lambda: put(file("h264.mp4"), "stts", 4, u32(2**32 - 1)), "mp4 data cannot be read"),
    "mp4 with 2^32 - 1 entries of chunks": ("video", lambda: put(file("h264.mp4"), "stsc", 4, u32(2**32 - 1)), "mp4 data cannot be read"),
    "mp4 whose frames lie behind its end": ("video", lambda: put(file("h264.mp4"), "stco", 8, u32(2**32 - 1)), "only 0 are present"),
    "mp4 whose frames have 2 GiB each": ("video", lambda: put(file("h264.mp4"), "stsz", 4, u32(2**31)), "only 0 are present"),
    "mp4 that claims one frame of twelve": ("video", lambda: put(file("h264.mp4"), "stsz", 8, u32(1)), "declares 12 frames, but only 1"),
    "mp4 with an edit of 2^32 - 1": ("video", lambda: put(file("h264.mp4"), "elst", 8, u32(2**32 - 1, 2**32 - 1)), "only 0 are present"),
    "mp4 of 64 x 48 that claims 6000 x 4000": ("video", lambda: put(file("h264.mp4"), "avc1", 24, struct.pack(">HH", 6000, 4000)), "64x48, but the container declares 6000x4000; re-encode"),
    "mp4 with a profile in its parameters that there is not": ("video", lambda: put(file("h264.mp4"), "avcC", 9, b"\xff\xff\xff"), "mp4 data cannot be read \\(Invalid data"),
    "mp4 without parameters": ("video", lambda: filled(file("h264.mp4"), "avcC", 0), "no frames"),
    "matroska without a width": ("video", lambda: filled(file("h264.mkv"), "B0", 0), "matroska data cannot be read"),
    "matroska of 64 pixels that claims 255": ("video", lambda: filled(file("h264.mkv"), "B0", 255), "container declares 255x48; re-encode"),
    "matroska without parameters": ("video", lambda: filled(file("h264.mkv"), "63A2", 0), "no frames"),
    "avi of 10^6 frames a second": ("video", lambda: put(file("h264.avi"), "strh", 20, struct.pack("<II", 1, 10**6)), "yield no frame rate; re-encode"),
    "avi of a frame in a century": ("video", lambda: put(file("h264.avi"), "strh", 20, struct.pack("<II", 2**32 - 1, 1)), "maxDurationSeconds"),
    "avi that claims 2^32 - 1 frames": ("video", lambda: put(file("h264.avi"), "strh", 32, b"\xff" * 4), "maxDurationSeconds"),
    "avi of -2^31 pixels a side": ("video", lambda: put(file("h264.avi"), "strf", 4, struct.pack("<ii", -(2**31), -(2**31))), "avi data cannot be read"),
    "avi of an unknown codec": ("video", lambda: put(file("h264.avi"), "strf", 16, b"\xff\xfe\xfd\xfc"), "no video stream that can be decoded; send"),
    "avi whose index leads nowhere": ("video", lambda: put(file("h264.avi"), "idx1", 8, b"\xff" * 8), "no frames"),
    "transport stream of two sizes": ("video", lambda: video_bytes(container="mpegts", frames=10) + video_bytes(container="mpegts", frames=10, width=128, height=96), "128x96, but the container declares 64x48; re-encode"),
    "m4a of one tick a second": ("audio", lambda: put(file("speech.m4a"), "mdhd", 12, u32(1)), "maxDurationSeconds"),
    "m4a that claims 2^31 packets": ("audio", lambda: put(file("speech.m4a"), "stsz", 8, u32(2**31)), "mp4 data cannot be read"),
    "m4a with packets of half a day": ("audio", lambda: put(file("speech.m4a"), "stts", 8, u32(1, 2**31 - 1)), "maxDurationSeconds"),
    "opus without channels": ("audio", lambda: opus(channels=0), "ogg data cannot be read"),
    "opus of 255 channels": ("audio", lambda: opus(channels=255), "ogg data cannot be read"),
    "opus of which all is skipped": ("audio", lambda: opus(skipped=65535), "no samples; send"),
    "opus that ends at sample 2^63 - 1": ("audio", lambda: opus(end=2**63 - 1), "ogg data cannot be read"),
    "wav of 2^63 - 1 bytes": ("audio", lambda: b"RF64" + b"\xff" * 4 + b"WAVEds64" + struct.pack("<IQQQI", 28, 2**63 - 1, 2**63 - 1, 2**63 - 1, 0) + wav(pcm())[12:36] + b"data" + b"\xff" * 4 + bytes(3200), "maxDurationSeconds"),
    "wav of 65,535 channels": ("audio", lambda: wav(pcm(channels=65535, align=65534)), "no samples; send"),
    "aac of reserved rates": ("audio", lambda: b"\xff\xf1\x74\x80\0\x1f\xfc" * 1000, "audio|aac"),
    "aac of one channel and then two": ("audio", lambda: audio_bytes("aac", "fltp", "adts") + audio_bytes("aac", "fltp", "adts", waveform=np.zeros((2, 44100), np.float32), layout="stereo"), "channels change from mono to stereo; re-encode"),
    "mp3 behind a tag of 256 MiB": ("audio", lambda: b"ID3\x03\0\0\x7f\x7f\x7f\x7f" + file("constant.mp3"), "mp3 data cannot be read"),
    "mov with a compressed header of 300 MiB": ("video", lambda: compressed_header(zeros(), 300 * MIB), "no video stream"),
    "mov with a compressed header that claims 4 GiB": ("video", lambda: compressed_header(zeros(), 2**32 - 1), "mp4 data cannot be read"),
    "mov with a compressed header larger than it claims": ("video", lambda: compressed_header(zeros(), 16), "mp4 data cannot be read"),
    "mp4 with 5000 boxes in one another": ("video", lambda: box(b"ftyp", b"isom" + u32(0)) + nested(b"udta", 5000) + file("h264.mp4"), "mp4 data cannot be read"),
    "a playlist": ("audio", lambda: b"#EXTM3U\nfile:///etc/passwd\n", "unknown format"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
async def test_what_lies_about_itself_is_refused(name: str, pool: DecodePool) -> None:
    modality, build, words = REFUSED[name]
    result = await sent(pool, build(), modality)
    assert isinstance(result, str), f"decoded as {result}"
    assert re.search(words, result), result


RIGHT: dict[str, tuple[Modality, Callable[[], bytes], tuple[int, ...]]] = {
    "png of one pixel": ("image", lambda: png(width=1, height=1), (1, 1)),
    "png of 65,535 x 1": ("image", lambda: png(width=65535, height=1), (65535, 1)),
    "png of 1 x 65,535": ("image", lambda: png(width=1, height=65535), (1, 65535)),
    "png with a compressed profile of 300 MiB": ("image", lambda: png(chunk(b"iCCP", b"p\0\0" + zeros())), (4, 3)),
    "png with a compressed text of 300 MiB": ("image", lambda: png(chunk(b"zTXt", b"t\0\0" + zeros())), (4, 3)),
    "png with a compressed text of 300 MiB behind its pixels": ("image", lambda: png(behind=chunk(b"zTXt", b"t\0\0" + zeros())), (4, 3)),
    "png with 300 MiB of pixels too many": ("image", lambda: png(pixels=zeros()), (4, 3)),
    "apng that claims 2^31 - 1 frames": ("image", lambda: png(chunk(b"acTL", u32(2**31 - 1, 0)), chunk(b"fcTL", u32(0, 4, 3, 0, 0) + b"\0\1\0\1\0\0")), (4, 3)),
    "png with 16 MiB behind its end": ("image", lambda: png() + bytes(16 * MIB), (4, 3)),
    "jpeg with a directory of EXIF that follows itself": ("image", lambda: jpeg_with(b"Exif\0\0" + exif([(0x8769, 4, 1, 8)], following=8)), (64, 48)),
    "jpeg with EXIF of 4 G values": ("image", lambda: jpeg_with(b"Exif\0\0" + exif([(tag, 2, 2**32 - 1, 8) for tag in range(256, 5000)])), (64, 48)),
    "jpeg with an orientation of 2^31 numbers": ("image", lambda: jpeg_with(b"Exif\0\0" + exif([(0x0112, 4, 2**31, 8)])), (64, 48)),
    "jpeg turned by an orientation that there is not": ("image", lambda: jpeg_with(b"Exif\0\0" + exif([(0x0112, 3, 1, 9)])), (64, 48)),
    "tiff with a directory that follows itself": ("image", lambda: tiff(following=8), (4, 3)),
    "tiff with a strip that grows to 300 MiB": ("image", lambda: tiff((259, 3, 1, 8), (279, 4, 1, len(zeros())), data=zeros()), (4, 3)),
    "tiff with a profile of 4 GiB": ("image", lambda: tiff((34675, 7, 2**32 - 1, 8)), (4, 3)),
    "jpeg of 65,500 x 1": ("image", lambda: saved("JPEG", 65500, 1), (65500, 1)),
    "gif of 65,535 x 1": ("image", lambda: saved("GIF", 65535, 1), (65535, 1)),
    "bmp of 1 x 65,535": ("image", lambda: saved("BMP", 1, 65535), (1, 65535)),
    "tiff of 1 x 65,535": ("image", lambda: saved("TIFF", 1, 65535), (1, 65535)),
    "webp of 16,383 x 1": ("image", lambda: saved("WEBP", 16383, 1), (16383, 1)),
    "jpeg of one pixel": ("image", lambda: saved("JPEG", 1, 1), (1, 1)),
    "webp of one pixel": ("image", lambda: saved("WEBP", 1, 1), (1, 1)),
    "avif of one pixel": ("image", lambda: saved("AVIF", 1, 1), (1, 1)),
    "heic of one pixel": ("image", lambda: saved("HEIF", 1, 1), (1, 1)),
    "jpeg of 100 scans": ("image", lambda: jpeg_of_scans(100), (64, 48)),
    "jpeg with a profile of 16 MiB": ("image", lambda: jpeg_with_profile(255, 65_000, 255), (64, 48)),
    "jpeg with a profile of which most is missing": ("image", lambda: jpeg_with_profile(3, 100, 255), (64, 48)),
    "jpeg with XMP of 10^9 words": ("image", lambda: jpeg_with(b"http://ns.adobe.com/xap/1.0/\0" + LAUGHS), (64, 48)),
    "png with XMP of 10^9 words": ("image", lambda: png(chunk(b"iTXt", b"XML:com.adobe.xmp\0\0\0\0\0" + LAUGHS)), (4, 3)),
    "png with a directory of EXIF that follows itself": ("image", lambda: png(chunk(b"eXIf", LOOP)), (4, 3)),
    "png with EXIF of 4 G values": ("image", lambda: png(chunk(b"eXIf", HUGE)), (4, 3)),
    "png with 100,000 texts": ("image", lambda: png(*[chunk(b"tEXt", b"a\0b")] * 100_000), (4, 3)),
    "webp with a profile of 16 MiB": ("image", lambda: webp((b"ICCP", bytes(16 * MIB)), flags=0x20), (64, 48)),
    "webp with a directory of EXIF that follows itself": ("image", lambda: webp((b"EXIF", LOOP), flags=8), (64, 48)),
    "webp with EXIF of 4 G values": ("image", lambda: webp((b"EXIF", HUGE), flags=8), (64, 48)),
    "webp with XMP of 10^9 words": ("image", lambda: webp((b"XMP ", LAUGHS), flags=4), (64, 48)),
    "webp of 10,000 frames": ("image", lambda: webp_animation(10_000), (64, 48)),
    "tiff with a directory of EXIF that is its own": ("image", lambda: tiff((0x8769, 4, 1, 8)), (4, 3)),
    "heic with a grid of 31 x 31 cells": ("image", lambda: heif_grid("HEIF", 31, 31, 1984, 1984), (1984, 1984)),
    "avif with a grid of 31 x 31 cells": ("image", lambda: heif_grid("AVIF", 31, 31, 1984, 1984), (1984, 1984)),
    "mp4 with a profile in its header that there is not": ("video", lambda: put(file("h264.mp4"), "avcC", 1, b"\xff\xff\xff"), (64, 48, 12)),
    "mp4 turned by a matrix of -2^31": ("video", lambda: put(file("h264.mp4"), "tkhd", 40, u32(*[2**31] * 9)), (64, 48, 12)),
    "matroska of no number of seconds": ("video", lambda: put(file("h264.mkv"), "4489", 0, struct.pack(">d", np.nan)), (64, 48, 12)),
    "matroska of 10^300 seconds": ("video", lambda: put(file("h264.mkv"), "4489", 0, struct.pack(">d", 1e300)), (64, 48, 12)),
    "matroska of frames that last no time": ("video", lambda: filled(file("h264.mkv"), "23E383", 0), (64, 48, 12)),
    "matroska with a profile that there is not": ("video", lambda: put(file("h264.mkv"), "63A2", 1, b"\xff\xff\xff"), (64, 48, 12)),
    "avi of no frames a second": ("video", lambda: put(file("h264.avi"), "strh", 20, bytes(8)), (64, 48, 12)),
    "avi that claims 2^32 - 1 streams": ("video", lambda: put(file("h264.avi"), "avih", 24, b"\xff" * 4), (64, 48, 12)),
    "webm of 255 channels": ("audio", lambda: put(file("sound.webm"), "9F", 0, b"\xff"), (12001,)),
    "webm of no hertz": ("audio", lambda: filled(file("sound.webm"), "B5", 0), (12001,)),
    "webm of no number of hertz": ("audio", lambda: filled(file("sound.webm"), "B5", 255), (12001,)),
    "m4a of 255 channels": ("audio", lambda: put(file("speech.m4a"), "mp4a", 16, struct.pack(">H", 255)), (11026,)),
    "flac of no hertz": ("audio", lambda: flac(rate=0), (44100,)),
    "flac of eight channels that are one": ("audio", lambda: flac(channels=8), (44100,)),
    "flac with 16 MiB of padding": ("audio", lambda: flac(padding=16 * MIB - 1), (44100,)),
    "mov with a compressed header": ("video", compressed_header, (64, 48, 12)),
    "mp4 with 5000 boxes in one another behind its end": ("video", lambda: file("h264.mp4") + nested(b"moov", 5000), (64, 48, 12)),
    "matroska with 300,000 cues": ("video", lambda: matroska_with(element(0x1C53BB6B, CUE * 300_000)), (64, 48, 5)),
    "matroska with 300,000 tags": ("video", lambda: matroska_with(element(0x1254C367, TAG * 300_000)), (64, 48, 5)),
    "matroska with 300,000 chapters": ("video", lambda: matroska_with(element(0x1043A770, element(0x45B9, CHAPTER * 300_000))), (64, 48, 5)),
    "matroska with 100,000 fonts": ("video", lambda: matroska_with(element(0x1941A469, FONT * 100_000)), (64, 48, 5)),
    "matroska with 10,000 tracks": ("video", lambda: matroska_with(tracks=b"".join(map(subtitle_track, range(2, 10_002)))), (64, 48, 5)),
    "mp3 with a cover of 60,000 pixels a side": ("audio", lambda: with_cover(png(width=60_000, height=60_000, pixels=zeros())), (11026,)),
    "flac with a cover that claims 4 GiB": ("audio", lambda: flac(picture=u32(3, 9) + b"image/png" + u32(0, 60_000, 60_000, 24, 0, 2**32 - 1)), (44100,)),
    "mp4 with frames of any duration": ("video", lambda: patched(video_bytes(options={"bf": "0"}), b"mvhd", 16, u32(2**32 - 1)), (64, 48, 60)),
    "mp4 whose frames last no time": ("video", lambda: patched(video_bytes(options={"bf": "0"}), b"stts", 8, u32(60, 0)), (64, 48, 60)),
    "float wav of huge numbers": ("audio", lambda: wav(pcm(tag=3, rate=44_100, align=4, bits=32), np.tile(np.float32([3e38, -3e38, 1]), 300).tobytes()), (900,)),
    "float wav of NaN": ("audio", lambda: wav(pcm(tag=3, align=4, bits=32), np.full(800, np.nan, np.float32).tobytes()), (800,)),
    "float wav of infinities": ("audio", lambda: wav(pcm(tag=3, align=4, bits=32), np.full(800, -np.inf, np.float32).tobytes()), (800,)),
    "wav of 64 channels": ("audio", lambda: wav(pcm(channels=64, align=128), bytes(128 * 50)), (50,)),
}  # fmt: skip


@pytest.mark.parametrize("name", RIGHT)
async def test_what_is_odd_and_in_order_is_decoded(name: str, pool: DecodePool) -> None:
    modality, build, expected = RIGHT[name]
    result = await sent(pool, build(), modality)
    assert isinstance(result, MediumInfo), f"refused: {result}"
    facts = {
        "image": (result.width, result.height),
        "video": (result.width, result.height, result.num_frames),
        "audio": (result.num_samples,),
    }
    assert facts[modality] == expected


POLYGLOTS: dict[str, tuple[Modality, Callable[[], bytes], str]] = {
    "a picture that is an archive as well": ("image", lambda: image_bytes("PNG") + b"PK\x05\x06" + bytes(18), "png"),
    "a picture that is a page as well": ("image", lambda: jpeg_with(b"<html><script>alert(1)</script>"), "jpeg"),
    "a picture that is a script as well": ("image", lambda: image_bytes("GIF") + b"/*=1;alert(1)//*/", "gif"),
    "a video that is a document as well": ("video", lambda: video_bytes() + b"%PDF-1.7\n%%EOF", "mp4"),
    "a sound that is a picture as well": ("audio", lambda: audio_bytes() + image_bytes("PNG"), "wav"),
    "a picture that is a video as well": ("image", lambda: image_bytes("PNG") + video_bytes(), "png"),
    "a video in Matroska that is one in MP4 as well": ("video", lambda: file("h264.mkv") + file("h264.mp4"), "matroska"),
    "a picture whose brand is that of a video": ("video", lambda: patched(file("corners.heic"), b"ftyp", 0, b"mp42"), "mp4"),
    "a picture in a tag of a sound": ("audio", lambda: b"ID3\x03\0\0\0\0\x01\x00" + image_bytes("PNG")[:128].ljust(128, b"\0") + audio_bytes("libmp3lame", "s16p", "mp3", 44100), "mp3"),
}  # fmt: skip


@pytest.mark.parametrize("name", POLYGLOTS)
async def test_a_file_of_two_formats_is_what_its_first_bytes_say(name: str, pool: DecodePool) -> None:
    modality, build, container = POLYGLOTS[name]
    result = await sent(pool, build(), modality)
    assert isinstance(result, MediumInfo), f"refused: {result}"
    assert result.container == container
    others: set[Modality] = {"image", "video", "audio"}
    for other in others - {modality}:
        answer = await sent(pool, build(), other)
        assert isinstance(answer, str), f"{container} is {other} as well"


@pytest.mark.parametrize("brand", ["heic", "avif"])
async def test_a_video_whose_brand_is_that_of_a_picture_is_neither(brand: str, pool: DecodePool) -> None:
    data = patched(file("h264.mp4"), b"ftyp", 0, brand.encode())
    assert f"the {brand} header cannot be read" in str(await sent(pool, data, "image"))
    assert f"declared as video, but the bytes are {brand}" in str(await sent(pool, data, "video"))


def media_files() -> dict[str, bytes]:
    """The undamaged pictures, videos and sounds, by name."""
    return {name: data for name, data in sorted(originals().items()) if not name.endswith(".pdf")}


def cuts(data: bytes) -> Iterator[tuple[str, int]]:
    """What is cut, and where: a box, an element, a chunk or a packet where it begins, where its body begins, and within that; in other
    formats where names are.
    """
    found = parts(data)
    for part in found:
        middle = (part.body + part.end) // 2
        yield from ((f"{part.name} {place}", at) for place, at in enumerate((part.start, part.body, middle)))
    if not found:
        names = re.finditer(rb"[A-Za-z0-9 ]{4}", data[:4096])
        yield from ((match[0].decode(), match.start()) for match in names)


@cache
def chosen_cuts() -> dict[str, list[int]]:
    """By file: places evenly between its beginning and its end, and those of kinds that few files before it are cut at."""
    seen: Counter[str] = Counter()
    chosen = {}
    for name, data in media_files().items():
        kinds: dict[str, int] = {}
        for kind, at in cuts(data):
            kinds.setdefault(kind, at)
        new = [kind for kind in kinds if seen[kind] < FILES_CUT_ALIKE][:CUTS_AT_PARTS]
        seen.update(new)
        even = range(1, len(data), max(1, len(data) // EVEN_CUTS))
        chosen[name] = sorted({*even, *(kinds[kind] for kind in new)} - {len(data)})
    return chosen


@pytest.mark.parametrize("name", media_files())
async def test_a_file_cut_off_anywhere_is_refused_or_gives_what_is_left(name: str, pool: DecodePool) -> None:
    data = media_files()[name]
    kinds: tuple[Modality, ...] = ("image", "video", "audio")
    found = {kind: await sent(pool, data, kind) for kind in kinds}
    served = {kind: info for kind, info in found.items() if isinstance(info, MediumInfo)}
    assert served
    for at in chosen_cuts()[name]:
        for kind, whole in served.items():
            left = await sent(pool, data[:at], kind)
            if isinstance(left, MediumInfo):
                assert (left.width, left.height) == (whole.width, whole.height)
                assert left.num_frames <= whole.num_frames
                assert left.num_samples <= whole.num_samples + whole.sample_rate_hz


@pytest.mark.parametrize(
    ("name", "needed"),
    [
        ("h264.mp4", {"moov", "trak", "stsd", "avc1", "avcC", "stts", "stco", "mdat"}),
        ("h264.mkv", {"1A45DFA3", "1654AE6B", "AE", "63A2", "1F43B675", "A3"}),
        ("h264.avi", {"RIFF", "LIST", "strh", "strf", "00dc", "idx1"}),
        ("h264.ts", {"0", "1000", "100"}),
        ("lossy.webp", {"RIFF", "VP8 "}),
    ],
)
async def test_cuts_are_at_the_parts_of_a_container(name: str, needed: set[str]) -> None:
    found = parts(file(name))
    assert needed <= {part.name for part in found}
    assert all(part.start < part.body <= part.end for part in found)


async def test_packets_of_other_tracks_do_not_count_however_many_there_are(pool: DecodePool) -> None:
    data = with_subtitles(2_000_000)
    with av.open(io.BytesIO(with_subtitles(3))) as opened:
        assert [stream.type for stream in opened.streams] == ["video", "subtitle"]
    result = await sent(pool, data, "video")
    assert isinstance(result, MediumInfo), f"refused: {result}"
    assert result.num_frames == 5


async def test_a_million_packets_of_sound_before_the_pictures_of_an_flv_take_little_memory(
    pool: DecodePool,
) -> None:
    data, tag = file("h264.flv"), b"\x08\0\0\1" + bytes(7) + b"\x0f" + u32(12)
    result = await sent(pool, data[:13] + tag * 1_500_000 + data[13:], "video")
    assert isinstance(result, MediumInfo), f"refused: {result}"
    assert result.num_frames == 12


async def test_an_animation_costs_its_first_picture(pool: DecodePool) -> None:
    frames = [Image.fromarray(np.full((600, 800, 3), shade, np.uint8)) for shade in range(0, 250, 25)]
    for format_ in ("GIF", "PNG", "WEBP"):
        out = io.BytesIO()
        frames[0].save(out, format_, save_all=True, append_images=frames[1:], duration=20)
        result = await sent(pool, out.getvalue(), "image")
        assert isinstance(result, MediumInfo), f"refused: {result}"
        assert (result.width, result.height) == (800, 600)
