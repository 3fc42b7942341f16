"""Logits of sequences that are guided away from what their companions would answer. As transformers' `generate` has it with `guidance_scale`."""

from __future__ import annotations

from collections.abc import Sequence as Items

import torch


def guide(logits: torch.Tensor, rows: Items[int], companions: torch.Tensor, scales: Items[float]) -> None:
    """Change float32 logits [n, vocab] in place: each of these rows by its companion's logits, a row of [rows, vocab], and its scale. What they
    become are no log probabilities: their sum is another one.
    """
    places = torch.tensor(rows, device=logits.device)
    scale = torch.tensor(scales, dtype=logits.dtype, device=logits.device)[:, None]
    away = torch.log_softmax(companions, dim=-1)
    logits[places] = scale * (torch.log_softmax(logits[places], dim=-1) - away) + away
