"""What the model roles hand to each other: prompt layouts, features, lowered prompts. Knows no network and no KV pool."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from mmd_api.contract.pools import Modality


@dataclass(frozen=True, slots=True)
class SamplingPlan:
    """How a medium is to be sampled when it is decoded: which frames of a video, which sample rate of sound.

    Chosen once, by the frontend, from `MediumInfo` and the model's processor settings; the decoder executes it.
    """

    frame_indices: list[int] = field(default_factory=list)
    sample_rate_hz: int = 0
    num_samples: int = 0  # at sample_rate_hz


@dataclass(frozen=True, slots=True)
class MediumLayout:
    """Position of one medium in the prompt. Lengths of `ranges` ([start, length]) add up to `num_tokens`."""

    modality: Modality
    num_tokens: int
    ranges: list[tuple[int, int]]
    geometry: dict[str, Any]  # JSON-able; e.g. {"image_grid_thw": [[1, 8, 6]]}
    sampling: SamplingPlan
    work: int  # encoder work: vision patches or mel frames before any pooling
    host_bytes: int = 0  # decoded, plus the inputs of the tower
    truncated_seconds: float = 0.0  # of sound beyond the model's window, which the model does not get


@dataclass(frozen=True, slots=True)
class PromptLayout:
    """A prompt with every placeholder expanded, known before any medium is decoded."""

    token_ids: list[int]
    media: list[MediumLayout]


@dataclass(frozen=True, slots=True)
class RenderedPrompt:
    """A prompt as text, each medium one marker of the template's. `encode`: lays it out."""

    num_characters: int
    encode: Callable[[], PromptLayout]


@dataclass(frozen=True, slots=True)
class ProcessedMedium:
    """Inputs of the tower for one medium, made on the CPU; media with equal `shape_key` may share a batch."""

    modality: Modality
    tensors: dict[str, torch.Tensor]
    geometry: dict[str, Any]
    num_tokens: int
    shape_key: tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class Feature:
    """What the language model gets of one medium. `tensors["embeddings"]`: [num_tokens, hidden]; architectures may add more
    of the same first dimension (`deepstack.0`, ...).
    """

    modality: Modality
    tensors: dict[str, torch.Tensor]

    @property
    def num_tokens(self) -> int:
        """Rows of the embeddings."""
        return int(self.tensors["embeddings"].shape[0])

    @property
    def num_bytes(self) -> int:
        """Bytes of all tensors."""
        return sum(t.numel() * t.element_size() for t in self.tensors.values())


@dataclass(slots=True)
class LoweredPrompt:
    """A prompt in the language model's own terms. Features may still be missing: see `filled_until`.

    positions: int64 [axes, tokens] with axes 1 (plain) or 3 (multi-axis rotary). `next_position`: rotary position of the
    first generated token (what `generate` uses: last column + 1). `embeds`: [tokens, hidden], placeholder rows zero until
    `LanguageModel.fill` scatters a feature. `extras`: per-token tensors an architecture needs beside the embeddings
    (first dimension = tokens), sliced together with them. `atomic_ranges`: [start, end) token ranges that must be
    prefilled in one chunk because attention inside is bidirectional.
    """

    token_ids: list[int]
    positions: torch.Tensor
    next_position: int
    embeds: torch.Tensor
    extras: dict[str, torch.Tensor]
    missing: dict[int, tuple[int, int]]  # medium number -> [first, last+1) of its placeholder positions
    atomic_ranges: list[tuple[int, int]]
    ranges: dict[int, list[tuple[int, int]]] = field(
        default_factory=dict
    )  # medium number -> its [start, length] runs

    @property
    def filled_until(self) -> int:
        """Tokens before the first missing feature: prefill may go this far."""
        return min((start for start, _ in self.missing.values()), default=len(self.token_ids))


@dataclass(frozen=True, slots=True)
class KvLayout:
    """Geometry of a model's KV. Peers whose layouts differ never pair. One entry per KV layer."""

    num_layers: int
    num_kv_heads: list[int]
    head_dim: list[int]
    dtype: str

    def bytes_per_token(self) -> int:
        """Bytes of K and V of one token over all layers."""
        size = torch.empty((), dtype=getattr(torch, self.dtype)).element_size()
        return sum(2 * h * d * size for h, d in zip(self.num_kv_heads, self.head_dim, strict=True))
