"""Answers of Hugging Face's own `generate` to the same chat messages with the same files.

They are the truth for every pipeline test.
"""

from __future__ import annotations

import functools
import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from mmd_api.spec.media import MediaPolicy
from mmd_workers.media.choice import SamplingChoice
from mmd_workers.media.decode import decode_audio, decode_video
from mmd_workers.media.probe import probe
from mmd_workers.model.source import eos_token_ids, load_config
from support.oracles import adapters
from support.oracles import model_zoo as zoo

WITH_SOUND = "video with sound"
File = tuple[str, bytes]  # (modality or WITH_SOUND, content)
Question = list["str | File"]


@functools.cache
def served(folder: Path) -> zoo.Served:
    """The whole model and its processor."""
    return zoo.serve(folder)


def answer(
    folder: Path,
    question: Question,
    max_tokens: int,
    ignore_eos: bool = False,
    adapter: Path | None = None,
    choices: Sequence[SamplingChoice] = (),
) -> str:
    """The greedy answer of the whole model in one process, cut at the model's end token as a server would.

    `adapter`: merged into the model. `choices`: how the files are sampled.
    """
    ids = tokens(folder, question, max_tokens, ignore_eos, adapter, choices)
    if not ignore_eos and ids and ids[-1] in end_tokens(folder):
        ids = ids[:-1]
    return str(served(folder).frontend.decode(list(ids)))


@functools.cache
def end_tokens(folder: Path) -> frozenset[int]:
    """Token ids that end an answer."""
    return frozenset(eos_token_ids(folder, load_config(folder)))


def tokens(
    folder: Path,
    question: Question,
    max_tokens: int,
    ignore_eos: bool = False,
    adapter: Path | None = None,
    choices: Sequence[SamplingChoice] = (),
) -> tuple[int, ...]:
    """The greedy tokens, up to and including the model's end token."""
    return _tokens(folder, tuple(question), max_tokens, ignore_eos, adapter, tuple(choices))


def guided_answer(
    folder: Path, question: Question, max_tokens: int, scale: float, negative: str | None = None
) -> str:
    """The greedy answer with classifier-free guidance.

    `negative`: text of the companion's only message; None: the companion has the prompt's last token.
    """
    whole = served(folder)
    inputs = _inputs(whole, question, ())
    companion = inputs["input_ids"][0, -1:]
    if negative is not None:
        messages = zoo.conversation(negative)
        alone = zoo.hf_inputs(whole, messages, [], whole.frontend.layout(messages, []))
        companion = alone["input_ids"][0]
    ids = zoo.generate(whole, inputs, max_tokens, **zoo.guidance(whole, scale, companion.tolist()))
    stop = next((at for at, token in enumerate(ids) if token in end_tokens(folder)), len(ids))
    return str(whole.frontend.decode(ids[:stop]))


@functools.lru_cache(maxsize=4096)
def _tokens(
    folder: Path,
    question: tuple[str | File, ...],
    max_tokens: int,
    ignore_eos: bool,
    adapter: Path | None,
    choices: tuple[SamplingChoice, ...],
) -> tuple[int, ...]:
    whole = served(folder)
    inputs = _inputs(whole, question, choices)
    with adapters.merged(whole.model, adapter):
        generated = zoo.generate(whole, inputs, max_tokens)
    if not ignore_eos:
        ends = end_tokens(folder)
        stop = next((i + 1 for i, token in enumerate(generated) if token in ends), len(generated))
        generated = generated[:stop]
    return tuple(generated)


def _inputs(
    whole: zoo.Served, question: Sequence[str | File], choices: Sequence[SamplingChoice]
) -> dict[str, Any]:
    """The inputs of `generate`."""
    parts: list[str | zoo.Medium] = []
    media = []
    for part in question:
        if isinstance(part, str):
            parts.append(part)
        else:
            kind, data = part
            part_media = (
                [_medium(kind, data)] if kind != WITH_SOUND else [_medium("video", data), _sound_of(data)]
            )
            media += part_media
            parts += part_media
    messages = zoo.conversation(*parts)
    layout = whole.frontend.layout(messages, [medium.info for medium in media], choices=choices)
    planned = [_as_planned(m, laid) for m, laid in zip(media, layout.media, strict=True)]
    size = next((laid.sampling.size for laid in layout.media if laid.sampling.size), None)
    return zoo.hf_inputs(whole, messages, planned, layout, size)


def is_greedy(folder: Path, text: str, answer: Sequence[int]) -> bool:
    """Whether `generate` would answer a text with exactly these tokens: each is the likeliest after those
    before it.

    Takes one pass over the prompt and the answer, where `generate` takes one for each token: for answers of
    thousands of tokens.
    """
    whole = served(folder)
    messages = zoo.conversation(text)
    prompt = zoo.hf_inputs(whole, messages, [], whole.frontend.layout(messages, []))["input_ids"]
    ids = torch.cat([prompt, torch.tensor([list(answer[:-1])], dtype=prompt.dtype)], dim=1)
    base = whole.model.base_model
    if hasattr(base, "rope_deltas"):
        base.rope_deltas = None
    with torch.no_grad():
        logits = whole.model(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False).logits[0]
    logits = logits[prompt.shape[1] - 1 :]
    logits[:, list(whole.language.suppress_token_ids)] = -torch.inf
    return bool(torch.equal(logits.argmax(-1), torch.tensor(list(answer))))


def _sound_of(data: bytes) -> zoo.Medium:
    return zoo.Medium(probe(data, "audio", MediaPolicy(), of_video=True), data)


def _medium(modality: str, data: bytes) -> zoo.Medium:
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
