"""Applies a request's rules to its logits. They depend only on the tokens so far, so every pod that continues
a sequence agrees.

The rules of all sequences of a step are applied together: indices are collected on the host, and the device
reads and writes those logits. Only a prompt's tokens, which may be as many as the vocabulary, stay on the
device from step to step.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from collections.abc import Sequence as Items
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from mmd_api.contract.sampling import LogitRules
from mmd_workers.engine.interface import SamplingParams

Ids = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float32]
Places = tuple[torch.Tensor, torch.Tensor]


class PromptTokens:
    """Distinct tokens of a prompt and their penalty. They stay on the logits' device until `leave_device`."""

    def __init__(self, prompt: Iterable[int], repetition_penalty: float) -> None:
        self._ids = np.unique(_ids(prompt))
        self._repetition_penalty = repetition_penalty
        self._on_device: tuple[torch.Tensor, torch.Tensor] | None = None

    def penalize(self, row: torch.Tensor) -> None:
        """Change float32 logits [vocab] in place."""
        if self._on_device is None:
            valid_ids = self._ids[(self._ids >= 0) & (self._ids < len(row))]
            # A copy, so that the memory profile counts it.
            ids = torch.from_numpy(valid_ids).to(row.device, copy=True)
            self._on_device = ids, torch.tensor([self._repetition_penalty], device=row.device)
        ids, penalty = self._on_device
        row.index_copy_(0, ids, _repeated(row[ids], penalty))

    def leave_device(self) -> None:
        """Free the tensors on the device, until the next step."""
        self._on_device = None


class TokenCounts:
    """Distinct tokens of an output, and the count of each."""

    def __init__(self) -> None:
        self._slots = dict[int, int]()
        self._ids = np.zeros(1, dtype=np.int64)
        self._counts = np.zeros(1, dtype=np.int64)

    def add(self, token: int) -> None:
        """Count an output token."""
        slot = self._slots.setdefault(token, len(self._slots))
        if slot == len(self._ids):
            self._ids = np.concatenate([self._ids, np.zeros_like(self._ids)])
            self._counts = np.concatenate([self._counts, np.zeros_like(self._counts)])
        self._ids[slot] = token
        self._counts[slot] += 1

    @property
    def ids(self) -> Ids:
        """Distinct tokens [n]."""
        return self._ids[: len(self._slots)]

    @property
    def counts(self) -> Ids:
        """Count of each token in the output [n]."""
        return self._counts[: len(self._slots)]


class RuleState:
    """Rules of one sequence, and the state of its tokens that they need."""

    def __init__(
        self, rules: LogitRules, min_tokens: int, ends: Iterable[int], prompt: Iterable[int]
    ) -> None:
        """`ends`: tokens that end the answer; they are excluded from the first `min_tokens` output tokens."""
        self.rules = rules
        self.num_outputs = 0
        self.allowed = _ids(rules.allowed_token_ids)
        self.biased = _ids(token for token, _ in rules.logit_bias)
        self.bias = np.array([bias for _, bias in rules.logit_bias], dtype=np.float32)
        self._min_tokens, self._ends = min_tokens, _ids(ends)
        self._words = _ids(word[0] for word in rules.bad_words if len(word) == 1)
        self._phrases: dict[int, list[list[int]]] = {}  # key: the token before the excluded one
        for word in rules.bad_words:
            if len(word) > 1:
                self._phrases.setdefault(word[-2], []).append(word)
        self._newest = deque[int](maxlen=max(map(len, rules.bad_words), default=1) - 1)
        repeats = rules.repetition_penalty != 1
        self.prompt = PromptTokens(prompt, rules.repetition_penalty) if repeats else None
        counts = repeats or rules.frequency_penalty or rules.presence_penalty
        self.counts = TokenCounts() if counts else None

    def follow(self, outputs: Items[int], first: int = 0) -> None:
        """Record the output tokens that are new since the last call. `outputs` begins with output token `first`."""
        for token in outputs[self.num_outputs - first :]:
            self.num_outputs += 1
            self._newest.append(token)
            if self.counts is not None:
                self.counts.add(token)

    def leave_device(self) -> None:
        """Free the tensors on the device, until the next step."""
        if self.prompt is not None:
            self.prompt.leave_device()

    def excluded(self) -> Ids:
        """Return the tokens that must not come next."""
        excluded = [self._words]
        if self.num_outputs < self._min_tokens:
            excluded.append(self._ends)
        if self._newest and (phrases := self._phrases.get(self._newest[-1])):
            newest = list(self._newest)
            excluded.append(_ids(p[-1] for p in phrases if newest[1 - len(p) :] == p[:-1]))
        return np.concatenate(excluded)


