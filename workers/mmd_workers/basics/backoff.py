"""Pauses between two tries of the same thing. Independent of the thing and of the clock."""

from __future__ import annotations

import random


class Backoff:
    """Growing, partly random pauses.

    Each pause may be twice as long as the one before, up to the longest. Half of it is random, so that callers that failed together do
    not retry together.
    """

    def __init__(self, first_seconds: float, longest_seconds: float) -> None:
        self._seconds = first_seconds
        self._longest_seconds = longest_seconds

    def next(self) -> float:
        """Seconds to wait before the next try."""
        seconds = self._seconds
        self._seconds = min(2 * seconds, self._longest_seconds)
        return seconds * random.uniform(0.5, 1.0)  # noqa: S311
