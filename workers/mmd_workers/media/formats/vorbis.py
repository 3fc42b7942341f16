"""Lengths of Vorbis packets, read from their first byte and the stream's headers (Vorbis I). Nothing is decoded; knows no container."""

from __future__ import annotations

MAX_MODES = 64
_MODE_BITS = 41  # block flag 1, window type 16, transform type 16, mapping 8
_COUNT_BITS = 6


class BlockSizes:
    """Samples of a stream's packets in order, from their block sizes (Vorbis I, 4.3.8).

    Args:
        headers: The three headers with Xiph lacing, as containers store them.
    """

    def __init__(self, headers: bytes) -> None:
        first, setup = _laced(headers)
        exponents = first[28] if len(first) > 28 else 0
        self._sizes = (1 << (exponents & 15), 1 << (exponents >> 4))
        self._modes = _block_flags(setup)
        self._previous = 0

    @property
    def is_known(self) -> bool:
        """False if the headers are not those of Vorbis."""
        return bool(self._modes)

    def samples(self, packet: bytes) -> int:
        """Samples that a decoder returns for the next packet. The first has none."""
        if not packet or packet[0] & 1:
            return 0
        mode = packet[0] >> 1 & ((1 << (len(self._modes) - 1).bit_length()) - 1)
        if mode >= len(self._modes):
            return 0
        size = self._sizes[self._modes[mode]]
        previous, self._previous = self._previous, size
        return (previous + size) // 4 if previous else 0


def _laced(headers: bytes) -> tuple[bytes, bytes]:
    """The first and the third of three headers; empty ones if the lacing is broken."""
    if headers[:1] != b"\x02":
        return b"", b""
    sizes: list[int] = []
    at = 1
    while len(sizes) < 2 and at < len(headers):
        size = 0
        while headers[at : at + 1] == b"\xff":
            size, at = size + 255, at + 1
        sizes.append(size + int.from_bytes(headers[at : at + 1], "big"))
        at += 1
    if len(sizes) < 2:
        return b"", b""
    return headers[at : at + sizes[0]], headers[at + sum(sizes) :]


def _block_flags(setup: bytes) -> list[int]:
    """Of each mode, whether its blocks are long: 0 or 1.

    Modes are the last part of a setup header (4.2.4) and are read from its end, since what precedes them needs a decoder. A mode
    has zeros as window and transform type. Of several lists that their own number allows, the longest counts.
    """
    tail = setup[-(MAX_MODES * _MODE_BITS // 8 + 8) :]
    bits = "".join(f"{byte:08b}"[::-1] for byte in tail)
    flags: list[int] = []
    at, longest = bits.rfind("1"), 0
    while at >= _MODE_BITS + _COUNT_BITS and len(flags) < MAX_MODES:
        at -= _MODE_BITS
        types, mapping = bits[at + 1 : at + 33], int(bits[at + 33 : at + 41][::-1], 2)
        if "1" in types or mapping >= MAX_MODES:
            break
        flags.append(int(bits[at]))
        if int(bits[at - _COUNT_BITS : at][::-1], 2) + 1 == len(flags):
            longest = len(flags)
    return flags[:longest][::-1]
