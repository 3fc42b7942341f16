"""Limits of a tenant's use, and when it may use more: requests in flight and per minute, work per minute, tokens per day.

`Gateway.admit` checks the limits on requests and tokens, `FairAdmission.ask` that on work. Time is an argument. Independent of HTTP.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from mmd_api.contract.errors import RateLimitError
from mmd_api.tenants import TenantLimits

WINDOW_SECONDS = 60
DAY_SECONDS = 86_400
MAX_RETRY_SECONDS = 60.0
DEFAULT_OUTPUT_TOKENS = 128
"""Expected tokens of an answer, until some of the tenant's answers have been seen."""
MAX_OWED_MINUTES = 60
"""Longest time for which a tenant is refused because its answers took more work than estimated."""
_NEWEST = 0.2  # weight of the newest request in means


class AmountOfAMinute:
    """Counts by whole seconds. An amount is kept for at least one minute, and at most one second longer."""

    def __init__(self) -> None:
        self._counts: deque[list[int]] = deque()  # [second, amount], the oldest first
        self._total = 0

    def add(self, now: float, amount: int = 1) -> None:
        """Count an amount. `now`: monotonic seconds."""
        second = math.floor(now)
        if not self._counts or self._counts[-1][0] != second:
            self._counts.append([second, 0])
        self._counts[-1][1] += amount
        self._total += amount

    def count(self, now: float) -> int:
        """The amount of the last minute."""
        while self._counts and now >= _forgotten_at(self._counts[0][0]):
            self._total -= self._counts.popleft()[1]
        return self._total

    def seconds_until_below(self, limit: int, now: float) -> float:
        """Seconds until fewer than `limit` remain if no more are added; 0 if that is so now."""
        remaining = self.count(now)
        if remaining < limit:
            return 0.0
        for second, amount in self._counts:
            remaining -= amount
            if remaining < limit:
                return _forgotten_at(second) - now
        return 0.0


def _forgotten_at(second: int) -> int:
    return second + 1 + WINDOW_SECONDS


