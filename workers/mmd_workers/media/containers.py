"""What the bytes really are, and how they are opened: magic bytes, pinned demuxers, packet tables. Independent of policies and the model.

The demuxer is always named, never guessed: formats that refer to other files or addresses (playlists, concat scripts)
cannot be reached through here.
"""

from __future__ import annotations

import io
import math
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from typing import Any

import av
import pillow_heif
from PIL import Image

from mmd_api.contract.errors import BadMediaError
from mmd_api.contract.pools import Modality

# The limit of pixels is the policy's and is checked before any pixel is decoded; Pillow's own would refuse or warn at another number.
Image.MAX_IMAGE_PIXELS = None
pillow_heif.register_heif_opener(thumbnails=False)

IMAGE_FORMATS = {
    "png": "PNG",
    "jpeg": "JPEG",
    "webp": "WEBP",
    "gif": "GIF",
    "bmp": "BMP",
    "avif": "AVIF",
    "heic": "HEIF",
}
_DEMUXERS = {
    "mp4": "mov",
    "matroska": "matroska",
    "avi": "avi",
    "mpegts": "mpegts",
    "ogg": "ogg",
    "wav": "wav",
    "flac": "flac",
    "mp3": "mp3",
    "aac": "aac",
}
CONTAINERS: dict[Modality, frozenset[str]] = {
    "image": frozenset(IMAGE_FORMATS),
    "video": frozenset({"mp4", "matroska", "avi", "mpegts", "ogg"}),
    "audio": frozenset({"wav", "mp3", "ogg", "flac", "mp4", "aac", "matroska"}),
}
MAX_NAL_UNITS = 256  # of a picture that are looked at: files may hold any number, and empty ones
_AVIF_BRANDS = frozenset({b"avif", b"avis"})
_HEIF_BRANDS = frozenset(
    {b"heic", b"heix", b"heim", b"heis", b"hevc", b"hevx", b"hevm", b"hevs", b"mif1", b"mif2", b"msf1"}
)
_QUICKTIME_ATOMS = (b"ftyp", b"moov", b"mdat", b"wide", b"free", b"skip")


def sniff(data: bytes) -> str | None:
    """Container named by the magic bytes, or None if that format is not served."""
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
        (b"BM", "bmp"),
    ):
        if head.startswith(magic):
            return name
    if head[:4] == b"RIFF":
        return {b"WEBP": "webp", b"WAVE": "wav", b"AVI ": "avi"}.get(head[8:12])
    if head[:4] == b"RF64" and head[8:12] == b"WAVE":
        return "wav"
    if head[4:8] in _QUICKTIME_ATOMS:
        return _still_image(head) or "mp4"
    if head[:1] == b"\x47" and head[188:189] in (b"\x47", b""):
        return "mpegts"
    return _mpeg_audio(head)


def _still_image(head: bytes) -> str | None:
    """avif or heic, by the major brand of an ISO base media file (ISO/IEC 23008-12, 10); the others decide where it names neither."""
    if head[4:8] != b"ftyp":
        return None
    major = head[8:12]
    if major in _AVIF_BRANDS:
        return "avif"
    if major not in _HEIF_BRANDS:
        return None
    end = min(len(head), struct.unpack_from(">I", head)[0])
    compatible = {head[at : at + 4] for at in range(16, end - 3, 4)}
    return "avif" if major in (b"mif1", b"msf1") and compatible & _AVIF_BRANDS else "heic"


def _mpeg_audio(head: bytes) -> str | None:
    if len(head) < 2 or head[0] != 0xFF or head[1] & 0xE0 != 0xE0:
        return None
    if head[1] & 0xF6 == 0xF0:
        return "aac"
    return "mp3" if head[1] & 0x06 else None


def open_image(data: bytes, container: str) -> Image.Image:
    """Open an image by its header; pixels are not decoded.

    Raises:
        BadMediaError: the header is broken.
    """
    try:
        return Image.open(io.BytesIO(data), formats=(IMAGE_FORMATS[container],))
    except (OSError, SyntaxError, ValueError, RuntimeError, EOFError, struct.error) as error:
        raise BadMediaError(
            f"the {container} header cannot be read ({error}); send a complete, valid file"
        ) from error


