"""Files made to mislead, from fields: with a valid structure, since what is merely damaged is `support.serving.mutations`."""

from __future__ import annotations

import functools
import io
import struct
import zlib
from collections.abc import Sequence

from PIL import Image

from support.serving.mutations import FILES

from .layouts import part
from .media_samples import audio_bytes, image_bytes, video_bytes

MIB = 2**20


@functools.cache
def zeros() -> bytes:
    """300 MiB, compressed to 300 kB."""
    return zlib.compress(bytes(300 * MIB))


def file(name: str) -> bytes:
    """One of tests/media/files."""
    return (FILES / name).read_bytes()


def u32(*values: int) -> bytes:
    return struct.pack(f">{len(values)}I", *values)


def put(data: bytes, name: str, at: int, fields: bytes) -> bytes:
    """With other bytes at an offset in the body of the first part of a name (`layouts`)."""
    found = part(data, name)
    start = found.body + at
    assert start + len(fields) <= found.end, f"{name} ends before"
    return data[:start] + fields + data[start + len(fields) :]


def filled(data: bytes, name: str, byte: int) -> bytes:
    """With one byte all over the body of the first part of a name."""
    found = part(data, name)
    return put(data, name, 0, bytes([byte]) * (found.end - found.body))


def patched(data: bytes, name: bytes, at: int, fields: bytes) -> bytes:
    """With other bytes at an offset behind the first bytes that are a name."""
    start = data.index(name) + 4 + at
    return data[:start] + fields + data[start + len(fields) :]


# --- images -----------------------------------------------------------------------------------------------------------


def chunk(kind: bytes, body: bytes) -> bytes:
    """A chunk of a PNG."""
    return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))


def png(
    *chunks: bytes, width: int = 4, height: int = 3, pixels: bytes | None = None, behind: bytes = b""
) -> bytes:
    """A PNG of RGB with chunks before its pixels."""
    header = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0))
    if pixels is None:
        pixels = zlib.compress(bytes(height * (1 + 3 * width)))
    return (
        b"\x89PNG\r\n\x1a\n"
        + header
        + b"".join(chunks)
        + chunk(b"IDAT", pixels)
        + behind
        + chunk(b"IEND", b"")
    )


def tiff(*entries: tuple[int, int, int, int], data: bytes = b"", following: int = 0) -> bytes:
    """A TIFF with one directory of (tag, type, count, value), and data at 1024. 4 x 3 pixels of grey unless the entries say otherwise."""
    tags = {256: (3, 1, 4), 257: (3, 1, 3), 258: (3, 1, 8), 259: (3, 1, 1), 262: (3, 1, 1), 273: (4, 1, 1024), 277: (3, 1, 1),
            278: (3, 1, 3), 279: (4, 1, 12)}  # fmt: skip
    tags |= {tag: value for tag, *value in entries}  # type: ignore[misc]
    directory = struct.pack("<H", len(tags)) + b"".join(
        struct.pack("<HHII", tag, *tags[tag]) for tag in sorted(tags)
    )
    head = b"II*\0" + struct.pack("<I", 8) + directory + struct.pack("<I", following)
    return head.ljust(1024, b"\0") + (data or bytes(12))


def exif(entries: list[tuple[int, int, int, int]], following: int = 0) -> bytes:
    directory = struct.pack("<H", len(entries)) + b"".join(struct.pack("<HHII", *entry) for entry in entries)
    return b"II*\0" + struct.pack("<I", 8) + directory + struct.pack("<I", following)


LOOP = exif([(0x8769, 4, 1, 8)], following=8)
"""A directory of EXIF that follows itself, and holds itself."""
HUGE = exif([(tag, 2, 2**32 - 1, 8) for tag in range(256, 5000)])
"""EXIF of 4 G values a tag."""
LAUGHS = (
    b'<!DOCTYPE x [<!ENTITY a "lol">'
    + b"".join(b'<!ENTITY %c "%s">' % (98 + n, b"&%c;" % (97 + n) * 10) for n in range(9))
    + b']><x:xmpmeta xmlns:x="adobe:ns:meta/"><t tiff:Orientation="&j;">&j;</t></x:xmpmeta>'
)
"""XMP whose entities are 10^9 words."""


