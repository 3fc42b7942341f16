"""Decodes the media that `probe` has measured, in exactly the shapes it promised. Independent of policies and the model.

The functions run in the calling process; bytes from outside belong in `sandbox.DecodePool`, which runs these same
functions in separate processes.
"""

from __future__ import annotations

import bisect
import logging
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any, Protocol

import av
import numpy as np
import numpy.typing as npt
import soxr
from PIL import Image, ImageChops

from mmd_api.contract.errors import BadMediaError
from mmd_workers.media import animations, containers, document
from mmd_workers.media.medium import DecodedAudio, DecodedImage, DecodedVideo, MediumInfo

log = logging.getLogger(__name__)

AUDIO_SLACK_SECONDS = 0.1  # how far a container may misstate its length before it counts as broken
DECODE_THREADS = 2
LOUDEST = 1e6  # limit of float samples: sums of louder ones may leave the range of float32 in the resampler

_TURNS = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}

_JPEG_ENDS = (b"\xff\xd9", b"\x55" * 64 + b"\xff\xd9")
_BITS_PER_SAMPLE, _PHOTOMETRIC = 258, 262  # tags of TIFF 6.0
_FRONT = 0.5**0.5
_WEIGHTS = {"FC": 1.0, "FL": _FRONT, "FR": _FRONT, "FLC": _FRONT, "FRC": _FRONT, "LFE": 0.0, "LFE2": 0.0}
_WEIGHT_OF_OTHERS = 0.5


def image_shape(info: MediumInfo) -> tuple[int, int, int]:
    """[height, width, 3] of a decoded image."""
    return (info.height, info.width, 3)


def video_shape(info: MediumInfo, frame_indices: Sequence[int]) -> tuple[int, int, int, int]:
    """[frames, height, width, 3] of a decoded video."""
    return (len(frame_indices), info.height, info.width, 3)


def decode_image(data: bytes, info: MediumInfo, out: npt.NDArray[np.uint8] | None = None) -> DecodedImage:
    """Decode the first frame of an image, or a page of a document, to RGB, uint8 [height, width, 3], in `out` if given.

    Raises:
        BadMediaError: the data is broken or truncated, or has another size than the header declares.
    """
    if info.page:
        out = np.empty(image_shape(info), np.uint8) if out is None else out
        document.render(data, info.page, out)
        return DecodedImage(out)
    image: Image.Image = containers.open_image(data, info.container)
    turn = None if info.container == "tiff" else _TURNS.get(containers.orientation(image, data))
    try:
        rgb = _rgb(_loaded(image, data))
    except containers.BROKEN_IMAGE as error:
        raise BadMediaError(
            f"the {info.container} image cannot be decoded ({error}); send a complete file"
        ) from error
    if turn is not None:
        rgb = rgb.transpose(turn)
    if rgb.size != (info.width, info.height):
        raise BadMediaError(
            f"the image is {rgb.size[0]}x{rgb.size[1]}, but its header declares {info.width}x{info.height}; re-encode the file"
        )
    if out is None:
        out = np.empty(image_shape(info), np.uint8)
    out[...] = np.asarray(rgb)
    return DecodedImage(out)


def _loaded(image: Image.Image, data: bytes) -> Image.Image:
    """Decode the pixels of an opened image, and turn a TIFF. A JPEG may lack its end marker if all pixels are there: then
    they do not depend on what follows the data.
    """
    try:
        image.load()
    except OSError:
        if image.format != "JPEG":
            raise
        ended, garbled = (containers.open_image(data.rstrip(b"\xff") + end, "jpeg") for end in _JPEG_ENDS)
        if ImageChops.difference(ended, garbled).getbbox() is not None:
            raise
        return ended
    return image


def _rgb(image: Image.Image) -> Image.Image:
    """Convert to 8-bit RGB. Transparency is dropped, and of 12 and 16 bits the upper 8 count.

    This includes grey: Pillow would cut it off at 255, and make a negative of a TIFF in which 0 is white.
    """
    if image.mode.startswith("I;16"):
        tags = getattr(image, "tag_v2", {})
        (bits, *_), white_is_zero = tags.get(_BITS_PER_SAMPLE, (16,)), tags.get(_PHOTOMETRIC) == 0
        grey = np.minimum(np.asarray(image) >> max(0, bits - 8), 255).astype(np.uint8)
        image = Image.fromarray(255 - grey if white_is_zero else grey)
    return image.convert("RGB")


