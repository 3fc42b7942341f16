"""How many tokens fit into the time of a step, learned from the steps before. Pure: times come from the steps' own stopwatch."""

from __future__ import annotations

from collections import deque
from statistics import median

from mmd_api.contract.steps import StepBound
from mmd_workers.engine.interface import StepOutput

STEPS = 24  # that the estimate is made of
SMALL_STEPS = 2  # kept of those in a row: a long answer must not displace what prompts took
LONG_STEP = 1.5  # bounds: in one step among alike ones that takes longer there may have been a pause


class Pace:
    """A row is a token that a step computes: one of each decoding sequence, the others of prompts.

    A step is taken to cost a fixed time and a time for each row. The line through the last steps is that of Theil and Sen: the slope is
    the median of the slopes between all pairs of unlike size, so a few outliers change little. Where noise makes it fall, or makes the fixed
    time negative, what a row takes on average counts. Steps that are all of one size show no line: then the next one has more, as many as fit
    if there is no fixed time, or half where the newest took too long. So it has when all but one are of one size and the newest took far too long.
    """

    def __init__(self, bound: StepBound) -> None:
        self.bound = bound
        self._steps: deque[tuple[int, float]] = deque(maxlen=STEPS)  # rows, seconds

    def tokens(self, decodes: int = 0) -> int:
        """How many tokens of prompts a step has beside `decodes`. As few as it may have before anything has been measured."""
        if not self._steps:
            return self.bound.least
        slopes = self._slopes()
        _, newest_seconds = self._steps[-1]
        long = newest_seconds > LONG_STEP * self.bound.seconds
        if not slopes or (len(slopes) < len(self._steps) and long):
            return int(self.bound.within(self._unlike_the_newest(decodes)))
        return self.bound.tokens(*self._line(slopes), decodes)

    def _unlike_the_newest(self, decodes: int) -> float:
        """Tokens of a step whose rows differ from those of the newest, unless that had all that a step may have and was in time."""
        newest, seconds = self._steps[-1]
        if self._small(newest):
            return self.bound.least
        tokens, unlike = newest - decodes, -(-self.bound.least // 2)
        if seconds <= self.bound.seconds:
            return max(newest * self.bound.seconds / seconds - decodes, tokens + unlike)
        if (half := -(-newest // 2) - decodes) >= self.bound.least:
            return half
        return tokens + unlike if tokens + unlike <= self.bound.most else tokens - unlike

    def add(self, output: StepOutput) -> None:
        """Learn from a step, if its time is its own."""
        if output.timed:
            rows = output.prefill_tokens + output.decode_sequences + output.draft_tokens
            self.learn(rows, output.duration_seconds)

    def learn(self, rows: int, seconds: float) -> None:
        """Take a measurement; one without rows or time is none."""
        if rows < 1 or seconds <= 0.0:
            return
        newest = [step_rows for step_rows, _ in self._steps][-SMALL_STEPS:]
        if len(newest) == SMALL_STEPS and all(map(self._small, [*newest, rows])):
            del self._steps[-SMALL_STEPS]
        self._steps.append((rows, seconds))

    def _small(self, rows: int) -> bool:
        return rows < self.bound.least

    def _slopes(self) -> list[float]:
        """Seconds a row, of each two steps of unlike size: others show noise."""
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
        """Seconds of a step without rows, and of each row: never negative, the second never 0."""
        if (per_row := median(slopes)) > 0.0:
            fixed = median(seconds - per_row * rows for rows, seconds in self._steps)
            if fixed > 0.0:
                return fixed, per_row
        large = [step for step in self._steps if not self._small(step[0])] or self._steps
        return 0.0, median(seconds / rows for rows, seconds in large)
