"""The queue of KV offers at a decode pod: the oldest request gets room first. Pure: time is an argument.

Offers are refused and repeated, not held open. Without this record every free block would go to whichever request asks next, and
a long request that was preempted might never find enough blocks free at once.
"""

from __future__ import annotations

REPEAT_SECONDS = 1.0  # an offer not repeated for this long has gone elsewhere
MAX_WAITING = 4096


class OfferQueue:
    """Requests refused a moment ago for lack of room, by id, with the time at which their gateways received them."""

    def __init__(self) -> None:
        self._waiting: dict[str, tuple[float, float]] = {}  # arrival, last refusal

    def __len__(self) -> int:
        return len(self._waiting)

    def waiting(self, now: float) -> int:
        """The number of requests that wait here."""
        self._waiting = {
            name: entry for name, entry in self._waiting.items() if now - entry[1] < REPEAT_SECONDS
        }
        return len(self._waiting)

    def ahead_of(self, request_id: str, arrived: float, now: float) -> int:
        """The number of older requests that wait here."""
        self.waiting(now)
        return sum((entry[0], name) < (arrived, request_id) for name, entry in self._waiting.items())

    def join(self, request_id: str, arrived: float, now: float) -> None:
        """Record that a request was refused now and is expected to ask again."""
        if request_id in self._waiting or len(self._waiting) < MAX_WAITING:
            self._waiting[request_id] = (arrived, now)

    def leave(self, request_id: str) -> None:
        """Forget a request that got its room, here or elsewhere, or has ended."""
        self._waiting.pop(request_id, None)
