"""Draws the files that the demo model is asked about: shapes in images, moving shapes in videos, tones.

Each is a real, encoded file. `mmd demo`, the tests, the benches and the model's training recipe use them, so
all of them see the same world. Independent of the model.
"""

from __future__ import annotations

import builtins
import colorsys
import io
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeVar

import av
import numpy as np
import numpy.typing as npt
from PIL import Image, ImageDraw

from mmd_api.contract.pools import MODALITIES, Modality

Mime = Literal["image/png", "image/jpeg", "video/mp4", "audio/wav", "audio/mpeg", "audio/ogg"]
SampleFacts = dict[str, str]
Pixels = npt.NDArray[np.uint8]
T = TypeVar("T")

MIMES: dict[Modality, tuple[Mime, ...]] = {
    "image": ("image/png", "image/jpeg"),
    "video": ("video/mp4",),
    "audio": ("audio/wav", "audio/mpeg", "audio/ogg"),
}
SHAPES = ("circle", "square", "triangle")
# Hue in degrees, saturation and value in percent.
COLORS: dict[str, tuple[float, float, float]] = {
    "red": (0, 82, 88),
    "yellow": (54, 80, 92),
    "green": (128, 78, 74),
    "blue": (226, 78, 92),
    "purple": (282, 72, 80),
    "white": (0, 0, 95),
}
# The shape's centre, as a share of width and height.
POSITIONS = {
    "top left": (0.26, 0.26),
    "top right": (0.74, 0.26),
    "center": (0.5, 0.5),
    "bottom center": (0.5, 0.74),
}
DIRECTIONS = {"left": (-1, 0), "right": (1, 0), "up": (0, -1), "down": (0, 1)}
PITCHES_HZ = {"low": (150, 320), "medium": (600, 1100), "high": (2200, 4200)}
TRENDS = {"steady": 1.0, "rising": 2.2, "falling": 1 / 2.2}  # last frequency ÷ first

IMAGE_SIZES = ((64, 64), (64, 64), (128, 128), (224, 224), (160, 120), (120, 160), (320, 240))
VIDEO_SIZES = ((64, 64), (64, 64), (128, 128), (160, 120))
VIDEO_FPS = 8
VIDEO_SECONDS = 4
AUDIO_RATES_HZ = (16_000, 22_050, 44_100, 48_000)

QUESTIONS: dict[Modality, dict[str, str]] = {
    "image": {
        "What is in this image?": "a {color} {shape} in the {position}",
        "Describe the image.": "a {color} {shape} in the {position}",
        "What color is the shape?": "{color}",
        "What shape is it?": "a {shape}",
        "Where is the shape?": "in the {position}",
    },
    "video": {
        "What happens in the video?": "a {color} {shape} moving {direction}",
        "Describe the video.": "a {color} {shape} moving {direction}",
        "What color is the shape?": "{color}",
        "What shape is it?": "a {shape}",
        "Which way does it move?": "{direction}",
    },
    "audio": {
        "What do you hear?": "a {pitch} {trend} tone",
        "Describe the sound.": "a {pitch} {trend} tone",
        "Is the tone high, medium or low?": "{pitch}",
        "Is the tone rising, falling or steady?": "{trend}",
    },
}


@dataclass(frozen=True, slots=True)
class Scene:
    """A file and all facts about it."""

    kind: Modality
    facts: SampleFacts
    bytes: builtins.bytes
    mime: Mime

    def answer(self, question: str) -> str:
        """The correct answer to one of `QUESTIONS[kind]`. Raises KeyError for any other question."""
        return QUESTIONS[self.kind][question].format(**self.facts)


@dataclass(frozen=True, slots=True)
class Sample:
    """One question about one file, and the exact answer."""

    kind: Modality
    question: str
    answer: str
    bytes: builtins.bytes
    mime: Mime


def draw(kind: Modality, seed: int, mime: Mime | None = None) -> Sample:
    """A question about a fresh file; the same arguments give the same bytes. `mime` fixes the file format."""
    scene = draw_scene(kind, seed, mime)
    question = pick(np.random.default_rng([seed, 1]), list(QUESTIONS[kind]))
    return Sample(kind, question, scene.answer(question), scene.bytes, scene.mime)


