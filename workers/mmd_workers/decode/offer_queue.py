"""The queue of KV offers at a decode pod: bounded overtaking by those who fit. Pure: time is an argument.

Offers are refused and repeated, not held open. Without this record every free block would go to whichever request asks next, and
a long request that was preempted might never find enough blocks free at once. A record that nobody may pass would instead let one
large request keep all younger ones out.
"""

from __future__ import annotations

from dataclasses import dataclass

from mmd_workers.basics.overtaking import next_in_line

REPEAT_SECONDS = 1.0  # an offer not repeated for this long is not waited for
FORGET_SECONDS = 60.0  # how long it is known how often a request was passed: a round over many decode pods may take seconds
MAX_WAITING = 4096


@dataclass(slots=True, eq=False)
class WaitingOffer:
    """A request refused for lack of room, or one that asks for room now. Times are in seconds."""

    request_id: str
    arrived: float  # when its gateway received it
    asked: float
    overtaken: int = (
        0  # younger requests that got room, or are asking for it, while this one was first in line
    )


class OfferQueue:
    """Requests that wait for room, by id."""

    def __init__(self) -> None:
        self._known: dict[str, WaitingOffer] = {}

    def waiting(self, now: float) -> int:
        """The number of requests that wait here."""
        return len(self._line(now))

    def turn(self, request_id: str, arrived: float, now: float) -> Turn | None:
        """The turn of a request to ask the engine for room; None if it must wait behind the first in line.

        The first in line counts as overtaken from now on, so simultaneous turns do not exceed the bound.
        """
        asking = self._known.get(request_id) or WaitingOffer(request_id, arrived, now)
        asking.asked = now
        others = [offer for offer in self._line(now) if offer is not asking]
        line = sorted([asking, *others], key=lambda offer: (offer.arrived, offer.request_id))
        if next_in_line(line, lambda offer: offer is asking) is None:
            return None
        return Turn(None if line[0] is asking else line[0])

    def join(self, request_id: str, arrived: float, now: float) -> None:
        """Record that a request was refused now and is expected to ask again."""
        if (offer := self._known.get(request_id)) is not None:
            offer.asked = now
            return
        if len(self._known) >= MAX_WAITING:
            self._known = {offer.request_id: offer for offer in self._line(now)}
        if len(self._known) < MAX_WAITING:
            self._known[request_id] = WaitingOffer(request_id, arrived, now)

    def leave(self, request_id: str) -> None:
        """Forget a request that got its room, here or elsewhere, or has ended."""
        self._known.pop(request_id, None)

    def _line(self, now: float) -> list[WaitingOffer]:
        """The requests that asked a moment ago. Those that have not asked for long are forgotten."""
        self._known = {
            name: offer for name, offer in self._known.items() if now - offer.asked < FORGET_SECONDS
        }
        return [offer for offer in self._known.values() if now - offer.asked < REPEAT_SECONDS]


@dataclass(frozen=True, slots=True)
class Turn:
    """Permission to ask the engine for room, and the request passed by it, if any."""

    passed: WaitingOffer | None

    def unused(self) -> None:
        """Record that no room was given: nobody was overtaken."""
        if self.passed is not None:
            self.passed.overtaken -= 1
