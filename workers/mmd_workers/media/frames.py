"""Finds the frames of a video that are key frames, begin scenes, or are shown at given seconds. Independent of policies and the model.

Bytes from outside belong in `sandbox.DecodePool.find_frames`. The cost of scene changes is bounded by the number of looks and of
pixels decoded for them, not by the clock: the same file has the same scenes on every machine.
"""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from itertools import pairwise
from statistics import median
from typing import Any

import numpy as np
import numpy.typing as npt

from mmd_api.contract.errors import BadMediaError
from mmd_workers.media import containers, decode
from mmd_workers.media.choice import FoundFrame, FoundFrames, FrameSampling, thinned
from mmd_workers.media.medium import MediumInfo

MAX_FOUND = 4096  # the most frames of a video that the resource allows
SPARE_FRAMES = 16
MAX_LOOKS = 200
LOOK_SIDE = 64  # pixels
# docs/media-mechanism.md explains the next three.
MOVEMENTS = 8  # a scene change is this many times the usual change from look to look
LEAST_CHANGE, MOST_CHANGE = 2.0, 30.0  # mean difference of brightness, out of 255
MAX_DECODED_PIXELS = 1 << 30  # total of all pictures decoded to look at some
TOLERANCE_SECONDS = 0.001  # a rounded timestamp may precede its frame by this much


def find_frames(
    data: bytes,
    info: MediumInfo,
    sampling: FrameSampling | None = None,
    timestamps: Sequence[float] | None = None,
) -> FoundFrames:
    """Find the frames of a video at these seconds after its first one, or else by `sampling`, in order and once each.

    Raises:
        BadMediaError: the video cannot be decoded, or only at a cost beyond the limit.
    """
    table, _ = decode.source_table(data, info)
    if table.num_frames != info.num_frames:
        raise BadMediaError("the video's packets cannot be read twice alike; re-encode the file")
    clock = _Clock(table, info)
    if timestamps is not None:
        indices = sorted({clock.shown_at(seconds) for seconds in timestamps})
    elif sampling == "scene_changes":
        indices = _scene_changes(data, info, table, clock)
    else:
        indices = clock.key_frames
    return FoundFrames(
        tuple(clock.frame(index) for index in thinned(indices, MAX_FOUND)),
        tuple(clock.frame(index) for index in _evenly(info.num_frames, SPARE_FRAMES)),
    )


class _Clock:
    """Frames of a video by time. Without timestamps, as in AVI, they count as shown at a constant rate in packet order."""

    def __init__(self, table: containers.VideoTable, info: MediumInfo) -> None:
        self._info = info
        self._times = table.presentation()
        self._tick_seconds = float(table.time_base)
        shown = [n for n, is_shown in enumerate(table.shown) if is_shown]
        if self._times is not None:
            ranks = {time: index for index, time in enumerate(self._times)}
            keys = [ranks[time] for n in shown if table.key[n] and (time := table.pts[n]) is not None]
        else:
            keys = [index for index, n in enumerate(shown) if table.key[n]]
        self.key_frames = sorted(keys)

    def shown_at(self, seconds: float) -> int:
        """The index of the frame that a player shows this long after the first one; after the end, the last one."""
        seconds += TOLERANCE_SECONDS
        if self._times is None:
            return min(self._info.num_frames - 1, int(seconds * self._info.fps))
        return bisect.bisect_right(self._times, self._times[0] + seconds / self._tick_seconds) - 1

    def frame(self, index: int) -> FoundFrame:
        """The frame with this index."""
        if self._times is None:
            return FoundFrame(index, index)
        seconds = (self._times[index] - self._times[0]) * self._tick_seconds
        return FoundFrame(index, min(self._info.num_frames - 1, round(seconds * self._info.fps)))


def _evenly(num_frames: int, count: int) -> list[int]:
    return thinned(range(num_frames), count)


def _scene_changes(data: bytes, info: MediumInfo, table: containers.VideoTable, clock: _Clock) -> list[int]:
    """The first frame, and each of some frames over the whole video that differs from the last one chosen.

    If decoding these would cost too much, the key frames are looked at, which encoders also put where scenes change.
    """
    looks, most = _evenly(info.num_frames, MAX_LOOKS), MAX_DECODED_PIXELS // (info.width * info.height)
    if decode.pictures_decoded(info, table, looks) > most:
        keys = clock.key_frames
        at_keys = {keys[at - 1] for look in looks if (at := bisect.bisect_right(keys, look))}
        looks = thinned(sorted({0} | at_keys), max(2, most))
        if decode.pictures_decoded(info, table, looks) > most:
            raise BadMediaError(
                f"finding scene changes would decode more than {MAX_DECODED_PIXELS >> 20} million pixels, because this video has too few key frames or "
                "no timestamps; use sampling keyframes or uniform, or re-encode the file with a key frame every few seconds"
            )
    views = _Views(looks)
    decode.deliver(data, info, table, views, most_scanned=most)
    # NumPy's median would load a module.
    usual = median([views.difference(*pair) for pair in pairwise(looks)] or [0.0])
    change = min(MOST_CHANGE, max(LEAST_CHANGE, MOVEMENTS * usual))
    chosen = looks[:1]
    for look in looks[1:]:
        if views.difference(chosen[-1], look) > change:
            chosen.append(look)
    return chosen


class _Views:
    """Small grey pictures of frames, int16 [LOOK_SIDE, LOOK_SIDE]."""

    def __init__(self, looks: Sequence[int]) -> None:
        self.missing = set(looks)
        self._pictures: dict[int, npt.NDArray[np.int16]] = {}

    def put(self, index: int, frame: Any) -> None:
        """Keep a view of a frame if it is missing."""
        if index in self.missing:
            small = frame.reformat(LOOK_SIDE, LOOK_SIDE, "gray", interpolation="AREA")
            self._pictures[index] = small.to_ndarray().astype(np.int16)
            self.missing.discard(index)

    def difference(self, first: int, second: int) -> float:
        """Mean difference of brightness between two frames that were looked at."""
        return float(np.abs(self._pictures[first] - self._pictures[second]).mean())
