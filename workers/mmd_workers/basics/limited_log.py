"""Limits the rate of log lines that may come in large numbers."""

from __future__ import annotations

import logging
import time

_LOG_KINDS = 1024


class RateLimitedLog:
    """Logs the first message of a kind at once, then at most one every `period_seconds`, with the number suppressed."""

    def __init__(self, logger: logging.Logger, period_seconds: float = 5.0) -> None:
        self._logger = logger
        self._period = period_seconds
        self._last: dict[str, float] = {}
        self._suppressed: dict[str, int] = {}

    def warning(self, kind: str, message: str, cause: BaseException | None = None) -> None:
        """Log `message`, with the traceback of `cause`, unless a message of the same `kind` was logged within the period."""
        now = time.monotonic()
        if now - self._last.get(kind, -self._period) < self._period:
            self._suppressed[kind] = self._suppressed.get(kind, 0) + 1
            return
        if len(self._last) >= _LOG_KINDS:
            self._last.clear()
            self._suppressed.clear()
        self._last[kind] = now
        more = self._suppressed.pop(kind, 0)
        self._logger.warning("%s%s", message, f" ({more} similar suppressed)" if more else "", exc_info=cause)
