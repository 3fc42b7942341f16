"""Reduces the media of a prompt: fewer frames or pixels until it fits, or the share that load permits. Independent of HTTP and of workers."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace

from mmd_workers.gateway.intake.prompt_content import PromptContent
from mmd_workers.media.choice import SamplingChoice
from mmd_workers.media.reduction import LEAST_FRAMES, MediaShare
from mmd_workers.model.interfaces import Frontend
from mmd_workers.model.prompt import DegradedBy, PromptLayout
from mmd_workers.model.reasoning import Begin

FITTING_PERCENTS = (70, 50, 35, 25, 12, 6)
"""Percentages of a frame's pixels, tried in order if even the fewest frames do not fit."""
PROPORTIONAL_STEPS = 3
"""First steps of the search for the most frames that fit. Every step lays out the prompt."""

LayOut = Callable[[Sequence[SamplingChoice]], Awaitable[tuple[PromptLayout, Begin | None]]]


@dataclass(frozen=True, slots=True)
class Fit:
    """Tokens of a prompt: the most that fit, and the number that leaves room for an answer."""

    most: int
    wanted: int


async def fitted(
    frontend: Frontend, layout: PromptLayout, content: PromptContent, fit: Fit, lay_out: LayOut
) -> tuple[PromptLayout, PromptContent]:
    """The prompt with fewer frames of its videos, or the given prompt if no reduction makes it fit.

    If the prompt does not fit with the fewest frames, these also get fewer pixels: the largest of `FITTING_PERCENTS` that fits.
    """
    layout = await with_fewer_frames(layout, content.choices, fit, lay_out)
    if len(layout.token_ids) <= fit.most:
        return layout, content
    if not any(info.modality == "video" for info in content.infos):
        return layout, content
    choices = content.choices
    amounts = await asyncio.to_thread(frontend.amounts, content.infos, choices)
    for percent in FITTING_PERCENTS:
        share, previous = MediaShare(pixels_percent=percent, frames_percent=0), choices
        choices = [
            share.of(choice, amount) if amount.pixels and amount.frames else choice
            for choice, amount in zip(content.choices, amounts, strict=True)
        ]
        if choices == previous:
            continue
        candidate, _ = await lay_out(choices)
        if len(candidate.token_ids) <= fit.most:
            content = replace(content, choices=choices)
            return await asyncio.to_thread(reported, frontend, content, candidate, "context"), content
    return layout, content


async def with_fewer_frames(
    layout: PromptLayout,
    choices: Sequence[SamplingChoice],
    fit: Fit,
    lay_out: LayOut,
) -> PromptLayout:
    """The prompt with the largest share of each video's frames that fits, or the given prompt if even the smallest share does not fit.

    Tokens are nearly proportional to frames. So the first steps interpolate, and the others halve the remaining interval.
    """
    frames = [len(medium.sampling.frame_indices) for medium in layout.media]
    longest = max(frames, default=0)
    if longest <= LEAST_FRAMES:
        return layout

    async def with_share(of_longest: int) -> PromptLayout:
        shares = [max(min(LEAST_FRAMES, count), count * of_longest // longest) for count in frames]
        limited = [replace(choice, max_frames=share) for choice, share in zip(choices, shares, strict=True)]
        return (await lay_out(limited))[0]

    best = await with_share(LEAST_FRAMES)
    if len(best.token_ids) > fit.most:
        return layout
    low, low_tokens = LEAST_FRAMES, len(best.token_ids)
    high, high_tokens = longest, len(layout.token_ids)  # too many tokens
    for number in itertools.count():
        if high - low <= 1 or low_tokens > fit.wanted:
            break
        middle = (low + high) // 2
        if number < PROPORTIONAL_STEPS:
            expected = low + (high - low) * (fit.wanted - low_tokens) // (high_tokens - low_tokens)
            middle = min(high - 1, max(low + 1, expected))
        candidate = await with_share(middle)
        if len(candidate.token_ids) <= fit.wanted:
            best, low, low_tokens = candidate, middle, len(candidate.token_ids)
        else:
            high, high_tokens = middle, len(candidate.token_ids)
    media = [
        replace(medium, omitted_frames=count - len(medium.sampling.frame_indices))
        for medium, count in zip(best.media, frames, strict=True)
    ]
    return replace(best, media=media, degraded_by=frozenset({"context"}))


def reduced(frontend: Frontend, content: PromptContent, share: MediaShare) -> PromptContent:
    """The content with each medium reduced to this share."""
    amounts = frontend.amounts(content.infos, content.choices)
    choices = [share.of(*pair) for pair in zip(content.choices, amounts, strict=True)]
    return replace(content, choices=choices)


def reported(
    frontend: Frontend, content: PromptContent, layout: PromptLayout, by: DegradedBy
) -> PromptLayout:
    """A layout of this content that records what its choices omit."""
    requested, used = (
        frontend.amounts(content.infos, choices) for choices in (content.asked, content.choices)
    )
    return content.reported(layout, requested, used, by)
