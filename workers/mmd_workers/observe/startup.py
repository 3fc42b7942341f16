"""The phases of a process from its start until it is Ready, with their durations. Independent of the phases' work."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from mmd_workers.observe.metrics import Metrics


class Startup:
    """The phases of one start, in order; each is on the metrics as soon as it ends."""

    def __init__(self, metrics: Metrics) -> None:
        self._seconds: dict[str, float] = {}
        self._metrics = metrics

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Time a block; a block that raises is recorded too."""
        started = time.monotonic()
        try:
            yield
        finally:
            self._seconds[name] = round(time.monotonic() - started, 4)
            self._metrics.startup.labels(name).set(self._seconds[name])

    def seconds(self) -> dict[str, float]:
        """Length of each phase that has ended."""
        return dict(self._seconds)

    def __str__(self) -> str:
        return ", ".join(f"{name} {seconds:.2f} s" for name, seconds in self._seconds.items())
