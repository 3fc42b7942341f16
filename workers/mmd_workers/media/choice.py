"""What a request chooses of how its media are sampled. Independent of the model and the network."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeVar

import numpy as np

FrameSampling = Literal["uniform", "keyframes", "scene_changes"]
"""Evenly; where the container has key frames; where the picture differs from the last one chosen."""

_Item = TypeVar("_Item")


@dataclass(frozen=True, slots=True)
class FoundFrame:
    """A frame of a video by its index. `nominal`: the index of its time in a video of the same length and a constant rate, which differs where
    the rate varies.
    """

    index: int
    nominal: int


@dataclass(frozen=True, slots=True)
class FoundFrames:
    """What a choice has found in a video, in order. `spare`: a few others over all of it, for models that take no fewer."""

    frames: tuple[FoundFrame, ...]
    spare: tuple[FoundFrame, ...] = ()

    def filled(self, frames: Sequence[FoundFrame], count: int) -> list[FoundFrame]:
        """So many frames where the spare ones last: these, and of the spare ones each time the one that is farthest from all."""
        chosen = list(frames)
        spare = {one.index: one for one in self.spare}
        while len(chosen) < count:
            taken = [one.index for one in chosen]
            left = [index for index in spare if index not in taken]
            if not left:
                break
            chosen.append(spare[max(left, key=lambda at: min((abs(at - one) for one in taken), default=0))])
        return sorted(chosen, key=lambda one: one.index)


@dataclass(frozen=True, slots=True)
class SamplingChoice:
    """Frames of a video by rate, by number, by what is in it or by their seconds, and how many there may be; how many pixels an image is resized
    to, or that few will do, and a frame, of which requests choose nothing. None: as the model's own processor has it. `found`: the frames of
    this video by `sampling` or `timestamps`, which only its file can tell. `with_sound`: a video has its sound track, if its file has one.
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
        """This choice, and `other` where it leaves one open. Rate, number, sampling and timestamps are one choice; low detail is a maximum of
        pixels beside another one, of which the smaller counts."""
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
    """At most so many of them, evenly."""
    if len(items) <= limit:
        return list(items)
    return [items[i] for i in np.linspace(0, len(items) - 1, limit).round().astype(int)]
