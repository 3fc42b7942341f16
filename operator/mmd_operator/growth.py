"""The record of growth that was decided and that the watch may not show yet, so that no other decision gives its GPUs away again.

A pass and a tick of the autoscaler run at the same time and decide from the same watch. Each records its growth before it waits for
anything; the record is kept until the watch shows the size, a later write replaces it, or the write was refused.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

from mmd_operator.cluster import RefusedError
from mmd_operator.observed import Child, Observed, PoolGrowth

LONGEST_LAG_SECONDS = 60.0
"""A size that the watch has not shown this long after it was written is not shown any more: it was lost, or another client changed it."""


@dataclass(frozen=True, slots=True)
class _Written:
    growth: PoolGrowth
    at: float


class PendingGrowth:
    """PoolGrowth of one deployment's StatefulSets. `clock`: monotonic seconds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._decided: list[Mapping[str, PoolGrowth]] = []  # each being carried out
        self._written: dict[str, _Written] = {}

    @contextmanager
    def deciding(self, growth: Mapping[str, PoolGrowth]) -> Iterator[None]:
        """While a decision is carried out: its growth by StatefulSet. What is not written by the end no longer counts."""
        self._decided.append(growth)
        try:
            yield
        finally:
            self._decided = [other for other in self._decided if other is not growth]

    @contextmanager
    def writing(self, name: str, replicas: int) -> Iterator[None]:
        """While a size is written. It counts unless it was refused: a write that got no answer may have been carried out."""
        growth = next((g[name] for g in self._decided if name in g and g[name].replicas == replicas), None)
        began = self._clock()
        answered = False
        try:
            yield
            answered = True
        except RefusedError:
            growth = None
            raise
        finally:
            before = self._written.get(name)
            overtaken = before is not None and before.at >= began and before.growth.replicas > replicas
            if growth is not None and not overtaken:
                self._written[name] = _Written(growth, self._clock())
            elif answered and not overtaken:
                self._written.pop(name, None)

    def unseen(self, observed: Observed) -> dict[str, PoolGrowth]:
        """PoolGrowth that the watch does not show, by StatefulSet: the largest where there are several."""
        oldest = self._clock() - LONGEST_LAG_SECONDS
        self._written = {
            name: written
            for name, written in self._written.items()
            if written.at > oldest and not _is_over(written.growth, observed.stateful_set(name))
        }
        found: dict[str, PoolGrowth] = {}
        for growth in (*self._decided, {name: written.growth for name, written in self._written.items()}):
            for name, one in growth.items():
                if name not in found or found[name].replicas < one.replicas:
                    found[name] = one
        return found

    def forget(self, name: str) -> None:
        """The StatefulSet is being deleted."""
        self._written.pop(name, None)


def _is_over(growth: PoolGrowth, child: Child | None) -> bool:
    """Whether the watch shows the size, or that the StatefulSet is another or gone."""
    if child is None or child.workload is None:
        return growth.uid is not None
    return growth.uid != child.uid or child.workload.replicas >= growth.replicas