def decode_video(
    data: bytes,
    info: MediumInfo,
    frame_indices: Sequence[int],
    out: npt.NDArray[np.uint8] | None = None,
) -> DecodedVideo:
    """Decode frames by index in presentation order to RGB, uint8 [frames, height, width, 3], in `out` if given.

    If timestamps allow it and it saves work, runs of pictures without a requested frame are skipped, and in H.264 also pictures that
    no other is predicted from (`nal_ref_idc` 0; ITU-T H.264, 7.4.1). Otherwise there is one scan. The pixels are the same either way.

    Raises:
        BadMediaError: the data is broken, a frame has another size than promised, or more than the last frame is missing.
    """
    if not frame_indices or min(frame_indices) < 0 or max(frame_indices) >= info.num_frames:
        raise BadMediaError(
            f"frames {list(frame_indices)[:8]} were requested, but the video has {info.num_frames} frames; request frames that exist"
        )
    if out is None:
        out = np.empty(video_shape(info, frame_indices), np.uint8)
    places: dict[int, list[int]] = {}
    for place, index in enumerate(frame_indices):
        places.setdefault(index, []).append(place)
    table, orientation = source_table(data, info)
    deliver(data, info, table, _FrameWriter(orientation, info, places, out))
    return DecodedVideo(out, list(frame_indices), info.fps, info.num_frames)


def source_table(data: bytes, info: MediumInfo) -> tuple[containers.VideoTable, int]:
    """The packets of a video, and the EXIF orientation in which its frames are shown.

    Raises:
        BadMediaError: the data is broken.
    """
    most = 2 * info.num_frames + 1024
    if info.container in animations.CONTAINERS:
        with containers.open_image(data, info.container) as image:
            orientation = containers.orientation(image, data)
        return animations.packet_table(data, info.container, most), orientation
    with containers.open_av(data, info.container, packets_only=True) as opened:
        stream = containers.video_stream(opened, info.container)
        orientation = containers.track_orientation(data, info.container, stream.id)
        return containers.video_table(opened, stream, most), orientation


class Sink(Protocol):
    """Takes decoded frames by index, in any order. `missing`: the indices it still needs."""

    missing: set[int]

    def put(self, index: int, frame: Any) -> None:
        """Take a frame, needed or not."""


def deliver(
    data: bytes, info: MediumInfo, table: containers.VideoTable, sink: Sink, most_scanned: int | None = None
) -> None:
    """Decode until `sink` has every frame that it needs.

    In H.264, pictures in between are skipped if no other is predicted from them. Frames that do not come where the container has them
    are searched for from the beginning, among at most `most_scanned` pictures (None: among all).

    Raises:
        BadMediaError: the data is broken, more than the last frame is missing, or the search would take more pictures.
    """
    if not _decode_needed(data, info, table, sink):
        if most_scanned is not None and max(sink.missing) >= most_scanned:
            raise BadMediaError(
                "frames of the video are not where its container has them, and it is too long to be searched; re-encode the file"
            )
        _decode_scan(data, info, sink)


def pictures_decoded(info: MediumInfo, table: containers.VideoTable, wanted: Sequence[int]) -> int:
    """The most pictures that `deliver` would decode for these frames."""
    times = table.presentation()
    if times is None or len(times) != info.num_frames or table.misplaced:
        return max(wanted) + 1
    runs = _runs(table, {times[index] for index in wanted})
    return sum(end - start + 1 for start, end in runs) or max(wanted) + 1