def jpeg_with(*segments: bytes, marker: int = 0xE1) -> bytes:
    """A JPEG with APP segments."""
    data = image_bytes("JPEG")
    made = b"".join(
        bytes([0xFF, marker]) + struct.pack(">H", len(segment) + 2) + segment for segment in segments
    )
    return data[:2] + made + data[2:]


def jpeg_with_profile(segments: int, size: int, total: int) -> bytes:
    """A JPEG with an ICC profile in so many segments of what its header says is `total`."""
    parts = (b"ICC_PROFILE\0" + bytes([number + 1, total]) + bytes(size) for number in range(segments))
    return jpeg_with(*parts, marker=0xE2)


def jpeg_of_hidden_scans(scans: int) -> bytes:
    """Behind a marker that has no length, though its next bytes look like one: decoders step over the marker alone."""

    def segment(marker: int, content: bytes) -> bytes:
        return bytes([0xFF, marker]) + struct.pack(">H", len(content) + 2) + content

    code = bytes([1] + [0] * 15) + b"\0"
    scan = segment(0xDA, b"\x01\x01\x00\x00\x00\x00")
    hidden = scan * scans
    return b"".join(
        (
            b"\xff\xd8",
            segment(0xDB, b"\0" + bytes([1] * 64)),
            segment(0xC2, struct.pack(">BHHB", 8, 64, 64, 1) + b"\x01\x11\x00"),
            segment(0xC4, b"\x00" + code),
            segment(0xC4, b"\x10" + code),
            segment(0xDD, struct.pack(">H", 1)),
            *(scan, b"\0", b"\xff\x02", struct.pack(">H", len(hidden) + 2), hidden),
            b"\xff\xd9",
        )
    )


def jpeg_of_scans(scans: int) -> bytes:
    """A progressive JPEG whose last scan comes again and again."""
    data = image_bytes("JPEG", progressive=True)
    last = data[data.rindex(b"\xff\xda") : -2]
    return data[:-2] + last * (scans - data.count(b"\xff\xda")) + data[-2:]


def riff(kind: bytes, *chunks: tuple[bytes, bytes]) -> bytes:
    body = kind + b"".join(
        name + struct.pack("<I", len(data)) + data + bytes(len(data) & 1) for name, data in chunks
    )
    return b"RIFF" + struct.pack("<I", len(body)) + body


def webp(*chunks: tuple[bytes, bytes], flags: int = 0, size: tuple[int, int] = (64, 48)) -> bytes:
    """A WebP of the extended format, with chunks and then a picture of 64 x 48."""
    width, height = ((side - 1).to_bytes(3, "little") for side in size)
    return riff(
        b"WEBP", (b"VP8X", struct.pack("<I", flags) + width + height), *chunks, (b"VP8 ", vp8_picture())
    )


def webp_animation(frames: int, size: tuple[int, int] = (64, 48)) -> bytes:
    """So many pictures of 64 x 48, each of which says that it has another size."""
    width, height = ((side - 1).to_bytes(3, "little") for side in size)
    picture = vp8_picture()
    frame = (
        bytes(6) + width + height + bytes(4) + b"VP8 " + struct.pack("<I", len(picture)) + picture
    ) + bytes(len(picture) & 1)
    canvas = struct.pack("<I", 2) + (63).to_bytes(3, "little") + (47).to_bytes(3, "little")
    return riff(b"WEBP", (b"VP8X", canvas), (b"ANIM", bytes(6)), *[(b"ANMF", frame)] * frames)


@functools.cache
def vp8_picture() -> bytes:
    data = image_bytes("WEBP")
    found = part(data, "VP8 ")
    return data[found.body : found.end]


def saved(kind: str, width: int, height: int) -> bytes:
    """A black image."""
    out = io.BytesIO()
    Image.new("RGB", (width, height)).save(out, kind)
    return out.getvalue()


def box(name: bytes, *bodies: bytes, version: int | None = None) -> bytes:
    """Of an ISO base media file; with a version it is a full box."""
    head = b"" if version is None else u32(version << 24)
    body = head + b"".join(bodies)
    return struct.pack(">I4s", 8 + len(body), name) + body