def draw_scene(kind: Modality, seed: int, mime: Mime | None = None) -> Scene:
    """A fresh file with its facts; the same arguments give the same bytes.

    Raises:
        ValueError: `mime` is not a format of this kind.
    """
    rng = np.random.default_rng([seed, 0, MODALITIES.index(kind)])
    any_mime = pick(rng, MIMES[kind])  # drawn even when given: a format changes nothing else
    if mime is not None and mime not in MIMES[kind]:
        raise ValueError(f"{mime} is not supported for {kind}; choose one of {', '.join(MIMES[kind])}")
    mime = mime or any_mime
    if kind == "image":
        facts, pixels = draw_image(rng)
        return Scene(kind, facts, encode_image(pixels, mime, quality=int(rng.integers(75, 96))), mime)
    if kind == "video":
        facts, frames = draw_video(rng)
        return Scene(kind, facts, encode_video(frames, crf=int(rng.integers(18, 27))), mime)
    facts, waveform, rate_hz = draw_tone(rng)
    return Scene(kind, facts, encode_audio(waveform, rate_hz, mime), mime)


def pick(rng: np.random.Generator, options: Sequence[T]) -> T:
    """One of the options, all equally likely."""
    return options[int(rng.integers(len(options)))]


def draw_image(rng: np.random.Generator) -> tuple[SampleFacts, Pixels]:
    """One shape on a dark background, uint8 [height, width, 3], at one of four places."""
    facts = {
        "shape": pick(rng, SHAPES),
        "color": pick(rng, tuple(COLORS)),
        "position": pick(rng, tuple(POSITIONS)),
    }
    width, height = pick(rng, IMAGE_SIZES)
    across, down = POSITIONS[facts["position"]]
    center = (across + rng.uniform(-0.04, 0.04), down + rng.uniform(-0.04, 0.04))
    ground = dark_ground(rng, width, height)
    return facts, paint(ground, facts["shape"], vary(rng, facts["color"]), center, rng.uniform(0.13, 0.18))


def draw_video(rng: np.random.Generator) -> tuple[SampleFacts, Pixels]:
    """One shape that crosses the picture in a straight line, uint8 [frames, height, width, 3]."""
    facts = {
        "shape": pick(rng, SHAPES),
        "color": pick(rng, tuple(COLORS)),
        "direction": pick(rng, tuple(DIRECTIONS)),
    }
    width, height = pick(rng, VIDEO_SIZES)
    towards = np.array(DIRECTIONS[facts["direction"]])
    path = rng.uniform(0.36, 0.54) * towards
    middle = 0.5 + np.where(towards == 0, rng.uniform(-0.26, 0.26, 2), rng.uniform(-0.04, 0.04, 2))
    ground, color, radius = (
        dark_ground(rng, width, height),
        vary(rng, facts["color"]),
        rng.uniform(0.13, 0.18),
    )
    count = VIDEO_FPS * VIDEO_SECONDS
    centers = (middle + path * (step / (count - 1) - 0.5) for step in range(count))
    return facts, np.stack([paint(ground, facts["shape"], color, (x, y), radius) for x, y in centers])


def draw_tone(rng: np.random.Generator) -> tuple[SampleFacts, npt.NDArray[np.float32], int]:
    """A steady or gliding tone of about a second: (facts, waveform float32 [samples], samples per second)."""
    facts = {"pitch": pick(rng, tuple(PITCHES_HZ)), "trend": pick(rng, tuple(TRENDS))}
    rate_hz = pick(rng, AUDIO_RATES_HZ)
    seconds, glide = rng.uniform(0.9, 1.3), TRENDS[facts["trend"]]
    time = np.arange(int(seconds * rate_hz)) / rate_hz
    middle_hz = rng.uniform(*PITCHES_HZ[facts["pitch"]])
    frequency = middle_hz * glide ** (time / seconds - 0.5)
    phase = 2 * np.pi * np.cumsum(frequency) / rate_hz + rng.uniform(0, 2 * np.pi)
    fade = np.minimum(1, np.minimum(time, seconds - time) / 0.02)  # a hard edge would click at every pitch
    tone = rng.uniform(0.1, 0.5) * fade * (np.sin(phase) + rng.uniform(0, 0.1) * np.sin(2 * phase))
    return facts, (tone + rng.normal(0, 0.003, time.size)).astype(np.float32), rate_hz


def dark_ground(rng: np.random.Generator, width: int, height: int) -> npt.NDArray[np.float32]:
    """A dark, slightly tinted background with a gradient and grain, float32 [height, width, 3] in 0..255."""
    top, bottom = rng.uniform(0, 60, 2)
    gradient = np.linspace(float(top), float(bottom), height)[:, None, None] * rng.uniform(0.7, 1.0, 3)
    grain = rng.standard_normal((height, width, 3), dtype=np.float32) * 4
    return gradient.astype(np.float32) + grain


