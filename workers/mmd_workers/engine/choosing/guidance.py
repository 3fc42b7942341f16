"""Steers logits of sequences away from their companions' answers, as transformers' `generate` does with
`guidance_scale`."""

from __future__ import annotations

from collections.abc import Sequence as Items

import torch


def guide(logits: torch.Tensor, rows: Items[int], companions: torch.Tensor, scales: Items[float]) -> None:
    """Change `rows` of float32 logits [n, vocab] in place, by their companions' logits [rows, vocab] and scales.

    The results are not log probabilities: they do not sum to 1.
    """
    places = torch.tensor(rows, device=logits.device)
    scale = torch.tensor(scales, dtype=logits.dtype, device=logits.device)[:, None]
    away = torch.log_softmax(companions, dim=-1)
    logits[places] = scale * (torch.log_softmax(logits[places], dim=-1) - away) + away
