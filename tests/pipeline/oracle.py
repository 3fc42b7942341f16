"""What Hugging Face's own `generate` answers to the same chat messages with the same files: the truth for every pipeline test."""

from __future__ import annotations

import functools
import io
from pathlib import Path
from typing import Any

import model_zoo as zoo
import numpy as np
from PIL import Image

from mmd_api.spec import MediaPolicy
from mmd_workers.media.decode import decode_audio, decode_video
from mmd_workers.media.probe import probe
from mmd_workers.model.source import eos_token_ids, load_config

File = tuple[str, bytes]  # modality and bytes
Question = list["str | File"]


@functools.cache
def served(folder: Path) -> zoo.Served:
    """The whole model and its processor."""
    return zoo.serve(folder)


def answer(folder: Path, question: Question, max_tokens: int, ignore_eos: bool = False) -> str:
    """The greedy answer of the whole model in one process, cut at the model's end token as a server would."""
    return _answer(folder, tuple(question), max_tokens, ignore_eos)


@functools.lru_cache(maxsize=4096)
def _answer(folder: Path, question: tuple[str | File, ...], max_tokens: int, ignore_eos: bool) -> str:
    whole = served(folder)
    parts: list[str | zoo.Medium] = []
    media = []
    for part in question:
        if isinstance(part, str):
            parts.append(part)
        else:
            media.append(_medium(whole, *part))
            parts.append(media[-1])
    messages = zoo.conversation(*parts)
    layout = whole.frontend.layout(messages, [medium.info for medium in media])
    inputs = zoo.hf_inputs(
        whole, messages, [_as_planned(m, laid) for m, laid in zip(media, layout.media, strict=True)], layout
    )
    tokens = zoo.generate(whole, inputs, max_tokens)
    if not ignore_eos:
        ends = eos_token_ids(folder, load_config(folder))
        stop = next((i for i, token in enumerate(tokens) if token in ends), len(tokens))
        tokens = tokens[:stop]
    return str(whole.frontend.decode(tokens))


def _medium(whole: zoo.Served, modality: str, data: bytes) -> zoo.Medium:
    info = probe(data, modality, MediaPolicy())  # type: ignore[arg-type]
    if modality == "image":
        return zoo.Medium(info, np.asarray(Image.open(io.BytesIO(data)).convert("RGB")))
    if modality == "video":
        return zoo.Medium(info, decode_video(data, info, list(range(info.num_frames))).frames)
    return zoo.Medium(info, data)


def _as_planned(medium: zoo.Medium, laid: Any) -> zoo.Medium:
    if medium.info.modality != "audio":
        return medium
    plan = laid.sampling
    wave = decode_audio(medium.source, medium.info, plan.sample_rate_hz, plan.num_samples).waveform
    return zoo.Medium(medium.info, wave)
