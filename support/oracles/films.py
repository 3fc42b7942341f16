"""Videos with their own sound track, as real files."""

from __future__ import annotations

import io
from collections.abc import Iterator
from typing import Any

import av
import numpy as np

FPS = 8
SOUND_HZ = 48_000
VIDEO_CODECS = {"mp4": "libx264", "matroska": "libx264", "webm": "libvpx", "mpegts": "libx264"}
SOUND_CODECS = {"mp4": "aac", "matroska": "aac", "webm": "libopus", "mpegts": "aac"}


def film(
    seconds: float, sound_seconds: float, seed: int = 0, container: str = "mp4", size: int = 64
) -> bytes:
    """A moving square and a rising tone. If the sound lasts 0 s, there is no sound track."""
    out = io.BytesIO()
    with av.open(out, "w", format=container) as file:
        options = {"deadline": "realtime", "cpu-used": "8"} if container == "webm" else {}
        pictures = file.add_stream(VIDEO_CODECS[container], rate=FPS, options=options)
        pictures.width = pictures.height = size
        pictures.pix_fmt = "yuv420p"
        sound = file.add_stream(SOUND_CODECS[container], rate=SOUND_HZ) if sound_seconds else None
        for number in range(round(seconds * FPS)):
            frame = av.VideoFrame.from_ndarray(_picture(number, seed, size), format="rgb24")
            file.mux(pictures.encode(frame))
        file.mux(pictures.encode(None))
        if sound is not None:
            for wave in _waves(sound_seconds, seed, sound):
                file.mux(sound.encode(wave))
            file.mux(sound.encode(None))
    return out.getvalue()


def _picture(number: int, seed: int, size: int) -> Any:
    pixels = np.full((size, size, 3), 30 + 20 * (seed % 7), np.uint8)
    left = (5 * number + 11 * seed) % (size - 16)
    pixels[16:32, left : left + 16] = (220, 40 * (seed % 5), 60)
    return pixels


def _waves(seconds: float, seed: int, stream: Any) -> Iterator[Any]:
    times = np.arange(round(seconds * SOUND_HZ)) / SOUND_HZ
    wave = 0.4 * np.sin(2 * np.pi * (200 + 90 * seed) * times * (1 + times / 4))
    frame = av.AudioFrame.from_ndarray(wave.astype(np.float32)[None], format="flt", layout="mono")
    frame.sample_rate, frame.pts = SOUND_HZ, 0
    resampler = av.AudioResampler(
        format=stream.codec_context.format,
        layout=stream.codec_context.layout,
        rate=SOUND_HZ,
        frame_size=stream.codec_context.frame_size or 960,
    )
    yield from resampler.resample(frame)
    yield from resampler.resample(None)