def heif_grid(
    kind: str, rows: int, columns: int, width: int, height: int, cells: Sequence[int] | None = None
) -> bytes:
    """An image of `width` x `height` in a grid (ISO/IEC 23008-12, 6.6.2.3) whose cells are pictures of 64 x 64: items that share their bytes. `cells`:
    other items in their places; 1 is the grid itself, the pictures follow.
    """
    picture = saved(kind, 64, 64)
    codec, item = {"HEIF": ("hvcC", b"hvc1"), "AVIF": ("av1C", b"av01")}[kind]
    found, mdat = part(picture, codec), part(picture, "mdat")
    coded = picture[mdat.body : mdat.end]
    pictures = range(2, rows * columns + 2)
    cells = pictures if cells is None else cells
    grid = struct.pack(">BBBBII", 0, 1, rows - 1, columns - 1, width, height)
    properties = box(
        b"ipco",
        picture[found.start : found.end],
        box(b"ispe", u32(64, 64), version=0),
        box(b"ispe", u32(width, height), version=0),
        box(b"pixi", bytes([3, 8, 8, 8]), version=0),
    )
    of_pictures = b"".join(struct.pack(">HBBBB", number, 3, 0x81, 2, 4) for number in pictures)
    associations = box(
        b"ipma", u32(1 + len(pictures)), struct.pack(">HBBB", 1, 2, 3, 4), of_pictures, version=0
    )
    infos = box(b"infe", struct.pack(">HH4s", 1, 0, b"grid"), b"\0", version=2) + b"".join(
        box(b"infe", struct.pack(">HH4s", number, 0, item), b"\0", version=2) for number in pictures
    )

    def meta(at: int) -> bytes:
        places = struct.pack(">HHHHII", 1, 1, 0, 1, 0, len(grid)) + b"".join(
            struct.pack(">HHHHII", number, 0, 0, 1, at, len(coded)) for number in pictures
        )
        return box(
            b"meta",
            box(b"hdlr", u32(0), b"pict", bytes(13), version=0),
            box(b"pitm", struct.pack(">H", 1), version=0),
            box(b"iloc", struct.pack(">BBH", 0x44, 0, 1 + len(pictures)), places, version=1),
            box(b"iinf", struct.pack(">H", 1 + len(pictures)), infos, version=0),
            box(
                b"iref",
                box(b"dimg", struct.pack(f">HH{len(cells)}H", 1, len(cells), *cells)),
                version=0,
            ),
            box(b"iprp", properties, associations),
            box(b"idat", grid),
            version=0,
        )

    brand = {"HEIF": b"heic", "AVIF": b"avif"}[kind]
    head = box(b"ftyp", brand, u32(0), brand, b"mif1")
    return head + meta(len(head) + len(meta(0)) + 8) + box(b"mdat", coded)


# --- sounds -----------------------------------------------------------------------------------------------------------


def wav(fmt: bytes, body: bytes = bytes(3200), declared: int | None = None) -> bytes:
    size = len(body) if declared is None else declared
    chunks = b"fmt " + struct.pack("<I", len(fmt)) + fmt + b"data" + struct.pack("<I", size) + body
    return b"RIFF" + struct.pack("<I", 4 + len(chunks)) + b"WAVE" + chunks


def pcm(tag: int = 1, channels: int = 1, rate: int = 16_000, align: int = 2, bits: int = 16) -> bytes:
    return struct.pack("<HHIIHH", tag, channels, rate, (rate * align) & 0xFFFFFFFF, align, bits)


def flac(
    *, rate: int = 44_100, channels: int = 1, total: int = 44_100, padding: int = 0, picture: bytes = b""
) -> bytes:
    """A second of a tone in one channel, whose header says something else (RFC 9639, 8.2)."""
    data = bytearray(audio_bytes("flac", "s16", "flac"))
    data[18:26] = (rate << 44 | (channels - 1) << 41 | 15 << 36 | total).to_bytes(8, "big")
    for kind, body in ((1, bytes(padding)), (6, picture)):
        if body:
            data[42:42] = bytes([kind]) + len(body).to_bytes(3, "big") + body
    return bytes(data)


