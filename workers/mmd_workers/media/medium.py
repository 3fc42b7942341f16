"""Facts of a medium before and after it is decoded. Independent of the model and the network."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from mmd_api.contract.pools import Modality

MediumKind = Modality | Literal["document"]
"""Kind of a file: a medium, or a document, whose pages are images."""


@dataclass(frozen=True, slots=True)
class MediumInfo:
    """Facts read from headers and packet tables, without decoding a pixel or a sample.

    `width`, `height`: pixels as displayed (EXIF orientation and rotation applied). `num_frames`, `fps`: video.
    `has_sound`: a video's file has a sound track that can be decoded. `of_video`: the medium is the sound track of the preceding
    video of the prompt, from the same file. `page`: the page of a PDF, counted from 1, that the image shows. `num_samples`,
    `sample_rate_hz`: the mono waveform of audio, at the sample rate stored in the file; the decoder pads or trims to exactly this
    count.
    """

    modality: Modality
    digest: str  # sha256 hex of the bytes as received
    num_bytes: int
    container: str
    width: int = 0
    height: int = 0
    num_frames: int = 0
    fps: float = 0.0
    duration_seconds: float = 0.0
    num_samples: int = 0
    sample_rate_hz: int = 0
    page: int = 0
    has_sound: bool = False
    of_video: bool = False

    def decoded_bytes(self, num_frames: int, num_samples: int) -> int:
        """Bytes of the decoded medium, with this many sampled frames of a video or samples of a sound."""
        pixels = 3 * self.width * self.height
        return {"image": pixels, "video": num_frames * pixels, "audio": 4 * num_samples}[self.modality]


@dataclass(frozen=True, slots=True)
class DecodedImage:
    """RGB pixels, uint8 [height, width, 3], orientation applied."""

    pixels: npt.NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class DecodedVideo:
    """RGB frames, uint8 [frames, height, width, 3], at `indices` of a source with `source_fps`."""

    frames: npt.NDArray[np.uint8]
    indices: list[int]
    source_fps: float
    source_num_frames: int


@dataclass(frozen=True, slots=True)
class DecodedAudio:
    """Mono waveform, float32 [samples] in [-1, 1], at `sample_rate_hz`."""

    waveform: npt.NDArray[np.float32]
    sample_rate_hz: int


Decoded = DecodedImage | DecodedVideo | DecodedAudio
