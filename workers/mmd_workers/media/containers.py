"""Identifies and opens files: magic bytes, pinned demuxers, packet tables. Independent of policies and the model.

The demuxer is always named, never guessed: formats that refer to other files or addresses (playlists, concat scripts)
cannot be opened here.
"""

from __future__ import annotations

import io
import math
import re
import struct
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from fractions import Fraction
from itertools import islice
from typing import Any

import av
import pillow_heif
from PIL import ExifTags, Image, TiffImagePlugin, UnidentifiedImageError

from mmd_api.contract.errors import BadMediaError
from mmd_api.contract.pools import Modality
from mmd_workers.media import pictures
from mmd_workers.media.formats.vorbis import BlockSizes

# The policy limits pixels, checked before any pixel is decoded; Pillow's own limit would refuse or warn at another number.
Image.MAX_IMAGE_PIXELS = None
pillow_heif.register_heif_opener(thumbnails=False)

IMAGE_FORMATS = {
    "png": "PNG",
    "jpeg": "JPEG",
    "webp": "WEBP",
    "gif": "GIF",
    "bmp": "BMP",
    "tiff": "TIFF",
    "avif": "AVIF",
    "heic": "HEIF",
}
_DEMUXERS = {
    "mp4": "mov",
    "matroska": "matroska",
    "avi": "avi",
    "flv": "flv",
    "mpegts": "mpegts",
    "mpegps": "mpeg",
    "ogg": "ogg",
    "wav": "wav",
    "w64": "w64",
    "caf": "caf",
    "au": "au",
    "flac": "flac",
    "mp3": "mp3",
    "aac": "aac",
    "amr": "amr",
    "avif": "mov",
    "heic": "mov",
}
CONTAINERS: dict[Modality, frozenset[str]] = {
    "image": frozenset(IMAGE_FORMATS),
    "video": frozenset(
        {"mp4", "matroska", "avi", "flv", "mpegts", "mpegps", "ogg", "gif", "png", "webp", "avif", "heic"}
    ),
    "audio": frozenset(_DEMUXERS) - frozenset(IMAGE_FORMATS),  # a video's sound track counts as audio
}
ISO_MEDIA = frozenset({"mp4", "avif", "heic"})
"""ISO base media files. Images may have tracks of pictures (ISO/IEC 23008-12, 7)."""
DOCUMENT = "pdf"
"""Container of pages, each an image. An image part of a request does not take it."""
PIXEL_MODES = frozenset(
    {"1", "L", "LA", "P", "PA", "RGB", "RGBA", "RGBa", "RGBX", "CMYK", "YCbCr", "I;16", "I;16B"}
)
"""Pillow's modes with a defined meaning in 8 bits. 32-bit integers and floats have no defined range."""
BROKEN_IMAGE = (OSError, SyntaxError, ValueError, RuntimeError, EOFError, LookupError, TypeError, AttributeError, ArithmeticError, AssertionError, struct.error)  # fmt: skip
"""Errors that Pillow's readers raise at malformed files."""
PROBED_BYTES = 2**20
"""Bytes of packets that FFmpeg reads and holds while it opens a file. Each packet takes another half kilobyte: with FFmpeg's own
5 MB, a subtitle with one byte per packet takes all memory that a decode may use.
"""
_HEADED = frozenset({"mp4", "matroska", "avi", "avif", "heic", "flv", "mpegps"})
"""Containers whose headers or first packets describe every stream. A transport stream may show its first picture late."""
SEI_BYTES = 256  # limit for reading the messages of an SEI unit
MAX_DESCRIBING_CHUNKS = 256  # limit for the chunks of a PNG with text or EXIF
# Each scan of a JPEG is decoded over all its pixels and may have few bytes. Progressive files have about 10.
MAX_SCANS = 100
MAX_ITEMS = 1000  # libheif's limit for HEIC, applied to AVIF: the cells of a grid may share their bytes
_DESCRIBING_KEYWORDS = (b"XML:com.adobe.xmp\0", b"Raw profile type ")
_UNPACKED_CHUNKS = (b"zTXt", b"iTXt", b"iCCP")
MIN_UNPACKED_BYTES = 512
"""Least size of a chunk that may unpack to 1 MiB, Pillow's limit: zlib shrinks to a thousandth at most."""
_ORIENTATION = ExifTags.Base.Orientation
_NEW_SUBFILE_TYPE, _SUB_DIRECTORIES = 254, 330  # tags of TIFF
_AVIF_BRANDS = frozenset({b"avif", b"avis"})
_HEIF_BRANDS = frozenset(
    {b"heic", b"heix", b"heim", b"heis", b"hevc", b"hevx", b"hevm", b"hevs", b"mif1", b"mif2", b"msf1"}
)
_SEQUENCE_BRANDS = frozenset({b"avis", b"msf1", b"hevc", b"hevx", b"hevm", b"hevs"})
_MARKER = re.compile(rb"\xff[\xc0-\xcf\xd9-\xfe]")  # JPEG markers with a segment; decoders skip lower ones
_TRANSPORT_PACKETS = ((4, 192), (0, 204))
"""Where the sync bytes (G) of longer packets of a transport stream are: behind a time (AVCHD, BDAV), or before check bytes (DVB)."""
_W64_RIFF = b"riff\x2e\x91\xcf\x11\xa5\xd6\x28\xdb\x04\xc1\0\0"
_QUICKTIME_ATOMS = (b"ftyp", b"moov", b"mdat", b"wide", b"free", b"skip")


