"""Token counts of a request by modality of its prompt and kind of its output. Independent of HTTP and workers."""

from __future__ import annotations

from collections.abc import Sequence

from pydantic import BaseModel

from mmd_workers.gateway.intake.omissions import omissions_of
from mmd_workers.model.prompt import DegradedBy, PromptLayout


class PromptTokensDetails(BaseModel):
    """Where prompt tokens come from; the modalities add up to `prompt_tokens`.

    These fields report what the model did not get:

    - `truncated_audio_seconds`: audio beyond the model's window.
    - `omitted_video_frames`: frames that the request asked for.
    - `omitted_pixels`: pixels that the request asked for, of images and of the remaining frames.
    - `replaced_media`: media replaced by a text that says they could not be read.
    - `degraded_by`: causes of omissions and replacements: `context`, `load`, `failure`.
    """

    cached_tokens: int = 0
    text_tokens: int = 0
    image_tokens: int = 0
    video_tokens: int = 0
    audio_tokens: int = 0
    truncated_audio_seconds: float = 0.0
    omitted_video_frames: int = 0
    omitted_pixels: int = 0
    replaced_media: int = 0
    degraded_by: list[DegradedBy] = []


class CompletionTokensDetails(BaseModel):
    """What answers consist of. `reasoning_tokens`: before their content, markers included."""

    reasoning_tokens: int = 0


class Usage(BaseModel):
    """Token counts of a request."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails


def prompt_details(layouts: Sequence[PromptLayout]) -> PromptTokensDetails:
    """Counts the tokens of prompts by modality, before any is found in a cache; each prompt counts once, whatever `n` is."""
    by_modality = {"image": 0, "video": 0, "audio": 0}
    for medium in (medium for layout in layouts for medium in layout.media):
        by_modality[medium.modality] += medium.num_tokens
    prompt_tokens = sum(len(layout.token_ids) for layout in layouts)
    return PromptTokensDetails(
        text_tokens=prompt_tokens - sum(by_modality.values()),
        image_tokens=by_modality["image"],
        video_tokens=by_modality["video"],
        audio_tokens=by_modality["audio"],
        **omissions_of(layouts),
    )


def usage_of(
    prompt: PromptTokensDetails, completion_tokens: int, cached_tokens: int, reasoning_tokens: int = 0
) -> Usage:
    """Counts a request's tokens. `prompt`: those of its prompts."""
    prompt_tokens = prompt.text_tokens + prompt.image_tokens + prompt.video_tokens + prompt.audio_tokens
    return Usage(
        prompt_tokens=prompt_tokens,
        completion_tokens=completion_tokens,
        total_tokens=prompt_tokens + completion_tokens,
        prompt_tokens_details=prompt.model_copy(update={"cached_tokens": cached_tokens}),
        completion_tokens_details=CompletionTokensDetails(reasoning_tokens=reasoning_tokens),
    )
