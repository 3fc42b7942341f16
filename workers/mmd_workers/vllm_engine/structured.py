"""Grammars of answers, beside vLLM's own: vLLM would not know the output tokens that a continued request brings, which are a part of its
prompt. The processor here masks the logits; the core follows the same grammar, to end an answer that is complete or fail one that does
not match.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from vllm.sampling_params import SamplingParams as VllmParams
from vllm.v1.sample.logits_processor import BatchUpdate, LogitsProcessor
from vllm.v1.sample.logits_processor.builtin import process_dict_updates

from mmd_api.contract.answers import Grammar
from mmd_api.contract.errors import GrammarFailedError
from mmd_workers.engine.masks import Masks
from mmd_workers.model import source
from mmd_workers.model.grammar import Constraint, Grammars, load_tokenizer

ARGUMENT = "mmd_grammar"
log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Followed:
    """A request's grammar, and the output tokens that are a part of its prompt. vLLM logs it when a step fails: nothing of the client's
    is in its `repr`.
    """

    grammar: Grammar = field(repr=False)
    output_token_ids: list[int] = field(repr=False)
    begun: Constraint | None = field(default=None, repr=False)
    """After these tokens; not for other processes, which compile the grammar once more."""

    def constraint(self, folder: Path) -> Constraint:
        """A new one for the next token. `folder`: of the model.

        Raises:
            GrammarFailedError: as `Grammars.begin`.
        """
        if self.begun is not None:
            return self.begun.copy()
        return grammars_of(folder).begin(self.grammar, self.output_token_ids)


@dataclass(slots=True)
class _Row:
    constraint: Constraint
    output_token_ids: list[int]  # vLLM appends to it
    followed: int = 0  # of these

    def follow(self) -> Constraint:
        """The constraint of the next token. Where it fails, the request has no mask any more, or only an end, and the core ends it."""
        new = self.output_token_ids[self.followed :]
        self.followed += len(new)
        try:
            self.constraint.advance(new)
        except GrammarFailedError as error:
            log.warning("a request fails: %s", error.code)  # the message may quote the grammar
        return self.constraint


class Constraints(LogitsProcessor):
    """vLLM's logits processor for requests with `followed` in their arguments."""

    def __init__(self, vllm_config: Any, device: torch.device, is_pin_memory: bool) -> None:
        self._folder = Path(vllm_config.model_config.model)
        self._rows: dict[int, _Row] = {}

    def is_argmax_invariant(self) -> bool:
        """It excludes tokens."""
        return False

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        """Follow the rows of vLLM's batch. A request that comes back after a preemption brings its tokens."""

        def row(params: VllmParams, _: list[int] | None, output_token_ids: list[int]) -> _Row | None:
            wanted: Followed | None = (params.extra_args or {}).get(ARGUMENT)
            if wanted is None:
                return None
            try:
                constraint = wanted.constraint(self._folder)
            except GrammarFailedError as error:
                log.warning("a request fails: %s", error.code)  # the message may quote the grammar
                return None
            return _Row(constraint, output_token_ids)

        process_dict_updates(self._rows, batch_update, row)

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        """Leave what the grammars allow [n, vocab]."""
        if self._rows:
            constraints = {number: row.follow() for number, row in sorted(self._rows.items())}
            Masks.of(constraints, logits.device).apply(logits)
        return logits


def followed(
    grammar: Grammar | None, output_token_ids: Sequence[int], begun: Constraint | None
) -> dict[str, Any]:
    """vLLM's `extra_args` of a request with these output tokens in its prompt. `begun`: see `Followed`; it is copied."""
    if grammar is None:
        return {}
    return {ARGUMENT: Followed(grammar, list(output_token_ids), begun and begun.copy())}


@functools.lru_cache(maxsize=4)
def grammars_of(folder: Path) -> Grammars:
    """The grammars of the model in a folder: one object for the core and, where they are in one process, the processor."""
    config = source.load_config(folder)
    vocab_size = int(config.get_text_config().vocab_size)
    return Grammars(
        functools.partial(load_tokenizer, folder), vocab_size, source.eos_token_ids(folder, config)
    )