def sniff(data: bytes) -> str | None:
    """The container that the magic bytes name, or None if it is not served."""
    head = data[:4096]
    if head[:3] == b"ID3" and len(head) >= 10:  # a tag may precede mp3, aac and flac
        size = (head[6] & 127) << 21 | (head[7] & 127) << 14 | (head[8] & 127) << 7 | (head[9] & 127)
        body = data[10 + size : 14 + size]
        return "flac" if body == b"fLaC" else _mpeg_audio(body) or "mp3"
    for magic, name in (
        (b"\x89PNG\r\n\x1a\n", "png"),
        (b"\xff\xd8\xff", "jpeg"),
        (b"GIF87a", "gif"),
        (b"GIF89a", "gif"),
        (b"\x1a\x45\xdf\xa3", "matroska"),
        (b"OggS", "ogg"),
        (b"fLaC", "flac"),
        (b"#!AMR", "amr"),
        (b"caff", "caf"),
        (b".snd", "au"),
        (_W64_RIFF, "w64"),
        (b"FLV\x01", "flv"),
        (b"\0\0\x01\xba", "mpegps"),
        (b"II*\0", "tiff"),
        (b"MM\0*", "tiff"),
        (b"II+\0", "tiff"),  # BigTIFF; Pillow does not read its other byte order
        (b"BM", "bmp"),
    ):
        if head.startswith(magic):
            return name
    if head[:4] == b"RIFF":
        return {b"WEBP": "webp", b"WAVE": "wav", b"AVI ": "avi"}.get(head[8:12])
    if head[:4] in (b"RF64", b"BW64") and head[8:12] == b"WAVE":
        return "wav"
    if head[4:8] in _QUICKTIME_ATOMS:
        return _still_image(head) or "mp4"
    if any(head[at::size][:3] == b"GGG" for at, size in _TRANSPORT_PACKETS):
        return "mpegts"
    if head[:1] == b"\x47" and head[188:189] in (b"\x47", b""):
        return "mpegts"
    return DOCUMENT if b"%PDF-" in head[:1024] else _mpeg_audio(head)


def _still_image(head: bytes) -> str | None:
    """avif or heic, by the major brand of an ISO base media file (ISO/IEC 23008-12, 10).

    The compatible brands decide if it names neither.
    """
    if head[4:8] != b"ftyp":
        return None
    major = head[8:12]
    if major in _AVIF_BRANDS:
        return "avif"
    if major not in _HEIF_BRANDS:
        return None
    return "avif" if major in (b"mif1", b"msf1") and _brands(head) & _AVIF_BRANDS else "heic"