def orientation(image: Image.Image) -> int:
    """EXIF orientation 1 to 8 as it stands in the header; 1 when there is none or it is broken."""
    raw = image.info.get("exif")
    if not isinstance(raw, bytes):
        return 1
    exif = Image.Exif()
    try:
        exif.load(raw)
        value = exif.get(0x0112, 1)
    except (OSError, SyntaxError, ValueError, struct.error, KeyError, TypeError):
        return 1
    return value if isinstance(value, int) and 1 <= value <= 8 else 1


@contextmanager
def open_av(data: bytes, container: str, *, packets_only: bool = False) -> Iterator[Any]:
    """Open audio or video with the demuxer of its magic bytes; FFmpeg's errors leave as BadMediaError.

    FFmpeg decodes the first picture to learn its size; not with `packets_only`.
    """
    options = {"skip_frame": "all"} if packets_only else {}
    try:
        with av.open(
            io.BytesIO(data), "r", format=_DEMUXERS[container], options=options, metadata_errors="ignore"
        ) as opened:
            yield opened
    except (av.error.FFmpegError, ValueError, OverflowError, EOFError) as error:
        raise BadMediaError(
            f"the {container} data cannot be read ({error}); send a complete, valid file"
        ) from error


def video_stream(opened: Any) -> Any:
    """First moving picture of a container (cover art is none).

    Raises:
        BadMediaError: there is none.
    """
    for stream in opened.streams.video:
        if not stream.disposition & av.stream.Disposition.attached_pic and stream.codec_context is not None:
            return stream
    raise BadMediaError(
        "the file has no video stream that can be decoded; send H.264, HEVC, VP8, VP9, AV1 or MPEG-4 video"
    )


def audio_stream(opened: Any) -> Any:
    """First audio stream of a container.

    Raises:
        BadMediaError: there is none.
    """
    for stream in opened.streams.audio:
        if stream.codec_context is not None:
            return stream
    raise BadMediaError("the file has no audio stream that can be decoded; send WAV, MP3, FLAC, Opus or AAC")


@dataclass(slots=True)
class VideoTable:
    """Facts of the packets of a video in decode order. `key`: decoding may begin here; `shown` is False where an edit list or the
    codec hides the frame.
    """

    pts: list[int | None]
    key: list[bool]
    shown: list[bool]
    last_duration: int

    @property
    def num_frames(self) -> int:
        """Frames a decoder will show."""
        return sum(self.shown)

    def presentation(self) -> list[int] | None:
        """Timestamps of shown frames in presentation order; None when they are missing or not unique."""
        times = [t for t, shown in zip(self.pts, self.shown, strict=True) if shown]
        if any(t is None for t in times) or len(set(times)) != len(times):
            return None
        return sorted(t for t in times if t is not None)


def video_table(opened: Any, stream: Any, max_packets: int) -> VideoTable:
    """Demux every packet of a stream, decoding none; stops once more than `max_packets` were seen."""
    table = VideoTable([], [], [], 0)
    vp8 = stream.codec_context.name == "vp8"
    h264 = stream.codec_context.name == "h264"
    header = bytes(stream.codec_context.extradata or b"") if h264 else b""
    for packet in opened.demux(stream):
        if packet.size == 0:
            continue
        # A VP8 packet may hold a reference frame that is never shown: bit 4 of the frame tag (RFC 6386, section 9.1).
        hidden = packet.is_discard or (vp8 and not bytes(memoryview(packet)[:1])[0] & 0x10)
        table.pts.append(packet.pts)
        # With gradual refresh (H.264, D.2.8) containers mark pictures as key frames after which some more are needed.
        table.key.append(packet.is_keyframe and (not h264 or all(_intra_slices(bytes(packet), header))))
        table.shown.append(not hidden)
        table.last_duration = packet.duration or table.last_duration
        if len(table.pts) > max_packets:
            break
    return table


def _intra_slices(picture: bytes, header: bytes) -> Iterator[bool]:
    """Of each slice of a coded H.264 picture whether it is predicted from itself alone (ITU-T H.264, 7.3.3 and table 7-6)."""
    for unit in islice(_nal_units(picture, header), MAX_NAL_UNITS):
        if unit and unit[0] & 0x1F in (1, 5):
            bits = "".join(f"{byte:08b}" for byte in unit[1:])
            _, at = _exp_golomb(bits, 0)  # first_mb_in_slice
            slice_type, _ = _exp_golomb(bits, at)
            yield slice_type % 5 in (2, 4)


