"""Memory of the autoscaler between ticks: windows of wanted sizes, times of actions, and known throughput.

Pure and bounded: a window keeps only values that can still become its extreme.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Self

GAP_SECONDS = 30.0
"""Windows restart if ticks are further apart than this (a sleeping operator, a clock set forward), since they were not observed."""


@dataclass(frozen=True, slots=True)
class Extremes:
    """The largest (`sign` 1) or smallest (`sign` -1) value of a sliding window, as a monotonic queue of (time, value)."""

    sign: int
    entries: tuple[tuple[float, int], ...] = ()

    def push(self, now: float, value: int, window_seconds: float) -> Self:
        """A copy with a value for now and without values older than the window. Future times count as now."""
        candidates = [
            (min(at, now), v)
            for at, v in self.entries
            if at >= now - window_seconds and v * self.sign > value * self.sign
        ]
        return replace(self, entries=(*candidates, (now, value)))

    @property
    def extreme(self) -> int:
        """The window's extreme; the window holds at least the newest value."""
        return self.entries[0][1]


@dataclass(frozen=True, slots=True)
class History:
    """Memory of one pool's scaler. `History(throughput=...)` is for a scaler that has just started."""

    last_tick: float | None = None
    observed_since: float = 0.0
    wanted_high: Extremes = Extremes(1)  # over the scale-down window: a pool falls no lower than this
    wanted_low: Extremes = Extremes(-1)  # over the scale-up window: a pool rises no higher than this
    wanted_burst: Extremes = Extremes(-1)  # over the panic window
    size_high: Extremes = Extremes(1)  # over the rate period
    size_low: Extremes = Extremes(-1)
    panic_until: float | None = None
    ready: int = 0
    ready_since: float = 0.0
    idle_since: float | None = None
    last_up: float | None = None
    last_down: float | None = None
    written: tuple[int, int] | None = None  # (previous, decided) size of this scaler's last decision
    # work per second of one replica, by kind; "tokens" for prefill
    throughput: Mapping[str, float] = field(default_factory=dict)

    def begin_tick(self, now: float, ready: int) -> History:
        """A copy that is safe against clock jumps and records this tick's time and number of ready pods."""
        history = self
        jumped = self.last_tick is None or now < self.last_tick or now - self.last_tick > GAP_SECONDS
        if jumped:
            history = replace(
                history,
                observed_since=now,
                ready_since=now,
                idle_since=None,
                last_up=_not_after(now, history.last_up),
                last_down=_not_after(now, history.last_down),
            )
        if ready != history.ready:
            history = replace(history, ready=ready, ready_since=now)
        return replace(history, last_tick=now)

    def acted(self, now: float, current: int, found: int, decided: int) -> History:
        """The history after a decision is carried out; `found` is spec.replicas before it."""
        return replace(
            self,
            written=(found, decided),
            last_up=now if decided > current else self.last_up,
            last_down=now if decided < current else self.last_down,
        )

    def size_now(self, spec_replicas: int) -> tuple[int, bool]:
        """The size that counts as current, and whether another client wrote `spec.replicas`.

        A size between the previous and the decided one is our own change in progress: pods that drain towards a smaller size
        no longer count as capacity.
        """
        if self.written is None:
            return spec_replicas, False
        previous, decided = self.written
        if not min(previous, decided) <= spec_replicas <= max(previous, decided):
            return spec_replicas, True
        return decided, False


def _not_after(now: float, then: float | None) -> float | None:
    return None if then is None else min(now, then)