def _brands(head: bytes) -> set[bytes]:
    """The major and the compatible brands of an ISO base media file (ISO/IEC 14496-12, 4.3)."""
    end = min(len(head), struct.unpack_from(">I", head)[0])
    return {head[8:12], *(head[at : at + 4] for at in range(16, end - 3, 4))}


def _mpeg_audio(head: bytes) -> str | None:
    if len(head) < 2 or head[0] != 0xFF or head[1] & 0xE0 != 0xE0:
        return None
    if head[1] & 0xF6 == 0xF0:
        return "aac"
    return "mp3" if head[1] & 0x06 else None


def open_image(data: bytes, container: str) -> Image.Image:
    """Open an image by its header; pixels are not decoded.

    Raises:
        BadMediaError: the header is broken, or decoding would take disproportionately long.
    """
    if container == "jpeg" and next(islice(_scans(data), MAX_SCANS, None), None) is not None:
        raise BadMediaError(f"the jpeg image has more than {MAX_SCANS} scans; re-encode the file")
    if container == "avif" and (items := _items(data)) > MAX_ITEMS:
        raise BadMediaError(
            f"the avif image has {items} items, more than {MAX_ITEMS}; re-encode it as one picture"
        )
    if container == "png":
        data = _without_texts(data)
    try:
        return Image.open(io.BytesIO(data), formats=(IMAGE_FORMATS[container],))
    except BROKEN_IMAGE as error:
        # Pillow's message for an unknown file names an object in memory.
        reason = "" if isinstance(error, UnidentifiedImageError) else f" ({error})"
        raise BadMediaError(
            f"the {container} header cannot be read{reason}; send a complete, valid file"
        ) from error


def _scans(jpeg: bytes) -> Iterator[int]:
    """Offsets of the scans of a JPEG (ITU-T T.81, B.1.1.4).

    Scans of a picture inside a segment, such as a thumbnail, do not count.
    """
    at = 2
    while (marker := _MARKER.search(jpeg, at)) is not None and marker[0] != b"\xff\xd9":
        if marker[0] == b"\xff\xda":
            yield marker.start()
        at = marker.end() + int.from_bytes(jpeg[marker.end() : marker.end() + 2], "big")


def _items(heif: bytes) -> int:
    """Number of items that an ISO base media file declares (ISO/IEC 14496-12, 8.11.6)."""
    for start, end in _boxes(heif, 0, len(heif), b"meta"):
        for infos, _ in _boxes(heif, start + 4, end, b"iinf"):
            return int.from_bytes(heif[infos + 4 : infos + (8 if heif[infos] else 6)], "big")
    return 0


def orientation(image: Image.Image, data: bytes) -> int:
    """EXIF orientation, 1 to 8, of an image that is opened and not yet decoded.

    It comes from EXIF or else XMP, as Pillow and transformers read it; 1 if there is none or it is broken. PNG may have it behind
    the pixels.
    """
    try:
        if image.format == "PNG":
            with Image.open(io.BytesIO(_description(data)), formats=("PNG",)) as described:
                value = Image.Image.getexif(described).get(_ORIENTATION, 1)
        else:
            value = image.getexif().get(_ORIENTATION, 1)
    except BROKEN_IMAGE:
        return 1
    return value if isinstance(value, int) and 1 <= value <= 8 else 1


def turned_by_pillow(image: Image.Image) -> bool:
    """Whether an opened image already has the size at which it is displayed."""
    return isinstance(image, TiffImagePlugin.TiffImageFile) and _ORIENTATION in image.tag_v2


def png_chunks(png: bytes) -> Iterator[tuple[bytes, int]]:
    """Type of each chunk, and the offset of its body."""
    at = 8
    while at + 12 <= len(png):
        yield png[at + 4 : at + 8], at + 8
        at += 12 + int.from_bytes(png[at : at + 4], "big")


