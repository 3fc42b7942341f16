"""How many requests a tenant may have, as timelines."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mmd_api.contract.errors import RateLimitError, TooManyRequestsError
from mmd_api.spec.observability import SloSpec
from mmd_api.tenants import TenantLimits
from mmd_workers.gateway.access.tenant_limits import AmountOfAMinute, TenantUsage
from mmd_workers.gateway.api.request_records import kept_promises
from mmd_workers.gateway.placement.timeline import Timeline


def limits(**which: int) -> TenantLimits:
    return TenantLimits.model_validate(which)


def refused(usage: TenantUsage, limits: TenantLimits, now: float, gateways: int = 1) -> RateLimitError:
    with pytest.raises(RateLimitError) as error:
        usage.begin("search", limits, gateways, now)
    return error.value


def test_requests_beyond_the_minute_limit_are_refused_until_the_oldest_expires() -> None:
    usage, limit = TenantUsage(), limits(requestsPerMinute=3)
    for now in (10.2, 20.0, 30.0):
        usage.begin("search", limit, 1, now)
        usage.end(0.1)
    error = refused(usage, limit, 40.0)
    assert error.retry_after_seconds == 31.0  # the first is forgotten at 71
    assert "requestsPerMinute is 3" in error.message
    assert "tenant search sent 3 requests in the last minute" in error.message
    refused(usage, limit, 70.9)
    usage.begin("search", limit, 1, 71.0)


def test_a_refused_request_does_not_count() -> None:
    usage, limit = TenantUsage(), limits(requestsPerMinute=1)
    usage.begin("search", limit, 1, 0.0)
    usage.end(0.1)
    for now in range(60):
        refused(usage, limit, float(now))
    usage.begin("search", limit, 1, 61.0)


def test_requests_in_flight_are_refused_beyond_the_limit_until_one_ends() -> None:
    usage, limit = TenantUsage(), limits(concurrentRequests=2)
    usage.begin("search", limit, 1, 0.0)
    usage.begin("search", limit, 1, 0.0)
    error = refused(usage, limit, 1.0)
    assert "has 2 requests in flight, and its limit concurrentRequests is 2" in error.message
    usage.end(20.0)
    usage.begin("search", limit, 1, 20.0)


def test_the_time_to_retry_follows_how_long_requests_take() -> None:
    usage, limit = TenantUsage(), limits(concurrentRequests=2)
    usage.begin("search", limit, 1, 0.0)
    usage.end(20.0)
    usage.begin("search", limit, 1, 20.0)
    usage.begin("search", limit, 1, 20.0)
    assert refused(usage, limit, 21.0).retry_after_seconds == 10.0  # two of 20 s each: one ends in half of it


def test_a_limit_is_divided_among_gateways_and_rounded_up() -> None:
    usage, limit = TenantUsage(), limits(concurrentRequests=3)
    usage.begin("search", limit, 2, 0.0)
    usage.begin("search", limit, 2, 0.0)
    error = refused(usage, limit, 0.0, gateways=2)
    assert "its limit concurrentRequests is 3, 2 at each of 2 gateways" in error.message
    usage.begin("search", limit, 1, 0.0)


def test_work_beyond_the_minute_limit_is_refused_until_enough_expires() -> None:
    usage, limit = TenantUsage(), limits(workSecondsPerMinute=10)
    for now, seconds in ((10.0, 4.0), (20.0, 5.9)):
        usage.check_work("search", limit, 1, 0.0, now)
        usage.begin_work(seconds, now)
    usage.check_work("search", limit, 1, 0.0, 30.0)  # 9.9 s
    with pytest.raises(RateLimitError) as error:
        usage.check_work("search", limit, 1, 0.2, 30.0)
    assert "had 9.9 s of work in the last minute and 0.2 s waiting" in error.value.message
    assert error.value.retry_after_seconds == 41.0  # the first is forgotten at 71
    usage.check_work("search", limit, 1, 0.2, 71.0)


def test_work_that_waits_alone_may_reach_the_limit() -> None:
    usage = TenantUsage()
    with pytest.raises(RateLimitError) as error:
        usage.check_work("search", limits(workSecondsPerMinute=10), 1, 12.0, 0.0)
    assert error.value.retry_after_seconds == 1.0


def test_tokens_of_a_day_are_refused_from_the_limit_on() -> None:
    usage, limit = TenantUsage(), limits(tokensPerDay=100)
    usage.tokens.add(99)
    usage.begin("search", limit, 3, 0.0)
    usage.tokens.add(1)
    error = refused(usage, limit, 1.0, gateways=3)
    assert "tenant search has had 100 tokens today, and its limit tokensPerDay is 100;" in error.message
    assert 0 < error.retry_after_seconds <= 86_400


def test_without_limits_nothing_is_refused() -> None:
    usage = TenantUsage()
    for _ in range(10_000):
        usage.begin("search", TenantLimits(), 1, 0.0)


@given(
    gaps=st.lists(st.floats(0, 40, allow_nan=False), max_size=120),
    limit=st.integers(1, 12),
    start=st.floats(0, 1e6),
)
def test_no_minute_exceeds_the_limit_and_waiting_as_told_is_enough(
    gaps: list[float], limit: int, start: float
) -> None:
    minute, let_in, now = AmountOfAMinute(), list[float](), start
    for gap in gaps:
        now += gap
        if (wait := minute.seconds_until_below(limit, now)) > 0:
            assert wait <= 61
            assert minute.count(now) == limit
            now = math.nextafter(now + wait, math.inf)
            assert minute.seconds_until_below(limit, now) == 0
        minute.add(now)
        let_in.append(now)
    for first in let_in:
        assert sum(first <= one < first + 60 for one in let_in) <= limit


def test_a_request_beyond_its_tenants_limits_misses_no_promise() -> None:
    slo = SloSpec(ttft_milliseconds=100)

    def kept(code: str) -> dict[str, bool]:
        return kept_promises(Timeline("one", arrived=0.0, status=429, code=code), slo)

    assert kept(RateLimitError.code) == {}
    assert kept(TooManyRequestsError.code) == {"ttft": False}
