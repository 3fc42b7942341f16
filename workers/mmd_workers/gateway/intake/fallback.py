"""What becomes of a prompt with a medium that no encoder could encode, by `spec.gateway.media.failurePolicy`. Independent of workers and HTTP."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from typing import Generic, Literal, TypeVar

from mmd_api.contract.errors import MmdError
from mmd_api.contract.pools import Modality
from mmd_workers.gateway.basics.api_errors import ApiError
from mmd_workers.gateway.intake.prompt_content import PromptContent
from mmd_workers.media.amount import MediaAmount, MediaShare
from mmd_workers.media.choice import SamplingChoice
from mmd_workers.media.medium import MediumInfo

Policy = Literal["TextOnly", "DegradeFrames", "DegradeResolution"]
MOST_HALVINGS = 2  # of one medium: every try costs encoders as much as the first
HALF: dict[Policy, MediaShare] = {
    "DegradeFrames": MediaShare(frames_percent=50),
    "DegradeResolution": MediaShare(pixels_percent=50),
}
NAMES: dict[Modality, str] = {"image": "An image", "video": "A video", "audio": "An audio recording"}

_Laid = TypeVar("_Laid")


def unread(modality: Modality) -> str:
    """What the model reads in place of a medium."""
    return f"[{NAMES[modality]} was attached here, but it could not be read.]"


class Fallback(Generic[_Laid]):
    """Lays the prompt of one request out again, with less of the medium that has failed. Each failure is answered once, however many of the
    request's answers report it.
    """

    def __init__(
        self,
        policy: Policy,
        content: PromptContent,
        feature_ids: Sequence[str],
        amounts: Callable[[Sequence[MediumInfo], Sequence[SamplingChoice]], list[MediaAmount]],
        lay_out: Callable[[PromptContent], Awaitable[tuple[_Laid, Sequence[str]]]],
    ) -> None:
        """`feature_ids`: of the media of `content`. `lay_out` returns a prompt and those of its media."""
        self.policy = policy
        self._content, self._feature_ids = content, list(feature_ids)
        self._amounts, self._lay_out = amounts, lay_out
        self._laid: _Laid | None = None
        self._halvings: Counter[int] = Counter()
        self._given_up: set[str] = set()
        self._turn = asyncio.Lock()

    async def without(self, feature_id: str) -> _Laid | None:
        """A prompt in which this feature is none any more; None: there is nothing left to leave out, or what is left does not fit."""
        async with self._turn:
            if feature_id in self._feature_ids:
                before = set(self._feature_ids)
                self._laid = await self._next(feature_id)
                self._given_up |= {feature_id} | (before - set(self._feature_ids))  # its sound, too
            return self._laid if feature_id in self._given_up else None

    async def _next(self, feature_id: str) -> _Laid | None:
        numbers = [number for number, one in enumerate(self._feature_ids) if one == feature_id]
        try:
            content = await asyncio.to_thread(self._less, numbers)
            if content is None:
                return None
            laid, self._feature_ids = await self._laid_out(content)
        except (ApiError, MmdError):  # the failure that led here says more
            return None
        self._content = content
        self._halvings.update(numbers)
        return laid

    async def _laid_out(self, content: PromptContent) -> tuple[_Laid, list[str]]:
        laid, feature_ids = await self._lay_out(content)
        return laid, list(feature_ids)

    def _less(self, numbers: Sequence[int]) -> PromptContent | None:
        """The content with less of these media; None: one cannot be less."""
        content = self._content
        if self.policy == "TextOnly":
            for number in reversed(numbers):
                content = content.with_text(number, unread(content.infos[number].modality))
            return content
        for number in numbers:
            info, choice = [content.infos[number]], content.choices[number]
            (before,) = self._amounts(info, [choice])
            less = HALF[self.policy].of(choice, before)
            (after,) = self._amounts(info, [less])
            if after == before or self._halvings[number] >= MOST_HALVINGS:
                return None
            content = content.with_choice(number, less)
        return content