def is_preview(image: Image.Image) -> bool:
    """Whether the first page of a TIFF is a small copy of the picture, which camera raw files have elsewhere (TIFF 6.0, NewSubfileType)."""
    tags = getattr(image, "tag_v2", {})
    try:
        kind = tags.get(_NEW_SUBFILE_TYPE, 0)
    except BROKEN_IMAGE:
        return False
    return _SUB_DIRECTORIES in tags and isinstance(kind, int) and kind & 1 == 1


def _without_texts(png: bytes) -> bytes:
    """A PNG without compressed texts and profiles that Pillow may refuse for their size; they are no part of the picture."""
    kept, begin = [], 0
    for kind, at in png_chunks(png):
        size = int.from_bytes(png[at - 8 : at - 4], "big")
        if kind in _UNPACKED_CHUNKS and size >= MIN_UNPACKED_BYTES:
            kept.append(png[begin : at - 8])
            begin = at + size + 4
    return b"".join([*kept, png[begin:]]) if kept else png


def _description(png: bytes) -> bytes:
    """A PNG with only the chunks that may have an orientation (PNG, third edition, 5.3), also those behind the pixels."""
    chunks = [png[:8]]
    for kind, at in png_chunks(png):
        is_text = kind in (b"tEXt", b"zTXt", b"iTXt") and png.startswith(_DESCRIBING_KEYWORDS, at)
        if kind in (b"IHDR", b"eXIf") or is_text:
            chunks.append(png[at - 8 : at + 4 + int.from_bytes(png[at - 8 : at - 4], "big")])
        if kind == b"IEND" or len(chunks) >= MAX_DESCRIBING_CHUNKS:
            break
    return b"".join([*chunks, b"\0\0\0\0IEND\xae\x42\x60\x82"])


@contextmanager
def open_av(data: bytes, container: str, *, packets_only: bool = False) -> Iterator[Any]:
    """Open audio or video with the demuxer named by its magic bytes; FFmpeg's errors become BadMediaError.

    FFmpeg decodes the first picture to learn its size, except with `packets_only`.
    """
    options = {"skip_frame": "all"} if packets_only else {}
    if container in _HEADED:
        options["probesize"] = str(PROBED_BYTES)
    try:
        with av.open(
            io.BytesIO(data), "r", format=_DEMUXERS[container], options=options, metadata_errors="ignore"
        ) as opened:
            yield opened
    except (av.error.FFmpegError, ValueError, OverflowError, EOFError) as error:
        # The reason leaves out FFmpeg's error number, and the file name, since there is none. The new error is in no local variable:
        # through its traceback it would hold its own frame, and the media.
        reason = getattr(error, "strerror", None) or str(error)
        raise BadMediaError(
            f"the {container} data cannot be read ({reason}); send a complete, valid file"
        ) from error


def video_stream(opened: Any, container: str) -> Any:
    """The video stream that a player shows: the first one with the default flag, or else the first; cover art is none.

    Of an image file it is the longest: FFmpeg has the still picture as a stream, too.

    Raises:
        BadMediaError: there is no video stream.
    """
    cover = av.stream.Disposition.attached_pic
    shown = [stream for stream in opened.streams.video if not stream.disposition & cover]
    if container in IMAGE_FORMATS:
        shown.sort(key=lambda stream: -stream.frames)
    stream = _chosen(shown)
    if stream is None:
        raise BadMediaError(
            "the file has no video stream that can be decoded; send H.264, HEVC, VP8, VP9, AV1, MPEG-2 or MPEG-4 video"
        )
    return _alone(opened, stream)


def has_audio_stream(opened: Any) -> bool:
    """Whether `audio_stream` would find one."""
    return _chosen(opened.streams.audio) is not None


def audio_stream(opened: Any) -> Any:
    """The audio stream that a player plays: the first one with the default flag, or else the first.

    Raises:
        BadMediaError: there is no audio stream.
    """
    stream = _chosen(opened.streams.audio)
    if stream is None:
        raise BadMediaError(
            "the file has no audio stream that can be decoded; send WAV, MP3, FLAC, Opus, Vorbis, AAC or AMR"
        )
    return _alone(opened, stream)


