"""A nats-server for a whole test session, and buses with subjects of their own. Use: `pytest_plugins = ["nats_fixture"]`."""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator

import pytest
import pytest_asyncio

from mmd_api.subjects import Subjects
from mmd_workers.wire.bus import Bus
from mmd_workers.wire.server import NatsServer

_counter = itertools.count()


@pytest.fixture(scope="session")
def nats_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NatsServer]:
    server = NatsServer(tmp_path_factory.mktemp("nats")).start()
    yield server
    server.kill()


@pytest.fixture
def own_nats_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NatsServer]:
    """A server that the test may stop, kill and start again."""
    server = NatsServer(tmp_path_factory.mktemp("own-nats")).start()
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
