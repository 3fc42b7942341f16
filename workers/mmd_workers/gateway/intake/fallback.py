"""Replaces or reduces a medium that no encoder could encode, by `spec.gateway.media.failurePolicy`. Independent of workers and HTTP."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from typing import Generic, Literal, TypeVar

from mmd_api.contract.errors import MmdError
from mmd_api.contract.pools import Modality
from mmd_workers.gateway.basics.api_errors import ApiError
from mmd_workers.gateway.intake.prompt_content import PromptContent
from mmd_workers.media.choice import SamplingChoice
from mmd_workers.media.medium import MediumInfo
from mmd_workers.media.reduction import MediaAmount, MediaShare

Policy = Literal["TextOnly", "DegradeFrames", "DegradeResolution"]
MOST_HALVINGS = 2  # per medium; every try costs encoders as much as the first
HALF: dict[Policy, MediaShare] = {
    "DegradeFrames": MediaShare(frames_percent=50),
    "DegradeResolution": MediaShare(pixels_percent=50),
}
NAMES: dict[Modality, str] = {"image": "An image", "video": "A video", "audio": "An audio recording"}

_Laid = TypeVar("_Laid")


def unread(modality: Modality) -> str:
    """The text that the model reads in place of a medium."""
    return f"[{NAMES[modality]} was attached here, but it could not be read.]"


class Fallback(Generic[_Laid]):
    """Lays out the prompt of one request again, with less of the medium that has failed.

    Each failure is handled once, however many of the request's answers report it.
    """

    def __init__(
        self,
        policy: Policy,
        content: PromptContent,
        feature_ids: Sequence[str],
        amounts: Callable[[Sequence[MediumInfo], Sequence[SamplingChoice]], list[MediaAmount]],
        lay_out: Callable[[PromptContent], Awaitable[tuple[_Laid, Sequence[str]]]],
    ) -> None:
        """`feature_ids`: of the media of `content`. `lay_out`: returns a prompt and the feature ids of its media."""
        self.policy = policy
        self._content, self._feature_ids = content, list(feature_ids)
        self._amounts, self._lay_out = amounts, lay_out
        self._laid: _Laid | None = None
        self._halvings: Counter[int] = Counter()
        self._given_up: set[str] = set()
        self._turn = asyncio.Lock()

    async def without(self, feature_id: str) -> _Laid | None:
        """A prompt without this feature; None if nothing is left to omit, or the rest does not fit."""
        async with self._turn:
            if feature_id in self._feature_ids:
                previous_ids = set(self._feature_ids)
                self._laid = await self._next(feature_id)
                # A video's sound is given up with it.
                self._given_up |= {feature_id} | (previous_ids - set(self._feature_ids))
            return self._laid if feature_id in self._given_up else None

    async def _next(self, feature_id: str) -> _Laid | None:
        numbers = [number for number, other_id in enumerate(self._feature_ids) if other_id == feature_id]
        try:
            content = await asyncio.to_thread(self._less, numbers)
            if content is None:
                return None
            prompt, self._feature_ids = await self._laid_out(content)
        except (ApiError, MmdError):  # the original failure is more informative
            return None
        self._content = content
        self._halvings.update(numbers)
        return prompt

    async def _laid_out(self, content: PromptContent) -> tuple[_Laid, list[str]]:
        prompt, feature_ids = await self._lay_out(content)
        return prompt, list(feature_ids)

    def _less(self, numbers: Sequence[int]) -> PromptContent | None:
        """The content with less of these media; None if one of them cannot be reduced further."""
        content = self._content
        if self.policy == "TextOnly":
            for number in reversed(numbers):
                content = content.with_text(number, unread(content.infos[number].modality))
            return content
        for number in numbers:
            info, choice = [content.infos[number]], content.choices[number]
            (before,) = self._amounts(info, [choice])
            reduced = HALF[self.policy].of(choice, before)
            (after,) = self._amounts(info, [reduced])
            if after == before or self._halvings[number] >= MOST_HALVINGS:
                return None
            content = content.with_choice(number, reduced)
        return content
