"""Records decided growth of pools until the watch shows it, so that no other decision assigns the same GPUs.

A pass and a tick of the autoscaler run at the same time and decide from the same watch. Each records its growth before it awaits anything.
The record is kept until the watch shows the size, a later write replaces it, the write was refused, or the API server itself shows another
size: a watch may lag for any time.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace

from mmd_operator.kube.cluster import BusyError, RefusedError
from mmd_operator.observed.observed import Child, Observed, PoolGrowth

VERIFY_SECONDS = 10.0
"""A written size is looked up if the watch has not shown it for this long, and again after the same time."""
UNANSWERED_SECONDS = 60.0
"""A write without an answer may still be carried out for this long."""


@dataclass(frozen=True, slots=True)
class _Written:
    """A written size. `shown`: whether the watch has shown the workload. `checked`: when the size was last known to hold."""

    growth: PoolGrowth
    at: float
    checked: float
    answered: bool
    shown: bool

    def is_over(self, child: Child | None) -> bool:
        """Whether the watch shows the size, or that the workload was replaced or removed."""
        if child is None or child.workload is None:
            return self.shown
        if child.uid == self.growth.uid:
            return child.workload.replicas >= self.growth.replicas
        return self.shown or self.growth.uid is None


class PendingGrowth:
    """Growth of one deployment's pools. `clock`: monotonic seconds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._decided: list[dict[str, PoolGrowth]] = []  # decisions being carried out
        self._written: dict[str, tuple[_Written, ...]] = {}
        self._writing: list[str] = []

    @contextmanager
    def deciding(self, growth: Mapping[str, PoolGrowth]) -> Iterator[None]:
        """Count a decision's growth, by workload name, while it is carried out. Growth not written by the end no longer counts."""
        decided = dict(growth)
        self._decided.append(decided)
        try:
            yield
        finally:
            self._decided = [other for other in self._decided if other is not decided]

    @contextmanager
    def writing(self, name: str, replicas: int) -> Iterator[None]:
        """Track the write of a size. The size counts unless it was refused: a write without an answer may have been carried out."""
        decided = next((d for d in self._decided if name in d and d[name].replicas == replicas), None)
        growth = decided[name] if decided is not None else None
        began = self._clock()
        answered = refused = False
        self._writing.append(name)
        try:
            yield
            answered = True
        except (BusyError, RefusedError) as error:
            refused = isinstance(error, RefusedError) or error.undone
            raise
        finally:
            self._writing.remove(name)
            if decided is not None:
                decided.pop(name, None)
            if answered:  # this write replaces writes answered before it began
                self._keep(name, (w for w in self._of(name) if not w.answered or w.at >= began))
            if growth is not None and not refused:
                now = self._clock()
                written = _Written(growth, now, now, answered, shown=growth.uid is not None)
                self._keep(name, (*self._of(name), written))

    def confirmed(self, found: Child, shown: Child | None) -> None:
        """Take a pool's size from the API server itself. `found`: the pool there; `shown`: the pool in the watch."""
        workload = found.workload
        if not found.is_sized or workload is None:
            return
        same_workload = shown is not None and shown.uid == found.uid
        growth = PoolGrowth(workload.replicas, workload.gpus, found.revision, found.uid)
        now = self._clock()
        written = _Written(growth, now, now, answered=True, shown=same_workload)
        if written.is_over(shown):
            return
        larger = (
            w
            for w in self._of(found.name)
            if w.growth.replicas > workload.replicas or w.growth.uid not in (None, found.uid)
        )
        self._keep(found.name, (*larger, written))

    async def verify(self, observed: Observed, get: Callable[[str], Awaitable[Child | None]]) -> None:
        """Look up written sizes that the watch still does not show after a while.

        `get`: returns a pool's workload by name, as the API server itself shows it.
        """
        self._forget_shown(observed)
        due = self._clock() - VERIFY_SECONDS
        for name in [name for name, writes in self._written.items() if min(w.checked for w in writes) <= due]:
            began = self._clock()
            child = await get(name)
            self._keep(
                name,
                (
                    replace(w, checked=began) if w.checked < began else w
                    for w in self._of(name)
                    if w.at >= began or _may_hold(w, child, began)
                ),
            )

    def unseen(self, observed: Observed) -> dict[str, PoolGrowth]:
        """Growth not shown by the watch, by workload name; the largest if there are several."""
        self._forget_shown(observed)
        written = ({name: w.growth} for name, writes in self._written.items() for w in writes)
        unseen: dict[str, PoolGrowth] = {}
        for growth in (*self._decided, *written):
            for name, candidate in growth.items():
                if name not in unseen or unseen[name].replicas < candidate.replicas:
                    unseen[name] = candidate
        return unseen

    def forbids(self, name: str, replicas: int) -> bool:
        """Whether a size may not be written now.

        That is so while another size is being written, and while the watch does not show a larger size that the pool was given: its pods
        would leave without draining.
        """
        decided = (d[name].replicas for d in self._decided if name in d)
        largest = max((*decided, *(w.growth.replicas for w in self._of(name))), default=0)
        return name in self._writing or largest > replicas

    def forget(self, name: str) -> None:
        """Forget a workload that is being deleted."""
        self._written.pop(name, None)

    def _forget_shown(self, observed: Observed) -> None:
        for name in list(self._written):
            child = observed.sized(name)
            self._keep(
                name,
                (
                    replace(w, shown=w.shown or (child is not None and child.uid == w.growth.uid))
                    for w in self._of(name)
                    if not w.is_over(child)
                ),
            )

    def _of(self, name: str) -> tuple[_Written, ...]:
        return self._written.get(name, ())

    def _keep(self, name: str, writes: Iterator[_Written] | tuple[_Written, ...]) -> None:
        if remaining := tuple(writes):
            self._written[name] = remaining
        else:
            self._written.pop(name, None)


def _may_hold(written: _Written, child: Child | None, now: float) -> bool:
    """Whether a pool has the written size, or may still get it. `child`: the pool as the API server itself shows it."""
    if not written.answered and now - written.at < UNANSWERED_SECONDS:
        return True
    if child is None or child.workload is None or written.growth.uid not in (None, child.uid):
        return False
    return child.workload.replicas >= written.growth.replicas
