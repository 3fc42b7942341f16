"""A nats-server for a whole test session, and buses with their own subjects.

Use: `pytest_plugins = ["support.servers.nats_fixture"]`.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator

import pytest
import pytest_asyncio

from mmd_api.contract.errors import OverloadedError
from mmd_api.contract.subjects import Subjects
from mmd_cli.local.pods import free_port
from mmd_workers.wire.bus import Bus
from mmd_workers.wire.codec import Frame
from mmd_workers.wire.messages.message_parts import Acknowledged
from mmd_workers.wire.server import NatsServer
from support.harness.waiting import until

_counter = itertools.count()


@pytest.fixture(scope="session")
def nats_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NatsServer]:
    server = NatsServer(tmp_path_factory.mktemp("nats")).start()
    yield server
    server.kill()


@pytest.fixture
def own_nats_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NatsServer]:
    """A server that the test may stop, kill and start again."""
    server = NatsServer(tmp_path_factory.mktemp("own-nats"), port=free_port()).start()
    yield server
    server.kill()


@pytest.fixture
def subjects() -> Subjects:
    """Subjects that no other test of this session uses."""
    return Subjects("test", f"t{next(_counter)}", "r1")


@pytest_asyncio.fixture
async def connect(
    request: pytest.FixtureRequest, subjects: Subjects
) -> AsyncIterator[Callable[[str], Awaitable[Bus]]]:
    """`await connect("name")` gives a bus on the test's server, closed when the test ends."""
    fixture = "own_nats_server" if "own_nats_server" in request.fixturenames else "nats_server"
    server: NatsServer = request.getfixturevalue(fixture)
    buses: list[Bus] = []

    async def make(name: str) -> Bus:
        bus = await Bus.connect(server.url, name, subjects)
        buses.append(bus)
        return bus

    yield make
    for bus in buses:
        await bus.close(timeout=1.0)


@pytest.fixture
def cut_off(own_nats_server: NatsServer) -> Callable[[Bus], Awaitable[None]]:
    """`await cut_off(bus)` ends the server, and fills to the last byte what the bus may send once it is back."""

    async def fill(bus: Bus) -> None:
        await asyncio.to_thread(own_nats_server.kill)
        await until(lambda: not bus.is_connected)
        for num_bytes in (900_000, 10_000, 0):
            while True:
                try:
                    await bus.publish("elsewhere", Frame(Acknowledged(), bytes(num_bytes)))
                except OverloadedError:
                    break

    return fill
