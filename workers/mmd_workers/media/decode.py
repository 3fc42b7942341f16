"""Pixels and samples out of bytes that `probe` has measured, in exactly the shapes it promised. Independent of policies and the model.

The functions run where they are called; bytes from outside belong into `sandbox.DecodePool`, which runs these same
functions in separate processes.
"""

from __future__ import annotations

import bisect
import logging
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import av
import numpy as np
import numpy.typing as npt
import soxr
from PIL import Image

from mmd_api.contract.errors import BadMediaError
from mmd_workers.media import containers, document
from mmd_workers.media.medium import DecodedAudio, DecodedImage, DecodedVideo, MediumInfo

log = logging.getLogger(__name__)

AUDIO_SLACK_SECONDS = 0.1  # how far a container may misstate its length before it counts as broken
DECODE_THREADS = 2
LOUDEST = 1e6  # of a float: sums of louder samples may leave the range of float32 in the resampler

_TURNS = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}

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
    """First frame of an image, or a page of a document, as RGB, uint8 [height, width, 3], written to `out` when given.

    Raises:
        BadMediaError: broken or cut off data, or another size than the header said.
    """
    if info.page:
        out = np.empty(image_shape(info), np.uint8) if out is None else out
        document.render(data, info.page, out)
        return DecodedImage(out)
    image: Image.Image = containers.open_image(data, info.container)
    turn = None if info.container == "tiff" else _TURNS.get(containers.orientation(image, data))
    try:
        image.load()  # and turns a TIFF
        rgb = _rgb(image)
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


def _rgb(image: Image.Image) -> Image.Image:
    """Transparency is dropped; of 12 and 16 bits the upper 8 count, also of grey, which Pillow would cut off at 255, and of a TIFF in which 0 is
    white it would make a negative.
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
    """Frames by index in presentation order as RGB, uint8 [frames, height, width, 3], written to `out` when given.

    When timestamps allow it and that saves work, runs of pictures without a wanted frame are skipped, and in H.264 pictures that no
    other is predicted from (`nal_ref_idc` 0; ITU-T H.264, 7.4.1); one scan otherwise. The pixels are the same either way.

    Raises:
        BadMediaError: broken data, another frame size than promised, or more than the last frame is missing.
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
    with containers.open_av(data, info.container, packets_only=True) as opened:
        stream = containers.video_stream(opened)
        orientation = containers.track_orientation(data, info.container, stream.id)
        table = containers.video_table(opened, stream, 2 * info.num_frames + 1024)
    deliver(data, info, table, _FrameWriter(orientation, info, places, out))
    return DecodedVideo(out, list(frame_indices), info.fps, info.num_frames)


class Sink(Protocol):
    """Takes decoded frames by index, in any order. `missing`: those that it still needs."""

    missing: set[int]

    def put(self, index: int, frame: Any) -> None:
        """Take a frame, which may be one that it does not need."""


def deliver(
    data: bytes, info: MediumInfo, table: containers.VideoTable, sink: Sink, most_scanned: int | None = None
) -> None:
    """Decode until `sink` has every frame that it needs. Of H.264 what lies between is skipped where no other is predicted from it. Frames that do not
    come where the container has them are looked for from the beginning, among `most_scanned` pictures at most (None: among all).

    Raises:
        BadMediaError: broken data, more than the last frame is missing, or it would take more pictures.
    """
    if not _decode_needed(data, info, table, sink):
        if most_scanned is not None and max(sink.missing) >= most_scanned:
            raise BadMediaError(
                "frames of the video are not where its container has them, and it is too long to be searched; re-encode the file"
            )
        _decode_scan(data, info, sink)


def pictures_decoded(info: MediumInfo, table: containers.VideoTable, wanted: Sequence[int]) -> int:
    """How many pictures `deliver` would decode at most for these frames."""
    times = table.presentation()
    if times is None or len(times) != info.num_frames:
        return max(wanted) + 1
    runs = _runs(table, {times[index] for index in wanted})
    return sum(end - start + 1 for start, end in runs) or max(wanted) + 1


class _FrameWriter:
    """Puts frames, turned as a player would, into their places of the output."""

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
    """Decode only from a key frame up to the last frame wanted of its run, and of H.264 of what lies between only what others are
    predicted from. False: not possible or not worth it.
    """
    times = table.presentation()
    if times is None or len(times) != info.num_frames:
        return False
    wanted = {times[index]: index for index in writer.missing}
    runs = _runs(table, set(wanted))
    last = max(end for _, end in runs) if runs else 0
    skips = table.codec == "h264"
    if not runs or (not skips and sum(end - start + 1 for start, end in runs) > 0.75 * (last + 1)):
        return False
    with containers.open_av(data, info.container) as opened:
        stream = containers.video_stream(opened)
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
            if skips:
                decoder.skip_frame = "DEFAULT" if packet.pts in wanted else "NONREF"
            frames = list(decoder.decode(packet))
            if number == run[1]:
                frames += decoder.decode(None)
                decoder.flush_buffers()
            for frame in frames:
                if frame.pts in wanted:
                    writer.put(wanted[frame.pts], frame)
            if number == run[1]:
                following = next(todo, None)
                if following is None:
                    break
                run = following
    return not writer.missing


