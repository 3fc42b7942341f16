"""How much of a medium the model gets, and the choice that leaves less of it. Independent of the model and the network."""

from __future__ import annotations

from dataclasses import dataclass, replace

from mmd_workers.media.choice import SamplingChoice

LEAST_FRAMES = 2  # of a video of which frames are left out


@dataclass(frozen=True, slots=True)
class MediaAmount:
    """Frames of a video, and pixels of an image or of each frame. `least_pixels`: of one token. Zero where there are none, or where the model's
    processor takes no number of them.
    """

    frames: int = 0
    pixels: int = 0
    least_pixels: int = 0


@dataclass(frozen=True, slots=True)
class MediaShare:
    """What is left of each medium."""

    pixels_percent: int = 100
    frames_percent: int = 100
    max_frames: int | None = None

    def of(self, choice: SamplingChoice, amount: MediaAmount) -> SamplingChoice:
        """A choice of so much of what `choice` comes to, as the same one of a request would have it. It never comes to more, and never to less
        than the model's processor takes."""
        frames = max(min(LEAST_FRAMES, amount.frames), amount.frames * self.frames_percent // 100)
        if self.max_frames is not None:
            frames = min(frames, self.max_frames)
        pixels = min(amount.pixels, max(amount.least_pixels, amount.pixels * self.pixels_percent // 100))
        if amount.frames:
            if frames < amount.frames:
                choice = replace(choice, max_frames=frames)
            if pixels and (frames, pixels) != (amount.frames, amount.pixels):
                choice = replace(choice, max_frame_pixels=pixels)  # fewer frames may have more each otherwise
        elif pixels < amount.pixels:
            choice = replace(choice, max_pixels=pixels)
        return choice
