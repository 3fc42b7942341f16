"""A cache of encoded features by content, bounded in bytes, with a disk below it if there is one. A miss costs time, never correctness.

Features that were used often and recently stay. A use counts half as much after every `HALF_LIFE_SECONDS`. The score of a feature is the
time at which one single use would count as much as all of its own: since all uses fade alike, only uses change the order of scores.
"""

from __future__ import annotations

import heapq
import itertools
import math
import time
from bisect import bisect_left
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Protocol

from mmd_workers.features.held import HeldFeatures
from mmd_workers.model.prompt import Feature

HALF_LIFE_SECONDS = 600.0


class Below(Protocol):
    """The tier that evicted features go to."""

    def keep(self, feature_id: str, feature: Feature) -> None:
        """Store a feature, soon and if there is room."""
        ...

    def __contains__(self, feature_id: str) -> bool:
        """Whether the feature is stored."""
        ...

    async def read(self, feature_id: str) -> Feature | None:
        """The feature; None if it is missing or cannot be read."""
        ...


_Coldest = tuple[float, int, str]  # score, number, feature id


@dataclass(slots=True)
class _Entry:
    feature: Feature
    score: float  # seconds on the clock


@dataclass(frozen=True, slots=True)
class Hot:
    """A feature and its score, as seconds from now: above 0 if its uses count more than one use now."""

    feature_id: str
    feature: Feature
    heat_seconds: float


class CacheRoom:
    """A snapshot of the bytes that a cache could free for features of other pods."""

    def __init__(self, now: float, free_bytes: int, held: Iterable[tuple[float, int]]) -> None:
        """`held`: score and bytes of each feature that the cache holds."""
        coldest_first = sorted(held)
        self._now = now
        self._scores = [score for score, _ in coldest_first]
        self._bytes = list(itertools.accumulate((size for _, size in coldest_first), initial=free_bytes))

    def bytes_for(self, heat_seconds: float) -> int:
        """Bytes that are free, or held by colder features."""
        return self._bytes[bisect_left(self._scores, self._now + heat_seconds)]


class FeatureCache:
    """Evicts the lowest score first; a feature larger than the whole budget is not kept in memory."""

    def __init__(
        self,
        budget_bytes: int,
        held: HeldFeatures | None = None,
        below: Below | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`held`: notes which features come and go. `below`: takes evicted features."""
        self.held = held if held is not None else HeldFeatures()
        self.budget_bytes = budget_bytes
        self.used_bytes = 0
        self._below = below
        self._clock = clock
        self._features: dict[str, _Entry] = {}
        self._coldest: list[_Coldest] = []  # one entry per feature, whose score may have risen since
        self._numbers = itertools.count()

    def get(self, feature_id: str) -> Feature | None:
        """The feature, if it is in memory. Counts as a use."""
        if (entry := self._features.get(feature_id)) is None:
            return None
        entry.score = _used_again(entry.score, self._clock())
        return entry.feature

    async def read_below(self, feature_id: str) -> Feature | None:
        """Read a feature that is not in memory from the disk."""
        return None if self._below is None else await self._below.read(feature_id)

    def __contains__(self, feature_id: str) -> bool:
        return feature_id in self._features or (self._below is not None and feature_id in self._below)

    def __len__(self) -> int:
        return len(self._features)

    def put(self, feature_id: str, feature: Feature) -> int:
        """Keep a feature, evicting until it fits; returns how many were evicted."""
        return self._put(feature_id, feature, self._clock())

    def put_handed_over(self, feature_id: str, feature: Feature, heat_seconds: float) -> bool:
        """Keep another pod's feature, unless that would evict a hotter one; returns whether it is kept."""
        if feature_id in self._features or not self.has_room_for(feature.num_bytes, heat_seconds):
            return False
        self._put(feature_id, feature, self._clock() + heat_seconds)
        return True

    def has_room_for(self, num_bytes: int, heat_seconds: float) -> bool:
        """Whether this many bytes are free, or held by colder features."""
        if num_bytes > self.budget_bytes:
            return False
        score, missing = self._clock() + heat_seconds, self.used_bytes + num_bytes - self.budget_bytes
        passed: list[_Coldest] = []
        while missing > 0 and (coldest := self._next_coldest()) is not None:
            passed.append(coldest)
            if coldest[0] >= score:
                break
            missing -= self._features[coldest[2]].feature.num_bytes
        for coldest in passed:
            heapq.heappush(self._coldest, coldest)
        return missing <= 0

    def room(self) -> CacheRoom:
        """A snapshot for many questions at once: each `has_room_for` would begin at the coldest feature."""
        entries = ((entry.score, entry.feature.num_bytes) for entry in self._features.values())
        return CacheRoom(self._clock(), self.budget_bytes - self.used_bytes, entries)

    def hottest(self, most: int, most_bytes: int) -> list[Hot]:
        """At most `most` features with the highest scores, as many as fit into `most_bytes`, hottest first."""
        now, hot_features, remaining_bytes = self._clock(), list[Hot](), most_bytes
        for feature_id, entry in sorted(self._features.items(), key=lambda item: -item[1].score):
            if len(hot_features) == most:
                break
            if entry.feature.num_bytes <= remaining_bytes:
                remaining_bytes -= entry.feature.num_bytes
                hot_features.append(Hot(feature_id, entry.feature, entry.score - now))
        return hot_features

    def _put(self, feature_id: str, feature: Feature, score: float) -> int:
        if feature_id in self._features:
            return 0
        if feature.num_bytes > self.budget_bytes:
            if self._below is not None:
                self._below.keep(feature_id, feature)
            return 0
        evictions = 0
        while self.used_bytes + feature.num_bytes > self.budget_bytes:
            coldest = self._next_coldest()
            assert coldest is not None, "an empty cache has room for all that fits into its budget"
            evicted_id = coldest[2]
            evicted = self._features.pop(evicted_id).feature
            self.used_bytes -= evicted.num_bytes
            if self._below is not None:
                self._below.keep(evicted_id, evicted)
            self.held.remove(evicted_id)
            evictions += 1
        self.used_bytes += feature.num_bytes
        self._features[feature_id] = _Entry(feature, score)
        heapq.heappush(self._coldest, (score, next(self._numbers), feature_id))
        self.held.add(feature_id)
        return evictions

    def _next_coldest(self) -> _Coldest | None:
        """Take the feature with the lowest score out of the heap."""
        while self._coldest:
            score, number, feature_id = heapq.heappop(self._coldest)
            if (current_score := self._features[feature_id].score) == score:
                return score, number, feature_id
            heapq.heappush(self._coldest, (current_score, number, feature_id))
        return None


def _used_again(score: float, now: float) -> float:
    """The score after one more use. Two uses at one time score as one use a half-life later."""
    return max(score, now) + HALF_LIFE_SECONDS * math.log2(1 + 2 ** (-abs(score - now) / HALF_LIFE_SECONDS))
