"""Headers of coded pictures: where decoding may begin, which fields are one frame, and the order of presentation. Knows no container."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice

MAX_PARAMETER_SETS = (
    1024  # limit for the different parameter sets read in a file: reading one takes up to half a millisecond
)
MAX_NAL_UNITS = 256  # limit for the units examined in a picture: files may hold any number, and empty ones
PARAMETER_BYTES = 1024  # limit for reading a parameter set of H.264, which may contain scaling lists
SLICE_BYTES = 48
MIN_CODED_BYTES = (
    19  # a shorter packet of MPEG-4 may be the empty one that follows two pictures in one packet
)
_HIGH_PROFILES = frozenset({100, 110, 122, 244, 44, 83, 86, 118, 128, 138, 139, 134, 135})
_B_SLICE = 1
MPEG_VIDEO = frozenset({"mpeg1video", "mpeg2video"})


def may_begin(codec: str, picture: bytes, header: bytes) -> bool:
    """Whether decoding may begin at a picture that its container marks as a key frame.

    With gradual refresh (H.264, D.2.8) containers mark pictures that need some more after them; of MPEG-4 and H.263, FFmpeg marks
    pictures that are predicted from others.
    """
    if codec == "h264":
        return all(intra_slices(picture, header))
    if codec == "mpeg4":
        return next(_vop_types(picture), 0) == 0 and len(picture) >= MIN_CODED_BYTES
    return codec != "h263" or _is_intra_h263(picture)


def is_bidirectional(codec: str, picture: bytes) -> bool:
    """Whether a picture of MPEG-1, MPEG-2 or MPEG-4 is a B picture (ITU-T H.262, 6.3.9)."""
    if codec == "mpeg4":
        return next(_vop_types(picture), 0) == 2
    at = picture.find(b"\x00\x00\x01\x00")
    return codec in MPEG_VIDEO and 0 <= at < len(picture) - 5 and picture[at + 5] >> 3 & 7 == 3


def _vop_types(picture: bytes) -> Iterator[int]:
    """Coding types of the VOPs of an MPEG-4 packet: I, P, B or S as 0 to 3 (ISO/IEC 14496-2, 6.2.5)."""
    at = picture.find(b"\x00\x00\x01\xb6")
    while 0 <= at < len(picture) - 4:
        yield picture[at + 4] >> 6
        at = picture.find(b"\x00\x00\x01\xb6", at + 4)


def _is_intra_h263(picture: bytes) -> bool:
    """Whether a picture of H.263 is predicted from itself alone (ITU-T H.263, 5.1.3 and 5.1.4)."""
    bits = _Bits(picture[:16])
    try:
        bits.skip(22 + 8 + 5)  # start code, temporal reference, and the first five bits of PTYPE
        if bits.take(3) != 7:
            return bits.take(1) == 0
        bits.skip(18 if bits.take(3) == 1 else 0)
        return bits.take(3) == 0
    except ValueError:
        return False


def intra_slices(picture: bytes, header: bytes) -> Iterator[bool]:
    """For each slice of a coded H.264 picture, whether it is predicted from itself alone (ITU-T H.264, 7.3.3 and table 7-6)."""
    for unit in islice(nal_units(picture, header), MAX_NAL_UNITS):
        if unit and unit[0] & 0x1F in (1, 5):
            bits = "".join(f"{byte:08b}" for byte in unit[1:])
            _, at = exp_golomb(bits, 0)  # first_mb_in_slice
            slice_type, _ = exp_golomb(bits, at)
            yield slice_type % 5 in (2, 4)


def nal_units(picture: bytes, header: bytes, length_at: int = 4, most: int = 16) -> Iterator[bytes]:
    """The first bytes, at most `most`, of each NAL unit of a picture.

    Units follow lengths if the header is that of ISO/IEC 14496-15 (5.3.3 and 8.3.3), which has the size of a length at `length_at`;
    otherwise they follow start codes.
    """
    if header[:1] != b"\x01" or len(header) <= length_at:
        at = picture.find(b"\x00\x00\x01")
        while at >= 0:
            yield picture[at + 3 : at + 3 + most]
            at = picture.find(b"\x00\x00\x01", at + 3)
        return
    at, size = 0, (header[length_at] & 3) + 1
    while at + size < len(picture):
        yield picture[at + size : at + size + most]
        at += size + int.from_bytes(picture[at : at + size], "big")


def exp_golomb(bits: str, at: int) -> tuple[int, int]:
    """An unsigned Exp-Golomb code (ITU-T H.264, 9.1) and the offset behind it; -1 if the bits run out."""
    first_one = bits.find("1", at)
    end = 2 * first_one - at + 1
    return (int(bits[first_one:end], 2) - 1, end) if first_one >= 0 and end <= len(bits) else (-1, len(bits))


class _Bits:
    """Reads bits from the first on; ValueError at their end."""

    def __init__(self, data: bytes) -> None:
        self._bits = int.from_bytes(data, "big")
        self._left = 8 * len(data)

    def skip(self, count: int) -> None:
        self.take(count)

    def take(self, count: int) -> int:
        """An unsigned number of `count` bits."""
        self._left -= count
        if self._left < 0:
            raise ValueError("the header is too short")
        return self._bits >> self._left & ((1 << count) - 1)

    def code(self) -> int:
        """An unsigned Exp-Golomb code (ITU-T H.264, 9.1)."""
        zeros = self._left - (self._bits & ((1 << self._left) - 1)).bit_length()
        return self.take(2 * zeros + 1) - 1

    def signed_code(self) -> int:
        """A signed Exp-Golomb code (ITU-T H.264, 9.1.1)."""
        code = self.code()
        return (code + 1) // 2 if code & 1 else -(code // 2)


class PictureOrder:
    """Compares the times of packets with the order that the pictures themselves declare. This class trusts the times.

    `misplaced`: the times are those of decoding, as programs write them that copy from AVI, and pictures come in another order.
    """

    misplaced = False

    def completes(self, picture: bytes, pts: int | None) -> bool:
        """Take the next packet in decode order. True if it is the second field of the frame that the last one began."""
        return False


def picture_order(codec: str, header: bytes) -> PictureOrder:
    """The order of pictures of a codec; `header` is the one that its container has."""
    return _H264Order(header) if codec == "h264" else _Mpeg4Order() if codec == "mpeg4" else PictureOrder()


class _Mpeg4Order(PictureOrder):
    """B-VOPs precede the VOP before them. Packed packets have two VOPs, of which the second one's time is another packet's."""

    def __init__(self) -> None:
        self._reference_pts: int | None = None

    def completes(self, picture: bytes, pts: int | None) -> bool:
        types = list(islice(_vop_types(picture), 2))
        if types[:1] != [2]:
            self._reference_pts = pts
        elif pts is not None and self._reference_pts is not None and pts > self._reference_pts:
            self.misplaced = True
        self.misplaced |= len(types) > 1
        return False


@dataclass(slots=True)
class _Sequence:
    """What a sequence parameter set of H.264 (7.3.2.1.1) declares about the headers of slices. `poc_bits`: 0 if they have no order."""

    frame_num_bits: int
    poc_bits: int
    has_fields: bool
    has_colour_planes: bool


@dataclass(slots=True)
class _Slice:
    """The beginning of a slice header of H.264 (7.3.3). `field`: (frame_num, is a reference, is a bottom field), None for a frame."""

    kind: int
    is_idr: bool
    is_reference: bool
    field: tuple[int, bool, bool] | None
    poc_lsb: int
    poc_bits: int


class _H264Order(PictureOrder):
    """Pairs fields (ITU-T H.264, 3.30) and compares times with picture order counts (8.2.1.1).

    The times are wrong if they never step back, but the counts of B slices do.
    """

    def __init__(self, header: bytes) -> None:
        self._header = header
        self._sequences: dict[int, _Sequence] = {}
        self._sequence_of: dict[int, int] = {}
        self._read: dict[bytes, tuple[int, _Sequence | int] | None] = {}  # by parameter set
        self._first_field: tuple[int, bool, bool] | None = None
        self._count = self._reference_count = self._idr_pictures = 0
        self._last_order = (0, 0)
        self._last_pts: int | None = None
        self._times_step_back = self._counts_step_back = False
        for unit in _parameter_sets(header):
            self._learn(unit)

    def completes(self, picture: bytes, pts: int | None) -> bool:
        slices = self._slices(picture)
        first = next(slices, None)
        if first is None:
            return False
        if first.field is not None and self._first_field == _opposite(first.field) and not first.is_idr:
            self._first_field = None
            return True
        is_pair = first.field is not None and any(other.field != first.field for other in slices)
        self._first_field = None if is_pair else first.field
        self._compare(first, pts)
        return False

    def _compare(self, picture: _Slice, pts: int | None) -> None:
        order = self._order(picture)
        self._counts_step_back |= picture.kind == _B_SLICE and order < self._last_order
        if pts is not None and self._last_pts is not None:
            self._times_step_back |= pts < self._last_pts
        self._last_order, self._last_pts = order, pts
        self.misplaced = self._counts_step_back and not self._times_step_back

    def _order(self, picture: _Slice) -> tuple[int, int]:
        """Number of IDR pictures and picture order count (8.2.1.1)."""
        if picture.is_idr:
            self._idr_pictures += 1
            self._reference_count = 0
        if not picture.poc_bits:
            return self._idr_pictures, 0
        size = 1 << picture.poc_bits
        lsb, reference = picture.poc_lsb, self._reference_count % size
        high = self._reference_count - reference
        if lsb < reference and reference - lsb >= size // 2:
            high += size
        elif lsb > reference and lsb - reference > size // 2:
            high -= size
        if picture.is_reference:
            self._reference_count = high + lsb
        return self._idr_pictures, high + lsb

    def _slices(self, picture: bytes) -> Iterator[_Slice]:
        for unit in islice(nal_units(picture, self._header, most=PARAMETER_BYTES), MAX_NAL_UNITS):
            if unit and unit[0] & 31 in (1, 5):
                read = self._slice(unit[:SLICE_BYTES])
                if read is not None:
                    yield read
            else:
                self._learn(unit)

    def _learn(self, unit: bytes) -> None:
        """Take a parameter set. Streams repeat them before each key frame, and each is read once."""
        kind = unit[0] & 31 if unit else 0
        if kind not in (7, 8):
            return
        if unit not in self._read and len(self._read) < MAX_PARAMETER_SETS:
            self._read[unit] = _parameter_set(unit)
        if (read := self._read.get(unit)) is None:
            return
        number, value = read
        if isinstance(value, _Sequence):
            self._sequences[number] = value
        else:
            self._sequence_of[number] = value

    def _slice(self, unit: bytes) -> _Slice | None:
        bits = _Bits(_unescaped(unit[1:]))
        is_idr, is_reference = unit[0] & 31 == 5, bool(unit[0] & 0x60)
        try:
            bits.code()  # first_mb_in_slice
            kind = bits.code() % 5
            sequence = self._sequences.get(self._sequence_of.get(bits.code(), -1))
            if sequence is None:
                return None
            bits.skip(2 if sequence.has_colour_planes else 0)
            number, field = bits.take(sequence.frame_num_bits), None
            if sequence.has_fields and bits.take(1):
                field = (number, is_reference, bool(bits.take(1)))
            if is_idr:
                bits.code()  # idr_pic_id
            poc_lsb = bits.take(sequence.poc_bits)
        except ValueError:
            return None
        return _Slice(kind, is_idr, is_reference, field, poc_lsb, sequence.poc_bits)


def _parameter_set(unit: bytes) -> tuple[int, _Sequence | int] | None:
    """Read a parameter set of H.264: the number of a sequence and what it declares, or that of a picture and of its sequence; None if
    it is invalid.
    """
    bits = _Bits(_unescaped(unit[1:]))
    try:
        return _sequence(bits) if unit[0] & 31 == 7 else (bits.code(), bits.code())
    except ValueError:
        return None


def _opposite(field: tuple[int, bool, bool]) -> tuple[int, bool, bool]:
    number, is_reference, is_bottom = field
    return number, is_reference, not is_bottom


def _unescaped(unit: bytes) -> bytes:
    """A unit without the bytes that keep it from containing start codes (ITU-T H.264, 7.4.1)."""
    return unit.replace(b"\0\0\3", b"\0\0")


def _parameter_sets(header: bytes) -> Iterator[bytes]:
    """The parameter sets that a container has: a record of ISO/IEC 14496-15, 5.3.3, or units behind start codes."""
    if header[:1] != b"\x01":
        yield from islice(nal_units(header, b"", most=PARAMETER_BYTES), MAX_NAL_UNITS)
        return
    at = 5
    for mask in (31, 255):
        count, at = header[at] & mask if at < len(header) else 0, at + 1
        for _ in range(count):
            size = int.from_bytes(header[at : at + 2], "big")
            yield header[at + 2 : at + 2 + min(size, PARAMETER_BYTES)]
            at += 2 + size


def _sequence(bits: _Bits) -> tuple[int, _Sequence]:
    """Read a sequence parameter set of H.264 (7.3.2.1.1) as far as its fields: its number and what it declares."""
    profile = bits.take(8)
    bits.skip(16)
    number, has_colour_planes = bits.code(), False
    if profile in _HIGH_PROFILES:
        is_444 = bits.code() == 3
        has_colour_planes = is_444 and bits.take(1) == 1
        bits.code()
        bits.code()
        bits.skip(1)
        if bits.take(1):
            for place in range(12 if is_444 else 8):
                _skip_scaling_list(bits, 16 if place < 6 else 64)
    frame_num_bits = bits.code() + 4
    poc_type, poc_bits = bits.code(), 0
    if poc_type == 0:
        poc_bits = bits.code() + 4
    elif poc_type == 1:
        bits.skip(1)
        bits.code()
        bits.code()
        for _ in range(min(255, bits.code())):
            bits.code()
    bits.code()
    bits.skip(1)
    bits.code()
    bits.code()
    if max(frame_num_bits, poc_bits) > 16:
        raise ValueError("the header is invalid")
    return number, _Sequence(frame_num_bits, poc_bits, bits.take(1) == 0, has_colour_planes)


def _skip_scaling_list(bits: _Bits, size: int) -> None:
    if not bits.take(1):
        return
    last = following = 8
    for _ in range(size):
        if following:
            following = (last + bits.signed_code()) % 256
        last = following or last
