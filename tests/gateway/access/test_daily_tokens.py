"""Tokens of a day: counted in memory, recorded on a real NATS server, shared by gateways and kept over their restarts."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from mmd_api.contract.errors import PeerLostError, RateLimitError
from mmd_api.contract.subjects import Subjects
from mmd_api.tenants import Tenant, new_key
from mmd_workers.gateway.access.daily_tokens import DailyTokens
from mmd_workers.gateway.access.keys import KnownTenant
from mmd_workers.gateway.access.tenant_limits import DAY_SECONDS, TokensOfADay
from mmd_workers.wire.bus import Bus
from mmd_workers.wire.server import NatsServer
from mmd_workers.wire.tenant_tokens import RecordedTokens, TokenRecords
from support.harness.waiting import until
from tests.gateway.running import Launch
from tests.gateway.spawned import BODY
from tests.gateway.tenancy import AUTH, bearer, tenant, write

_names = itertools.count()


@pytest.fixture
async def bus(nats_server: NatsServer) -> AsyncIterator[Bus]:
    subjects = Subjects("test", f"tokens{next(_names)}", "r1")
    made = await Bus.connect(nats_server.url, "gateway-0", subjects)
    yield made
    await made.close()


def limited(name: str = "search", limit: int = 1000) -> KnownTenant:
    return KnownTenant(Tenant.model_validate({"name": name, "keys": [], "limits": {"tokensPerDay": limit}}))


def gateway(bus: Bus, *tenants: KnownTenant) -> DailyTokens:
    return DailyTokens(TokenRecords(bus), lambda: tenants)


def test_a_day_ends_at_midnight_utc() -> None:
    now = [3 * DAY_SECONDS - 10.0]
    tokens = TokensOfADay(lambda: now[0])
    tokens.add(70)
    tokens.record(2, 100, 0)
    assert (tokens.total(), tokens.seconds_left()) == (170, 10.0)
    now[0] += 10.0
    assert (tokens.total(), tokens.seconds_left()) == (0, DAY_SECONDS)


def test_tokens_given_back_offset_later_tokens_of_the_same_day() -> None:
    now = [3 * DAY_SECONDS - 10.0]
    tokens = TokensOfADay(lambda: now[0])
    tokens.add(70)
    tokens.give_back(50)
    assert tokens.total() == 70, "what other gateways may know never falls"
    tokens.add(30)
    assert tokens.total() == 70
    tokens.add(30)
    assert tokens.total() == 80
    tokens.give_back(50)
    now[0] += 10.0
    tokens.add(30)
    assert tokens.total() == 30


def test_a_record_of_another_day_changes_nothing() -> None:
    tokens = TokensOfADay(lambda: 3.5 * DAY_SECONDS)
    tokens.add(5)
    tokens.record(2, 100, 5)
    assert (tokens.total(), tokens.unrecorded()) == (5, 5)


async def test_gateways_add_up_what_each_has_counted(bus: Bus) -> None:
    one, other = limited(), limited()
    first, second = gateway(bus, one), gateway(bus, other)
    one.usage.tokens.add(30)
    other.usage.tokens.add(12)
    for exchanging in (first, second, first):
        await exchanging.exchange()
    assert (one.usage.tokens.total(), other.usage.tokens.total()) == (42, 42)


async def test_a_gateway_learns_from_others_that_a_tenants_day_is_spent(bus: Bus) -> None:
    one, other = limited(limit=1000), limited(limit=1000)
    first, second = gateway(bus, one), gateway(bus, other)
    await second.exchange()
    one.usage.tokens.add(1000)
    await first.exchange()
    await second.exchange()
    with pytest.raises(RateLimitError, match="1000 tokens today"):
        other.usage.begin("search", other.tenant.limits, 2, time.monotonic())


async def test_gateways_that_add_at_the_same_time_lose_nothing(bus: Bus) -> None:
    known = [limited(), limited()]
    pair = [gateway(bus, one) for one in known]
    for _ in range(20):
        for one in known:
            one.usage.tokens.add(1)
        await asyncio.gather(*(one.exchange() for one in pair))
    for one in (*pair, *pair):
        await one.exchange()
    assert [one.usage.tokens.total() for one in known] == [40, 40]


async def test_a_restarted_gateway_goes_on_from_the_record(bus: Bus) -> None:
    before, after = limited(), limited()
    before.usage.tokens.add(99)
    await gateway(bus, before).exchange()
    await gateway(bus, after).exchange()
    assert after.usage.tokens.total() == 99


async def test_a_server_that_lost_its_records_gets_them_back(bus: Bus) -> None:
    known = limited()
    exchanging = gateway(bus, known)
    known.usage.tokens.add(50)
    await exchanging.exchange()
    await TokenRecords(bus)._manager.delete_stream(bus.subjects.tokens_stream)
    known.usage.tokens.add(1)
    with pytest.raises(PeerLostError):
        await exchanging.exchange()
    exchanging._there = False  # as `run` sets it
    await exchanging.exchange()
    assert (await TokenRecords(bus).read(known.usage.tokens.day(), "search")).total == 51


async def test_a_writer_that_has_read_an_older_total_is_refused(bus: Bus) -> None:
    records = TokenRecords(bus)
    await records.ensure()
    await records.ensure()
    assert await records.read(1, "search") == RecordedTokens()
    assert await records.write(1, "search", 5, RecordedTokens())
    assert not await records.write(1, "search", 6, RecordedTokens())
    read = await records.read(1, "search")
    assert read.total == 5
    assert await records.write(1, "search", 7, read)
    assert (await records.read(2, "search")).total == 0


async def test_a_daily_token_limit_spans_gateways_and_restarts(
    launch: Launch, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mmd_workers.process.live.CHECK_SECONDS", 0.02)
    monkeypatch.setattr("mmd_workers.gateway.access.daily_tokens.PERIOD_SECONDS", 0.02)
    key, file = new_key(), tmp_path / "keys.yaml"
    write(file, tenant("search", key, limits={"tokensPerDay": 20}))
    first = await launch(keys_file=str(file), auth=AUTH)
    worker = await first.worker()

    async def status(running) -> int:
        answer = await running.http.post("/v1/chat/completions", json=BODY, headers=bearer(key))
        if answer.status_code == 429:
            assert "tokensPerDay is 20" in answer.json()["error"]["message"]
            assert int(answer.headers["retry-after"]) <= DAY_SECONDS
        return answer.status_code

    async def until_refused(running) -> None:
        async def is_refused() -> bool:
            answer = await running.http.post("/v1/chat/completions", json=BODY, headers=bearer(key))
            return answer.status_code == 429

        await until(is_refused, pause_seconds=0.05)
        assert await status(running) == 429

    if time.time() % DAY_SECONDS > DAY_SECONDS - 60:
        pytest.skip("the day is about to end")
    assert await status(first) == 200
    await until_refused(first)
    second = await launch(keys_file=str(file), auth=AUTH, pod="gateway-1", beside=first)
    second.workers.append(worker)
    await second.until_known()
    second.workers.clear()
    await until_refused(second)
