"""The whole model: prepares inputs with the model's own processor, and generates from them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from transformers.processing_utils import OmniModalProcessorMixin
from transformers.video_utils import VideoMetadata

from mmd_cli.check.model import NEW_TOKENS, Checked
from mmd_cli.check.prompts import Medium
from mmd_workers.media import samples
from mmd_workers.model.prompt import PromptLayout


def unsplit_inputs(
    checked: Checked, messages: list[dict[str, Any]], media: Sequence[Medium], layout: PromptLayout
) -> dict[str, Any]:
    """Inputs that the model's own processor makes from the same text and media."""
    if checked.processor is None or not media:
        if checked.processor is None:
            messages = [{**m, "content": "".join(p["text"] for p in m["content"])} for m in messages]
        speaker = checked.processor or checked.tokenizer
        text = checked.adapter.render(speaker, messages) if checked.processor else None
        text = text or checked.tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=True
        )
        if checked.processor is not None:
            return _on(checked, checked.adapter.unsplit_inputs(speaker, _given(text), []))
        ids = checked.tokenizer(text, add_special_tokens=False, return_tensors="pt")
        return _on(checked, {name: ids[name] for name in ("input_ids", "attention_mask")})
    sounds_of_videos = any(medium.info.of_video for medium in media)
    if sounds_of_videos:
        messages = _without_sounds_of_videos(messages, media)
    arguments = _given(checked.adapter.render(checked.processor, messages))
    if images := [torch.from_numpy(m.data).permute(2, 0, 1) for m in media if m.info.modality == "image"]:
        arguments["images"] = [images]
    if sounds := [m.data for m in media if m.info.modality == "audio"]:
        arguments["audio"] = sounds
        arguments["audio_kwargs"] = {"sampling_rate": samples.SAMPLE_RATE_HZ}
    videos, metadata = [], []
    for medium, laid in zip(media, layout.media, strict=True):
        if medium.info.modality != "video":
            continue
        info, chosen = medium.info, laid.sampling.frame_indices
        videos.append(torch.from_numpy(medium.data[chosen]).permute(0, 3, 1, 2))
        metadata.append(
            VideoMetadata(
                total_num_frames=info.num_frames,
                fps=info.fps,
                width=info.width,
                height=info.height,
                duration=info.duration_seconds,
                frames_indices=list(chosen),
            )
        )
    if videos:
        arguments["videos"] = videos
        arguments["videos_kwargs"] = {"video_metadata": metadata, "do_sample_frames": False}
        if isinstance(checked.processor, OmniModalProcessorMixin):
            arguments["videos_kwargs"]["fps"] = metadata[0].sampled_fps
    if sounds_of_videos:
        arguments |= {"load_audio_from_video": True, "audio_from_video_indices": _videos_of_sounds(media)}
    inputs = checked.adapter.unsplit_inputs(checked.processor, arguments, layout.media)
    if sounds_of_videos:
        inputs["use_audio_in_video"] = True
    return _on(checked, inputs)


def _without_sounds_of_videos(
    messages: list[dict[str, Any]], media: Sequence[Medium]
) -> list[dict[str, Any]]:
    """Remove the sounds of videos, for which the prompt has no marker."""
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
    kinds = [medium.info.modality for medium in media]
    return [
        kinds[:number].count("video") - 1 if medium.info.of_video else None
        for number, medium in enumerate(media)
        if medium.info.modality == "audio"
    ]


def _given(text: str) -> dict[str, Any]:
    return {"text": [text], "return_tensors": "pt"}


def _on(checked: Checked, inputs: dict[str, Any]) -> dict[str, Any]:
    device, dtype = checked.language.device, checked.language.dtype
    return {
        name: value.to(device, dtype if value.is_floating_point() else None)
        if isinstance(value, torch.Tensor)
        else value
        for name, value in inputs.items()
        if name != "labels"
    }


def generate(checked: Checked, inputs: dict[str, Any]) -> tuple[list[int], torch.Tensor, torch.Tensor | None]:
    """Greedy tokens, the logits of each step, and the decoder's input in the first step ([tokens, hidden])."""
    decoder_inputs: list[torch.Tensor | None] = []

    def record(_: Any, __: Any, kwargs: dict[str, Any]) -> None:
        embeds = kwargs.get("inputs_embeds")
        decoder_inputs.append(None if embeds is None else embeds[0].clone())

    if hasattr(checked.whole.base_model, "rope_deltas"):
        checked.whole.base_model.rope_deltas = None
    hook = checked.whole.get_decoder().register_forward_pre_hook(record, with_kwargs=True)
    try:
        with torch.no_grad():
            generated = checked.whole.generate(
                **inputs,
                max_new_tokens=NEW_TOKENS,
                do_sample=False,
                eos_token_id=None,
                pad_token_id=0,
                suppress_tokens=list(checked.language.suppress_token_ids) or None,
                output_logits=True,
                return_dict_in_generate=True,
            )
    finally:
        hook.remove()
    tokens = generated.sequences[0, inputs["input_ids"].shape[1] :].tolist()
    return tokens, torch.cat([row[:1] for row in generated.logits]).float().cpu(), decoder_inputs[0]
