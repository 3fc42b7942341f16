"""Progress and rate of a download. Threads that download count its bytes, threads that report read them."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable

from mmd_api.contract.weights import WeightsProgress, WeightsState

WINDOW_SECONDS = 20.0
"""Window over which the rate is measured."""


class DownloadProgress:
    """Bytes present and bytes expected. `clock`: monotonic seconds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock, self._lock = clock, threading.Lock()
        self._state: WeightsState = "Waiting"
        self._bytes = self._verified_bytes = self._total_bytes = 0
        self._received: deque[tuple[float, int]] = deque()
        self._began = clock()

    def enter(self, state: WeightsState) -> None:
        """Change the state of the download."""
        with self._lock:
            if state != self._state:
                self._state, self._began = state, self._clock()
                self._received.clear()

    def expect(self, total_bytes: int) -> None:
        """Set the bytes of all downloads together."""
        with self._lock:
            self._total_bytes = total_bytes

    def present(self, size: int) -> None:
        """Count bytes that need no download; a negative number must be downloaded again."""
        with self._lock:
            self._bytes += size

    def received(self, size: int) -> None:
        """Count downloaded bytes."""
        with self._lock:
            now = self._clock()
            self._bytes += size
            self._received.append((now, size))
            self._forget(now)

    def verified(self, size: int) -> None:
        """Count bytes read again for their digest."""
        with self._lock:
            self._verified_bytes += size

    def snapshot(self) -> WeightsProgress:
        """The current progress."""
        with self._lock:
            now = self._clock()
            self._forget(now)
            seconds = min(WINDOW_SECONDS, now - self._began)
            rate = round(sum(size for _, size in self._received) / seconds) if seconds > 0 else 0
            remaining = max(0, self._total_bytes - self._bytes)
            return WeightsProgress(
                state=self._state,
                bytes=max(0, self._bytes),
                total_bytes=self._total_bytes,
                verified_bytes=self._verified_bytes,
                bytes_per_second=rate,
                remaining_seconds=-(-remaining // rate) if rate and self._state == "Downloading" else None,
            )

    def _forget(self, now: float) -> None:
        while self._received and now - self._received[0][0] > WINDOW_SECONDS:
            self._received.popleft()