def _chosen(streams: Iterable[Any]) -> Any:
    """Of the streams that can be decoded, the first with the default flag, or else the first; None if there is none."""
    decodable = [stream for stream in streams if stream.codec_context is not None]
    flagged = (stream for stream in decodable if stream.disposition & av.stream.Disposition.default)
    return next(flagged, decodable[0] if decodable else None)


def _alone(opened: Any, stream: Any) -> Any:
    """Make the demuxer leave out the packets of all other streams; returns the stream."""
    for other in opened.streams:
        if other is not stream:
            other.discard = av.stream.Discard.all
    return stream


def packets(opened: Any, stream: Any) -> Iterator[Any]:
    """Packets of a stream in decode order, and at the end an empty one that flushes its decoder."""
    try:
        yield from opened.demux(stream)
    except IndexError:
        # All packets are read: PyAV fails at the end of a transport stream in which other streams appeared meanwhile.
        return


def audio_packets(opened: Any, stream: Any) -> Iterator[Any]:
    """Packets as `packets` returns them, except a last frame of AAC of which the file has only a part (ISO/IEC 13818-7, 6.2)."""
    is_adts = opened.format.name == "aac"
    for packet in packets(opened, stream):
        head = bytes(memoryview(packet)[:6]) if is_adts and packet.size >= 6 else b""
        if not (head[:1] == b"\xff" and packet.size < (head[3] & 3) << 11 | head[4] << 3 | head[5] >> 5):
            yield packet


@dataclass(slots=True)
class VideoTable:
    """The packets of a video in decode order. `time_base`: seconds per tick.

    `key`: decoding may begin here. `shown` is False if an edit list or the codec hides the frame, or if the file begins after a frame
    it is predicted from. `completing`: the packet is the second field of the frame that the one before it began, and not shown either. `misplaced`: the times are right, but of other frames (`pictures.PictureOrder`).
    """

    codec: str
    time_base: Fraction
    pts: list[int | None]
    key: list[bool]
    shown: list[bool]
    completing: list[bool]
    last_duration: int
    misplaced: bool = False

    @property
    def num_frames(self) -> int:
        """Number of frames that a decoder will show."""
        return sum(self.shown)

    def presentation(self) -> list[int] | None:
        """Timestamps of shown frames in presentation order; None if they are missing or not unique."""
        times = [t for t, shown in zip(self.pts, self.shown, strict=True) if shown]
        if any(t is None for t in times) or len(set(times)) != len(times):
            return None
        return sorted(t for t in times if t is not None)


def video_table(opened: Any, stream: Any, max_packets: int) -> VideoTable:
    """Demux every packet of a stream without decoding; stops after more than `max_packets`.

    AVI has packets in decode order and no timestamps; those that FFmpeg makes up are left out.
    """
    codec, header = stream.codec_context.name, bytes(stream.codec_context.extradata or b"")
    table = VideoTable(codec, stream.time_base, [], [], [], [], 0)
    timed = opened.format.name != "avi"
    beginning = _Beginning(stream.codec_context)
    order = pictures.picture_order(codec, header)
    for packet in packets(opened, stream):
        if packet.size == 0:
            continue
        picture = bytes(packet)
        # A VP8 packet may hold a reference frame that is never shown: bit 4 of the frame tag (RFC 6386, section 9.1).
        hidden = beginning.drops(packet) or packet.is_discard or (codec == "vp8" and not picture[0] & 0x10)
        completing = order.completes(picture, None if hidden else packet.pts)
        table.pts.append(packet.pts if timed else None)
        table.key.append(packet.is_keyframe and not completing and pictures.may_begin(codec, picture, header))
        table.shown.append(not hidden and not completing)
        table.completing.append(completing)
        table.last_duration = packet.duration or table.last_duration
        if len(table.pts) > max_packets:
            break
    table.misplaced = order.misplaced
    return table


