"""The objects that speak for a model, each loading only what it needs. Independent of the network and the KV pool.

- `Frontend` (gateway): tokenizer, chat template, exact placeholder layout from dimensions. No weights.
- `EncoderModel` (encode role): towers and projectors.
- `LanguageModel` (prefill and decode roles): embeddings, decoder stack, output head.

What differs between architectures is in `model.adapters`, the only place that names one.
"""

from __future__ import annotations

from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from typing import Any, Protocol

import torch

from mmd_api.contract.pools import Modality
from mmd_api.spec.media import MediaPolicy
from mmd_workers.media.amount import MediaAmount
from mmd_workers.media.choice import SamplingChoice
from mmd_workers.media.medium import Decoded, MediumInfo
from mmd_workers.model.grammar import Grammars
from mmd_workers.model.prompt import (
    Feature,
    KvLayout,
    LoweredPrompt,
    MediumLayout,
    ProcessedMedium,
    PromptLayout,
    RenderedPrompt,
)
from mmd_workers.model.reasoning import Reasoning
from mmd_workers.model.tool_calls import Spelling


class Frontend(Protocol):
    """Turns chat messages and medium facts into token ids, and token ids back into text. Thread safe."""

    eos_token_ids: frozenset[int]
    vocab_size: int
    longest_token_characters: int
    max_model_len: int
    modalities: frozenset[Modality]
    takes_sound_of_videos: bool
    placeholder_ids: frozenset[int]
    grammars: Grammars

    @property
    def renders_tools(self) -> bool:
        """Whether the model's template has a place for tools."""
        ...

    @property
    def call_spelling(self) -> Spelling | None:
        """How the model writes calls of tools; None: in no form that is known."""
        ...

    @property
    def reasoning(self) -> Reasoning | None:
        """How the model reasons before it answers; None: in no form that is known."""
        ...

    def layout(
        self,
        messages: Sequence[dict[str, Any]],
        media: Sequence[MediumInfo],
        tools: Sequence[dict[str, Any]] = (),
        reasons: bool | None = None,
        choices: Sequence[SamplingChoice] = (),
    ) -> PromptLayout:
        """Lay out a conversation: `render` it and encode the text."""
        ...

    def render(
        self,
        messages: Sequence[dict[str, Any]],
        media: Sequence[MediumInfo],
        tools: Sequence[dict[str, Any]] = (),
        reasons: bool | None = None,
        choices: Sequence[SamplingChoice] = (),
    ) -> RenderedPrompt:
        """Render a conversation. Content parts are {"type": "text"|"image"|"video"|"audio", ...}; media in order of use. `reasons`: whether the
        answer begins with reasoning, where the template has a switch for it; None: as the template has it. `choices`: how each of the media is
        sampled, as far as the request chooses; empty: it chooses nothing.

        Raises:
            UnsupportedInputError: the model cannot take this modality or size; names the part and the remedy.
        """
        ...

    def amounts(self, media: Sequence[MediumInfo], choices: Sequence[SamplingChoice]) -> list[MediaAmount]:
        """How much of each of the media a prompt has with these choices. Fast: no text is laid out.

        Raises:
            UnsupportedInputError: as `render`.
        """
        ...

    def encode(self, text: str, *, special_tokens: bool = True) -> list[int]:
        """Token ids of a text in which control tokens count as such. `special_tokens`: with those that the tokenizer puts around a text."""
        ...

    def decode(
        self, token_ids: Sequence[int], *, special_tokens: bool = False, kept: AbstractSet[int] = frozenset()
    ) -> str:
        """Text of token ids; special tokens other than those that are `kept` are skipped unless `special_tokens` is true."""
        ...

    def token_strings(self, token_ids: Sequence[int]) -> list[str]:
        """How the vocabulary spells these tokens; "" for an id without one."""
        ...

    def sequences_of(self, word: str) -> list[list[int]]:
        """Sequences of token ids that are this word in a text; empty: it has no tokens."""
        ...


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
        """CPU preprocessing with the model's own processor, of a medium or one of its `frame_pooling.clips`; safe in a thread.

        Raises:
            CountMismatchError: processing arrived at other numbers than the layout.
        """
        ...

    def blank(self, info: MediumInfo, layout: MediumLayout) -> ProcessedMedium:
        """What `process` makes of a medium of these dimensions, without content: for measuring."""
        ...

    def part(self, medium: ProcessedMedium, first: int, last: int) -> ProcessedMedium:
        """The parts [first, last) of a medium, to be run without the others."""
        ...

    def encode(self, batch: Sequence[ProcessedMedium]) -> list[Feature]:
        """Run the tower and projector on media of one `shape_key`."""
        ...


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
        """Tokens and positions of a prompt (plus tokens already generated elsewhere), features missing. Nothing of it is on the device."""
        ...

    def fill(self, prompt: LoweredPrompt, medium: int, feature: Feature) -> None:
        """Keep a feature with the prompt and mark it no longer missing. Raises CountMismatchError."""
        ...

    def rows(
        self, prompt: LoweredPrompt, start: int, end: int
    ) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
        """The tokens [start, end) of a prompt on the device: embeddings [n, hidden], positions [axes, n] and extras [n, hidden], with the
        features that are here; rows of a missing one are zero."""
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
