"""Applies grammars to answers, instead of vLLM's own support.

A continued request brings output tokens as part of its prompt, where vLLM would not know them. The core
advances a grammar, computes the masks of each step while the model runs, and passes them to the process that
samples. Only the pod's own process compiles grammars and advances them.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from vllm.v1.sample.logits_processor import BatchUpdate, LogitsProcessor

from mmd_workers.engine.choosing.masks import Masks
from mmd_workers.engine.cpu.library import kernels
from mmd_workers.model import source
from mmd_workers.model.grammar import Constraint, Grammars, load_tokenizer


@dataclass(frozen=True, slots=True)
class StepMasks:
    """Tokens that the grammars of a step's requests allow next. The rows of `masks` are in the order of `names`."""

    names: list[str]
    masks: Masks

    @classmethod
    def of(cls, constraints: Mapping[str, Constraint], device: torch.device) -> StepMasks:
        """Compute the masks of these requests, at least one. `device`: see `Masks.of`."""
        return cls([*constraints], Masks.of(dict(enumerate(constraints.values())), device))

    def in_rows(self, rows: Mapping[str, int]) -> Masks:
        """Return the masks for a batch in which `rows` gives each request's row."""
        return Masks([rows[name] for name in self.names], self.masks.bits)


class Constraints(LogitsProcessor):
    """Logits processor of vLLM that applies the masks of a step."""

    def __init__(self, vllm_config: Any, device: torch.device, is_pin_memory: bool) -> None:
        self.masks: Masks | None = None  # masks of the step that samples now
        kernels(device, torch.float32)  # build the kernels now, and not in a step

    def is_argmax_invariant(self) -> bool:
        """Return False: the processor excludes tokens."""
        return False

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        """Do nothing: masks come with their rows."""

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        """Mask logits [n, vocab] of tokens that the grammars do not allow."""
        if self.masks is not None:
            self.masks.apply(logits)
        return logits


def mask_next(batch: Any, wanted: StepMasks | None) -> None:
    """Make the `Constraints` of vLLM's batch apply these masks, and no others, when it samples next."""
    for processor in batch.logitsprocs.non_argmax_invariant:
        if isinstance(processor, Constraints):
            processor.masks = wanted.in_rows(batch.req_id_to_index) if wanted is not None else None


def grammars_of(folder: Path) -> Grammars:
    """Return the grammars of the model in a folder."""
    config = source.load_config(folder)
    vocab_size = int(config.get_text_config().vocab_size)
    return Grammars(
        functools.partial(load_tokenizer, folder), vocab_size, source.eos_token_ids(folder, config)
    )