class _FrameWriter:
    """Writes frames, turned as a player would, to their places in the output."""

    def __init__(
        self,
        orientation: int,
        info: MediumInfo,
        places: dict[int, list[int]],
        out: npt.NDArray[np.uint8],
    ) -> None:
        self._orientation = orientation
        self._size = (info.width, info.height)
        self._places = places
        self._out = out
        self.missing = set(places)

    def put(self, index: int, frame: Any) -> None:
        if index not in self.missing:
            return
        sideways = self._orientation >= 5
        width, height = (frame.height, frame.width) if sideways else (frame.width, frame.height)
        if (width, height) != self._size:
            raise BadMediaError(
                f"frame {index} of the video is {width}x{height}, but the container declares {self._size[0]}x{self._size[1]}; "
                "re-encode the file at one size"
            )
        pixels = frame.to_ndarray(format="rgb24")
        turn = _TURNS.get(self._orientation)
        if turn is not None:
            pixels = np.asarray(Image.fromarray(pixels).transpose(turn))
        for place in self._places[index]:
            self._out[place] = pixels
        self.missing.discard(index)


def _decode_needed(data: bytes, info: MediumInfo, table: containers.VideoTable, writer: Sink) -> bool:
    """Decode each run from its key frame to its last needed frame; False if not possible or not worth it.

    In H.264, pictures in between are decoded only if others are predicted from them.
    """
    times = table.presentation()
    if info.container in animations.CONTAINERS:  # each picture builds on the one before it
        return False
    if times is None or len(times) != info.num_frames or table.misplaced:
        return False
    needed = {times[index]: index for index in writer.missing}
    runs = _runs(table, set(needed))
    last = max(end for _, end in runs) if runs else 0
    skips = table.codec == "h264"
    if not runs or (not skips and sum(end - start + 1 for start, end in runs) > 0.75 * (last + 1)):
        return False
    with containers.open_av(data, info.container) as opened:
        stream = containers.video_stream(opened, info.container)
        decoder = stream.codec_context
        decoder.thread_count = DECODE_THREADS
        todo = iter(runs)
        run = next(todo)
        number = -1
        for packet in containers.packets(opened, stream):
            if packet.size == 0:
                continue
            number += 1
            if number < run[0]:
                continue
            if skips and not table.completing[number]:
                decoder.skip_frame = "DEFAULT" if packet.pts in needed else "NONREF"
            frames = list(decoder.decode(packet))
            if number == run[1]:
                frames += decoder.decode(None)
                decoder.flush_buffers()
            for frame in frames:
                if frame.pts in needed:
                    writer.put(needed[frame.pts], frame)
            if number == run[1]:
                following = next(todo, None)
                if following is None:
                    break
                run = following
    return not writer.missing


def _runs(table: containers.VideoTable, needed: set[int]) -> list[tuple[int, int]]:
    """Packet ranges [first, last] with the needed timestamps, each starting at a key frame shown no later than they are."""
    keys = sorted(
        (t, n) for n, (t, key) in enumerate(zip(table.pts, table.key, strict=True)) if key and t is not None
    )
    runs: dict[int, int] = {}
    for number, (time, shown) in enumerate(zip(table.pts, table.shown, strict=True)):
        if not shown or time is None or time not in needed:
            continue
        at = bisect.bisect_right(keys, (time, number)) - 1
        if at < 0 or keys[at][1] > number:
            return []
        start = keys[at][1]
        end = number
        while table.completing[end + 1 : end + 2] == [True]:
            end += 1
        runs[start] = max(runs.get(start, 0), end)
    merged: list[tuple[int, int]] = []
    for start, end in sorted(runs.items()):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((start, end))
    return merged


def _decode_scan(data: bytes, info: MediumInfo, writer: Sink) -> None:
    """Decode from the start, counting frames, up to the last needed one."""
    seen = 0
    newest = max(writer.missing)
    last_frame: Any = None
    for frame in _frames(data, info):
        writer.put(seen, frame)
        seen += 1
        last_frame = frame
        if seen > newest:
            break
    if not writer.missing:
        return
    lost = info.num_frames - seen
    if last_frame is None or lost > 1 or writer.missing != {seen}:
        raise BadMediaError(
            f"the container declares {info.num_frames} frames, but only {seen} can be decoded; send a complete, valid file"
        )
    log.warning("video %s ends one frame early; its last frame is repeated", info.digest[:12])
    writer.put(seen, last_frame)


def _frames(data: bytes, info: MediumInfo) -> Iterator[Any]:
    if info.container in animations.CONTAINERS:
        for picture in animations.pictures(data, info.container):
            yield av.VideoFrame.from_ndarray(np.asarray(_rgb(picture)), format="rgb24")
        return
    with containers.open_av(data, info.container) as opened:
        stream = containers.video_stream(opened, info.container)
        stream.codec_context.thread_count = DECODE_THREADS
        for packet in containers.packets(opened, stream):
            yield from packet.decode()


