"""The architectures under test, and real media for them.

The oracle is Hugging Face's own processing of the same media.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from transformers.video_utils import VideoMetadata

from mmd_api.spec.media import MediaPolicy
from mmd_api.spec.model import ModelSpec
from mmd_workers.media.medium import Decoded, DecodedAudio, DecodedImage, DecodedVideo, MediumInfo
from mmd_workers.model.encoder import HfEncoderModel, load_encoder
from mmd_workers.model.frontend import HfFrontend, load_frontend
from mmd_workers.model.language import HfLanguageModel, load_language_model
from mmd_workers.model.prompt import LoweredPrompt, PromptLayout
from mmd_workers.model.roles import architecture_class
from mmd_workers.model.source import load_config
from mmd_workers.model.tiles import bound_tiles, follow_tiles
from support.oracles.devices import DEVICE

CPU = torch.device("cpu")
NEW_TOKENS = 12

MODALITIES: dict[str, tuple[str, ...]] = {
    "llava": ("image",),
    "llava_next": ("image",),
    "llava_onevision": ("image", "video"),
    "video_llava": ("image", "video"),
    "qwen2_vl": ("image", "video"),
    "qwen2_5_vl": ("image", "video"),
    "qwen3_vl": ("image", "video"),
    "video_llama_3": ("image", "video"),
    "internvl": ("image", "video"),
    "idefics3": ("image",),
    "smolvlm": ("image", "video"),
    "gemma3": ("image",),
    "paligemma": ("image",),
    "mistral3": ("image",),
    "qwen2_audio": ("audio",),
    "voxtral": ("audio",),
    "audioflamingo3": ("audio",),
    "qwen2_5_omni": ("image", "video", "audio"),
    "qwen3_omni_moe": ("image", "video", "audio"),
    "llama": (),
}


@dataclass(frozen=True)
class Medium:
    """A medium as the gateway sees it, and its content. `source` has every frame of a video."""

    info: MediumInfo
    source: Any


def digest(data: np.ndarray) -> str:
    return hashlib.sha256(str(data.shape).encode() + data.tobytes()).hexdigest()


def image(width: int, height: int, seed: int = 0) -> Medium:
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return Medium(
        MediumInfo("image", digest(pixels), pixels.nbytes, "png", width=width, height=height), pixels
    )


def video(width: int, height: int, num_frames: int = 12, fps: float = 6.0, seed: int = 0) -> Medium:
    frames = np.random.default_rng(seed).integers(0, 256, (num_frames, height, width, 3), dtype=np.uint8)
    info = MediumInfo(
        "video",
        digest(frames),
        frames.nbytes,
        "mp4",
        width=width,
        height=height,
        num_frames=num_frames,
        fps=fps,
        duration_seconds=num_frames / fps,
    )
    return Medium(info, frames)


def video_with_sound(
    width: int, height: int, num_frames: int, fps: float, samples: int, seed: int = 0
) -> tuple[Medium, Medium]:
    """A video and its sound track, as two media of one file."""
    film, sound = video(width, height, num_frames, fps, seed), audio(samples, seed)
    of_film = replace(sound.info, digest=film.info.digest, container="mp4", of_video=True)
    return Medium(replace(film.info, has_sound=True), film.source), Medium(of_film, sound.source)


def audio(samples: int, seed: int = 0) -> Medium:
    wave = (0.1 * np.random.default_rng(seed).standard_normal(samples)).astype(np.float32)
    info = MediumInfo("audio", digest(wave), wave.nbytes, "wav", num_samples=samples, sample_rate_hz=16000)
    return Medium(info, wave)


def decoded(medium: Medium, indices: Sequence[int], samples: int) -> Decoded:
    """A medium as it is decoded, once the sampling plan has been followed."""
    if medium.info.modality == "image":
        return DecodedImage(medium.source)
    if medium.info.modality == "video":
        frames = medium.source[list(indices)]
        return DecodedVideo(frames, list(indices), medium.info.fps, medium.info.num_frames)
    return DecodedAudio(medium.source[:samples], 16000)


def conversation(*parts: str | Medium) -> list[dict[str, Any]]:
    """One user message; strings are text parts."""
    content = [
        {"type": "text", "text": p} if isinstance(p, str) else {"type": p.info.modality} for p in parts
    ]
    return [{"role": "user", "content": content}]


@dataclass(frozen=True)
class Served:
    """The three model objects of one checkpoint, and the whole model for comparison."""

    folder: Path
    frontend: HfFrontend
    encoder: HfEncoderModel | None
    language: HfLanguageModel
    processor: Any
    model: Any


@functools.cache
def serve(folder: Path, policy: MediaPolicy | None = None, max_image_tiles: int | None = None) -> Served:
    """Load a checkpoint. `max_image_tiles` bounds the tiles of the whole model's processor too."""
    spec = ModelSpec(id=str(folder), dtype="Float32", max_image_tiles=max_image_tiles)
    config = load_config(folder)
    frontend = load_frontend(spec, policy or MediaPolicy())
    processor = transformers.AutoProcessor.from_pretrained(folder)
    if max_image_tiles is not None:
        bound_tiles(processor, max_image_tiles)
        follow_tiles(config, processor)
    whole = architecture_class(config).from_pretrained(folder, config=config, dtype=torch.float32)
    return Served(
        folder,
        frontend,
        load_encoder(spec, DEVICE) if frontend.modalities else None,
        load_language_model(spec, DEVICE),
        processor,
        whole.eval().to(DEVICE),
    )


