"""What the NATS client leaves behind, and how long it takes, when a request cannot be sent."""

from __future__ import annotations

import asyncio

import pytest
from nats.aio.client import Client

from mmd_api.contract.errors import DeadlineError, OverloadedError
from mmd_workers.wire.messages.prefill import Cancel, Placed

pytest_plugins = ["support.servers.nats_fixture"]


async def test_a_request_that_cannot_be_sent_leaves_nothing_behind(own_nats_server, connect, cut_off):
    bus = await connect("here")
    with pytest.raises(DeadlineError):
        await ask_nobody(bus)  # the client makes its inbox with the first request
    await cut_off(bus)
    for _ in range(100):
        with pytest.raises(OverloadedError):
            await bus.request("elsewhere", Cancel("r", 0), Placed, timeout=1.0)
    assert len(bus.client._resp_map) == 0


async def test_a_request_cancelled_while_it_is_sent_leaves_nothing_behind(connect, monkeypatch):
    bus = await connect("here")
    sending = asyncio.Event()

    async def stuck(*_args: object, **_options: object) -> None:
        sending.set()
        await asyncio.Event().wait()

    monkeypatch.setattr(Client, "publish", stuck)
    asking = asyncio.create_task(bus.request("elsewhere", Cancel("r", 0), Placed, timeout=60.0))
    await sending.wait()
    asking.cancel()
    await asyncio.wait([asking])
    assert asking.cancelled()
    assert len(bus.client._resp_map) == 0


async def test_the_time_limit_of_a_request_includes_sending_it(connect, monkeypatch):
    bus = await connect("here")

    async def stuck(*_args: object, **_options: object) -> None:
        await asyncio.Event().wait()

    monkeypatch.setattr(Client, "publish", stuck)
    async with asyncio.timeout(30):
        with pytest.raises(DeadlineError, match="no reply on elsewhere within"):
            await bus.request("elsewhere", Cancel("r", 0), Placed, timeout=0.1)


async def ask_nobody(bus) -> None:
    async def hang(_: Cancel) -> Placed:
        await asyncio.Event().wait()
        raise AssertionError

    await bus.serve("silent", Cancel, hang)
    await bus.request("silent", Cancel("r", 0), Placed, timeout=0.1)
