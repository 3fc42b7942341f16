"""The language model of a checkpoint: embeddings, decoder stack, output head. Independent of the KV pool: the engine has the attention."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from mmd_api.contract.errors import CountMismatchError, UnsupportedModelError
from mmd_api.spec.model import ModelSpec
from mmd_workers.model import requirements, source
from mmd_workers.model.adapters import adapter_for
from mmd_workers.model.adapters.base import EMBEDDINGS, TOKEN_TYPES, Adapter, rope_index
from mmd_workers.model.prompt import Feature, KvLayout, LoweredPrompt, MediumLayout
from mmd_workers.model.roles import load_role

SERVED_LAYERS = {"full_attention", "sliding_attention"}


class HfLanguageModel:
    """Lowers prompts and runs the decoder on ragged batches. `lower` and `fill` may run concurrently with `forward`."""

    def __init__(
        self,
        model: Any,
        adapter: Adapter,
        device: torch.device,
        dtype: torch.dtype,
        loaded_bytes: int,
        eos_token_ids: frozenset[int],
    ) -> None:
        text = adapter.config.get_text_config()
        self.model = model
        self.decoder: torch.nn.Module = model.get_decoder()
        self.device, self.dtype, self.loaded_bytes = device, dtype, loaded_bytes
        self.eos_token_ids = eos_token_ids
        self.hidden_size = int(text.hidden_size)
        self.max_model_len = int(text.max_position_embeddings)
        self.kv_layout = _kv_layout(self.decoder, text, dtype)
        self.position_axes = 1 if rope_index(model) is None else 3
        self.bidirectional_prompt = adapter.bidirectional == "prompt"
        self._adapter = adapter
        self._head = model.get_output_embeddings()
        self._table = self.decoder.get_input_embeddings()
        self._extra_names = adapter.extra_names()
        names = ("final_logit_softcapping", "logit_scale", "logits_scaling")
        scalings = {name: getattr(text, name, None) for name in names if requirements.uses(model, name)}
        self._softcap = scalings.get("final_logit_softcapping")
        self._scale = scalings.get("logit_scale") or 1 / (scalings.get("logits_scaling") or 1)
        self.vocab_size = int(self._head.weight.shape[0])
        self.suppress_token_ids = adapter.placeholder_ids(self.vocab_size)

    def lower(
        self, token_ids: Sequence[int], media: Sequence[MediumLayout], output_token_ids: Sequence[int] = ()
    ) -> LoweredPrompt:
        """Lower a prompt, with tokens already generated elsewhere, to tokens and positions; its features are missing.

        Nothing of it is on the device. Positions of `output_token_ids` continue as in `generate`: one more each, from the last column's
        largest axis.
        """
        prompt = torch.tensor(token_ids, dtype=torch.long)
        types = np.zeros(len(prompt), dtype=np.int32)
        for medium in media:
            for start, length in medium.ranges:
                types[start : start + length] = TOKEN_TYPES[medium.modality]
        in_order = sorted(media, key=lambda m: m.ranges[0])
        positions = self._adapter.positions(self.model, prompt, in_order, torch.from_numpy(types))
        following = int(positions[:, -1].max()) + 1
        outputs = torch.tensor(list(output_token_ids), dtype=torch.long)
        if len(outputs):
            more = torch.arange(following, following + len(outputs)).expand(positions.shape[0], -1)
            positions = torch.cat([positions, more], dim=1)
            following += len(outputs)
        return LoweredPrompt(
            token_ids=[*token_ids, *output_token_ids],
            positions=positions.cpu(),
            next_position=following,
            missing={n: (m.ranges[0][0], sum(m.ranges[-1])) for n, m in enumerate(media)},
            atomic_ranges=self._adapter.atomic_ranges(len(prompt), in_order),
            ranges={n: list(m.ranges) for n, m in enumerate(media)},
        )

    def fill(self, prompt: LoweredPrompt, medium: int, feature: Feature) -> None:
        """Keep a feature with the prompt, where it is no longer missing.

        Raises:
            CountMismatchError: the feature has other rows or tensors than the placeholders need; nothing is changed.
        """
        ranges = prompt.ranges[medium]
        tokens = sum(length for _, length in ranges)
        expected = (tokens, self.hidden_size)
        wrong = [name for name, t in feature.tensors.items() if tuple(t.shape) != expected]
        wrong += [name for name in feature.tensors if name not in (EMBEDDINGS, *self._extra_names)]
        if EMBEDDINGS not in feature.tensors or wrong:
            shapes = {name: list(t.shape) for name, t in feature.tensors.items()}
            raise CountMismatchError(
                f"medium {medium} has {tokens} placeholders of width {self.hidden_size}, its feature {shapes}; "
                "encoder and language model serve different models or settings"
            )
        prompt.features[medium] = feature
        prompt.missing.pop(medium, None)

    def rows(
        self, prompt: LoweredPrompt, start: int, end: int
    ) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
        """The tokens [start, end) of a prompt on the device: embeddings [n, hidden], positions [axes, n] and extras [n, hidden].

        The available features are in place; rows of missing ones are zero.
        """
        ids = torch.tensor(prompt.token_ids[start:end], dtype=torch.long)
        pieces = [
            piece for medium, runs in prompt.ranges.items() for piece in _pieces(medium, runs, start, end)
        ]
        for piece in pieces:
            ids[piece.target] = 0  # the table may have no rows for placeholders
        embeds, extras = self.embed(ids.to(self.device))
        for piece in pieces:
            if (feature := prompt.features.get(piece.medium)) is None:
                embeds[piece.target] = 0
                continue
            for name, tensor in feature.tensors.items():
                target = embeds if name == EMBEDDINGS else extras[name]
                target[piece.target] = tensor[piece.source].to(self.device, self.dtype)
        return embeds, prompt.positions[:, start:end].to(self.device, non_blocking=True), extras

    def embed(self, token_ids: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Embeddings [n, hidden] and extras of generated tokens [n]."""
        with torch.no_grad():
            embeds = self._table(token_ids)
        embeds = embeds.clone()
        return embeds, {name: torch.zeros_like(embeds) for name in self._extra_names}

    def feature_bytes(self, modality: str, num_tokens: int) -> int:
        """Bytes of all tensors of a feature with this many tokens, to reserve room before it is made."""
        levels = 1 + (len(self._extra_names) if modality != "audio" else 0)
        return num_tokens * self.hidden_size * self.dtype.itemsize * levels

    def forward(
        self, embeds: torch.Tensor, positions: torch.Tensor, extras: dict[str, torch.Tensor]
    ) -> torch.Tensor:
        """Final hidden states [tokens, hidden] of a ragged batch: embeds [tokens, hidden], positions [axes, tokens]."""
        with torch.no_grad():
            output = self.decoder(
                inputs_embeds=embeds.unsqueeze(0),
                position_ids=positions if self.position_axes == 1 else positions.unsqueeze(1),
                use_cache=False,
                **self.decoder_extras(extras),
            )
        return output.last_hidden_state[0]  # type: ignore[no-any-return]

    def decoder_extras(self, extras: dict[str, torch.Tensor]) -> dict[str, Any]:
        """Extras [tokens, hidden] as keyword arguments of the decoder.

        Deepstack rows are added at every token: text has zeros there, so no mask is needed.
        """
        if not self._extra_names:
            return {}
        levels = [extras[name] for name in self._extra_names]
        everywhere = torch.ones(1, levels[0].shape[0], dtype=torch.bool, device=levels[0].device)
        return {"visual_pos_masks": everywhere, "deepstack_visual_embeds": levels}

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """float32 logits [n, vocab] of hidden states [n, hidden], scaled and soft-capped if the model does so."""
        with torch.no_grad():
            scores = self._head(hidden)
            if self._scale != 1:
                scores = scores * self._scale
            if self._softcap:
                scores = torch.tanh(scores / self._softcap) * self._softcap
        return scores.float()  # type: ignore[no-any-return]


