"""What the three model roles hand to each other: prompt layouts, features, lowered prompts. Independent of the network and the KV pool.

Four objects speak for a model, each loading only what it needs:
- `Frontend` (gateway): tokenizer, chat template, exact placeholder layout from dimensions. No weights.
- `EncoderModel` (encode role): towers and projectors.
- `LanguageModel` (prefill and decode roles): embeddings, decoder stack, output head.
- `Adapter`: what differs between architectures; the only place that names one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from mmd_api.contract.pools import Modality
from mmd_api.spec.media import MediaPolicy
from mmd_workers.media.types import Decoded, MediumInfo


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
    """Where one medium stands in the prompt. Lengths of `ranges` ([start, length]) add up to `num_tokens`."""

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


class Frontend(Protocol):
    """Turns chat messages and medium facts into token ids, and token ids back into text. Thread safe."""

    eos_token_ids: frozenset[int]
    vocab_size: int
    longest_token_characters: int
    max_model_len: int
    modalities: frozenset[Modality]

    def layout(self, messages: Sequence[dict[str, Any]], media: Sequence[MediumInfo]) -> PromptLayout:
        """Lay out a conversation. Content parts are {"type": "text"|"image"|"video"|"audio", ...}; media in order of use.

        Raises:
            UnsupportedInputError: the model cannot take this modality or size; names the part and the remedy.
        """
        ...

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of token ids, special tokens skipped."""
        ...


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


class EncoderModel(Protocol):
    """Towers and projectors of a model, and nothing else of it."""

    loaded_bytes: int
    modalities: frozenset[Modality]
    device: torch.device

    def frontend(self, policy: MediaPolicy | None = None) -> Frontend:
        """Lays media out by this model's own processor, within the limits of a policy; default: those that it has by default."""
        ...

    def feature_headers(self, modality: Modality, num_tokens: int) -> dict[str, tuple[str, list[int]]]:
        """Name -> (dtype, shape) of the tensors that `encode` will return for a medium of this many tokens."""
        ...

    def process(self, medium: Decoded, layout: MediumLayout) -> ProcessedMedium:
        """CPU preprocessing with the model's own processor; safe in a thread.

        Raises:
            CountMismatchError: processing arrived at other numbers than the layout.
        """
        ...

    def blank(self, info: MediumInfo, layout: MediumLayout) -> ProcessedMedium:
        """What `process` makes of a medium of these dimensions, without content: for measuring."""
        ...

    def encode(self, batch: Sequence[ProcessedMedium]) -> list[Feature]:
        """Run the tower and projector on media of one `shape_key`."""
        ...


@dataclass(slots=True)
class LoweredPrompt:
    """A prompt in the language model's own terms. Features may still be missing: see `filled_until`.

    positions: int64 [axes, tokens] with axes 1 (plain) or 3 (multi-axis rotary). `next_position`: rotary position of the
    first generated token (what `generate` uses: last column + 1). `embeds`: [tokens, hidden], placeholder rows zero until
    `LanguageModel.fill` scatters a feature. `extras`: per-token tensors an architecture needs besides the embeddings
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


class LanguageModel(Protocol):
    """Embeddings, decoder stack and output head of a model, and nothing else of it.

    The attention of `decoder` is replaced by the engine (AttentionInterface); this object knows no KV pool.
    """

    decoder: torch.nn.Module
    kv_layout: KvLayout
    loaded_bytes: int
    hidden_size: int
    vocab_size: int
    max_model_len: int
    position_axes: int  # 1 or 3
    eos_token_ids: frozenset[int]
    suppress_token_ids: tuple[int, ...]  # placeholders: never to be sampled
    device: torch.device
    dtype: torch.dtype

    def lower(
        self, token_ids: Sequence[int], media: Sequence[MediumLayout], output_token_ids: Sequence[int] = ()
    ) -> LoweredPrompt:
        """Token embeddings, positions and extras of a prompt (plus tokens already generated elsewhere), features missing."""
        ...

    def fill(self, prompt: LoweredPrompt, medium: int, feature: Feature) -> None:
        """Scatter a feature into the prompt's rows and mark it no longer missing. Raises CountMismatchError."""
        ...

    def feature_bytes(self, modality: str, num_tokens: int) -> int:
        """Bytes of all tensors of a feature of this many tokens, for reserving room before it is made."""
        ...

    def embed(self, token_ids: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Embeddings [n, hidden] and extras of generated tokens [n]."""
        ...

    def forward(
        self, embeds: torch.Tensor, positions: torch.Tensor, extras: dict[str, torch.Tensor]
    ) -> torch.Tensor:
        """Final hidden states [tokens, hidden] of a ragged batch: embeds [tokens, hidden], positions [axes, tokens]."""
        ...

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """float32 logits [n, vocab] of hidden states [n, hidden], soft-capped where the model does."""
        ...