class TokensOfADay:
    """Prompt and output tokens of a tenant since midnight UTC: the record of all gateways, and newer tokens of this one."""

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._day = self.day()
        self._recorded = self._unrecorded = 0
        self._credit = 0

    def day(self) -> int:
        """Number of the day since 1970."""
        return int(self._clock() // DAY_SECONDS)

    def add(self, tokens: int) -> None:
        """Count tokens."""
        self._begin_new_day()
        credited = min(self._credit, tokens)
        self._credit -= credited
        self._unrecorded += tokens - credited

    def give_back(self, tokens: int) -> None:
        """Give back counted tokens that were not used. The next tokens of the day are free instead, because records never fall."""
        self._begin_new_day()
        self._credit += tokens

    def total(self) -> int:
        """Tokens of the day, as far as this gateway knows."""
        self._begin_new_day()
        return self._recorded + self._unrecorded

    def unrecorded(self) -> int:
        """Tokens counted here that are not in the record yet."""
        self._begin_new_day()
        return self._unrecorded

    def record(self, day: int, total: int, added: int) -> None:
        """Note that a day's record was read or written. `total` includes `added` tokens that were unrecorded here."""
        self._begin_new_day()
        if day == self._day:
            self._recorded, self._unrecorded = total, self._unrecorded - added

    def recorded(self) -> int:
        """The latest total that was read or written."""
        self._begin_new_day()
        return self._recorded

    def seconds_left(self) -> float:
        """Seconds until the next day."""
        return DAY_SECONDS - self._clock() % DAY_SECONDS

    def _begin_new_day(self) -> None:
        """Forget all counts if the day has changed."""
        if (day := self.day()) != self._day:
            self._day, self._recorded, self._unrecorded, self._credit = day, 0, 0, 0


@dataclass(slots=True)
class TenantUsage:
    """A tenant's use of this gateway. Limits may change at any time; requests in flight are kept."""

    running: int = 0
    tokens: TokensOfADay = field(default_factory=TokensOfADay)
    expected_output_tokens: float = DEFAULT_OUTPUT_TOKENS  # tokens of an answer that is not cut short
    _minute: AmountOfAMinute = field(default_factory=AmountOfAMinute)
    _work_milliseconds: AmountOfAMinute = field(default_factory=AmountOfAMinute)
    _owed_seconds: float = 0.0  # work beyond estimates; each minute deducts the tenant's limit
    _owed_at: float = 0.0
    _mean_seconds: float = 0.0  # mean duration of a request; 0: none has ended

    def begin(self, tenant: str, limits: TenantLimits, gateways: int, now: float) -> None:
        """Count a request in.

        Raises:
            RateLimitError: a limit is reached, as in `check`.
        """
        self.check(tenant, limits, gateways, now)
        self.running += 1
        self._minute.add(now)

    def check(self, tenant: str, limits: TenantLimits, gateways: int, now: float) -> None:
        """Check whether one more request may come. `gateways`: number of gateways; each allows its part of the tenant's limits.

        Raises:
            RateLimitError: a limit is reached; it names the limit, and when one more may come.
        """
        max_running = _share(limits.concurrent_requests, gateways)
        if max_running is not None and self.running >= max_running:
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
        if limits.tokens_per_day is not None and self.tokens.total() >= limits.tokens_per_day:
            raise _reached(
                tenant,
                f"has had {self.tokens.total()} tokens today",
                "tokensPerDay",
                limits.tokens_per_day,
                1,  # the limit is for all gateways together
                self.tokens.seconds_left(),
            )

    def check_work(
        self, tenant: str, limits: TenantLimits, gateways: int, waiting_seconds: float, now: float
    ) -> None:
        """Check whether the tenant may have more work. `waiting_seconds`: its work that has not started.

        Raises:
            RateLimitError: the limit is reached.
        """
        if (max_seconds := self._pay(limits, gateways, now)) is None:
            return
        limit, waiting, owed = 1000 * max_seconds, round(1000 * waiting_seconds), self._owed_seconds
        if self._work_milliseconds.count(now) + waiting + 1000 * owed >= limit:
            until_paid = WINDOW_SECONDS * owed / max_seconds
            seconds = max(
                1.0, until_paid, self._work_milliseconds.seconds_until_below(max(1, limit - waiting), now)
            )
            beyond = f", and {owed:.1f} s before that were not estimated" if owed else ""
            raise _reached(
                tenant,
                f"had {self._work_milliseconds.count(now) / 1000:.1f} s of work in the last minute and {waiting_seconds:.1f} s waiting{beyond}",
                "workSecondsPerMinute",
                limits.work_seconds_per_minute,
                gateways,
                seconds,
            )

    def begin_work(self, seconds: float, now: float) -> None:
        """Count work that has started."""
        self._work_milliseconds.add(now, max(1, round(1000 * seconds)))

    def correct_work(self, limits: TenantLimits, gateways: int, seconds: float, now: float) -> None:
        """Correct the work of a request that has ended by its difference to the estimate given to `begin_work`.

        Additional work counts until enough minutes have paid for it.
        """
        max_seconds = self._pay(limits, gateways, now)
        if max_seconds is not None:
            self._owed_seconds = min(MAX_OWED_MINUTES * max_seconds, max(0.0, self._owed_seconds + seconds))

    def _pay(self, limits: TenantLimits, gateways: int, now: float) -> int | None:
        """Deduct the work that has been paid for, and return the tenant's limit at this gateway."""
        max_seconds = _share(limits.work_seconds_per_minute, gateways)
        paid = math.inf if max_seconds is None else max_seconds * (now - self._owed_at) / WINDOW_SECONDS
        self._owed_seconds, self._owed_at = max(0.0, self._owed_seconds - paid), now
        return max_seconds

    def note_answer(self, tokens: int, *, complete: bool) -> None:
        """Learn the length of the tenant's answers. Without `complete`, its limit or client cut the answer short, so it might have been longer."""
        if complete or tokens > self.expected_output_tokens:
            self.expected_output_tokens += (tokens - self.expected_output_tokens) * _NEWEST

    def counts(self, now: float) -> bool:
        """True if a request is in flight, or was begun in the last minute."""
        return self.running > 0 or self._minute.count(now) > 0

    def end(self, seconds: float) -> None:
        """Count a request out. `seconds`: its duration."""
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
