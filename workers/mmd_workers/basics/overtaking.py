"""Bounded overtaking: who fits passes those who do not, but the first in line is passed only so often. Pure.

First come, first served lets one large waiter hold up all small ones; taking whoever fits lets small ones starve the large one. Batch
schedulers call the way between them backfilling.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Protocol, TypeVar

MAX_OVERTAKEN = 16
"""How many others may pass the first in line. So at most `MAX_OVERTAKEN * (n + 1)` of those behind it pass a waiter with n others ahead."""


class Waiter(Protocol):
    """Somebody who waits for room."""

    overtaken: int  # how many others passed it while it was first in line


W = TypeVar("W", bound=Waiter)


def next_in_line(line: Iterable[W], fits: Callable[[W], bool]) -> W | None:
    """The waiter to serve now; None if nobody is to be served. The caller removes it from the line.

    This is the first that fits. If the first of all does not fit and has been overtaken `MAX_OVERTAKEN` times, nobody passes it, so
    that the room that is freed adds up until it fits. Those who fit then wait for this one waiter, not for others that do not fit.
    """
    first: W | None = None
    for waiter in line:
        if fits(waiter):
            if first is not None:
                first.overtaken += 1
            return waiter
        if first is None:
            first = waiter
            if first.overtaken >= MAX_OVERTAKEN:
                return None
    return None