_TYPED_LEADING = pictures.MPEG_VIDEO | {"mpeg4"}
"""Codecs whose pictures before the first key frame in presentation order are all B pictures, and precede others in decode order."""


class _Beginning:
    """The first pictures of a file cut out of a longer one, as recordings of broadcasts are.

    Decoders drop the pictures before the first key frame and, with gradual refresh, until it is complete (ITU-T H.264, D.2.8). They
    also drop pictures that are shown before the first one and predicted from missing ones (H.265, 8.1.3, RASL; H.262, 6.3.8,
    closed_gop).
    """

    def __init__(self, codec: Any) -> None:
        self._codec = codec.name
        self._header = bytes(codec.extradata or b"")
        self._over = self._codec not in _TYPED_LEADING | {"h264", "hevc"}
        self._has_begun = False
        self._first_shown_pts: int | None = None
        self._refreshing: int | None = 0  # reference pictures until the first shown one; None: it is reached

    def drops(self, packet: Any) -> bool:
        """Whether the decoder drops this packet. Call it for every packet in decode order."""
        if self._over:
            return False
        picture = bytes(packet)
        units = self._units(picture)
        if not self._has_begun:
            if not (packet.is_keyframe or any(self._is_key(unit) for unit in units)):
                return True
            self._has_begun = True
            self._refreshing = _recovery_frames(units) if self._codec == "h264" else 0
        if self._refreshing is not None:
            return self._refreshes(units, packet.pts, picture)
        if self._is_leading(picture, units):
            return True
        at, first = packet.pts, self._first_shown_pts
        if at is None:  # Matroska has no times before the first one
            self._over = self._codec != "hevc"
        else:
            self._over = self._codec in _TYPED_LEADING or first is None or at >= first
        return self._codec == "h264" and not self._over

    def _is_leading(self, picture: bytes, units: list[bytes]) -> bool:
        """Whether the type of a picture shows that it is predicted from one before the first key frame. Of H.264 its time shows it."""
        if self._codec == "hevc":
            return any(unit[0] >> 1 & 63 in (8, 9) for unit in units)
        return pictures.is_bidirectional(self._codec, picture)

    def _refreshes(self, units: list[bytes], pts: int | None, picture: bytes) -> bool:
        """Whether this picture is still part of the refresh; otherwise it is the first shown one."""
        reference = self._codec != "h264" or any(unit[0] & 31 in (1, 5) and unit[0] & 0x60 for unit in units)
        is_key_picture = self._codec == "h264" and any(self._is_key(unit) for unit in units)
        if not is_key_picture and (self._refreshing or not reference):
            self._refreshing = (self._refreshing or 0) - reference
            return True
        self._refreshing, self._first_shown_pts = None, pts
        self._over = self._codec in pictures.MPEG_VIDEO and _closed_gop(picture)
        return False

    def _is_key(self, unit: bytes) -> bool:
        """Whether decoding may begin at this unit, whatever the container says."""
        if self._codec == "h264":
            return unit[0] & 31 == 5
        return self._codec == "hevc" and 16 <= unit[0] >> 1 & 63 < 24

    def _units(self, picture: bytes) -> list[bytes]:
        if self._codec not in ("h264", "hevc"):
            return []
        length_at = 4 if self._codec == "h264" else 21
        units = islice(
            pictures.nal_units(picture, self._header, length_at, SEI_BYTES), pictures.MAX_NAL_UNITS
        )
        return [unit for unit in units if unit]


def _recovery_frames(units: list[bytes]) -> int:
    """Reference pictures until a gradual refresh of H.264 is complete, by its recovery point message; 0 without one."""
    for unit in units:
        if unit[0] & 31 != 6:
            continue
        messages, at = unit[1:].replace(b"\0\0\3", b"\0\0"), 0  # emulation prevention removed (7.4.1)
        while at < len(messages):
            kind, at = _sei_number(messages, at)
            size, at = _sei_number(messages, at)
            if kind == 6:
                bits = "".join(f"{byte:08b}" for byte in messages[at : at + 8])
                return max(0, pictures.exp_golomb(bits, 0)[0])
            at += size
    return 0


