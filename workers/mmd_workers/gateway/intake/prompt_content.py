"""The content of a prompt, kept so that it can be laid out again with less of its media. Independent of the model and the network."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from mmd_api.contract.pools import MODALITIES
from mmd_workers.media.choice import SamplingChoice
from mmd_workers.media.medium import MediumInfo
from mmd_workers.media.reduction import MediaAmount
from mmd_workers.model.prompt import DegradedBy, PromptLayout


@dataclass(frozen=True, slots=True)
class PromptContent:
    """A conversation in the frontend's form, with a part for each medium.

    `asked`: the sampling that the request chooses. `choices`: the actual sampling. `replaced_media`: number of media replaced by text.
    """

    messages: Sequence[dict[str, Any]]
    infos: Sequence[MediumInfo]
    asked: Sequence[SamplingChoice]
    choices: Sequence[SamplingChoice]
    replaced_media: int = 0

    def with_choice(self, number: int, choice: SamplingChoice) -> PromptContent:
        """Use another choice for this medium."""
        choices = [choice if index == number else other for index, other in enumerate(self.choices)]
        return replace(self, choices=choices)

    def with_text(self, number: int, text: str) -> PromptContent:
        """Put a text in place of the medium; a video's sound is removed with it."""
        end = number + 1
        if end < len(self.infos) and self.infos[end].of_video:
            end += 1
        numbers, messages = itertools.count(), list[dict[str, Any]]()
        for message in self.messages:
            parts = []
            for part in message["content"]:
                index = next(numbers) if part["type"] in MODALITIES else None
                if index == number:
                    parts.append({"type": "text", "text": text})
                elif index is None or not number < index < end:
                    parts.append(part)
            messages.append({**message, "content": parts})

        def others(values: Sequence[Any]) -> list[Any]:
            return [value for n, value in enumerate(values) if not number <= n < end]

        return PromptContent(
            messages,
            others(self.infos),
            others(self.asked),
            others(self.choices),
            self.replaced_media + end - number,
        )

    def sampled_as(self, layout: PromptLayout) -> PromptContent:
        """Use choices that select the frames of this layout, which may have fewer."""
        choices = [
            replace(choice, max_frames=len(medium.sampling.frame_indices))
            if medium.omitted_frames
            else choice
            for choice, medium in zip(self.choices, layout.media, strict=True)
        ]
        return replace(self, choices=choices)

    def reported(
        self, layout: PromptLayout, asked: Sequence[MediaAmount], taken: Sequence[MediaAmount], by: DegradedBy
    ) -> PromptLayout:
        """A layout of this content that records the omissions. `asked`, `taken`: amounts of its choices."""
        media = [
            replace(
                medium,
                omitted_frames=requested.frames - len(medium.sampling.frame_indices),
                omitted_pixels=max(0, requested.pixels - used.pixels),
            )
            for medium, requested, used in zip(layout.media, asked, taken, strict=True)
        ]
        is_less = self.replaced_media or any(
            before != after for before, after in zip(asked, taken, strict=True)
        )
        causes = layout.degraded_by | ({by} if is_less else frozenset())
        return replace(layout, media=media, replaced_media=self.replaced_media, degraded_by=causes)