def _runs(table: containers.VideoTable, wanted: set[int]) -> list[tuple[int, int]]:
    """Packet ranges [first, last] that hold the wanted timestamps, each starting at a key frame shown no later than they are."""
    keys = sorted(
        (t, n) for n, (t, key) in enumerate(zip(table.pts, table.key, strict=True)) if key and t is not None
    )
    runs: dict[int, int] = {}
    for number, (time, shown) in enumerate(zip(table.pts, table.shown, strict=True)):
        if not shown or time is None or time not in wanted:
            continue
        at = bisect.bisect_right(keys, (time, number)) - 1
        if at < 0 or keys[at][1] > number:
            return []
        start = keys[at][1]
        runs[start] = max(runs.get(start, 0), number)
    merged: list[tuple[int, int]] = []
    for start, end in sorted(runs.items()):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((start, end))
    return merged


def _decode_scan(data: bytes, info: MediumInfo, writer: Sink) -> None:
    """Decode from the start and count, up to the last frame wanted."""
    seen = 0
    newest = max(writer.missing)
    held: Any = None
    for frame in _frames(data, info):
        writer.put(seen, frame)
        seen += 1
        held = frame
        if seen > newest:
            break
    if not writer.missing:
        return
    lost = info.num_frames - seen
    if held is None or lost > 1 or writer.missing != {seen}:
        raise BadMediaError(
            f"the container declares {info.num_frames} frames, but only {seen} can be decoded; send a complete, valid file"
        )
    log.warning("video %s ends one frame early; its last frame is repeated", info.digest[:12])
    writer.put(seen, held)


def _frames(data: bytes, info: MediumInfo) -> Iterator[Any]:
    with containers.open_av(data, info.container) as opened:
        stream = containers.video_stream(opened)
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
    """Mono waveform, float32 [num_samples] in [-1, 1] at `sample_rate_hz`, written to `out` when given.

    Channels are mixed (`_mono`), the source is trimmed or padded to `info.num_samples`, resampled with soxr (HQ), then cut or
    padded with silence to `num_samples`.

    Raises:
        BadMediaError: broken data, or noticeably fewer samples than the packets announced.
    """
    source = _source_waveform(data, info)
    if sample_rate_hz != info.sample_rate_hz:
        source = soxr.resample(source, info.sample_rate_hz, sample_rate_hz)
    if out is None:
        out = np.empty(num_samples, np.float32)
    kept = min(len(source), num_samples)
    np.clip(source[:kept], -1.0, 1.0, out=out[:kept])
    out[kept:] = 0
    return DecodedAudio(out, sample_rate_hz)


def _source_waveform(data: bytes, info: MediumInfo) -> npt.NDArray[np.float32]:
    """Mono float32 [info.num_samples] at the source's own rate; NaN and infinities become silence."""
    waveform = np.zeros(info.num_samples, np.float32)
    filled = 0
    with containers.open_av(data, info.container) as opened:
        stream = containers.audio_stream(opened)
        stream.codec_context.thread_count = 1
        to_float = av.AudioResampler(format="flt")  # of planes PyAV reads eight, and then other memory
        frames = (frame for packet in containers.packets(opened, stream) for frame in packet.decode())
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
                kept = min(len(mono), info.num_samples - filled)
                waveform[filled : filled + kept] = mono[:kept]
                filled += kept
    if info.num_samples - filled > AUDIO_SLACK_SECONDS * info.sample_rate_hz + 0.02 * info.num_samples:
        raise BadMediaError(
            f"the container declares {info.num_samples} samples, but only {filled} can be decoded; send a complete, valid file"
        )
    np.nan_to_num(waveform, copy=False, nan=0.0, posinf=0.0, neginf=0.0)
    return np.clip(waveform, -LOUDEST, LOUDEST, out=waveform)


def _mono(planes: npt.NDArray[np.float32], channels: list[str]) -> npt.NDArray[np.float32]:
    """One channel of [channels, samples]: the mean of two; more are weighed as FFmpeg weighs them, which favours the centre, where speech
    is, and leaves out low-frequency effects.
    """
    mono: npt.NDArray[np.float32]
    if len(planes) <= 2:
        mono = planes.mean(axis=0, dtype=np.float32)
    else:
        weights = np.array([_WEIGHTS.get(name, _WEIGHT_OF_OTHERS) for name in channels], np.float32)
        mono = ((weights / weights.sum())[:, None] * planes).sum(axis=0, dtype=np.float32)
    return mono
