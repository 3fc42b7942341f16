"""Back-off against a competing writer: when to repair an object that another client keeps changing. Pure; time is an argument."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
from dataclasses import dataclass

from mmd_operator.kube.pauses import Pauses

FREE_REPAIRS = 3
"""Repairs without a pause: a change made by mistake is undone at once, even if made twice."""
CALM_SECONDS = 600.0
"""After this long without a repair, an object is no longer contested."""
MAX_CONTESTS = 1000


@dataclass(slots=True)
class _Contest:
    repairs: int
    at: float  # time of the last repair, in monotonic seconds
    rival: str | None


class Contests:
    """Repairs of objects, or of single fields, by key. The pause between two repairs of one key doubles."""

    def __init__(self, pauses: Pauses) -> None:
        self._pauses = pauses
        self._contests: OrderedDict[Hashable, _Contest] = OrderedDict()

    def pause(self, key: Hashable, now: float) -> float:
        """Seconds until the object may be repaired again; 0: now."""
        contest = self._current(key, now)
        if contest is None or contest.repairs < FREE_REPAIRS:
            return 0.0
        doublings = min(contest.repairs - FREE_REPAIRS, 20)
        pause = min(self._pauses.first_contest_seconds * 2.0**doublings, self._pauses.last_contest_seconds)
        return max(0.0, contest.at + pause - now)

    def repaired(self, key: Hashable, now: float, rival: str | None) -> None:
        """Record a repair. `rival`: the field manager that had changed the object, if known."""
        contest = self._current(key, now) or _Contest(0, now, None)
        contest.repairs, contest.at, contest.rival = contest.repairs + 1, now, rival or contest.rival
        self._contests[key] = contest
        self._contests.move_to_end(key)
        while len(self._contests) > MAX_CONTESTS:
            self._contests.popitem(last=False)

    def against(self, key: Hashable, now: float) -> str | None:
        """The client that keeps changing the object, in words; None if none does."""
        contest = self._current(key, now)
        if contest is None or contest.repairs < FREE_REPAIRS:
            return None
        return f'field manager "{contest.rival}"' if contest.rival else "another client"

    def forget(self, key: Hashable) -> None:
        """Forget the repairs of an object that was removed."""
        self._contests.pop(key, None)

    def _current(self, key: Hashable, now: float) -> _Contest | None:
        contest = self._contests.get(key)
        if contest is not None and now - contest.at > CALM_SECONDS:
            del self._contests[key]
            return None
        return contest
