"""Grammars of answers, beside vLLM's own: vLLM would not know the output tokens that a continued request brings, which are a part of its
prompt. The core follows a grammar, computes the masks of each step while the model runs, and hands them to whatever process samples: none
but the pod's own compiles a grammar or follows one.
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
    """What the grammars of a step's requests allow next. The rows of `masks` are numbered as `names`."""

    names: list[str]
    masks: Masks

    @classmethod
    def of(cls, constraints: Mapping[str, Constraint], device: torch.device) -> StepMasks:
        """Those of these requests, at least one. `device`: as of `Masks.of`."""
        return cls([*constraints], Masks.of(dict(enumerate(constraints.values())), device))

    def in_rows(self, rows: Mapping[str, int]) -> Masks:
        """For a batch that has each request in one of its `rows`."""
        return Masks([rows[name] for name in self.names], self.masks.bits)


class Constraints(LogitsProcessor):
    """vLLM's logits processor that applies the masks of a step."""

    def __init__(self, vllm_config: Any, device: torch.device, is_pin_memory: bool) -> None:
        self.masks: Masks | None = None  # of the step that samples now
        kernels(device, torch.float32)  # where they have to be built, not in a step

    def is_argmax_invariant(self) -> bool:
        """It excludes tokens."""
        return False

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        """Nothing: masks come with their rows."""

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        """Leave what the grammars allow [n, vocab]."""
        if self.masks is not None:
            self.masks.apply(logits)
        return logits


def mask_next(batch: Any, wanted: StepMasks | None) -> None:
    """Have the `Constraints` of vLLM's batch apply these masks, and no others, where it samples next."""
    for processor in batch.logitsprocs.non_argmax_invariant:
        if isinstance(processor, Constraints):
            processor.masks = wanted.in_rows(batch.req_id_to_index) if wanted is not None else None


def grammars_of(folder: Path) -> Grammars:
    """The grammars of the model in a folder."""
    config = source.load_config(folder)
    vocab_size = int(config.get_text_config().vocab_size)
    return Grammars(
        functools.partial(load_tokenizer, folder), vocab_size, source.eos_token_ids(folder, config)
    )