def decode_audio(
    data: bytes,
    info: MediumInfo,
    sample_rate_hz: int,
    num_samples: int,
    out: npt.NDArray[np.float32] | None = None,
) -> DecodedAudio:
    """Decode to a mono waveform, float32 [num_samples] in [-1, 1] at `sample_rate_hz`, in `out` if given.

    Channels are mixed (`_mono`), the source is trimmed or padded to `info.num_samples`, resampled with soxr (HQ), then cut or
    padded with silence to `num_samples`.

    Raises:
        BadMediaError: the data is broken, or has noticeably fewer samples than its packets announced.
    """
    source = _source_waveform(data, info)
    if sample_rate_hz != info.sample_rate_hz:
        source = soxr.resample(source, info.sample_rate_hz, sample_rate_hz)
    if out is None:
        out = np.empty(num_samples, np.float32)
    copied = min(len(source), num_samples)
    np.clip(source[:copied], -1.0, 1.0, out=out[:copied])
    out[copied:] = 0
    return DecodedAudio(out, sample_rate_hz)


def _source_waveform(data: bytes, info: MediumInfo) -> npt.NDArray[np.float32]:
    """Mono float32 [info.num_samples] at the source's own rate; NaN and infinities become silence."""
    waveform = np.zeros(info.num_samples, np.float32)
    filled = 0
    with containers.open_av(data, info.container) as opened:
        stream = containers.audio_stream(opened)
        stream.codec_context.thread_count = 1
        to_float = av.AudioResampler(format="flt")  # PyAV reads only eight planes, and then other memory
        packets = containers.audio_packets(opened, stream)
        frames: Iterator[Any] = (frame for packet in packets for frame in packet.decode())
        if containers.cuts_twice(opened, stream):
            stream.codec_context.flags2 |= av.codec.context.Flags2.skip_manual
        if containers.is_ogg_vorbis(opened, stream):
            stream.codec_context.flags2 |= av.codec.context.Flags2.skip_manual
            frames = islice(frames, 1, None)  # the first one has no samples that are meant to be heard
        first = ""
        for frame in frames:
            first = first or frame.layout.name
            if frame.layout.name != first:
                raise BadMediaError(
                    f"the channels change from {first} to {frame.layout.name}; re-encode the file"
                )
            if frame.sample_rate != info.sample_rate_hz:
                raise BadMediaError(
                    f"the sample rate changes from {info.sample_rate_hz} to {frame.sample_rate} Hz; re-encode the file"
                )
            for packed in to_float.resample(frame):
                channels = [channel.name for channel in packed.layout.channels]
                mono = _mono(packed.to_ndarray().reshape(-1, len(channels)).T, channels)
                copied = min(len(mono), info.num_samples - filled)
                waveform[filled : filled + copied] = mono[:copied]
                filled += copied
    if info.num_samples - filled > AUDIO_SLACK_SECONDS * info.sample_rate_hz + 0.02 * info.num_samples:
        raise BadMediaError(
            f"the container declares {info.num_samples} samples, but only {filled} can be decoded; send a complete, valid file"
        )
    np.nan_to_num(waveform, copy=False, nan=0.0, posinf=0.0, neginf=0.0)
    return np.clip(waveform, -LOUDEST, LOUDEST, out=waveform)


def _mono(planes: npt.NDArray[np.float32], channels: list[str]) -> npt.NDArray[np.float32]:
    """Mix [channels, samples] to one channel. Two are averaged; more are weighted as FFmpeg weights them.

    That favours the centre, where speech is, and leaves out low-frequency effects.
    """
    mono: npt.NDArray[np.float32]
    if len(planes) <= 2:
        mono = planes.mean(axis=0, dtype=np.float32)
    else:
        weights = np.array([_WEIGHTS.get(name, _WEIGHT_OF_OTHERS) for name in channels], np.float32)
        mono = ((weights / weights.sum())[:, None] * planes).sum(axis=0, dtype=np.float32)
    return mono
