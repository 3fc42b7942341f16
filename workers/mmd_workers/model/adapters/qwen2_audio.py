"""Qwen2-Audio: without `get_audio_features`, tower and projector are called one after the other."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from mmd_api.contract.pools import Modality
from mmd_workers.model.adapters.base import Adapter
from mmd_workers.model.runs import Along, TowerRun


class Qwen2AudioAdapter(Adapter):
    """The tower pads every sound to its full window; rows beyond the sound's own length are dropped."""

    def tower_run(self, modality: Modality) -> TowerRun:
        """Sounds of any length share a run, each in its window."""
        del modality
        return Along({})

    def features(self, model: Any, modality: Modality, batch: Mapping[str, torch.Tensor]) -> Any:
        """Rows of each sound, as `Qwen2AudioModel.forward` selects them."""
        del modality
        base, mask = model.base_model, batch["feature_attention_mask"]
        mel_lengths, row_lengths = base.audio_tower._get_feat_extract_output_lengths(mask.sum(-1))
        frames = (batch["input_features"].shape[-1] - 2) // 2 + 1
        padding = torch.arange(frames, device=mask.device)[None] >= mel_lengths[:, None]
        scores = torch.zeros(len(mel_lengths), 1, frames, frames, dtype=base.audio_tower.conv1.weight.dtype)
        scores = scores.to(mask.device).masked_fill(padding[:, None, None], float("-inf"))
        rows = base.multi_modal_projector(
            base.audio_tower(batch["input_features"], attention_mask=scores).last_hidden_state
        )
        return [sound[:length] for sound, length in zip(rows, row_lengths.tolist(), strict=True)]
