"""Learns from earlier steps how many tokens fit into a step's time limit. Pure: times come from the steps'
own stopwatch."""

from __future__ import annotations

from collections import deque
from statistics import median

from mmd_api.contract.steps import StepBound
from mmd_workers.engine.interface import StepOutput

STEPS = 24  # newest steps that the estimate uses
SMALL_STEPS = 2  # kept of consecutive small steps: a long answer must not displace measurements of prompts
LONG_STEP = 1.5  # bounds; a single step among similar ones that takes longer may contain a pause


class Pace:
    """Estimates how many prompt tokens a step may have. A row is a token that a step computes.

    Each decoding sequence has one row; the others belong to prompts. The model of a step is a fixed time plus
    a time per row. The line through the last steps is a Theil-Sen fit: its slope is the median of the slopes
    between all pairs of unlike size, so a few outliers change little. If noise makes the line fall, or the
    fixed time negative, the average time per row is used.

    Steps of one size show no line. The next step then has more rows, as many as fit if there is no fixed
    time; or half as many if the newest took too long. The same happens if all steps but one are of one size
    and the newest took far too long.
    """

    def __init__(self, bound: StepBound) -> None:
        self.bound = bound
        self._steps: deque[tuple[int, float]] = deque(maxlen=STEPS)  # rows, seconds

    def tokens(self, decodes: int = 0) -> int:
        """Return the number of prompt tokens of a step beside `decodes`; the least allowed before the first measurement."""
        if not self._steps:
            return self.bound.least
        slopes = self._slopes()
        _, newest_seconds = self._steps[-1]
        too_long = newest_seconds > LONG_STEP * self.bound.seconds
        if not slopes or (len(slopes) < len(self._steps) and too_long):
            return int(self.bound.within(self._unlike_the_newest(decodes)))
        return self.bound.tokens(*self._line(slopes), decodes)

    def _unlike_the_newest(self, decodes: int) -> float:
        """Return tokens for a step of another size than the newest, unless that was in time with as many as a
        step may have."""
        newest_rows, newest_seconds = self._steps[-1]
        if self._small(newest_rows):
            return self.bound.least
        tokens, difference = newest_rows - decodes, -(-self.bound.least // 2)
        if newest_seconds <= self.bound.seconds:
            return max(newest_rows * self.bound.seconds / newest_seconds - decodes, tokens + difference)
        if (half := -(-newest_rows // 2) - decodes) >= self.bound.least:
            return half
        return tokens + difference if tokens + difference <= self.bound.most else tokens - difference

    def add(self, output: StepOutput) -> None:
        """Learn from a step, if its duration covers no other work."""
        if output.timed:
            rows = output.prefill_tokens + output.decode_sequences + output.draft_tokens
            self.learn(rows, output.duration_seconds)

    def learn(self, rows: int, seconds: float) -> None:
        """Add a measurement. One without rows or time is ignored."""
        if rows < 1 or seconds <= 0.0:
            return
        newest_rows = [step_rows for step_rows, _ in self._steps][-SMALL_STEPS:]
        if len(newest_rows) == SMALL_STEPS and all(map(self._small, [*newest_rows, rows])):
            del self._steps[-SMALL_STEPS]
        self._steps.append((rows, seconds))

    def _small(self, rows: int) -> bool:
        return rows < self.bound.least

    def _slopes(self) -> list[float]:
        """Return seconds per row for each pair of steps of unlike size; other pairs show noise."""
        steps = sorted(self._steps)
        return [
            (seconds - less_seconds) / (rows - fewer_rows)
            for place, (rows, seconds) in enumerate(steps)
            for fewer_rows, less_seconds in steps[:place]
            if self._unlike(rows, fewer_rows)
        ]

    def _unlike(self, rows: int, fewer_rows: int) -> bool:
        return 2 * (rows - fewer_rows) >= self.bound.least

    def _line(self, slopes: list[float]) -> tuple[float, float]:
        """Return the fixed seconds of a step, and the seconds per row. Neither is negative, and the second is never 0."""
        if (per_row := median(slopes)) > 0.0:
            fixed = median(seconds - per_row * rows for rows, seconds in self._steps)
            if fixed > 0.0:
                return fixed, per_row
        large = [step for step in self._steps if not self._small(step[0])] or self._steps
        return 0.0, median(seconds / rows for rows, seconds in large)