def opus(*, channels: int = 1, skipped: int = 312, end: int | None = None) -> bytes:
    """An Ogg Opus file whose header says something else (RFC 7845, 5.1), or that ends at another sample."""
    data, at, made = bytearray(file("speech.opus")), 0, b""
    head = data.index(b"OpusHead")
    data[head + 9] = channels
    data[head + 10 : head + 12] = struct.pack("<H", skipped)
    while data[at : at + 4] == b"OggS":
        segments = data[at + 26]
        size = 27 + segments + sum(data[at + 27 : at + 27 + segments])
        page = data[at : at + size]
        at += size
        if end is not None and at >= len(data):
            page[6:14] = struct.pack("<Q", end)
        page[22:26] = bytes(4)
        page[22:26] = struct.pack("<I", _ogg_checksum(page))
        made += bytes(page)
    return made


def _ogg_checksum(page: bytes) -> int:
    value = 0
    for byte in page:
        value ^= byte << 24
        for _ in range(8):
            value = (value << 1 ^ (0x04C11DB7 if value & 0x80000000 else 0)) & 0xFFFFFFFF
    return value


# --- videos -----------------------------------------------------------------------------------------------------------


def compressed_header(packed: bytes | None = None, declared: int | None = None) -> bytes:
    """A MOV whose header is compressed (QuickTime File Format, "Compressed movie resources"): its own, or other bytes."""
    data = file("h264.mov")
    movie = part(data, "moov")
    own = data[movie.start : movie.end]
    packed = zlib.compress(own) if packed is None else packed
    size = len(own) if declared is None else declared
    header = box(b"moov", box(b"cmov", box(b"dcom", b"zlib"), box(b"cmvd", u32(size), packed)))
    return data[: movie.start] + header + data[movie.end :]


def nested(name: bytes, depth: int) -> bytes:
    """Boxes in boxes."""
    made = b""
    for _ in range(depth):
        made = box(name, made)
    return made


def element(identity: int, *bodies: bytes) -> bytes:
    """Of Matroska."""
    body = b"".join(bodies)
    return (
        identity.to_bytes(-(-identity.bit_length() // 8), "big")
        + (len(body) | 1 << 56).to_bytes(8, "big")
        + body
    )


def matroska_with(*elements: bytes, tracks: bytes = b"") -> bytes:
    """A video of five frames with elements before its tracks, and with other tracks."""
    data = video_bytes(
        container="matroska", frames=5, options={"bf": "0"}, mux={"live": "1", "write_crc32": "0"}
    )
    found = part(data, "1654AE6B")
    made = element(0x1654AE6B, data[found.body : found.end], tracks)
    return data[: found.start] + b"".join(elements) + made + data[found.end :]


def subtitle_track(number: int) -> bytes:
    width = number.to_bytes(2, "big")
    return element(
        0xAE, b"\xd7\x82" + width, b"\x73\xc5\x82" + width, b"\x83\x81\x11", b"\x86\x8bS_TEXT/UTF8"
    )


def with_subtitles(count: int) -> bytes:
    """A video in Matroska with a subtitle track of so many packets of a byte."""
    block = b"\xa3\x85\x82\0\1\x80 "  # SimpleBlock of track 2
    return matroska_with(tracks=subtitle_track(2)) + element(0x1F43B675, b"\xe7\x81\0", block * count)


CUE = element(0xBB, b"\xb3\x81\0", element(0xB7, b"\xf7\x81\1\xf1\x81\0"))
TAG = element(0x7373, element(0x67C8, b"\x45\xa3\x81A\x44\x87\x81B"))
CHAPTER = element(0xB6, b"\x73\xc4\x81\1\x91\x81\0")
FONT = element(
    0x61A7, element(0x466E, b"a"), element(0x4660, b"font/ttf"), element(0x465C, b"a"), element(0x46AE, b"\1")
)


def with_cover(picture: bytes) -> bytes:
    """An MP3 with a picture in its tag (ID3v2.3, 4.15)."""
    frame = b"\0image/png\0\x03\0" + picture
    tag = b"APIC" + u32(len(frame)) + b"\0\0" + frame
    size = bytes(len(tag) >> shift & 127 for shift in (21, 14, 7, 0))
    return b"ID3\x03\0\0" + size + tag + file("constant.mp3")
