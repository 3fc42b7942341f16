"""A text model with media: the oracle of its answers stays `generate` of the text model."""

from __future__ import annotations

import time
from typing import Any

import torch

from mmd_workers.model.prompt import Feature
from mmd_workers.wire.messages.message_parts import FeatureRef, Sampling
from mmd_workers.wire.messages.prefill import GenerateRequest
from support.oracles.engine_oracle import TextModel, prompt_of

NEW_TOKENS = 6
TOKENS = prompt_of(40, 1)  # in blocks of 8
FIRST, SECOND = (8, 8), (24, 8)  # placeholders: start, length


class MediaModel(TextModel):
    """Media are runs of tokens, and their features what the text model would have embedded there: `generate` stays the oracle."""

    def feature_bytes(self, modality: str, num_tokens: int) -> int:
        return num_tokens * self.hidden_size * 4

    def lower(self, token_ids: Any, media: Any = (), output_token_ids: Any = ()) -> Any:
        prompt = super().lower(token_ids, media, output_token_ids)
        for number, medium in enumerate(media):
            ((start, length),) = medium.ranges
            prompt.missing[number] = (start, start + length)
        return prompt

    def feature(self, start: int, length: int) -> Feature:
        with torch.inference_mode():
            return Feature(
                "image", {"embeddings": self.embed(torch.tensor(TOKENS[start : start + length]))[0]}
            )


def request_of(name: str, max_tokens: int = NEW_TOKENS, *, media: bool = True) -> GenerateRequest:
    """A request with both media, or with the same tokens as text."""
    refs = [
        FeatureRef(f"feature-{start}", "d", "image", 1, length, [[start, length]], {}, {}, 1)
        for start, length in (FIRST, SECOND)
    ]
    now, sampling = time.time(), Sampling(max_tokens, ignore_eos=True)
    return GenerateRequest(name, 0, "g", TOKENS, refs if media else [], sampling, [], now + 60, now)
