"""Data that the model roles pass to each other: prompt layouts, features, lowered prompts. Knows no network and no KV pool."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch

from mmd_api.contract.pools import Modality
from mmd_api.spec.engine import KvDtype
from mmd_workers.basics.packing import row_bytes
from mmd_workers.model.reasoning import Begin

DegradedBy = Literal["context", "load", "failure"]


@dataclass(frozen=True, slots=True)
class SamplingPlan:
    """How a medium is sampled: the frames of a video, the sample rate of a sound, the size to which an image is resized.

    The frontend chooses it once, from `MediumInfo`, the model's processor settings and the request. The decoder executes it, and for an
    image the processor.

    - `num_samples`: samples at `sample_rate_hz`.
    - `size`: the processor's setting of this name; empty: its own.
    - `nominal_indices`: indices of the same frames at a constant rate, from which the model gets their times; empty: they are at one.
    - `pooled_frames`: number of successive frames that become one frame to the model.
    - `page`: number of the document's page, from 1; 0: not a page.
    - `of_video`: the sound belongs to the video before it, and its tokens are among that video's tokens.
    """

    frame_indices: list[int] = field(default_factory=list)
    sample_rate_hz: int = 0
    num_samples: int = 0
    size: dict[str, int] = field(default_factory=dict)
    nominal_indices: list[int] = field(default_factory=list)
    pooled_frames: int = 1
    page: int = 0
    of_video: bool = False

    @property
    def timed_indices(self) -> list[int]:
        """The indices from which the model's frames get their times: for frames that become one, the index in the middle."""
        frames = self.nominal_indices or self.frame_indices
        return frames[self.pooled_frames // 2 :: self.pooled_frames]


@dataclass(frozen=True, slots=True)
class MediumLayout:
    """Position of one medium in the prompt.

    `num_tokens`: the placeholders that the model's own processor makes of the medium (`SamplingPlanner.probe`). The lengths of
    `ranges` ([start, length]) add up to it.
    """

    modality: Modality
    num_tokens: int
    ranges: list[tuple[int, int]]
    geometry: dict[str, Any]  # JSON-able; e.g. {"image_grid_thw": [[1, 8, 6]]}
    sampling: SamplingPlan
    work: int  # encoder work: vision patches or mel frames before any pooling
    host_bytes: int = 0  # the decoded medium and the inputs of the tower
    truncated_seconds: float = 0.0  # sound beyond the model's window, which the model does not get
    omitted_frames: int = 0  # a video's frames in the request's choice that the model does not get
    omitted_pixels: int = 0  # likewise, pixels of an image or of each frame


@dataclass(frozen=True, slots=True)
class PromptLayout:
    """A prompt with every placeholder expanded, known before any medium is decoded.

    `replaced_media`: number of media with a text in their place. `degraded_by`: why the model gets less of its media than the request
    chose.
    """

    token_ids: list[int]
    media: list[MediumLayout]
    replaced_media: int = 0
    degraded_by: frozenset[DegradedBy] = frozenset()


@dataclass(frozen=True, slots=True)
class RenderedPrompt:
    """A prompt as text, with one marker of the template for each medium. `encode` lays it out.

    `reasoning_begins`: where the reasoning is when an answer begins; None: the model has none.
    """

    num_characters: int
    reasoning_begins: Begin | None
    encode: Callable[[], PromptLayout]


@dataclass(frozen=True, slots=True)
class ProcessedMedium:
    """Inputs of the tower for one medium, made on the CPU. Media with equal `shape_key` may share a run.

    `part_tokens`: rows of each part that may run without the others, such as a frame; empty: the medium runs whole.
    """

    modality: Modality
    tensors: dict[str, torch.Tensor]
    geometry: dict[str, Any]
    num_tokens: int
    shape_key: tuple[Any, ...]
    part_tokens: tuple[int, ...] = ()

    @property
    def parts(self) -> int:
        """Number of runs between which the medium can be divided."""
        return max(1, len(self.part_tokens))


@dataclass(frozen=True, slots=True)
class Feature:
    """The language model's input for one medium.

    `tensors["embeddings"]`: [num_tokens, hidden]; architectures may add more tensors of the same first dimension (`deepstack.0`, ...).
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

    - `positions`: int64 [axes, tokens] with axes 1 (plain) or 3 (multi-axis rotary), in host memory.
    - `next_position`: rotary position of the first generated token (as in `generate`: last column + 1).
    - `missing`: medium number -> [first, last+1) of its placeholder positions.
    - `atomic_ranges`: [start, end) token ranges that must be prefilled in one chunk because attention inside is bidirectional.
    - `ranges`: medium number -> its [start, length] runs.
    - `features`: medium number -> feature, as `LanguageModel.fill` brought it; `LanguageModel.rows` puts it into the rows of a chunk.
    """

    token_ids: list[int]
    positions: torch.Tensor
    next_position: int
    missing: dict[int, tuple[int, int]]
    atomic_ranges: list[tuple[int, int]]
    ranges: dict[int, list[tuple[int, int]]] = field(default_factory=dict)
    features: dict[int, Feature] = field(default_factory=dict)

    @property
    def filled_until(self) -> int:
        """Number of tokens before the first missing feature: prefill may go this far."""
        return min((start for start, _ in self.missing.values()), default=len(self.token_ids))


@dataclass(frozen=True, slots=True)
class KvLayout:
    """KV geometry of a model or a pool, with one entry per KV layer. Peers with different layouts never pair.

    `packed`: the format of rows in 8 bits; `head_dim` is then the bytes of a row, and the dtype uint8.
    """

    num_layers: int
    num_kv_heads: list[int]
    head_dim: list[int]
    dtype: str
    packed: KvDtype = "Model"

    def packed_as(self, kv_dtype: KvDtype) -> KvLayout:
        """The layout of a pool that keeps a model's KV in this type."""
        if kv_dtype == "Model":
            return self
        rows = [row_bytes(dim, kv_dtype) for dim in self.head_dim]
        return replace(self, head_dim=rows, dtype="uint8", packed=kv_dtype)

    def bytes_per_token(self) -> int:
        """Bytes of K and V of one token over all layers."""
        size = torch.empty((), dtype=getattr(torch, self.dtype)).element_size()
        return sum(2 * h * d * size for h, d in zip(self.num_kv_heads, self.head_dim, strict=True))