@dataclass(frozen=True, slots=True)
class _Piece:
    """Rows `source` of a medium's feature, placed at rows `target` of a chunk."""

    medium: int
    source: slice
    target: slice


def _pieces(medium: int, runs: Sequence[tuple[int, int]], start: int, end: int) -> Iterator[_Piece]:
    """The pieces of a medium with these [start, length] runs among the tokens [start, end)."""
    before = 0
    for first, length in runs:
        begin, stop = max(start, first), min(end, first + length)
        if begin < stop:
            source = slice(before + begin - first, before + stop - first)
            yield _Piece(medium, source, slice(begin - start, stop - start))
        before += length


def _kv_layout(decoder: torch.nn.Module, text: Any, dtype: torch.dtype) -> KvLayout:
    """Heads and dims of every layer with its own KV; layers that read another layer's KV are not counted.

    Raises:
        UnsupportedModelError: the decoder has other state than attention KV.
    """
    kinds = set(getattr(text, "layer_types", None) or [])
    if kinds - SERVED_LAYERS:
        raise UnsupportedModelError(
            f"spec.model.id: {text.model_type} has layers of type {', '.join(sorted(kinds - SERVED_LAYERS))}, whose state is not "
            "block-paged KV; choose a model of full and sliding attention layers"
        )
    owners, layers = {}, set()
    for module in decoder.modules():
        index = getattr(module, "layer_idx", None)
        if index is None or not hasattr(module, "head_dim"):
            continue
        layers.add(int(index))
        if not getattr(module, "is_kv_shared_layer", False):
            owners[int(index)] = module
    if not owners:
        raise UnsupportedModelError(
            f"spec.model.id: {text.model_type} has no attention layers that transformers allows to replace; choose another model"
        )
    if len(layers) != text.num_hidden_layers:
        raise UnsupportedModelError(
            f"spec.model.id: {len(layers)} of the {text.num_hidden_layers} layers of {text.model_type} have attention, and the state of "
            "the others is not block-paged KV; choose a model of full and sliding attention layers"
        )
    heads, dims = [], []
    for index in sorted(owners):
        module = owners[index]
        dims.append(int(module.head_dim))  # type: ignore[arg-type]
        projection = getattr(module, "k_proj", None)
        heads.append(
            projection.out_features // dims[-1] if projection is not None else int(text.num_key_value_heads)
        )
    return KvLayout(len(owners), heads, dims, str(dtype).removeprefix("torch."))


def load_language_model(model: ModelSpec, device: torch.device) -> HfLanguageModel:
    """Load the language model of a checkpoint, without its towers.

    Raises:
        UnsupportedModelError: the model is missing, lacks weights or cannot be served; the message names the field and the remedy.
    """
    folder = source.resolve(model, weights=True)
    config = source.load_config(folder)
    adapter = adapter_for(config)
    dtype = source.resolve_dtype(model, config)
    loaded, loaded_bytes = load_role(folder, config, "language", dtype, device)
    if not getattr(loaded.get_decoder(), "_supports_attention_backend", False):
        raise UnsupportedModelError(
            f"spec.model.id: {config.model_type} does not allow replacing its attention; choose another architecture"
        )
    requirements.check(loaded, adapter)
    eos = source.eos_token_ids(folder, config)
    return HfLanguageModel(loaded, adapter, device, dtype, loaded_bytes, eos)
