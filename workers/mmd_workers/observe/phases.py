"""Times the phases of a request on this pod. Lengths come from the monotonic clock, so a stepped wall clock cannot bend them."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from mmd_workers.wire.messages import Phase


class PhaseClock:
    """Phases of one request in the order they ended. Unix seconds are anchored once, when the clock is made."""

    def __init__(self) -> None:
        self._offset = time.time() - time.monotonic()
        self._open: dict[str, tuple[float, dict[str, Any]]] = {}
        self.phases: list[Phase] = []

    def start(self, name: str, **detail: Any) -> None:
        """Begin a phase; one that is open under this name begins anew."""
        self._open[name] = (time.monotonic(), detail)

    def end(self, name: str, **detail: Any) -> Phase:
        """End a phase that was started; `detail` joins what `start` was given.

        Raises:
            KeyError: it was not started.
        """
        started, known = self._open.pop(name)
        return self.add(name, started, time.monotonic(), **known, **detail)

    def add(self, name: str, start_monotonic: float, end_monotonic: float, **detail: Any) -> Phase:
        """Record a phase timed elsewhere in this process (`time.monotonic()` values)."""
        phase = Phase(name, start_monotonic + self._offset, end_monotonic + self._offset, detail)
        self.phases.append(phase)
        return phase

    @contextmanager
    def phase(self, name: str, **detail: Any) -> Iterator[dict[str, Any]]:
        """Time a block; the dictionary it yields takes details found on the way. A block that raises is recorded too."""
        started = time.monotonic()
        found: dict[str, Any] = dict(detail)
        try:
            yield found
        finally:
            self.add(name, started, time.monotonic(), **found)
