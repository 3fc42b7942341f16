"""The interfaces of a model's parts, each of which loads only what it needs. Independent of the network and the KV pool.

- `Frontend` (gateway): tokenizer, chat template, exact placeholder layout from dimensions. No weights.
- `EncoderModel` (encode role): towers and projectors.
- `LanguageModel` (prefill and decode roles): embeddings, decoder stack, output head.

The differences between architectures are in `model.adapters`, the only place that names one.
"""

from __future__ import annotations

from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from typing import Any, Protocol

import torch

from mmd_api.contract.pools import Modality
from mmd_api.spec.media import MediaPolicy
from mmd_workers.media.choice import SamplingChoice
from mmd_workers.media.medium import Decoded, MediumInfo
from mmd_workers.media.reduction import MediaAmount
from mmd_workers.model.call_forms import Spelling
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


class Frontend(Protocol):
    """Turns chat messages and medium facts into token ids, and token ids back into text. Thread safe.

    `sampling_defaults`: the sampling that the checkpoint recommends, by the names of the API's parameters.
    """

    eos_token_ids: frozenset[int]
    sampling_defaults: dict[str, float]
    vocab_size: int
    longest_token_characters: int
    max_model_len: int
    modalities: frozenset[Modality]
    takes_sound_of_videos: bool
    placeholder_ids: frozenset[int]
    bidirectional_prompt: bool
    grammars: Grammars

    @property
    def renders_tools(self) -> bool:
        """Whether the model's template has a place for tools."""
        ...

    @property
    def call_spelling(self) -> Spelling | None:
        """How the model writes calls of tools; None: in no known form."""
        ...

    @property
    def reasoning(self) -> Reasoning | None:
        """How the model reasons before it answers; None: in no known form."""
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
        *,
        continues: bool = False,
    ) -> RenderedPrompt:
        """Render a conversation. Content parts are {"type": "text"|"image"|"video"|"audio", ...}; media in order of use.

        `reasons`: whether the answer begins with reasoning, if the template has a switch for it; None: the template's default.
        `choices`: how each medium is sampled, as far as the request chooses; empty: it chooses nothing. `continues`: the answer continues the
        last message, which has text and no calls of tools.

        Raises:
            UnsupportedInputError: the model cannot take this modality or size; the message names the part and the remedy.
        """
        ...

    def amounts(self, media: Sequence[MediumInfo], choices: Sequence[SamplingChoice]) -> list[MediaAmount]:
        """The amount of each medium in a prompt with these choices. Fast: no text is laid out.

        Raises:
            UnsupportedInputError: as for `render`.
        """
        ...

    def encode(self, text: str, *, special_tokens: bool = True) -> list[int]:
        """Encode a text in which control tokens count as such. `special_tokens`: add those that the tokenizer puts around a text."""
        ...

    def decode(
        self, token_ids: Sequence[int], *, special_tokens: bool = False, kept: AbstractSet[int] = frozenset()
    ) -> str:
        """Decode token ids to text. Special tokens are skipped, unless they are `kept` or `special_tokens` is true."""
        ...

    def token_strings(self, token_ids: Sequence[int]) -> list[str]:
        """How the vocabulary spells these tokens; "" for an id without a token."""
        ...

    def sequences_of(self, word: str) -> list[list[int]]:
        """Sequences of token ids for this word in a text; empty if it has no tokens."""
        ...


class EncoderModel(Protocol):
    """Towers and projectors of a model, and nothing else of it."""

    loaded_bytes: int
    modalities: frozenset[Modality]
    device: torch.device

    def frontend(self, policy: MediaPolicy | None = None) -> Frontend:
        """A frontend that lays out media with this model's own processor, within a policy's limits (None: the default policy)."""
        ...

    def feature_headers(self, modality: Modality, num_tokens: int) -> dict[str, tuple[str, list[int]]]:
        """Name -> (dtype, shape) of the tensors that `encode` will return for a medium of this many tokens."""
        ...

    def process(self, medium: Decoded, layout: MediumLayout) -> ProcessedMedium:
        """Preprocess a medium, or one of its `frame_pooling.clips`, on the CPU with the model's own processor; safe in a thread.

        Raises:
            CountMismatchError: processing arrived at other numbers than the layout.
        """
        ...

    def blank(self, info: MediumInfo, layout: MediumLayout) -> ProcessedMedium:
        """The result of `process` for a medium of these dimensions without content, for measuring."""
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
    bidirectional_prompt: bool  # all tokens of a prompt see one another
    eos_token_ids: frozenset[int]
    suppress_token_ids: tuple[int, ...]  # placeholders, never to be sampled
    device: torch.device
    dtype: torch.dtype

    def lower(
        self, token_ids: Sequence[int], media: Sequence[MediumLayout], output_token_ids: Sequence[int] = ()
    ) -> LoweredPrompt:
        """Lower a prompt, with tokens already generated elsewhere, to tokens and positions; its features are missing.

        Nothing of it is on the device.
        """
        ...

    def fill(self, prompt: LoweredPrompt, medium: int, feature: Feature) -> None:
        """Keep a feature with the prompt, where it is no longer missing. Raises CountMismatchError."""
        ...

    def rows(
        self, prompt: LoweredPrompt, start: int, end: int
    ) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
        """The tokens [start, end) of a prompt on the device: embeddings [n, hidden], positions [axes, n] and extras [n, hidden].

        The available features are in place; rows of missing ones are zero.
        """
        ...

    def feature_bytes(self, modality: str, num_tokens: int) -> int:
        """Bytes of all tensors of a feature with this many tokens, to reserve room before it is made."""
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
        """float32 logits [n, vocab] of hidden states [n, hidden], soft-capped if the model does so."""
        ...
