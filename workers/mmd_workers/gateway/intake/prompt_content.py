"""What a prompt is made from, so that it can be laid out again with less of its media. Independent of the model and the network."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from mmd_api.contract.pools import MODALITIES
from mmd_workers.media.amount import MediaAmount
from mmd_workers.media.choice import SamplingChoice
from mmd_workers.media.medium import MediumInfo
from mmd_workers.model.prompt import DegradedBy, PromptLayout


@dataclass(frozen=True, slots=True)
class PromptContent:
    """A conversation as the frontend takes it, with a part for each of its media. `asked`: how the request chooses to sample them; `choices`: how
    they are sampled; `replaced_media`: of which a text stands in its place.
    """

    messages: Sequence[dict[str, Any]]
    infos: Sequence[MediumInfo]
    asked: Sequence[SamplingChoice]
    choices: Sequence[SamplingChoice]
    replaced_media: int = 0

    def with_choice(self, number: int, choice: SamplingChoice) -> PromptContent:
        """Another choice for this medium."""
        choices = [choice if n == number else one for n, one in enumerate(self.choices)]
        return replace(self, choices=choices)

    def with_text(self, number: int, text: str) -> PromptContent:
        """This text in place of the medium, and of the sound of such a video."""
        end = number + 1
        if end < len(self.infos) and self.infos[end].of_video:
            end += 1
        numbers, messages = itertools.count(), list[dict[str, Any]]()
        for message in self.messages:
            parts = []
            for part in message["content"]:
                at = next(numbers) if part["type"] in MODALITIES else None
                if at == number:
                    parts.append({"type": "text", "text": text})
                elif at is None or not number < at < end:
                    parts.append(part)
            messages.append({**message, "content": parts})

        def others(values: Sequence[Any]) -> list[Any]:
            return [one for n, one in enumerate(values) if not number <= n < end]

        return PromptContent(
            messages,
            others(self.infos),
            others(self.asked),
            others(self.choices),
            self.replaced_media + end - number,
        )

    def sampled_as(self, layout: PromptLayout) -> PromptContent:
        """With choices that come to the frames of this layout, which may have fewer."""
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
        """A layout of this content that says what is missing from it. `asked`, `taken`: amounts of its choices."""
        media = [
            replace(
                medium,
                omitted_frames=wanted.frames - len(medium.sampling.frame_indices),
                omitted_pixels=max(0, wanted.pixels - given.pixels),
            )
            for medium, wanted, given in zip(layout.media, asked, taken, strict=True)
        ]
        is_less = self.replaced_media or any(one != other for one, other in zip(asked, taken, strict=True))
        causes = layout.degraded_by | ({by} if is_less else frozenset())
        return replace(layout, media=media, replaced_media=self.replaced_media, degraded_by=causes)
