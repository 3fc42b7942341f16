"""Where the parts of a container begin: boxes of ISO base media files, elements of Matroska, chunks of RIFF, packets of transport streams."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass

_BOXES = {b"moov", b"trak", b"mdia", b"minf", b"stbl", b"dinf", b"edts", b"udta", b"moof", b"traf", b"mvex", b"meta", b"iprp", b"ipco"}  # fmt: skip
"""Of ISO/IEC 14496-12: those that hold boxes."""
_ENTRIES = {
    b"avc1": 78,
    b"hvc1": 78,
    b"hev1": 78,
    b"mp4v": 78,
    b"av01": 78,
    b"mp4a": 28,
    b"alac": 28,
    b"samr": 28,
}
"""Of a sample table: where their boxes begin."""
_MASTERS = {0x18538067, 0x1549A966, 0x1654AE6B, 0xAE, 0xE0, 0xE1, 0x114D9B74, 0x4DBB, 0x1F43B675, 0xA0, 0x1C53BB6B, 0xBB, 0xB7, 0x1A45DFA3, 0x1254C367}  # fmt: skip
"""Of RFC 9559: elements that hold elements."""
_LISTS = {b"RIFF", b"LIST"}
TS_PACKET = 188


@dataclass(frozen=True)
class Part:
    """A part of a file: its name, where it begins, where its body begins, and where it ends."""

    name: str
    start: int
    body: int
    end: int


def parts(data: bytes) -> list[Part]:
    """All of them, outer ones first; none of a format that is not known here."""
    if data[4:8] in (b"ftyp", b"moov", b"mdat", b"wide", b"free", b"skip"):
        return list(_boxes(data, 0, len(data)))
    if data[:4] == b"\x1a\x45\xdf\xa3":
        return list(_elements(data, 0, len(data)))
    if data[:4] == b"RIFF":
        return list(_chunks(data, 0, len(data)))
    if data[:1] == b"\x47" and data[TS_PACKET : TS_PACKET + 1] in (b"\x47", b""):
        return list(_packets(data))
    return []


def part(data: bytes, name: str, number: int = 0) -> Part:
    """One of a name, counted from 0."""
    return [found for found in parts(data) if found.name == name][number]


def _boxes(data: bytes, at: int, end: int) -> Iterator[Part]:
    while at + 8 <= end:
        size, name = struct.unpack_from(">I4s", data, at)
        body = at + 8
        if size == 1:
            size, body = struct.unpack_from(">Q", data, at + 8)[0], at + 16
        close = min(end, at + (size or end - at))
        if close < body:
            return
        yield Part(name.decode("latin-1"), at, body, close)
        if name in _BOXES:
            full = 4 if name == b"meta" and data[body + 4 : body + 8] != b"hdlr" else 0
            yield from _boxes(data, body + full, close)
        elif name == b"stsd":
            yield from _boxes(data, body + 8, close)
        elif name in _ENTRIES:
            yield from _boxes(data, body + _ENTRIES[name], close)
        at = close


def _elements(data: bytes, at: int, end: int) -> Iterator[Part]:
    while at < end:
        width = 9 - data[at].bit_length()
        identity = int.from_bytes(data[at : at + width], "big")
        after = at + width
        if width > 4 or after >= end:
            return
        length = 9 - data[after].bit_length()
        size = int.from_bytes(data[after : after + length], "big") & ((1 << 7 * length) - 1)
        body = after + length
        close = end if size == (1 << 7 * length) - 1 else min(end, body + size)
        yield Part(f"{identity:X}", at, body, close)
        if identity in _MASTERS:
            yield from _elements(data, body, close)
        at = close


def _chunks(data: bytes, at: int, end: int) -> Iterator[Part]:
    while at + 8 <= end:
        name, size = struct.unpack_from("<4sI", data, at)
        close = min(end, at + 8 + size)
        yield Part(name.decode("latin-1"), at, at + 8, close)
        if name in _LISTS:
            yield from _chunks(data, at + 12, close)
        at = close + (size & 1)


def _packets(data: bytes) -> Iterator[Part]:
    """Those in which a table or a picture begins."""
    for at in range(0, len(data) - TS_PACKET + 1, TS_PACKET):
        if data[at + 1] & 0x40:
            yield Part(
                f"{int.from_bytes(data[at + 1 : at + 3], 'big') & 0x1FFF:X}", at, at + 4, at + TS_PACKET
            )
