"""Gemma 3: the tokens of one image see each other in both directions."""

from __future__ import annotations

from collections.abc import Sequence

from mmd_api.contract.pools import Modality
from mmd_workers.model.adapters.base import Adapter
from mmd_workers.model.prompt import MediumLayout
from mmd_workers.model.runs import Along, TowerRun


class Gemma3Adapter(Adapter):
    """Attention among the tokens of one tile of an image is bidirectional, in sliding layers within the window."""

    bidirectional = "media"

    def atomic_ranges(self, prompt_tokens: int, media: Sequence[MediumLayout]) -> list[tuple[int, int]]:
        """Each unbroken run of image tokens."""
        del prompt_tokens
        return [(start, start + length) for medium in media for start, length in medium.ranges]

    def atomic_tokens_of_media(self) -> int:
        """Tokens of a tile of an image."""
        return int(self.config.mm_tokens_per_image)

    def tower_run(self, modality: Modality) -> TowerRun:
        """Images with any number of crops share a run."""
        return Along({"pixel_values": 0}) if modality == "image" else super().tower_run(modality)