def vary(rng: np.random.Generator, color: str) -> npt.NDArray[np.float32]:
    """RGB in 0..255 of a named colour, slightly different each time."""
    hue, saturation, value = COLORS[color]
    hue = (hue + rng.uniform(-6, 6)) / 360 % 1
    saturation, value = saturation / 100 * rng.uniform(0.9, 1.1), value / 100 * rng.uniform(0.93, 1.05)
    return np.array(colorsys.hsv_to_rgb(hue, saturation, value), np.float32) * 255


def paint(
    ground: npt.NDArray[np.float32],
    shape: str,
    color: npt.NDArray[np.float32],
    center: tuple[float, float],
    radius: float,
) -> Pixels:
    """The background with a smooth-edged shape.

    Its centre is a share of (width, height), its radius of the shorter side.
    """
    height, width, _ = ground.shape
    oversampling = 4 if width <= 128 else 2
    x, y = center[0] * width * oversampling, center[1] * height * oversampling
    r = radius * min(width, height) * oversampling
    mask = Image.new("L", (width * oversampling, height * oversampling))
    pen = ImageDraw.Draw(mask)
    if shape == "circle":
        pen.ellipse((x - r, y - r, x + r, y + r), fill=255)
    elif shape == "square":
        pen.rectangle((x - 0.88 * r, y - 0.88 * r, x + 0.88 * r, y + 0.88 * r), fill=255)
    else:
        pen.polygon([(x, y - r), (x + 1.1 * r, y + 0.85 * r), (x - 1.1 * r, y + 0.85 * r)], fill=255)
    cover = np.asarray(mask.reduce(oversampling), np.float32)[..., None] / 255
    return np.clip(ground * (1 - cover) + color * cover, 0, 255).astype(np.uint8)


def encode_image(pixels: Pixels, mime: Mime, quality: int) -> bytes:
    """A PNG or a JPEG (4:2:0 chroma) of uint8 [height, width, 3]."""
    file = io.BytesIO()
    image = Image.fromarray(pixels)
    if mime == "image/png":
        image.save(file, "PNG", compress_level=3)
    else:
        image.save(file, "JPEG", quality=quality, subsampling="4:2:0")
    return file.getvalue()


def encode_video(frames: Pixels, crf: int) -> bytes:
    """An MP4 (H.264, 4:2:0 chroma) of uint8 [frames, height, width, 3].

    The bytes are reproducible: one thread, and no macroblock tree, which x264 starts from uncleared memory.
    """
    file = io.BytesIO()
    options = {"preset": "veryfast", "crf": str(crf), "threads": "1", "x264-params": "mbtree=0"}
    with av.open(file, "w", format="mp4") as container:
        stream = container.add_stream("libx264", rate=VIDEO_FPS, options=options)
        stream.height, stream.width = frames.shape[1:3]
        stream.pix_fmt = "yuv420p"
        for pixels in frames:
            container.mux(stream.encode(av.VideoFrame.from_ndarray(pixels, format="rgb24")))
        container.mux(stream.encode(None))
    return file.getvalue()


def as_another_file(mp4: bytes, number: int) -> bytes:
    """The same pictures as a distinct file that no cache has: with a box that players skip.

    `number`: 64 bits.
    """
    return mp4 + struct.pack(">I4sq", 16, b"free", number)


def encode_audio(waveform: npt.NDArray[np.float32], rate_hz: int, mime: Mime) -> bytes:
    """A WAV (16 bit), MP3 or Ogg Opus file of a mono waveform in [-1, 1]. Opus is always 48 kHz."""
    container_format, codec = {
        "audio/wav": ("wav", "pcm_s16le"),
        "audio/mpeg": ("mp3", "libmp3lame"),
        "audio/ogg": ("ogg", "libopus"),
    }[mime]
    file = io.BytesIO()
    with av.open(file, "w", format=container_format, options={"fflags": "+bitexact"}) as container:
        stream = container.add_stream(codec, rate=48_000 if codec == "libopus" else rate_hz, layout="mono")
        frame = av.AudioFrame.from_ndarray(waveform[None], format="fltp", layout="mono")
        frame.sample_rate = rate_hz
        resampler = av.AudioResampler(stream.format, stream.layout, stream.rate, stream.frame_size or None)
        for piece in [*resampler.resample(frame), *resampler.resample(None)]:
            container.mux(stream.encode(piece))
        container.mux(stream.encode(None))
    return file.getvalue()