def _nal_units(picture: bytes, header: bytes) -> Iterator[bytes]:
    """The first 16 bytes of each NAL unit of a picture: behind lengths where the header is that of ISO/IEC 14496-15 (5.3.3), else
    behind start codes.
    """
    if header[:1] != b"\x01" or len(header) < 5:
        at = picture.find(b"\x00\x00\x01")
        while at >= 0:
            yield picture[at + 3 : at + 19]
            at = picture.find(b"\x00\x00\x01", at + 3)
        return
    at, size = 0, (header[4] & 3) + 1
    while at + size < len(picture):
        yield picture[at + size : at + size + 16]
        at += size + int.from_bytes(picture[at : at + size], "big")


def _exp_golomb(bits: str, at: int) -> tuple[int, int]:
    """An unsigned Exp-Golomb code (ITU-T H.264, 9.1) and where it ends; -1 when the bits run out."""
    one = bits.find("1", at)
    end = 2 * one - at + 1
    return (int(bits[one:end], 2) - 1, end) if one >= 0 and end <= len(bits) else (-1, len(bits))


def clockwise_quarter_turns(data: bytes, container: str, track_id: int) -> int:
    """How a player turns the frames of an ISO base media file: quarter turns clockwise, from the track header's matrix.

    Source: ISO/IEC 14496-12, section 8.3.2. Other containers: 0.
    """
    if container != "mp4":
        return 0
    for moov_start, moov_end in _boxes(data, 0, len(data), b"moov"):
        for trak_start, trak_end in _boxes(data, moov_start, moov_end, b"trak"):
            for start, end in _boxes(data, trak_start, trak_end, b"tkhd"):
                wide = data[start] == 1
                id_at, matrix_at = start + (20 if wide else 12), start + (52 if wide else 40)
                if matrix_at + 36 > end or struct.unpack_from(">I", data, id_at)[0] != track_id:
                    continue
                a, b = struct.unpack_from(">ii", data, matrix_at)
                turns = math.degrees(math.atan2(b, a)) / 90
                return round(turns) % 4 if abs(turns - round(turns)) < 0.01 else 0
    return 0


def _boxes(data: bytes, start: int, end: int, kind: bytes) -> Iterator[tuple[int, int]]:
    """Bodies [start, end) of the boxes of one kind directly inside a range."""
    while start + 8 <= end:
        size, name = struct.unpack_from(">I4s", data, start)
        header = 8
        if size == 1 and start + 16 <= end:
            size, header = struct.unpack_from(">Q", data, start + 8)[0], 16
        elif size == 0:
            size = end - start
        if size < header or start + size > end:
            return
        if name == kind and size > header:
            yield start + header, start + size
        start += size


def count_samples(opened: Any, stream: Any, max_packets: int) -> int:
    """Mono samples of an audio stream at its own rate, from packet durations and the encoder's trimming marks; decodes none."""
    codec = stream.codec_context
    rate, base = codec.sample_rate, stream.time_base
    coarse = base * rate > 1  # durations are rounded to more than a sample (Matroska)
    total = ticks = skipped = packets = 0
    first: int | None = None
    end = 0
    for packet in opened.demux(stream):
        if packet.size == 0:
            continue
        packets += 1
        if packets > max_packets:
            raise BadMediaError(f"the audio has more than {max_packets} packets; re-encode the file")
        if packet.pts is not None:
            first = packet.pts if first is None else first
            end = max(end, packet.pts + (packet.duration or 0))
        if packet.is_discard:
            continue
        if packet.has_sidedata("skip_samples"):
            skipped += sum(struct.unpack_from("<II", bytes(packet.get_sidedata("skip_samples"))))
        if codec.name in ("opus", "libopus"):
            total += opus_samples(bytes(memoryview(packet)[:2]))
        elif coarse and codec.frame_size:
            total += codec.frame_size
        else:
            ticks += packet.duration or 0
    if coarse and not total:
        ticks = end - (first or 0)
    from_ticks: int = round(ticks * base * rate)
    return max(0, total + from_ticks - skipped)


def wav_missing_bytes(data: bytes) -> int:
    """Bytes of sound that a RIFF WAVE header announces and that are not there; 0 for streams of unknown length."""
    at = 12
    while at + 8 <= len(data):
        name, size = struct.unpack_from("<4sI", data, at)
        if name == b"data":
            streamed = data[:4] == b"RF64" or size in (0, 0xFFFFFFFF, 0x7FFFFFFF)
            return 0 if streamed else max(0, at + 8 + size - len(data))
        at += 8 + size + (size & 1)
    return 0


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
