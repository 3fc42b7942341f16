"""The drawn files are real, reproducible, and show what their answers say."""

import io
import subprocess
import sys

import numpy as np
import pytest
from PIL import Image

from mmd_api.contract.pools import MODALITIES
from mmd_api.spec.media import MediaPolicy
from mmd_cli.samples import (
    DIRECTIONS,
    MIMES,
    PITCHES_HZ,
    POSITIONS,
    QUESTIONS,
    VIDEO_FPS,
    VIDEO_SECONDS,
    draw,
    draw_scene,
)
from mmd_workers.media import decode
from mmd_workers.media.probe import probe

CONTAINERS = [
    ("image", "image/png", "png"),
    ("image", "image/jpeg", "jpeg"),
    ("video", "video/mp4", "mp4"),
    ("audio", "audio/wav", "wav"),
    ("audio", "audio/mpeg", "mp3"),
    ("audio", "audio/ogg", "ogg"),
]
SEEDS = range(20)


def center_of_shape(pixels: np.ndarray) -> np.ndarray:
    """Where the bright, drawn shape is, as a share of (width, height)."""
    bright = pixels.max(axis=2) > 140
    rows, columns = np.nonzero(bright)
    return np.array([columns.mean() / pixels.shape[1], rows.mean() / pixels.shape[0]])


def test_every_format_is_covered():
    assert {(kind, mime) for kind, mime, _ in CONTAINERS} == {
        (kind, m) for kind in MODALITIES for m in MIMES[kind]
    }


@pytest.mark.parametrize(("kind", "mime", "container"), CONTAINERS)
def test_a_file_matches_its_type_and_is_the_same_each_time(kind, mime, container):
    sample = draw(kind, 11, mime)
    assert (sample.kind, sample.mime) == (kind, mime)
    assert probe(sample.bytes, kind, MediaPolicy()).container == container
    assert draw(kind, 11, mime) == sample
    assert draw(kind, 12, mime).bytes != sample.bytes


@pytest.mark.parametrize("kind", MODALITIES)
def test_the_question_fits_the_kind_and_the_answer_the_facts(kind):
    for seed in SEEDS:
        sample, scene = draw(kind, seed), draw_scene(kind, seed)
        assert sample.bytes == scene.bytes
        assert sample.question in QUESTIONS[kind]
        assert sample.answer == scene.answer(sample.question)
        assert "{" not in sample.answer


def test_the_shape_of_an_image_is_where_the_answer_states():
    for seed in SEEDS:
        scene = draw_scene("image", seed)
        center = center_of_shape(np.asarray(Image.open(io.BytesIO(scene.bytes)).convert("RGB")))
        nearest = min(POSITIONS, key=lambda name: np.linalg.norm(center - POSITIONS[name]))
        assert nearest == scene.facts["position"]


def test_the_shape_of_a_video_moves_as_the_answer_states():
    for seed in SEEDS:
        scene = draw_scene("video", seed)
        info = probe(scene.bytes, "video", MediaPolicy())
        assert (info.num_frames, round(info.fps)) == (VIDEO_FPS * VIDEO_SECONDS, VIDEO_FPS)
        first, last = decode.decode_video(scene.bytes, info, [0, info.num_frames - 1]).frames
        way = center_of_shape(last) - center_of_shape(first)
        towards = max(DIRECTIONS, key=lambda name: np.dot(way, DIRECTIONS[name]))
        assert towards == scene.facts["direction"]
        assert np.linalg.norm(way) > 0.25


@pytest.mark.parametrize("mime", MIMES["audio"])
def test_a_tone_has_the_pitch_and_the_trend_that_the_answer_states(mime):
    for seed in SEEDS:
        scene = draw_scene("audio", seed, mime)
        info = probe(scene.bytes, "audio", MediaPolicy())
        waveform = decode.decode_audio(scene.bytes, info, info.sample_rate_hz, info.num_samples).waveform
        start, middle, end = (
            peak_hz(part, info.sample_rate_hz) for part in np.array_split(waveform, 9)[1::3]
        )
        low, high = PITCHES_HZ[scene.facts["pitch"]]
        assert 0.9 * low < middle < 1.1 * high
        heard = "steady" if 0.9 < end / start < 1.1 else "rising" if end > start else "falling"
        assert heard == scene.facts["trend"]


def peak_hz(waveform: np.ndarray, rate_hz: int) -> float:
    spectrum = np.abs(np.fft.rfft(waveform * np.hanning(len(waveform)), 1 << 16))
    return float(spectrum.argmax() * rate_hz / (1 << 16))


def test_a_format_of_another_kind_is_refused():
    with pytest.raises(ValueError, match="choose one of image/png, image/jpeg"):
        draw("image", 0, "audio/wav")


def test_drawing_needs_no_torch():
    code = "import sys, mmd_cli.samples as s; s.draw('video', 1); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=60).returncode == 0
