"""How much a tower run has that shares its device or its cores with an engine, learned from the runs before. Pure: times come from outside."""

from __future__ import annotations

from collections.abc import Callable

from mmd_api.contract.pools import Modality
from mmd_api.contract.steps import StepBound
from mmd_workers.engine.pacing.pace import Pace


class RunPace(Pace):
    """A row is a patch or a frame. While all runs are of one size, the next one has a part more, and at least a quarter, or half of them where
    they take too long: so a tower whose time is mostly that of a run, and not of its media, is found out. Parts are media, or those of them
    that are divided between runs."""

    def __init__(self, max_seconds: float, max_work: int) -> None:
        """`max_seconds`: of a run, or twice its fixed time. `max_work`: of a run, however fast."""
        super().__init__(StepBound(max_seconds, max_work, least=1, fixed_cost_multiple=1))
        self._parts = 1  # of the newest run

    def ran(self, work: int, parts: int, seconds: float) -> None:
        """Learn from a run."""
        self._parts = parts
        self.learn(work, seconds)

    def _unlike(self, rows: int, fewer_rows: int) -> bool:
        """By a quarter: between runs of nearly the same size the difference is noise."""
        return 4 * (rows - fewer_rows) >= rows

    def _unlike_the_newest(self, decodes: int) -> float:
        work, seconds = self._steps[-1]
        if seconds > self.bound.seconds and self._parts > 1:
            return work // 2
        return max(-(-work * (self._parts + 1) // self._parts), -(-work * 5 // 4))


class RunPaces:
    """Of the runs of each modality. They are bounded while somebody waits for the end of an engine's step."""

    def __init__(self, max_seconds: float, max_work: int, somebody_waits: Callable[[], bool]) -> None:
        """`max_seconds`: of a run for which somebody waits."""
        self._max_seconds = max_seconds
        self._max_work = max_work
        self._somebody_waits = somebody_waits
        self._paces: dict[Modality, RunPace] = {}

    def max_work(self, modality: Modality) -> int:
        """Of the next run, unless one part has more. One part while nothing has been measured."""
        if not self._somebody_waits():
            return self._max_work
        pace = self._paces.get(modality)
        return 1 if pace is None else pace.tokens()

    def ran(self, modality: Modality, work: int, parts: int, seconds: float) -> None:
        """Learn from a run."""
        pace = self._paces.setdefault(modality, RunPace(self._max_seconds, self._max_work))
        pace.ran(work, parts, seconds)
