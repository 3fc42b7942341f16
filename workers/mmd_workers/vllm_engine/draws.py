"""Draws by the native sampler inside vLLM's: a token depends on (seed, index) and its logits alone, wherever and with whom it runs.

vLLM's own draws depend on how often a request has been drawn for on this pod. So a sequence that goes on elsewhere would go on
differently, and a chunk of a prompt costs a draw, which vLLM takes back in a way that its build for CPUs does not have.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import vllm
from vllm.v1.sample.logits_processor import BatchUpdate, LogitsProcessor
from vllm.v1.sample.logits_processor.builtin import process_dict_updates

from mmd_workers.engine.interface import SamplingParams
from mmd_workers.engine.sampler import Draw, sample

if TYPE_CHECKING:
    from vllm.config import VllmConfig

DRAW = (
    "mmd_draw"  # a request's extra argument: its sampling, and the index of the first token that is made here
)
DrawnRow = tuple[
    SamplingParams, int, list[int]
]  # with the tokens that have been made since, which vLLM appends to


class NativeDraws(LogitsProcessor):
    """Chooses the tokens of requests with `DRAW`: it leaves one logit of a row, so that vLLM takes the token greedily."""

    def __init__(self, vllm_config: VllmConfig, device: torch.device, is_pin_memory: bool) -> None:
        self._rows: dict[int, DrawnRow] = {}

    def is_argmax_invariant(self) -> bool:
        """It is not: it moves the maximum."""
        return False

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        """Follow the batch."""
        process_dict_updates(self._rows, batch_update, _row)

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        """Draw. Rows without a finite logit stay as they are."""
        if not self._rows:
            return logits
        rows = sorted(self._rows)
        draws = [Draw(params, first + len(made)) for params, first, made in map(self._rows.__getitem__, rows)]
        drawn = sample(logits[rows], draws)
        chosen = [(row, one.token_id) for row, one in zip(rows, drawn, strict=True) if one is not None]
        if chosen:
            at, tokens = torch.tensor(chosen, device=logits.device).unbind(1)
            logits[at] = -torch.inf
            logits[at, tokens] = 0.0
        return logits


def _row(params: vllm.SamplingParams, prompt: list[int] | None, output: list[int]) -> DrawnRow | None:
    wanted = (params.extra_args or {}).get(DRAW)
    return (*wanted, output) if wanted is not None else None