def hf_inputs(
    served: Served,
    messages: list[dict[str, Any]],
    media: Sequence[Medium],
    layout: PromptLayout,
    image_size: dict[str, int] | None = None,
) -> dict[str, Any]:
    """Run the checkpoint's own processor on the same text and the same real media.

    `image_size` replaces the processor's own setting, as does the size of a video's plan.
    """
    processor, arch = served.processor, served.model.config.model_type
    if not media:
        tokenizer = getattr(processor, "tokenizer", processor)
        if tokenizer.chat_template is None:
            tokenizer.chat_template = processor.chat_template
        if tokenizer is processor:
            messages = [{**m, "content": "".join(p["text"] for p in m["content"])} for m in messages]
        ids = tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
        return {k: ids[k] for k in ("input_ids", "attention_mask")}
    if arch == "voxtral":
        return _voxtral_inputs(served, messages, media, layout)
    with_sound = any(m.info.of_video for m in media)
    if with_sound:
        messages = _without_sounds_of_videos(messages, media)
    text = processor.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    arguments: dict[str, Any] = {"text": [text], "return_tensors": "pt"}
    images = [torch.from_numpy(m.source).permute(2, 0, 1) for m in media if m.info.modality == "image"]
    if images:
        arguments["images"] = [images] if arch in ("idefics3", "smolvlm", "gemma3") else images
    if image_size is not None:
        arguments["images_kwargs"] = {"size": image_size}
    metadata, frames = [], []
    for medium, laid in zip(media, layout.media, strict=True):
        if medium.info.modality != "video":
            continue
        chosen = laid.sampling.frame_indices
        frames.append(torch.from_numpy(medium.source[chosen]).permute(0, 3, 1, 2))
        info = medium.info
        metadata.append(
            VideoMetadata(
                total_num_frames=info.num_frames,
                fps=info.fps,
                width=info.width,
                height=info.height,
                duration=info.num_frames / info.fps,
                frames_indices=list(laid.sampling.timed_indices),
            )
        )
    if frames:
        arguments["videos"] = frames
        options: dict[str, Any] = {"video_metadata": metadata, "do_sample_frames": False}
        if "omni" in arch:
            options["fps"] = metadata[0].sampled_fps
            options["size"] = dict(processor.video_processor.size)
        if sizes := [m.sampling.size for m in layout.media if m.modality == "video" and m.sampling.size]:
            options["size"] = sizes[0]
        arguments["videos_kwargs"] = options
    sounds = [m.source for m in media if m.info.modality == "audio"]
    if sounds:
        arguments["audio"] = sounds
        arguments["audio_kwargs"] = {"sampling_rate": 16000} | (
            {"truncation": False} if "omni" in arch else {}
        )
    if with_sound:
        arguments |= {"load_audio_from_video": True, "audio_from_video_indices": _videos_of_sounds(media)}
        if arch == "qwen3_omni_moe_thinker":  # the rate for the integer positions below
            (seconds,) = {s for m in layout.media for s in m.geometry.get("video_second_per_grid", ())}
            options["fps"] = processor.video_processor.temporal_patch_size / seconds
    inputs = dict(processor(**arguments))
    inputs.pop("labels", None)
    if with_sound:
        inputs["use_audio_in_video"] = True
    if arch == "qwen3_omni_moe_thinker" and frames:  # served with integer positions; see the adapter
        seconds = [m.geometry["video_second_per_grid"] for m in layout.media if m.modality == "video"]
        inputs["video_second_per_grid"] = torch.tensor(seconds).flatten()
    return inputs


def _without_sounds_of_videos(
    messages: list[dict[str, Any]], media: Sequence[Medium]
) -> list[dict[str, Any]]:
    remaining = iter(media)
    return [
        {
            **m,
            "content": [p for p in m["content"] if p["type"] == "text" or not next(remaining).info.of_video],
        }
        for m in messages
    ]


def _videos_of_sounds(media: Sequence[Medium]) -> list[int | None]:
    """For each sound, the number of its video; None for a sound without a video."""
    numbers: list[int | None] = []
    videos = 0
    for medium in media:
        videos += medium.info.modality == "video"
        if medium.info.modality == "audio":
            numbers.append(videos - 1 if medium.info.of_video else None)
    return numbers


