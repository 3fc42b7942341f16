"""Draws that both engines make alike: that of output token i depends on (seed, i) and the logits alone, on whichever pod it is made.

vLLM draws from one generator a request, which another pod could not go on with. So to vLLM every request is greedy, and this processor
leaves a request that wants a draw only the token that was drawn.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from vllm.sampling_params import SamplingParams as VllmParams
from vllm.v1.sample.logits_processor import BatchUpdate, LogitsProcessor
from vllm.v1.sample.logits_processor.builtin import process_dict_updates

from mmd_workers.engine.interface import SamplingParams
from mmd_workers.engine.sampler import Draw, choose
from mmd_workers.wire.messages import Sampling

ARGUMENT = "mmd_draw"


@dataclass(frozen=True, slots=True)
class _Row:
    first: Draw  # of the first token that is made here
    output_token_ids: list[int]  # vLLM appends to it

    def next(self) -> Draw:
        return replace(self.first, index=self.first.index + len(self.output_token_ids))


class Draws(LogitsProcessor):
    """vLLM's logits processor for requests with `draw_of` in their arguments."""

    def __init__(self, vllm_config: Any, device: torch.device, is_pin_memory: bool) -> None:
        self._rows: dict[int, _Row] = {}

    def is_argmax_invariant(self) -> bool:
        """It decides the token."""
        return False

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        """Follow the rows of vLLM's batch."""

        def row(params: VllmParams, _: list[int] | None, output_token_ids: list[int]) -> _Row | None:
            draw = (params.extra_args or {}).get(ARGUMENT)
            return None if draw is None else _Row(draw, output_token_ids)

        process_dict_updates(self._rows, batch_update, row)

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        """Leave the drawn token [n, vocab]; a row whose logits are not finite stays as it is."""
        if self._rows:
            numbers = torch.tensor(list(self._rows), device=logits.device)
            rows = logits[numbers]
            finite = torch.isfinite(rows.max(dim=-1, keepdim=True).values)
            draws = [row.next() for row in self._rows.values()]
            tokens = choose(rows.float().masked_fill(~finite, 0.0), draws)
            drawn = torch.full_like(rows, -torch.inf).scatter_(-1, tokens[:, None], 0.0)
            logits[numbers] = torch.where(finite, drawn, rows)
        return logits


def draw_of(wanted: Sampling, index: int) -> dict[str, Any] | None:
    """vLLM's `extra_args` of a request whose first token here is output token `index`; None where it is greedy."""
    if wanted.temperature <= 0:
        return None
    params = SamplingParams(wanted.max_tokens, wanted.temperature, wanted.top_p, wanted.top_k, wanted.seed)
    return {ARGUMENT: Draw(params, index)}