def _sei_number(messages: bytes, at: int) -> tuple[int, int]:
    """Type or size of an SEI message (ITU-T H.264, 7.3.2.3.1), and the offset behind it."""
    value = 0
    while messages[at : at + 1] == b"\xff":
        value, at = value + 255, at + 1
    return value + int.from_bytes(messages[at : at + 1], "big"), at + 1


def _closed_gop(picture: bytes) -> bool:
    at = picture.find(b"\x00\x00\x01\xb8")
    return at >= 0 and len(picture) > at + 7 and bool(picture[at + 7] & 0x40)


_ORIENTATIONS = {  # EXIF orientation by the matrix (a b; c d) that maps the stored picture to the displayed one
    (1, 0, 0, 1): 1,
    (-1, 0, 0, 1): 2,
    (-1, 0, 0, -1): 3,
    (1, 0, 0, -1): 4,
    (0, 1, 1, 0): 5,
    (0, 1, -1, 0): 6,
    (0, -1, -1, 0): 7,
    (0, -1, 1, 0): 8,
}


def track_orientation(data: bytes, container: str, track_id: int) -> int:
    """EXIF orientation in which a player shows the frames of an ISO base media file, from the matrices of its track and its movie.

    Source: ISO/IEC 14496-12, sections 8.2.2 and 8.3.2. Other containers: 1.
    """
    if container not in ISO_MEDIA:
        return 1
    for moov_start, moov_end in _boxes(data, 0, len(data), b"moov"):
        movie = next((_matrix(data, *box, 36) for box in _boxes(data, moov_start, moov_end, b"mvhd")), None)
        for trak_start, trak_end in _boxes(data, moov_start, moov_end, b"trak"):
            for start, end in _boxes(data, trak_start, trak_end, b"tkhd"):
                id_at, matrix = start + (20 if data[start] == 1 else 12), _matrix(data, start, end, 40)
                if matrix is None or struct.unpack_from(">I", data, id_at)[0] != track_id:
                    continue
                (a, b, c, d), (e, f, g, h) = matrix, movie or (1, 0, 0, 1)
                shown = (*_direction(a * e + b * g, a * f + b * h), *_direction(c * e + d * g, c * f + d * h))
                return _ORIENTATIONS.get(shown, 1)
    return 1


def has_tracks(data: bytes, container: str) -> bool:
    """Whether an image file declares a sequence of pictures, and has one."""
    if container not in ISO_MEDIA or not _brands(data[:4096]) & _SEQUENCE_BRANDS:
        return False
    return any(True for _ in _boxes(data, 0, len(data), b"moov"))


def _matrix(data: bytes, start: int, end: int, at: int) -> tuple[int, int, int, int] | None:
    """(a, b, c, d) of the matrix in a header box, `at` its offset in version 0 of the box; None if the box is too short."""
    at += start + (12 if data[start] == 1 else 0)
    if at + 36 > end:
        return None
    a, b, _, c, d = struct.unpack_from(">5i", data, at)
    return a, b, c, d


def _direction(x: int, y: int) -> tuple[int, int]:
    """The signed axis on which a vector lies within one degree; (0, 0) for none."""
    length = math.hypot(x, y) or 1
    axis = round(x / length), round(y / length)
    return axis if abs(x * axis[1] - y * axis[0]) < 0.0175 * length else (0, 0)


def _boxes(data: bytes, start: int, end: int, kind: bytes) -> Iterator[tuple[int, int]]:
    """Bodies [start, end) of the boxes of one kind directly inside a range. A truncated body ends with the range, as in FFmpeg."""
    while start + 8 <= end:
        size, name = struct.unpack_from(">I4s", data, start)
        header = 8
        if size == 1 and start + 16 <= end:
            size, header = struct.unpack_from(">Q", data, start + 8)[0], 16
        elif size == 0:
            size = end - start
        if size < header:
            return
        close = min(end, start + size)
        if name == kind and close > start + header:
            yield start + header, close
        start = close


