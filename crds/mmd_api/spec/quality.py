"""How much of images and videos the model gets while the pools are loaded."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from mmd_api.base import ApiModel
from mmd_api.rule import Rule

MAX_TIERS = 4
MOST_FRAMES = 4096


def _thresholds_rise(load: UnderLoad) -> bool:
    pairs = zip(load.tiers, load.tiers[1:], strict=False)
    return all(
        one.memory_percent <= other.memory_percent and one.backlog_milliseconds <= other.backlog_milliseconds
        for one, other in pairs
    )


def _quality_falls(load: UnderLoad) -> bool:
    pairs = zip(load.tiers, load.tiers[1:], strict=False)
    return all(
        one.pixels_percent >= other.pixels_percent
        and one.frames_percent >= other.frames_percent
        and one.max_frames >= other.max_frames
        for one, other in pairs
    )


def _something_falls(tier: QualityTier) -> bool:
    return tier.pixels_percent < 100 or tier.frames_percent < 100 or tier.max_frames < MOST_FRAMES


def _of_pairs(condition: str) -> str:
    """CEL that holds if `condition` does for each tier, `one`, and the tier that follows it, `other`."""
    written = condition.replace("other.", "self.tiers[i + 1].").replace("one.", "self.tiers[i].")
    return f"{list(range(MAX_TIERS - 1))}.all(i, i + 1 >= self.tiers.size() || ({written}))"


TIER = (
    Rule(
        field="pixelsPercent",
        cel=f"self.pixelsPercent < 100 || self.framesPercent < 100 || self.maxFrames < {MOST_FRAMES}",
        holds=_something_falls,
        problem="the tier changes nothing",
        remedy="lower pixelsPercent, framesPercent or maxFrames, or remove the tier",
    ),
)

UNDER_LOAD = (
    Rule(
        field="tiers",
        cel=_of_pairs(
            "one.memoryPercent <= other.memoryPercent && one.backlogMilliseconds <= other.backlogMilliseconds"
        ),
        holds=_thresholds_rise,
        problem="a tier has a lower threshold than the one before it",
        remedy="order the tiers by memoryPercent and backlogMilliseconds, lowest first",
    ),
    Rule(
        field="tiers",
        cel=_of_pairs(
            "one.pixelsPercent >= other.pixelsPercent && one.framesPercent >= other.framesPercent && "
            "one.maxFrames >= other.maxFrames"
        ),
        holds=_quality_falls,
        problem="a tier has more pixels or frames than the one before it",
        remedy="let pixelsPercent, framesPercent and maxFrames fall from tier to tier",
    ),
)


class QualityTier(ApiModel, rules=TIER):
    """Thresholds of load, either of which starts the tier, and what images and videos are reduced to."""

    memory_percent: Annotated[int, Field(ge=1, le=100)]
    """Memory in use above which the tier starts, as the largest of KV blocks in prefill, KV blocks in decode, media in encoders and embeddings that prompts need."""
    backlog_milliseconds: Annotated[int, Field(ge=1, le=600_000)]
    """Backlog of all encoders, as time to process it, above which the tier starts."""
    pixels_percent: Annotated[int, Field(ge=1, le=100)] = 100
    """Percentage of the pixels that the model's processor would resize an image or a frame to. Applies where the processor takes a number of pixels."""
    frames_percent: Annotated[int, Field(ge=1, le=100)] = 100
    """Percentage of the frames that would be sampled from a video, taken evenly; 50 is every second one."""
    max_frames: Annotated[int, Field(ge=1, le=MOST_FRAMES)] = MOST_FRAMES
    """Maximum number of frames sampled from a video."""


class UnderLoad(ApiModel, rules=UNDER_LOAD):
    """Tiers of lower quality for images and videos, and when they end."""

    tiers: Annotated[list[QualityTier], Field(min_length=1, max_length=MAX_TIERS)] = [
        QualityTier(memory_percent=80, backlog_milliseconds=4000, pixels_percent=56, frames_percent=75),
        QualityTier(
            memory_percent=90,
            backlog_milliseconds=8000,
            pixels_percent=25,
            frames_percent=50,
            max_frames=32,
        ),
    ]
    """Tiers, the one of the lowest load first. The last one whose threshold is exceeded applies to new requests at once."""
    recovery_percent: Annotated[int, Field(ge=1, le=100)] = 80
    """Percentage of a tier's thresholds that load must not exceed for the tier to end."""
    hold_seconds: Annotated[int, Field(ge=1, le=3600)] = 30
    """How long load must stay that low before the tier ends."""
