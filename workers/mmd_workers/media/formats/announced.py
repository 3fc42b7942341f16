"""Length of the sound that headers announce, to recognise files that are cut off. Nothing is decoded; knows no policy.

Streams of unknown length announce none: programs that write to a pipe cannot come back to the header.
"""

from __future__ import annotations

import struct

LEAST_STREAMED_BYTES = 0x7FFF0000
"""Least size in a WAVE header that stands for an unknown one: what programs write to a pipe, GStreamer the least of them."""
_UNKNOWN = 0xFFFFFFFF
_W64_HEAD_BYTES = 24  # a GUID and a size, which counts these bytes too


def missing_bytes(data: bytes, container: str) -> int:
    """Bytes of sound that the header of a WAVE, Wave64, CAF or AU file announces and that are missing; 0 for other containers."""
    ends = {"wav": _end_of_wav, "w64": _end_of_w64, "caf": _end_of_caf, "au": _end_of_au}
    end = ends[container](data) if container in ends else 0
    return max(0, end - len(data)) if end < 1 << 63 else 0


def _end_of_wav(data: bytes) -> int:
    """Also of RF64 and BW64 (EBU Tech 3306, ITU-R BS.2088), which have the size in a chunk of its own."""
    at, size_of_rf64 = 12, 0
    while at + 8 <= len(data):
        name, size = struct.unpack_from("<4sI", data, at)
        if name == b"ds64" and at + 24 <= len(data):
            size_of_rf64 = struct.unpack_from("<Q", data, at + 16)[0]
        if name == b"data":
            return at + 8 + (size_of_rf64 if size == _UNKNOWN else size if size < LEAST_STREAMED_BYTES else 0)
        at += 8 + size + (size & 1)
    return 0


def _end_of_w64(data: bytes) -> int:
    at = 40
    while at + _W64_HEAD_BYTES <= len(data):
        name, size = struct.unpack_from("<4s12xQ", data, at)
        if name == b"data":
            return int(at + size)
        at += max(_W64_HEAD_BYTES, size + -size % 8)
    return 0


def _end_of_caf(data: bytes) -> int:
    """The size is -1 where it is unknown (Apple Core Audio Format, "Chunk Header")."""
    at = 8
    while at + 12 <= len(data):
        name, size = struct.unpack_from(">4sq", data, at)
        if name == b"data" or size < 0:
            return int(at + 12 + size)
        at += 12 + size
    return 0


def _end_of_au(data: bytes) -> int:
    start, size = struct.unpack_from(">II", data, 4) if len(data) >= 12 else (0, 0)
    return start + size if size != _UNKNOWN else 0
