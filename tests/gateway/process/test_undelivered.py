"""An answer that is finished has not been received: a gateway that leaves waits for those who read slowly."""

from __future__ import annotations

import asyncio
import math
import socket
from collections.abc import Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any, cast

import pytest

from mmd_workers.gateway.api.undelivered import undelivered_bytes
from mmd_workers.gateway.process import gateway_process
from mmd_workers.gateway.process.leave import Leave, OtherGateways
from support.harness.waiting import until

SENT = b"x" * 200_000


@pytest.fixture(params=["127.0.0.1", "::1"])
def connection(request: pytest.FixtureRequest) -> Iterator[tuple[socket.socket, socket.socket, int]]:
    """The gateway's end and that of a client that has not read yet, and the port."""
    family = socket.AF_INET6 if ":" in request.param else socket.AF_INET
    with socket.socket(family) as listener, socket.socket(family) as client:
        listener.bind((request.param, 0))
        listener.listen()
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.connect(listener.getsockname())
        accepted, _ = listener.accept()
        with accepted:
            yield accepted, client, listener.getsockname()[1]


def received(client: socket.socket) -> int:
    count = 0
    while part := client.recv(65_536):
        count += len(part)
    return count


async def test_what_was_sent_on_a_closed_connection_counts_until_it_is_received(
    connection: tuple[socket.socket, socket.socket, int],
) -> None:
    accepted, client, port = connection
    assert undelivered_bytes(port) == 0
    accepted.sendall(SENT)
    accepted.close()
    assert undelivered_bytes(port) > 100_000
    assert undelivered_bytes(port + 1) == 0
    assert await asyncio.to_thread(received, client) == len(SENT)
    await until(lambda: undelivered_bytes(port) == 0)


async def test_a_gateway_that_leaves_waits_until_clients_have_received_their_answers(
    connection: tuple[socket.socket, socket.socket, int],
) -> None:
    accepted, client, port = connection
    accepted.sendall(SENT)
    accepted.close()

    async def announce() -> None:
        pass

    gateway: Any = SimpleNamespace(
        running=0, last_request=-math.inf, draining=False, drained_at=0.0, picker=None
    )
    leave = Leave(gateway, OtherGateways("gateway-0", 1), partial(undelivered_bytes, port), is_replaced=False)
    heartbeater = cast(Any, SimpleNamespace(announce=announce))
    leaving = asyncio.create_task(gateway_process._drain(gateway, heartbeater, leave, 600))
    await asyncio.sleep(0.6)
    assert not leaving.done()
    await asyncio.to_thread(received, client)
    async with asyncio.timeout(30):
        await leaving
