"""Speculative decoding by prompt lookup: a sequence whose last tokens stood in it before probably goes on as it did there. The tokens that
followed are computed in the same step as its next token, and count as far as the model samples the very same ones.

The algorithm is that of "Prompt Lookup Decoding" (Saxena, 2023). How many tokens are worth a step is decided by what rows cost here and by how
often drafts were right. Pure bookkeeping: times come from the steps' own stopwatch.
"""

from __future__ import annotations

import itertools
from array import array
from collections.abc import Collection
from collections.abc import Sequence as Items

from mmd_workers.engine.interface import StepOutput

GRAMS = (3, 2)
"""Numbers of last tokens that are looked up, the longest first."""
CHANCE_BEFORE = 0.5
"""Of a drafted token to be right, where nothing is known of the sequence."""
CHANCE_WEIGHT = 2.0
"""Drafted tokens that this counts as."""
KEPT_BY_DRAFT = 0.9
"""Of what is known, when another draft has been computed."""
KEPT_BY_STEP = 0.98
"""Of it, by a step without a draft: so a sequence whose drafts were wrong has another chance after some dozens of tokens."""
ROW_SHARE_BEFORE = 1 / 16
"""Of a step's time, that another row takes, where nothing has been measured."""
SPREAD_BEFORE = 0.1
"""Of the rows of steps, as which that counts: theirs tell more as soon as some have two rows and some one."""
KEPT_OF_COSTS = 63 / 64
LONGEST_STEP = 2.0
"""Times the average, that a step counts as at most: a pause says nothing about rows."""


class PromptLookup:
    """The tokens of one sequence, searched for what followed its last ones. 4 bytes a token."""

    def __init__(self) -> None:
        self._tokens = array("i")
        self._bytes = bytearray()
        self._hits = self._trials = 0.0

    @property
    def chance(self) -> float:
        """Of a drafted token to be right, if all before it are."""
        return (self._hits + CHANCE_WEIGHT * CHANCE_BEFORE) / (self._trials + CHANCE_WEIGHT)

    def learn(self, drafted: int, accepted: int) -> None:
        """How a draft ended; what comes after the first wrong token says nothing. Without a draft, what is known fades."""
        kept = KEPT_BY_DRAFT if drafted else KEPT_BY_STEP
        self._hits = kept * self._hits + accepted
        self._trials = kept * self._trials + min(drafted, accepted + 1)

    def draft(self, token_ids: Items[int], most: int) -> list[int]:
        """Up to `most` tokens that followed the last ones of `token_ids` the last time, which only grow from call to call. Where those overlap
        the end, the tokens go round."""
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
        new = array("i", token_ids[len(self._tokens) :])
        self._tokens += new
        self._bytes += new.tobytes()

    def _last(self, size: int) -> int | None:
        """Where the last `size` tokens stood before: the index after them."""
        width = self._tokens.itemsize
        wanted = self._bytes[-size * width :]
        end = len(self._bytes) - width
        while (found := self._bytes.rfind(wanted, 0, end)) >= 0:
            if found % width == 0:
                return found // width + size
            end = found + len(wanted) - 1
        return None


class RowCosts:
    """A step takes a fixed time and a time for each of its rows: a line through the steps of late, by least squares, of which older ones count
    for less and less. Until their rows differ, another row is taken to cost `ROW_SHARE_BEFORE` of a step.
    """

    def __init__(self) -> None:
        self._weight = self._rows = self._seconds = self._squares = self._products = 0.0

    def add(self, rows: int, seconds: float) -> None:
        """A step of so many rows took so long."""
        if rows < 1 or seconds <= 0.0:
            return
        if self._weight > 1.0:
            seconds = min(seconds, LONGEST_STEP * self._seconds / self._weight)
        new = (1.0, rows, seconds, rows * rows, rows * seconds)
        old = (self._weight, self._rows, self._seconds, self._squares, self._products)
        self._weight, self._rows, self._seconds, self._squares, self._products = (
            KEPT_OF_COSTS * before + now for before, now in zip(old, new, strict=True)
        )

    def share(self, rows: int) -> float:
        """Of the time of a step with so many rows, that they take together: 1 where there is no fixed time."""
        if not self._weight:
            return min(1.0, rows * ROW_SHARE_BEFORE)
        average, seconds = self._rows / self._weight, self._seconds / self._weight
        spread = self._squares / self._weight - average**2
        slope = self._products / self._weight - average * seconds
        each = (slope + SPREAD_BEFORE * ROW_SHARE_BEFORE * seconds) / (spread + SPREAD_BEFORE)
        each = min(max(each, 0.0), seconds / average)
        return min(1.0, each * rows / (seconds + each * (rows - average))) if each else 0.0


class Drafts:
    """Which tokens sequences are drafted. One is computed where that makes tokens come faster: its chance is larger than the part of a step's time that
    a row takes for each that the step decodes.
    """

    def __init__(self, most: int, vocab_size: int, excluded: Collection[int] = ()) -> None:
        """`most`: tokens of a draft. `excluded`: those that are never sampled, such as placeholders, of which embeddings may not exist."""
        self.most = most
        self._vocab_size = vocab_size
        self._excluded = frozenset(excluded)
        self.drafted = self.accepted = 0
        self._costs = RowCosts()

    def draft(self, lookup: PromptLookup, token_ids: Items[int], most: int, decodes: int) -> list[int]:
        """Up to `most` tokens that may come after those of a sequence, in a step that decodes so many sequences."""
        share, chance, worthwhile = self._costs.share(decodes), 1.0, 0
        while worthwhile < min(most, self.most) and (chance := chance * lookup.chance) > share:
            worthwhile += 1
        if not worthwhile:
            return []
        return list(itertools.takewhile(self._can_be_sampled, lookup.draft(token_ids, worthwhile)))

    def _can_be_sampled(self, token: int) -> bool:
        return token < self._vocab_size and token not in self._excluded

    def learn(self, lookup: PromptLookup, drafted: int, accepted: int) -> None:
        """Count how a draft ended, which had `drafted` tokens, maybe none."""
        self.drafted += drafted
        self.accepted += accepted
        lookup.learn(drafted, accepted)

    def finish_step(self, output: StepOutput) -> None:
        """Learn how long a step took, if its time is its own and nothing else was in it."""
        if output.timed and not output.prefill_tokens:
            self._costs.add(output.decode_sequences + output.draft_tokens, output.duration_seconds)
