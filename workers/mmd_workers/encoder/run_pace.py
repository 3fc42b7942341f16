"""Learns how much work a tower run may have that shares its device or cores with an engine. Pure: times are arguments."""

from __future__ import annotations

from collections.abc import Callable

from mmd_api.contract.pools import Modality
from mmd_api.contract.steps import StepBound
from mmd_workers.engine.pacing.pace import Pace


class RunPace(Pace):
    """The pace of one modality; a row is a patch or a frame.

    While all runs have the same size, the next one has one part more, and at least a quarter more work, or half the work if runs take too
    long. This reveals a tower whose time goes mostly into the run itself and not into its media. Parts are media, or parts of media that
    are divided between runs.
    """

    def __init__(self, max_seconds: float, max_work: int) -> None:
        """`max_seconds`: limit of a run, or twice its fixed time. `max_work`: limit of a run, however fast."""
        super().__init__(StepBound(max_seconds, max_work, least=1, fixed_cost_multiple=1))
        self._newest_run_parts = 1

    def ran(self, work: int, parts: int, seconds: float) -> None:
        """Learn from a run."""
        self._newest_run_parts = parts
        self.learn(work, seconds)

    def _unlike(self, rows: int, fewer_rows: int) -> bool:
        """Whether the sizes differ by a quarter: between runs of nearly the same size the difference is noise."""
        return 4 * (rows - fewer_rows) >= rows

    def _unlike_the_newest(self, decodes: int) -> float:
        work, seconds = self._steps[-1]
        if seconds > self.bound.seconds and self._newest_run_parts > 1:
            return work // 2
        return max(-(-work * (self._newest_run_parts + 1) // self._newest_run_parts), -(-work * 5 // 4))


class RunPaces:
    """The paces of all modalities. Runs are bounded while somebody waits for the end of an engine step."""

    def __init__(self, max_seconds: float, max_work: int, somebody_waits: Callable[[], bool]) -> None:
        """`max_seconds`: limit of a run for which somebody waits."""
        self._max_seconds = max_seconds
        self._max_work = max_work
        self._somebody_waits = somebody_waits
        self._paces: dict[Modality, RunPace] = {}

    def max_work(self, modality: Modality) -> int:
        """The maximum work of the next run, unless one part has more; one part while nothing has been measured."""
        if not self._somebody_waits():
            return self._max_work
        pace = self._paces.get(modality)
        return 1 if pace is None else pace.tokens()

    def ran(self, modality: Modality, work: int, parts: int, seconds: float) -> None:
        """Learn from a run."""
        pace = self._paces.setdefault(modality, RunPace(self._max_seconds, self._max_work))
        pace.ran(work, parts, seconds)
