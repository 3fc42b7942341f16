"""Speculative decoding by prompt lookup.

If the last tokens of a sequence occurred in it before, it probably continues as it did there. The tokens that
followed are computed in the same step as the next token, and accepted as far as the model samples the very
same ones. The algorithm is "Prompt Lookup Decoding" (Saxena, 2023). The length of a draft depends on the
measured cost of rows and on how often drafts were right. Pure bookkeeping: times come from the steps' own
stopwatch.
"""

from __future__ import annotations

import itertools
from array import array
from collections.abc import Collection
from collections.abc import Sequence as Items

from mmd_workers.engine.interface import StepOutput

GRAMS = (3, 2)
"""Lengths of the token suffixes that are looked up, longest first."""
CHANCE_BEFORE = 0.5
"""Prior chance that a drafted token is right, before a sequence has any draft."""
CHANCE_WEIGHT = 2.0
"""Weight of the prior, in drafted tokens."""
KEPT_BY_DRAFT = 0.9
"""Factor by which each draft discounts the earlier ones."""
KEPT_BY_STEP = 0.98
"""Factor for a step without a draft: a sequence whose drafts were wrong gets another chance after some dozens of tokens."""
ROW_SHARE_BEFORE = 1 / 16
"""Prior share of a step's time that another row takes, before any measurement."""
SPREAD_BEFORE = 0.1
"""Weight of that prior, as a variance of rows per step: measurements outweigh it once some steps have two
rows and some one."""
KEPT_OF_COSTS = 63 / 64
LONGEST_STEP = 2.0
"""A step counts as at most this many times the average: a pause says nothing about rows."""


class PromptLookup:
    """Searches the tokens of one sequence for what followed its last ones. Takes 4 bytes per token."""

    def __init__(self) -> None:
        self._tokens = array("i")
        self._bytes = bytearray()
        self._hits = self._trials = 0.0

    @property
    def chance(self) -> float:
        """Chance that a drafted token is right, if all drafted before it are."""
        return (self._hits + CHANCE_WEIGHT * CHANCE_BEFORE) / (self._trials + CHANCE_WEIGHT)

    def learn(self, drafted: int, accepted: int) -> None:
        """Learn how a draft ended. Tokens after the first wrong one say nothing. Without a draft, earlier results fade."""
        discount = KEPT_BY_DRAFT if drafted else KEPT_BY_STEP
        self._hits = discount * self._hits + accepted
        self._trials = discount * self._trials + min(drafted, accepted + 1)

    def draft(self, token_ids: Items[int], most: int) -> list[int]:
        """Return up to `most` tokens that followed the previous occurrence of the last tokens.

        `token_ids` only grow from call to call. Where the tokens that followed reach the end, they repeat.
        """
        self._follow(token_ids)
        count = len(self._tokens)
        for size in GRAMS:
            if count <= size:
                continue
            if (start := self._last(size)) is not None:
                period = count - start
                return [self._tokens[start + place % period] for place in range(most)]
        return []

    def _follow(self, token_ids: Items[int]) -> None:
        new_tokens = array("i", token_ids[len(self._tokens) :])
        self._tokens += new_tokens
        self._bytes += new_tokens.tobytes()

    def _last(self, size: int) -> int | None:
        """Return the index after the previous occurrence of the last `size` tokens; None: there is none."""
        width = self._tokens.itemsize
        suffix = self._bytes[-size * width :]
        end = len(self._bytes) - width
        while (offset := self._bytes.rfind(suffix, 0, end)) >= 0:
            if offset % width == 0:
                return offset // width + size
            end = offset + len(suffix) - 1
        return None


class RowCosts:
    """Estimates the cost of rows by a least-squares line through recent steps: a fixed time, and a time per row.

    Older steps weigh less and less. Until the steps' rows differ, another row is assumed to cost
    `ROW_SHARE_BEFORE` of a step.
    """

    def __init__(self) -> None:
        self._weight = self._rows = self._seconds = self._squares = self._products = 0.0

    def add(self, rows: int, seconds: float) -> None:
        """Add a step of `rows` rows that took `seconds`."""
        if rows < 1 or seconds <= 0.0:
            return
        if self._weight > 1.0:
            seconds = min(seconds, LONGEST_STEP * self._seconds / self._weight)
        step_sums = (1.0, rows, seconds, rows * rows, rows * seconds)
        sums = (self._weight, self._rows, self._seconds, self._squares, self._products)
        self._weight, self._rows, self._seconds, self._squares, self._products = (
            KEPT_OF_COSTS * sum_before + step_value
            for sum_before, step_value in zip(sums, step_sums, strict=True)
        )

    def share(self, rows: int) -> float:
        """Return the share of a step's time that its `rows` rows take together; 1 if there is no fixed time."""
        if not self._weight:
            return min(1.0, rows * ROW_SHARE_BEFORE)
        average, seconds = self._rows / self._weight, self._seconds / self._weight
        spread = self._squares / self._weight - average**2
        slope = self._products / self._weight - average * seconds
        row_seconds = (slope + SPREAD_BEFORE * ROW_SHARE_BEFORE * seconds) / (spread + SPREAD_BEFORE)
        row_seconds = min(max(row_seconds, 0.0), seconds / average)
        return (
            min(1.0, row_seconds * rows / (seconds + row_seconds * (rows - average))) if row_seconds else 0.0
        )


class Drafts:
    """Chooses the tokens to draft. A token is drafted if that makes tokens come faster.

    This holds if its chance exceeds the share of a step's time that the rows of all decoding sequences take together.
    """

    def __init__(self, most: int, vocab_size: int, excluded: Collection[int] = ()) -> None:
        """`most`: longest draft, in tokens. `excluded`: tokens that are never sampled, such as placeholders,
        which may lack embeddings."""
        self.most = most
        self._vocab_size = vocab_size
        self._excluded = frozenset(excluded)
        self.drafted = self.accepted = 0
        self._costs = RowCosts()

    def draft(self, lookup: PromptLookup, token_ids: Items[int], most: int, decodes: int) -> list[int]:
        """Return up to `most` tokens that may follow those of a sequence, in a step that decodes `decodes` sequences."""
        share, chance, worthwhile = self._costs.share(decodes), 1.0, 0
        while worthwhile < min(most, self.most) and (chance := chance * lookup.chance) > share:
            worthwhile += 1
        if not worthwhile:
            return []
        return list(itertools.takewhile(self._can_be_sampled, lookup.draft(token_ids, worthwhile)))

    def _can_be_sampled(self, token: int) -> bool:
        return token < self._vocab_size and token not in self._excluded

    def learn(self, lookup: PromptLookup, drafted: int, accepted: int) -> None:
        """Count how a draft of `drafted` tokens ended; it may have had none."""
        self.drafted += drafted
        self.accepted += accepted
        lookup.learn(drafted, accepted)

    def finish_step(self, output: StepOutput) -> None:
        """Learn how long a step took, if it only decoded and its duration covers no other work."""
        if output.timed and not output.prefill_tokens:
            self._costs.add(output.decode_sequences + output.draft_tokens, output.duration_seconds)
