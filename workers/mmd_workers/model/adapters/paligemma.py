"""PaliGemma: a prefix language model, which reads the whole prompt in both directions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from mmd_api.contract.pools import Modality
from mmd_workers.model.adapters.base import Adapter
from mmd_workers.model.prompt import MediumLayout


class PaliGemmaAdapter(Adapter):
    """Its processor puts the beginning-of-text token after the last image and a line break at the end."""

    bidirectional = "prompt"

    def atomic_ranges(self, prompt_tokens: int, media: Sequence[MediumLayout]) -> list[tuple[int, int]]:
        """The prompt as one range."""
        del media
        return [(0, prompt_tokens)]

    def expand(
        self, processor: Any, text: str, replacements: Mapping[str, list[str]]
    ) -> tuple[str, list[Modality]]:
        """Replace the markers as the processor's own `prepare_inputs_layout` does."""
        head, marker, tail = text.rpartition(processor.image_token)
        return super().expand(
            processor, f"{head}{marker}{processor.tokenizer.bos_token}{tail}\n", replacements
        )
