"""What the model roles hand to each other: prompt layouts, features, lowered prompts. Knows no network and no KV pool."""

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
    """How a medium is to be sampled: which frames of a video, which sample rate of sound, and to which size an image is resized.

    Chosen once, by the frontend, from `MediumInfo`, the model's processor settings and the request; the decoder executes it, and of an image the
    processor. `size`: the processor's setting of this name; empty: its own. `nominal_indices`: of the same frames, where they would be at a constant
    rate, from which the model gets their times; empty: they are at one. `pooled_frames`: successive ones that become one frame to the model. `page`: number of the document's page, from 1; 0: not a page.
    `of_video`: a sound is that of the video before it, among whose tokens its own are.
    """

    frame_indices: list[int] = field(default_factory=list)
    sample_rate_hz: int = 0
    num_samples: int = 0  # at sample_rate_hz
    size: dict[str, int] = field(default_factory=dict)
    nominal_indices: list[int] = field(default_factory=list)
    pooled_frames: int = 1
    page: int = 0
    of_video: bool = False

    @property
    def timed_indices(self) -> list[int]:
        """The indices that stand for the times of the frames that the model gets: of several that become one, that in the middle."""
        frames = self.nominal_indices or self.frame_indices
        return frames[self.pooled_frames // 2 :: self.pooled_frames]


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
    omitted_frames: int = (
        0  # of a video, that the model does not get although the request's choice comes to them
    )
    omitted_pixels: int = 0  # of an image or of each frame, in the same way


@dataclass(frozen=True, slots=True)
class PromptLayout:
    """A prompt with every placeholder expanded, known before any medium is decoded. `replaced_media`: of which a text stands in its place;
    `degraded_by`: why the model gets less of its media than the request's choice comes to.
    """

    token_ids: list[int]
    media: list[MediumLayout]
    replaced_media: int = 0
    degraded_by: frozenset[DegradedBy] = frozenset()


@dataclass(frozen=True, slots=True)
class RenderedPrompt:
    """A prompt as text, each medium one marker of the template's. `reasoning_begins`: where the reasoning is when an answer begins; None: in a
    model that has none. `encode`: lays it out."""

    num_characters: int
    reasoning_begins: Begin | None
    encode: Callable[[], PromptLayout]


@dataclass(frozen=True, slots=True)
class ProcessedMedium:
    """Inputs of the tower for one medium, made on the CPU; media with equal `shape_key` may share a run.

    `part_tokens`: rows of each of the parts that may run without the others, such as frames; empty: it runs whole.
    """

    modality: Modality
    tensors: dict[str, torch.Tensor]
    geometry: dict[str, Any]
    num_tokens: int
    shape_key: tuple[Any, ...]
    part_tokens: tuple[int, ...] = ()

    @property
    def parts(self) -> int:
        """How many runs it can be divided between."""
        return max(1, len(self.part_tokens))


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

    positions: int64 [axes, tokens] with axes 1 (plain) or 3 (multi-axis rotary), in host memory. `next_position`: rotary position of the
    first generated token (what `generate` uses: last column + 1). `atomic_ranges`: [start, end) token ranges that must be
    prefilled in one chunk because attention inside is bidirectional. `features`: those that `LanguageModel.fill` brought, as they came;
    `LanguageModel.rows` puts them into the rows of a chunk.
    """

    token_ids: list[int]
    positions: torch.Tensor
    next_position: int
    missing: dict[int, tuple[int, int]]  # medium number -> [first, last+1) of its placeholder positions
    atomic_ranges: list[tuple[int, int]]
    ranges: dict[int, list[tuple[int, int]]] = field(
        default_factory=dict
    )  # medium number -> its [start, length] runs
    features: dict[int, Feature] = field(default_factory=dict)  # by medium number

    @property
    def filled_until(self) -> int:
        """Tokens before the first missing feature: prefill may go this far."""
        return min((start for start, _ in self.missing.values()), default=len(self.token_ids))


@dataclass(frozen=True, slots=True)
class KvLayout:
    """Geometry of the KV of a model, or of a pool. Peers whose layouts differ never pair. One entry per KV layer.

    `packed`: the format of rows in 8 bits; `head_dim` is then the bytes of a row, and the dtype uint8.
    """

    num_layers: int
    num_kv_heads: list[int]
    head_dim: list[int]
    dtype: str
    packed: KvDtype = "Model"

    def packed_as(self, kv_dtype: KvDtype) -> KvLayout:
        """That of a pool which keeps a model's KV in this type."""
        if kv_dtype == "Model":
            return self
        rows = [row_bytes(dim, kv_dtype) for dim in self.head_dim]
        return replace(self, head_dim=rows, dtype="uint8", packed=kv_dtype)

    def bytes_per_token(self) -> int:
        """Bytes of K and V of one token over all layers."""
        size = torch.empty((), dtype=getattr(torch, self.dtype)).element_size()
        return sum(2 * h * d * size for h, d in zip(self.num_kv_heads, self.head_dim, strict=True))
