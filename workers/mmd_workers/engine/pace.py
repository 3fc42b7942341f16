"""How much work fits into a step of bounded time, learned from the steps before. Pure: times come from the steps' own stopwatch."""

from __future__ import annotations

import statistics
from collections import deque

from mmd_workers.engine.interface import StepOutput

MIN_PROMPT_TOKENS = 32
"""Of a step with prompts, however slow: prompts advance, and weights are not read for a few rows."""
FIRST_ROWS = 64  # before anything has been measured
SAMPLES = 5  # steps that the estimate is the median of: two slow ones among them change nothing


class Pace:
    """A row is a token that a step computes: one of each decoding sequence, the others of prompts.

    Steps count that were at least half full, since what every step costs weighs more in small ones, and those that took too long,
    whatever their size.
    """

    def __init__(self, max_seconds: float, max_rows: int) -> None:
        """`max_seconds`: of a step. `max_rows`: of a step, however fast."""
        self.max_seconds = max_seconds
        self._max_rows = max_rows
        self._seconds_per_row: deque[float] = deque(maxlen=SAMPLES)

    @property
    def rows(self) -> int:
        """As many as a step computes in `max_seconds`, from 1 to `max_rows`."""
        if not self._seconds_per_row:
            return min(FIRST_ROWS, self._max_rows)
        fits = self.max_seconds / statistics.median_low(self._seconds_per_row)
        return max(1, min(self._max_rows, int(fits)))

    def add(self, output: StepOutput) -> None:
        """Learn from a step with prompts. One in which the model failed ran more than once and is left out."""
        rows, seconds = output.prefill_tokens + output.decode_sequences, output.duration_seconds
        if not output.prefill_tokens or output.failed or seconds <= 0.0:
            return
        if 2 * rows >= self.rows or seconds > self.max_seconds:
            self._seconds_per_row.append(seconds / rows)