def rule_state(sampling: SamplingParams, ends: Iterable[int], prompt: Iterable[int]) -> RuleState | None:
    """Return the rule state of a sequence without output; None if it has no rules. `ends`: tokens that end the answer."""
    if sampling.rules is None and not sampling.min_tokens:
        return None
    return RuleState(sampling.rules or LogitRules(), sampling.min_tokens, ends, prompt)


def apply_rules(logits: torch.Tensor, ruled: Items[tuple[int, RuleState]]) -> None:
    """Apply rules to rows of float32 logits [n, vocab] in place, in vLLM's order: equal parameters have equal effects."""
    if allowed := [(row, state.allowed) for row, state in ruled if len(state.allowed)]:
        places, _ = _places(logits, allowed)
        allowed_logits = logits[places]
        logits.index_fill_(0, torch.tensor([row for row, _ in allowed], device=logits.device), -torch.inf)
        logits[places] = allowed_logits
    if excluded := [(row, ids) for row, state in ruled if len(ids := state.excluded())]:
        places, _ = _places(logits, excluded)
        logits[places] = -torch.inf
    if biased := [(row, state) for row, state in ruled if len(state.biased)]:
        places, (bias,) = _places(
            logits, [(row, state.biased) for row, state in biased], [state.bias for _, state in biased]
        )
        logits[places] = logits[places] + bias
    counted = [(row, s.rules, s.counts) for row, s in ruled if s.counts and len(s.counts.ids)]
    # Read before the prompt's penalty changes the logits of tokens that are in both.
    penalized = _penalized(logits, counted) if counted else None
    for row, state in ruled:
        if state.prompt is not None:
            state.prompt.penalize(logits[row])
    if penalized is not None:
        places, values = penalized
        logits[places] = values


def _penalized(
    logits: torch.Tensor, counted: Items[tuple[int, LogitRules, TokenCounts]]
) -> tuple[Places, torch.Tensor]:
    """Return the places of output tokens' logits, and their new values."""
    factors, penalties = list[Floats](), list[Floats]()
    for _, rules, tokens in counted:
        counts = tokens.counts
        factors.append(np.full(len(counts), rules.repetition_penalty, dtype=np.float32))
        penalty = rules.frequency_penalty * counts + rules.presence_penalty * (counts > 0)
        penalties.append(penalty.astype(np.float32))
    places, (factor, penalty_sums) = _places(
        logits, [(row, tokens.ids) for row, _, tokens in counted], factors, penalties
    )
    return places, _repeated(logits[places], factor) - penalty_sums


def _repeated(values: torch.Tensor, penalty: torch.Tensor) -> torch.Tensor:
    """Return the penalized logits of tokens that would repeat."""
    return torch.where(values > 0, values / penalty, values * penalty)


def _places(
    logits: torch.Tensor, parts: Items[tuple[int, Ids]], *values: Items[Floats]
) -> tuple[Places, list[torch.Tensor]]:
    """Return rows and tokens of logits as indices on their device, with the values that belong to them.

    Tokens beyond the vocabulary are left out: on CUDA such an index makes the device unusable for every request.
    """
    ids = np.concatenate([ids for _, ids in parts])
    rows = np.repeat([row for row, _ in parts], [len(ids) for _, ids in parts])
    in_vocabulary = (ids >= 0) & (ids < logits.shape[-1])

    def moved(array: npt.NDArray[Any]) -> torch.Tensor:
        return torch.from_numpy(array[in_vocabulary]).to(logits.device, non_blocking=True)

    return (moved(rows), moved(ids)), [moved(np.concatenate(value)) for value in values]


def _ids(tokens: Iterable[int]) -> Ids:
    return np.fromiter(tokens, dtype=np.int64)
