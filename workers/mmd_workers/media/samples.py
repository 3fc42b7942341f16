"""A small encoded file of each modality, with which pods warm up. Independent of the model and the network."""

from __future__ import annotations

import io
import wave

import av
import numpy as np
import numpy.typing as npt
from PIL import Image

from mmd_api.contract.pools import Modality

SIDE = 224  # pixels, enough for every processor to make tokens
FRAMES = 8
FRAMES_PER_SECOND = 8
SOUND_SECONDS = 1.0
SAMPLE_RATE_HZ = 16_000


def sample(modality: Modality) -> bytes:
    """Encode the file: a PNG, an MP4 (H.264) or a WAV (16 bit)."""
    return {"image": _image, "video": _video, "audio": _audio}[modality]()


def pixels(shift: int = 0) -> npt.NDArray[np.uint8]:
    """A gradient, uint8 [height, width, 3], moved by `shift` pixels."""
    ramp = ((np.arange(SIDE) + shift) % SIDE * 255 // SIDE).astype(np.uint8)
    return np.stack(np.broadcast_arrays(ramp[None, :], ramp[:, None], np.uint8(128)), axis=-1)


def sound() -> npt.NDArray[np.float32]:
    """A tone of 440 Hz, float32 [samples]."""
    time = np.arange(int(SOUND_SECONDS * SAMPLE_RATE_HZ)) / SAMPLE_RATE_HZ
    return (0.3 * np.sin(2 * np.pi * 440 * time)).astype(np.float32)


def _image() -> bytes:
    file = io.BytesIO()
    Image.fromarray(pixels()).save(file, "PNG", compress_level=1)
    return file.getvalue()


def _video() -> bytes:
    file = io.BytesIO()
    options = {"preset": "ultrafast", "threads": "1"}
    with av.open(file, "w", format="mp4") as container:
        stream = container.add_stream("libx264", rate=FRAMES_PER_SECOND, options=options)
        stream.height = stream.width = SIDE
        stream.pix_fmt = "yuv420p"
        for number in range(FRAMES):
            frame = av.VideoFrame.from_ndarray(pixels(8 * number), format="rgb24")
            container.mux(stream.encode(frame))
        container.mux(stream.encode(None))
    return file.getvalue()


def _audio() -> bytes:
    file = io.BytesIO()
    with wave.open(file, "wb") as container:
        container.setnchannels(1)
        container.setsampwidth(2)
        container.setframerate(SAMPLE_RATE_HZ)
        container.writeframes((sound() * 32767).astype("<i2").tobytes())
    return file.getvalue()
