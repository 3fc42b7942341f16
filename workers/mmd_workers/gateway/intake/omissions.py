"""The parts of a request's media that the model does not get, as the response reports them. Independent of HTTP and the model."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from mmd_workers.model.prompt import MediumLayout, PromptLayout


def omissions_of(layouts: Sequence[PromptLayout]) -> dict[str, Any]:
    """The fields of `PromptTokensDetails` about omissions; where nothing is missing, their values say so."""
    media = list(_media(layouts))
    return {
        "truncated_audio_seconds": round(sum(medium.truncated_seconds for medium in media), 3),
        "omitted_video_frames": sum(medium.omitted_frames for medium in media),
        "omitted_pixels": sum(_pixels(medium) for medium in media),
        "replaced_media": sum(layout.replaced_media for layout in layouts),
        "degraded_by": sorted({cause for layout in layouts for cause in layout.degraded_by}),
    }


def headers_of(layouts: Sequence[PromptLayout]) -> dict[str, str]:
    """The omissions as headers of the response; a header is absent where nothing is missing."""
    omissions = {name: value for name, value in omissions_of(layouts).items() if value}
    return {
        f"x-mmd-{name.replace('_', '-')}": ", ".join(value) if isinstance(value, list) else str(value)
        for name, value in omissions.items()
    }


HEADERS = (
    "x-mmd-degraded-by",
    "x-mmd-omitted-pixels",
    "x-mmd-omitted-video-frames",
    "x-mmd-replaced-media",
    "x-mmd-truncated-audio-seconds",
)


def _media(layouts: Sequence[PromptLayout]) -> Iterable[MediumLayout]:
    return (medium for layout in layouts for medium in layout.media)


def _pixels(medium: MediumLayout) -> int:
    return medium.omitted_pixels * max(1, len(medium.sampling.frame_indices))
