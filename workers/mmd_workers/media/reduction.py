"""The amount of a medium that the model gets, and choices that reduce it. Independent of the model and the network."""

from __future__ import annotations

from dataclasses import dataclass, replace

from mmd_workers.media.choice import SamplingChoice

LEAST_FRAMES = 2  # minimum for a video that loses frames


@dataclass(frozen=True, slots=True)
class MediaAmount:
    """Frames of a video, and pixels of an image or of each frame. `least_pixels`: pixels of one token.

    A number is zero if the medium has none of these, or if the model's processor takes no number of them.
    """

    frames: int = 0
    pixels: int = 0
    least_pixels: int = 0


@dataclass(frozen=True, slots=True)
class MediaShare:
    """The share of each medium that remains."""

    pixels_percent: int = 100
    frames_percent: int = 100
    max_frames: int | None = None

    def of(self, choice: SamplingChoice, amount: MediaAmount) -> SamplingChoice:
        """Reduce a choice, which yields `amount`, to this share, as if the request had chosen it.

        The result never yields more than `amount`, and never less than the model's processor takes.
        """
        frames = max(min(LEAST_FRAMES, amount.frames), amount.frames * self.frames_percent // 100)
        if self.max_frames is not None:
            frames = min(frames, self.max_frames)
        pixels = min(amount.pixels, max(amount.least_pixels, amount.pixels * self.pixels_percent // 100))
        if amount.frames:
            if frames < amount.frames:
                choice = replace(choice, max_frames=frames)
            if pixels and (frames, pixels) != (amount.frames, amount.pixels):
                choice = replace(choice, max_frame_pixels=pixels)  # otherwise fewer frames may get more each
        elif pixels < amount.pixels:
            choice = replace(choice, max_pixels=pixels)
        return choice
