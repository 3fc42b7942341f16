"""Asks the demo model about freshly drawn files and counts exact answers.

Bytes of a PNG, JPEG, MP4, WAV, MP3 or Ogg file are decoded as the encoder decodes them, then go through the model's own Hugging Face
processor into greedy `generate` in float32. Leaves with status 1 when a kind stays below the bar.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from rich.console import Console
from rich.table import Table
from transformers import AutoProcessor, Qwen2_5OmniThinkerForConditionalGeneration
from transformers.video_utils import VideoMetadata

import mmd_workers
from mmd_api.contract.pools import MODALITIES, Modality
from mmd_api.spec.media import MediaPolicy
from mmd_cli.samples import Sample, draw
from mmd_workers.media import decode
from mmd_workers.media.probe import probe, resampled_num_samples

BUILTIN = Path(mmd_workers.__file__).parent / "model" / "demo"
BAR = 0.95
ANSWER_TOKENS = 40
SAMPLING_RATE_HZ = 16_000
POLICY = MediaPolicy()


@dataclass(frozen=True, slots=True)
class Miss:
    """A sample whose answer was not the right one."""

    sample: Sample
    answer: str


def decode_image(data: bytes) -> npt.NDArray[np.uint8]:
    """RGB pixels, uint8 [height, width, 3]."""
    return decode.decode_image(data, probe(data, "image", POLICY)).pixels


def decode_video(data: bytes) -> tuple[npt.NDArray[np.uint8], VideoMetadata]:
    """All frames as RGB, uint8 [frames, height, width, 3], and what a video processor needs to choose among them."""
    info = probe(data, "video", POLICY)
    frames = decode.decode_video(data, info, range(info.num_frames)).frames
    return frames, VideoMetadata(info.num_frames, fps=info.fps, duration=info.duration_seconds)


def decode_audio(data: bytes) -> npt.NDArray[np.float32]:
    """A mono waveform, float32 [samples], at 16 kHz."""
    info = probe(data, "audio", POLICY)
    count = resampled_num_samples(info.num_samples, info.sample_rate_hz, SAMPLING_RATE_HZ)
    return decode.decode_audio(data, info, SAMPLING_RATE_HZ, count).waveform


def prompt(processor: Any, sample: Sample, *, text_first: bool) -> str:
    """The chat template's text for a sample, question before or after its medium."""
    parts = [{"type": sample.kind}, {"type": "text", "text": sample.question}]
    message = {"role": "user", "content": parts[::-1] if text_first else parts}
    return str(processor.apply_chat_template([message], add_generation_prompt=True, tokenize=False))


def model_inputs(processor: Any, samples: list[Sample]) -> Any:
    """One padded batch of samples of one kind; every other question stands before its medium."""
    texts = [prompt(processor, sample, text_first=bool(number % 2)) for number, sample in enumerate(samples)]
    kind = samples[0].kind
    if kind == "image":
        media: dict[str, Any] = {"images": [[decode_image(s.bytes)] for s in samples]}
    elif kind == "video":
        frames, metadata = zip(*(decode_video(s.bytes) for s in samples), strict=True)
        media = {"videos": list(frames), "videos_kwargs": {"video_metadata": list(metadata)}}
    else:
        media = {"audio": [decode_audio(s.bytes) for s in samples]}
    return processor(text=texts, padding=True, return_tensors="pt", **media)


def misses(model: Any, processor: Any, kind: Modality, seeds: Iterable[int], batch_size: int) -> list[Miss]:
    """The samples of these seeds that are not answered exactly."""
    samples = [draw(kind, seed) for seed in seeds]
    wrong = []
    for start in range(0, len(samples), batch_size):
        batch = samples[start : start + batch_size]
        inputs = model_inputs(processor, batch)
        with torch.inference_mode():
            output = model.generate(**inputs, max_new_tokens=ANSWER_TOKENS, do_sample=False)
        answers = processor.batch_decode(output[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
        wrong += [Miss(s, a) for s, a in zip(batch, answers, strict=True) if s.answer != a]
    return wrong


def main() -> int:
    """Print a table of exact answers per kind; 1 when one is below the bar."""
    options = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options.add_argument("--model", type=Path, default=BUILTIN, help="folder of the model")
    options.add_argument("--samples", type=int, default=300, help="fresh files of each kind")
    options.add_argument("--first-seed", type=int, default=100_000, help="seed of the first file")
    options.add_argument("--batch", type=int, default=20, help="files in one batch")
    options.add_argument("--threads", type=int, default=1)
    arguments = options.parse_args()

    torch.set_num_threads(arguments.threads)
    processor = AutoProcessor.from_pretrained(arguments.model, local_files_only=True)
    model = Qwen2_5OmniThinkerForConditionalGeneration.from_pretrained(
        arguments.model, dtype=torch.float32, local_files_only=True
    ).eval()
    table = Table("kind", "files", "exact answers", "seconds", "some misses")
    passed = True
    for kind in MODALITIES:
        begin = time.perf_counter()
        seeds = range(arguments.first_seed, arguments.first_seed + arguments.samples)
        wrong = misses(model, processor, kind, seeds, arguments.batch)
        share = 1 - len(wrong) / arguments.samples
        passed = passed and share >= BAR
        examples = "\n".join(f"{m.sample.question} {m.sample.answer!r}: {m.answer!r}" for m in wrong[:3])
        seconds = time.perf_counter() - begin
        table.add_row(kind, str(arguments.samples), f"{share:.3f}", f"{seconds:.1f}", examples)
    Console().print(table)
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