def _voxtral_inputs(
    served: Served, messages: list[dict[str, Any]], media: Sequence[Medium], layout: PromptLayout
) -> dict[str, Any]:
    """The processor's own mel windows; the prompt by hand, because its template needs mistral-common."""
    processor = served.processor
    settings = dict(type(processor).audio_kwargs)
    frames = settings.pop("max_source_positions")
    mel = processor._retrieve_input_features([m.source for m in media], frames, **settings)
    text = processor.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    config = served.model.config.audio_config
    for medium in media:
        windows = -(-len(medium.source) // 480000)
        rows = windows * 1500 * config.hidden_size // config.intermediate_size
        text = text.replace("[BEGIN_AUDIO][AUDIO]t", "[BEGIN_AUDIO]" + "[AUDIO]" * rows + "t", 1)
    ids = processor.tokenizer(text, return_tensors="pt")
    return {"input_ids": ids["input_ids"], "attention_mask": ids["attention_mask"], "input_features": mel}


def guidance(served: Served, scale: float, token_ids: Sequence[int]) -> dict[str, Any]:
    """Options of `generate` for its own classifier-free guidance.

    The companion's rotary positions are counted after its prompt alone. Where a model has three axes of them,
    `guidance_scale` uses those of the prompt's media, or fails.
    """
    base = served.model.base_model

    def companion(input_ids: torch.Tensor, **more: Any) -> Any:
        before = getattr(base, "rope_deltas", None)
        if hasattr(base, "rope_deltas"):
            base.rope_deltas = None
        out = served.model(input_ids=input_ids, **more)
        if hasattr(base, "rope_deltas"):
            base.rope_deltas = before
        return out

    ids = torch.tensor([list(token_ids)], device=DEVICE)
    guided = transformers.generation.logits_process.UnbatchedClassifierFreeGuidanceLogitsProcessor(
        scale, companion, ids, use_cache=False
    )
    return {"logits_processor": transformers.LogitsProcessorList([guided])}


def generate(served: Served, inputs: dict[str, Any], tokens: int = NEW_TOKENS, **more: Any) -> list[int]:
    """The reference: the whole model's own `generate`."""
    base = served.model.base_model
    if hasattr(base, "rope_deltas"):
        base.rope_deltas = None
    inputs = {k: v.to(DEVICE) if isinstance(v, torch.Tensor) else v for k, v in inputs.items()}
    with torch.no_grad():
        out = served.model.generate(
            **inputs,
            max_new_tokens=tokens,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
            suppress_tokens=list(served.language.suppress_token_ids) or None,
            **more,
        )
    return out[0, inputs["input_ids"].shape[1] :].tolist()


def lowered(
    served: Served, layout: PromptLayout, media: Sequence[Medium], outputs: Sequence[int] = ()
) -> LoweredPrompt:
    """Encode each medium and fill it into the lowered prompt."""
    prompt = served.language.lower(layout.token_ids, layout.media, outputs)
    for number, (medium, laid) in enumerate(zip(media, layout.media, strict=True)):
        assert served.encoder is not None
        content = decoded(medium, laid.sampling.frame_indices, laid.sampling.num_samples)
        (feature,) = served.encoder.encode([served.encoder.process(content, laid)])
        served.language.fill(prompt, number, feature)
    return prompt


def greedy(served: Served, prompt: LoweredPrompt, tokens: int = NEW_TOKENS) -> list[int]:
    """Prefill and decode with the language role alone, Hugging Face's default attention and its DynamicCache."""
    language = served.language
    cache = transformers.DynamicCache(config=language.model.config.get_text_config())
    banned = list(language.suppress_token_ids)
    out: list[int] = []
    embeds, positions, extras = language.rows(prompt, 0, len(prompt.token_ids))
    mask: Any = _mask(served, prompt)
    for step in range(tokens):
        with torch.no_grad():
            hidden = language.decoder(
                inputs_embeds=embeds.unsqueeze(0),
                position_ids=positions if language.position_axes == 1 else positions.unsqueeze(1),
                past_key_values=cache,
                use_cache=True,
                attention_mask=mask,
                **language.decoder_extras(extras),
            ).last_hidden_state[0]
        scores = language.logits(hidden[-1:])
        scores[:, banned] = float("-inf")
        out.append(int(scores.argmax()))
        embeds, extras = language.embed(torch.tensor([out[-1]], device=DEVICE))
        positions = torch.full((language.position_axes, 1), prompt.next_position + step, device=DEVICE)
        mask = None
    return out


def _mask(served: Served, prompt: LoweredPrompt) -> Any:
    """Additive masks per layer type where ranges are bidirectional: AND(window, OR(causal, same range))."""
    if not prompt.atomic_ranges:
        return None
    tokens = len(prompt.token_ids)
    rows, columns = torch.arange(tokens)[:, None], torch.arange(tokens)[None]
    visible = columns <= rows
    for start, end in prompt.atomic_ranges:
        visible[start:end, start:end] = True
    text = served.model.config.get_text_config()
    full = torch.zeros(tokens, tokens).masked_fill(~visible, float("-inf"))[None, None].to(DEVICE)
    if not getattr(text, "layer_types", None) or "sliding_attention" not in text.layer_types:
        return full
    near = rows - columns < text.sliding_window
    sliding = torch.zeros(tokens, tokens).masked_fill(~(visible & near), float("-inf"))[None, None].to(DEVICE)
    return {"full_attention": full, "sliding_attention": sliding}
