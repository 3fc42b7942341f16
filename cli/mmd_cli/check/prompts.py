"""Generates the prompts for both copies of the model, with an image, a video and a sound.

Independent of the model.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from mmd_api.contract.pools import Modality
from mmd_workers.media import samples
from mmd_workers.media.medium import Decoded, DecodedAudio, DecodedImage, DecodedVideo, MediumInfo


@dataclass(frozen=True, slots=True)
class Medium:
    """A generated medium: what a gateway knows about it, and its pixels or samples."""

    info: MediumInfo
    data: Any

    def decoded(self, indices: Sequence[int], num_samples: int) -> Decoded:
        """The medium as the media sandbox would pass it to an encoder."""
        if self.info.modality == "image":
            return DecodedImage(self.data)
        if self.info.modality == "video":
            chosen = self.data[list(indices)]
            return DecodedVideo(chosen, list(indices), self.info.fps, self.info.num_frames)
        return DecodedAudio(self.data[:num_samples], self.info.sample_rate_hz)


def _image(width: int, height: int, seed: int) -> Medium:
    pixels = samples.pixels(8 * seed)[:height, :width]
    noise = np.random.default_rng(seed).integers(0, 64, pixels.shape, dtype=np.uint8)
    data = pixels // 2 + noise
    return Medium(MediumInfo("image", f"image-{seed}", data.nbytes, "png", width=width, height=height), data)


def _video() -> Medium:
    frames = np.stack([_image(128, 96, seed).data for seed in range(12)])
    count, height, width = frames.shape[:3]
    info = MediumInfo(
        "video",
        "video",
        frames.nbytes,
        "mp4",
        width=width,
        height=height,
        num_frames=count,
        fps=6.0,
        duration_seconds=count / 6,
    )
    return Medium(info, frames)


def _audio() -> Medium:
    wave = samples.sound()
    rate = samples.SAMPLE_RATE_HZ
    info = MediumInfo("audio", "audio", wave.nbytes, "wav", num_samples=len(wave), sample_rate_hz=rate)
    return Medium(info, wave)


def prompts(takes: frozenset[Modality], sound_of_videos: bool) -> Iterator[tuple[str, list[Medium]]]:
    """Yield the name and the media of each prompt. All prompts ask the same question.

    `sound_of_videos`: the model takes a video with its own sound.
    """
    image, video, audio = _image(200, 144, 1), _video(), _audio()
    yield "text", []
    by_modality = {"image": image, "video": video, "audio": audio}
    accepted = [medium for modality, medium in by_modality.items() if modality in takes]
    for medium in accepted:
        yield medium.info.modality, [medium]
    if "image" in takes:
        yield "two images", [image, _image(96, 160, 2)]
    if len(accepted) > 1:
        yield " and ".join(medium.info.modality for medium in accepted), accepted
    if sound_of_videos:
        film = Medium(replace(video.info, has_sound=True), video.data)
        yield "video with its sound", [film, Medium(replace(audio.info, of_video=True), audio.data)]
