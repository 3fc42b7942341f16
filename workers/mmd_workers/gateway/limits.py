"""How many requests a tenant may have, in flight and in a minute, and when one more may come. Time is an argument; independent of HTTP."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field

from mmd_api.contract.errors import RateLimitError
from mmd_api.tenants import TenantLimits

WINDOW_SECONDS = 60
MAX_RETRY_SECONDS = 60.0
_NEWEST = 0.2  # weight of the newest request in the mean duration


class RequestsOfAMinute:
    """Counts by whole seconds; none is forgotten before it is a minute old, or later than a second after that."""

    def __init__(self) -> None:
        self._counts: deque[list[int]] = deque()  # [second, requests], the oldest first
        self._total = 0

    def add(self, now: float) -> None:
        """A request has come. `now`: monotonic seconds."""
        second = math.floor(now)
        if not self._counts or self._counts[-1][0] != second:
            self._counts.append([second, 0])
        self._counts[-1][1] += 1
        self._total += 1

    def count(self, now: float) -> int:
        """Requests of the last minute."""
        while self._counts and now >= _forgotten_at(self._counts[0][0]):
            self._total -= self._counts.popleft()[1]
        return self._total

    def seconds_until_below(self, limit: int, now: float) -> float:
        """Seconds until fewer than `limit` are left if no more come; 0 if that is so now."""
        left = self.count(now)
        if left < limit:
            return 0.0
        for second, requests in self._counts:
            left -= requests
            if left < limit:
                return _forgotten_at(second) - now
        return 0.0


def _forgotten_at(second: int) -> int:
    return second + 1 + WINDOW_SECONDS


@dataclass(slots=True)
class TenantUsage:
    """What a tenant uses at this gateway. Limits may change at any time; requests in flight stay."""

    running: int = 0
    _minute: RequestsOfAMinute = field(default_factory=RequestsOfAMinute)
    _mean_seconds: float = 0.0  # of a request; 0: none has ended

    def begin(self, tenant: str, limits: TenantLimits, gateways: int, now: float) -> None:
        """Count a request in. `gateways`: how many share the tenant's requests, each of which allows its part of the limits.

        Raises:
            RateLimitError: a limit is reached; it names the limit, and when one more may come.
        """
        most = _share(limits.concurrent_requests, gateways)
        if most is not None and self.running >= most:
            seconds = min(MAX_RETRY_SECONDS, max(1.0, self._mean_seconds / self.running))
            raise _reached(
                tenant,
                f"has {self.running} requests in flight",
                "concurrentRequests",
                limits.concurrent_requests,
                gateways,
                seconds,
            )
        per_minute = _share(limits.requests_per_minute, gateways)
        if per_minute is not None and (seconds := self._minute.seconds_until_below(per_minute, now)) > 0:
            raise _reached(
                tenant,
                f"sent {self._minute.count(now)} requests in the last minute",
                "requestsPerMinute",
                limits.requests_per_minute,
                gateways,
                seconds,
            )
        self.running += 1
        self._minute.add(now)

    def counts(self, now: float) -> bool:
        """Whether a request is in flight, or was begun in the last minute."""
        return self.running > 0 or self._minute.count(now) > 0

    def end(self, seconds: float) -> None:
        """Count a request out, which took so long."""
        self.running -= 1
        self._mean_seconds += (seconds - self._mean_seconds) * (_NEWEST if self._mean_seconds else 1.0)


def _share(limit: int | None, gateways: int) -> int | None:
    return None if limit is None else math.ceil(limit / max(1, gateways))


def _reached(
    tenant: str, fact: str, name: str, limit: int | None, gateways: int, seconds: float
) -> RateLimitError:
    shared = f", {_share(limit, gateways)} at each of {gateways} gateways" if gateways > 1 else ""
    return RateLimitError(
        f"tenant {tenant} {fact}, and its limit {name} is {limit}{shared}; retry in {math.ceil(seconds)} s, "
        "or have its limit raised",
        retry_after_seconds=seconds,
    )
