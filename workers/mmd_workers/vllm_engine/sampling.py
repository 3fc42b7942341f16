"""Makes vLLM choose the same tokens as the native engine.

Token i of an output depends on (seed, i), the logits and the tokens before it, on whichever pod it is
generated. vLLM draws from one generator per request, which another pod could not continue, and its penalties
would count the tokens of earlier pods as the prompt's. So vLLM sees every request as greedy and without
rules. If a request has random sampling or rules, this processor leaves only the chosen token in its logits.
vLLM itself decides what ends an answer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from vllm.sampling_params import SamplingParams as VllmParams
from vllm.v1.sample.logits_processor import BatchUpdate, LogitsProcessor
from vllm.v1.sample.logits_processor.builtin import process_dict_updates

from mmd_workers.engine.choosing.logit_rules import rule_state
from mmd_workers.engine.choosing.sampler import Draw, pick
from mmd_workers.engine.interface import SamplingParams
from mmd_workers.wire.messages.message_parts import Sampling

ARGUMENT = "mmd_draw"


@dataclass(frozen=True, slots=True)
class _Row:
    first: Draw  # draw of the first token that is generated here
    output_token_ids: list[int]  # vLLM appends to it

    def next(self) -> Draw:
        draw, outputs = self.first, self.output_token_ids
        if draw.rules is not None:
            draw.rules.follow(outputs, draw.index)
        return replace(draw, index=draw.index + len(outputs))


def _row(first: Draw, prompt: Sequence[int], output_token_ids: list[int]) -> _Row:
    """Make a row. `prompt`: vLLM's prompt, which ends with the output tokens of earlier pods."""
    prompt_length = len(prompt) - first.index
    if (rules := rule_state(first.sampling, (), prompt[:prompt_length])) is not None:
        rules.follow(prompt[prompt_length:])
    return _Row(replace(first, rules=rules), output_token_ids)


class Draws(LogitsProcessor):
    """Logits processor of vLLM for requests with `draw_of` in their arguments."""

    def __init__(self, vllm_config: Any, device: torch.device, is_pin_memory: bool) -> None:
        self._rows: dict[int, _Row] = {}

    def is_argmax_invariant(self) -> bool:
        """Return False: the processor decides the token."""
        return False

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        """Follow the rows of vLLM's batch."""

        def row(params: VllmParams, prompt: list[int] | None, output_token_ids: list[int]) -> _Row | None:
            draw = (params.extra_args or {}).get(ARGUMENT)
            return None if draw is None else _row(draw, prompt or (), output_token_ids)

        process_dict_updates(self._rows, batch_update, row)

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        """Leave only the chosen token in logits [n, vocab]. A row whose largest logit is not finite stays as it is."""
        if self._rows:
            numbers = torch.tensor(list(self._rows), device=logits.device)
            rows = logits[numbers].float()
            tokens = pick(rows, [row.next() for row in self._rows.values()])[:, None]
            chosen = torch.full_like(rows, -torch.inf).scatter_(-1, tokens.clamp(min=0), 0.0)
            logits[numbers] = torch.where(tokens < 0, rows, chosen).to(logits.dtype)
        return logits


def draw_of(wanted: Sampling, index: int) -> dict[str, Any] | None:
    """Return vLLM's `extra_args` for a request whose first token here is output token `index`.

    None: the request is greedy and has no rules.
    """
    if wanted.temperature <= 0 and wanted.rules is None:
        return None
    params = SamplingParams(
        max_tokens=wanted.max_tokens,
        temperature=wanted.temperature,
        top_p=wanted.top_p,
        top_k=wanted.top_k,
        min_p=wanted.min_p,
        seed=wanted.seed,
        rules=wanted.rules,
    )
    return {ARGUMENT: Draw(params, index)}
