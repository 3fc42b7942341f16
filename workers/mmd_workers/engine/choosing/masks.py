"""Masks of the tokens that a batch's grammars allow next, and their application to logits."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
from llguidance import LLExecutor

from mmd_workers.engine.cpu.library import kernels
from mmd_workers.model.grammar import Constraint, mask_bytes

FEWEST_IN_PARALLEL = 32  # a mask takes 20 to 100 µs, and threads that wait for a core delay the step


@dataclass(frozen=True, slots=True)
class Masks:
    """Masks of some rows of a batch. `bits` [rows, bytes] on the CPU: bit i, from the lowest of a row's first
    byte, allows token i."""

    rows: list[int]
    bits: torch.Tensor

    @classmethod
    def of(cls, constraints: dict[int, Constraint], device: torch.device) -> Masks:
        """Compute the masks of rows with a constraint, for logits on a device. `constraints`: by row.

        Call this while the device computes the logits. On an accelerator the model runs meanwhile. On a CPU
        the model has all cores, and a thread beside it would cost more than the masks. A constraint that
        fails reports it when it advances.
        """
        matchers = [constraint.matcher for constraint in constraints.values()]
        width = next(iter(constraints.values())).mask_bytes
        bits = torch.zeros(len(matchers), width, dtype=torch.uint8, pin_memory=device.type == "cuda")
        if len(matchers) < FEWEST_IN_PARALLEL:
            for number, matcher in enumerate(matchers):
                matcher.unsafe_compute_mask_ptr(bits[number].data_ptr(), width)
        else:
            numbered = [(matcher, number) for number, matcher in enumerate(matchers)]
            _executor().unsafe_compute_mask_ptr(numbered, bits.data_ptr(), width, len(matchers))
        return cls([*constraints], bits)

    @classmethod
    def of_all(cls, rows: int, vocab: int) -> Masks:
        """Return masks for every row that allow every token: the case that takes the most memory."""
        return cls([*range(rows)], torch.full((rows, mask_bytes(vocab)), 255, dtype=torch.uint8))

    def apply(self, logits: torch.Tensor) -> None:
        """Overwrite the logits [batch, vocab] of tokens that are not allowed."""
        device, vocab = logits.device, logits.shape[-1]
        if logits.is_contiguous() and (library := kernels(device, logits.dtype)) is not None:
            library.mask(logits, self.rows, self.bits)
            return
        bits = self.bits.to(device, non_blocking=True)
        shifts = torch.arange(8, dtype=torch.uint8, device=device)
        allowed = ((bits[:, :, None] >> shifts) & 1).flatten(1)[:, :vocab]
        if self.rows == [*range(len(logits))]:
            logits.masked_fill_(allowed == 0, -torch.inf)
            return
        rows = torch.tensor(self.rows, device=device)
        logits[rows] = logits[rows].masked_fill_(allowed == 0, -torch.inf)


@functools.cache
def _executor() -> LLExecutor:
    return LLExecutor(max(1, torch.get_num_threads()))
