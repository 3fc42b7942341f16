"""A request's choices of how its media are sampled. Independent of the model and the network."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeVar

import numpy as np

FrameSampling = Literal["uniform", "keyframes", "scene_changes"]
"""Evenly; at the container's key frames; where the picture differs from the last one chosen."""

_Item = TypeVar("_Item")


@dataclass(frozen=True, slots=True)
class FoundFrame:
    """A frame of a video by its index.

    `nominal`: the index it would have, by its time, in a video of the same length at a constant rate. It differs from `index` where
    the rate varies.
    """

    index: int
    nominal: int


@dataclass(frozen=True, slots=True)
class FoundFrames:
    """Frames that a choice found in a video, in order.

    `spare`: a few others from all over the video, for models that take no fewer.
    """

    frames: tuple[FoundFrame, ...]
    spare: tuple[FoundFrame, ...] = ()

    def filled(self, frames: Sequence[FoundFrame], count: int) -> list[FoundFrame]:
        """Fill `frames` up to `count`, each time with the spare frame farthest from all others, as long as these last."""
        chosen = list(frames)
        spare = {frame.index: frame for frame in self.spare}
        while len(chosen) < count:
            indices = [frame.index for frame in chosen]
            free = [index for index in spare if index not in indices]
            if not free:
                break
            chosen.append(spare[max(free, key=lambda at: min((abs(at - n) for n in indices), default=0))])
        return sorted(chosen, key=lambda frame: frame.index)


@dataclass(frozen=True, slots=True)
class SamplingChoice:
    """A choice of frames and pixels. None: the setting of the model's own processor.

    Frames of a video are chosen by rate (`fps`), by number, by content (`sampling`) or by their seconds (`timestamps`), up to
    `max_frames`. An image is resized to a number of pixels, or few will do (`low_detail`). `max_frame_pixels` limits each frame;
    requests do not choose it. `found`: the frames of this video by `sampling` or `timestamps`, which only its file can tell.
    `with_sound`: a video has its sound track, if its file has one.
    """

    fps: float | None = None
    num_frames: int | None = None
    max_frames: int | None = None
    min_pixels: int | None = None
    max_pixels: int | None = None
    low_detail: bool = False
    sampling: FrameSampling | None = None
    timestamps: tuple[float, ...] | None = None
    found: FoundFrames | None = None
    max_frame_pixels: int | None = None
    with_sound: bool = False

    @property
    def searches(self) -> bool:
        """Whether the frames must be looked for in the file."""
        return self.timestamps is not None or self.sampling in ("keyframes", "scene_changes")

    def or_else(self, other: SamplingChoice) -> SamplingChoice:
        """Complete this choice with `other` where it leaves one open.

        Rate, number, sampling and timestamps are one choice. Low detail is a maximum of pixels; beside another maximum, the smaller
        counts.
        """
        ways = (self.fps, self.num_frames, self.sampling, self.timestamps)
        frames = self if any(way is not None for way in ways) else other
        return SamplingChoice(
            fps=frames.fps,
            num_frames=frames.num_frames,
            max_frames=other.max_frames if self.max_frames is None else self.max_frames,
            min_pixels=other.min_pixels if self.min_pixels is None else self.min_pixels,
            max_pixels=other.max_pixels if self.max_pixels is None else self.max_pixels,
            low_detail=self.low_detail or (self.max_pixels is None and other.low_detail),
            sampling=frames.sampling,
            timestamps=frames.timestamps,
            found=frames.found,
            with_sound=self.with_sound or other.with_sound,
        )


NO_CHOICE = SamplingChoice()


def thinned(items: Sequence[_Item], limit: int) -> list[_Item]:
    """At most `limit` items, evenly spaced."""
    if len(items) <= limit:
        return list(items)
    return [items[i] for i in np.linspace(0, len(items) - 1, limit).round().astype(int)]