def count_samples(opened: Any, stream: Any, max_packets: int) -> int:
    """Count the mono samples of an audio stream at its own rate, from packet durations and the encoder's trimming marks.

    Nothing is decoded.
    """
    codec = stream.codec_context
    rate, base = codec.sample_rate, stream.time_base
    is_caf = opened.format.name == "caf"
    coarse = base * rate > 1  # durations are rounded to more than a sample (Matroska)
    blocks = BlockSizes(bytes(codec.extradata or b"") if codec.name == "vorbis" else b"")
    total = ticks = skipped = count = 0
    first: int | None = None
    end = unplayed = 0
    for packet in audio_packets(opened, stream):
        if packet.size == 0:
            continue
        count += 1
        if count > max_packets:
            raise BadMediaError(f"the audio has more than {max_packets} packets; re-encode the file")
        if packet.pts is not None:
            first = packet.pts if first is None else first
            end = max(end, packet.pts + (packet.duration or 0))
        if count == 1 and packet.pts == 0 and is_ogg_vorbis(opened, stream):
            unplayed = packet.duration or 0
        if packet.is_discard:
            continue
        at_start, at_end = _trimmed(packet)
        if blocks.is_known:
            samples = blocks.samples(bytes(memoryview(packet)[:1]))
            total += max(0, samples - at_start - max(0, at_end - unplayed))
            continue
        skipped += at_start + (0 if is_caf else at_end)  # the last duration of a CAF is without it
        if codec.name in ("opus", "libopus"):
            total += opus_samples(bytes(memoryview(packet)[:2]))
        elif is_caf and codec.name.startswith("pcm_"):  # the last packet may be shorter than its duration
            total += packet.size // (_pcm_bytes(codec.name) * codec.channels or 1)
        elif (
            coarse or opened.format.name in ("mpegts", "mpeg")
        ) and codec.frame_size:  # ticks of 90 kHz are truncated
            total += codec.frame_size
        else:
            ticks += packet.duration or 0
    if coarse and not total:
        ticks = end - (first or 0)
    from_ticks: int = round(ticks * base * rate)
    return max(0, total + from_ticks - skipped)


def is_ogg_vorbis(opened: Any, stream: Any) -> bool:
    """Whether FFmpeg may cut too much off the end: in an Ogg it counts samples for the first packet of Vorbis, which has none."""
    return bool(opened.format.name == "ogg" and stream.codec_context.name == "vorbis")


def cuts_twice(opened: Any, stream: Any) -> bool:
    """Whether FFmpeg cuts the end off twice: a CAF says how long the last packet of ALAC is, and so does the packet."""
    return bool(opened.format.name == "caf" and stream.codec_context.name == "alac")


def _pcm_bytes(codec: str) -> int:
    """Bytes of a sample, from a name such as pcm_s24be; of A-law and mu-law 1."""
    bits = re.search(r"\d+", codec)
    return int(bits[0]) // 8 if bits else 1


def _trimmed(packet: Any) -> tuple[int, int]:
    """Samples that the encoder marked to be cut from the beginning and the end of a packet."""
    if not packet.has_sidedata("skip_samples"):
        return 0, 0
    at_start, at_end = struct.unpack_from("<II", bytes(packet.get_sidedata("skip_samples")))
    return at_start, at_end


def opus_samples(head: bytes) -> int:
    """Samples at 48 kHz of an Opus packet, from its table of contents byte (RFC 6716, section 3.1)."""
    toc = head[0]
    config = toc >> 3
    if config < 12:
        size = (480, 960, 1920, 2880)[config & 3]
    elif config < 16:
        size = (480, 960)[config & 1]
    else:
        size = (120, 240, 480, 960)[config & 3]
    code = toc & 3
    frames = 1 if code == 0 else 2 if code < 3 else (head[1] & 63 if len(head) > 1 else 0)
    return size * frames
