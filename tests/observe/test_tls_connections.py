"""Connections with TLS have the bounds of those without, from before their handshake on."""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import AsyncIterator, Callable
from functools import partial
from itertools import pairwise
from pathlib import Path

import pytest
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route, Router

from mmd_workers.gateway.access.certificate import load_pair
from mmd_workers.observe import server as module
from mmd_workers.observe import tls
from mmd_workers.observe.server import HttpServer
from support.harness.waiting import is_closed, until
from support.servers.certificates import Authority

LIMIT = 3
ADDRESS = "127.0.0.1"
Stream = tuple[asyncio.StreamReader, asyncio.StreamWriter]


class Serving:
    """A server with TLS, whose `/endless` answers without end until its client has gone."""

    def __init__(self, tmp_path: Path) -> None:
        self.authority = Authority()
        pair = self.authority.issue()
        loaded = load_pair(pair["tls.crt"].encode(), pair["tls.key"].encode())
        self.ended, self.sent_bytes = asyncio.Event(), 0
        table = Router([Route("/fast", self._fast), Route("/endless", self._endless)])
        self.server = HttpServer(table, ADDRESS, 0, context=lambda: loaded.context)

    async def _fast(self, request: Request) -> Response:
        return PlainTextResponse(request.url.scheme)

    async def _endless(self, _: Request) -> Response:
        return StreamingResponse(self._pieces())

    async def _pieces(self) -> AsyncIterator[bytes]:
        try:
            while True:
                await asyncio.sleep(0)
                self.sent_bytes += 65536
                yield b"x" * 65536
        finally:
            self.ended.set()

    async def plain(self) -> Stream:
        return await asyncio.open_connection(ADDRESS, self.server.port)

    async def get(self, path: str) -> bytes:
        """An answer over a new connection, to its end."""
        reader, writer = await asyncio.open_connection(
            ADDRESS, self.server.port, ssl=self.authority.trusted(), server_hostname="localhost"
        )
        writer.write(f"GET /{path} HTTP/1.1\r\nHost: {ADDRESS}\r\nConnection: close\r\n\r\n".encode())
        data = await asyncio.wait_for(reader.read(), 30)
        writer.close()
        return data


@pytest.fixture
async def serving(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Serving]:
    monkeypatch.setattr(module, "MAX_CONNECTIONS", LIMIT)
    one = Serving(tmp_path)
    await one.server.start()
    yield one
    await one.server.stop()


async def test_connections_that_never_finish_their_handshake_are_bounded_and_lock_nobody_out(
    serving: Serving,
) -> None:
    silent = [await serving.plain() for _ in range(LIMIT)]
    assert (await serving.get("fast")).endswith(b"https")
    assert await asyncio.wait_for(silent[0][0].read(), 30) == b"", "the one that waited longest was closed"
    more = [await serving.plain() for _ in range(3 * LIMIT)]
    for reader, _ in (*silent[1:], *more[: 2 * LIMIT]):
        assert await asyncio.wait_for(reader.read(), 30) == b""
    assert (await serving.get("fast")).endswith(b"https")
    for _, writer in (*silent, *more):
        writer.close()


async def test_a_handshake_has_a_deadline(serving: Serving, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tls, "HANDSHAKE_SECONDS", 0.2)
    reader, writer = await serving.plain()
    assert await asyncio.wait_for(reader.read(), 30) == b""
    writer.close()
    reader, writer = await serving.plain()
    writer.write(b"GET /fast HTTP/1.1\r\n\r\n")
    assert b"HTTP" not in await asyncio.wait_for(reader.read(), 30), "not TLS at all"
    writer.close()


async def test_handshakes_take_short_turns_and_let_the_loop_go_on() -> None:
    now, done = 0.0, []

    def step(number: int) -> None:
        nonlocal now
        now += tls.TURN_SECONDS / 2
        done.append(number)

    handshakes = tls.Handshakes(lambda: now)
    for number in range(20):
        handshakes.add(partial(step, number))
    at_each_iteration = [0]
    async with asyncio.timeout(30):
        while len(done) < 20:
            await asyncio.sleep(0)
            at_each_iteration.append(len(done))
    assert done == list(range(20))
    assert max(b - a for a, b in pairwise(at_each_iteration)) == 2


async def test_a_step_that_fails_holds_up_no_other() -> None:
    handshakes, done = tls.Handshakes(), asyncio.Event()
    asyncio.get_running_loop().set_exception_handler(lambda *_: None)

    def fail() -> None:
        raise RuntimeError

    handshakes.add(fail)
    handshakes.add(done.set)
    await asyncio.wait_for(done.wait(), 30)


def hello() -> bytes:
    """The first message of a client, which anyone may send again and again."""
    received, sent = ssl.MemoryBIO(), ssl.MemoryBIO()
    client = ssl.create_default_context().wrap_bio(received, sent, server_hostname="localhost")
    with pytest.raises(ssl.SSLWantReadError):
        client.do_handshake()
    return sent.read()


async def test_clients_that_replay_a_hello_are_answered_a_few_in_each_iteration(
    serving: Serving, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MAX_CONNECTIONS", 200)
    monkeypatch.setattr(tls, "TURN_SECONDS", 1e-9)
    streams = [await serving.plain() for _ in range(50)]
    message, steps, most = hello(), 0, 0
    step = tls.TlsConnection._take_step

    def counted(connection: tls.TlsConnection) -> None:
        nonlocal steps
        steps += 1
        step(connection)

    monkeypatch.setattr(tls.TlsConnection, "_take_step", counted)
    for _, writer in streams:
        writer.write(message)
    answers = asyncio.gather(*(reader.readexactly(1) for reader, _ in streams))
    async with asyncio.timeout(60):
        while not answers.done():
            before = steps
            await asyncio.sleep(0)
            most = max(most, steps - before)
    assert await answers == [b"\x16"] * 50, "a handshake message"
    assert steps >= 50
    assert most == 1
    assert (await serving.get("fast")).endswith(b"https")
    for _, writer in streams:
        writer.close()


async def test_what_a_client_sends_before_its_turn_is_not_kept(
    serving: Serving, monkeypatch: pytest.MonkeyPatch
) -> None:
    waiting: list[Callable[[], None]] = []
    monkeypatch.setattr(serving.server._handshakes, "add", waiting.append)
    _, writer = await serving.plain()
    await until(lambda: waiting)
    (connection,) = serving.server._connections._open
    assert not connection._raw.is_reading()
    writer.transport.abort()
    waiting.pop()()


async def test_a_client_that_does_not_read_is_bounded_and_cut_off(
    serving: Serving, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "WRITE_SECONDS", 1.0)
    quiet = socket.socket()
    quiet.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    quiet.connect((ADDRESS, serving.server.port))
    quiet.setblocking(True)
    wrapped = await asyncio.to_thread(
        serving.authority.trusted().wrap_socket, quiet, server_hostname="localhost"
    )
    wrapped.sendall(f"GET /endless HTTP/1.1\r\nHost: {ADDRESS}\r\n\r\n".encode())
    await asyncio.wait_for(serving.ended.wait(), 60)
    assert serving.sent_bytes < 16 << 20
    wrapped.close()


async def test_each_connection_takes_the_context_that_is_current_as_it_comes(
    serving: Serving, tmp_path: Path
) -> None:
    other = Authority()
    pair = other.issue()
    context = load_pair(pair["tls.crt"].encode(), pair["tls.key"].encode()).context
    reader, writer = await asyncio.open_connection(
        ADDRESS, serving.server.port, ssl=serving.authority.trusted(), server_hostname="localhost"
    )
    serving.server._context = lambda: context
    writer.write(f"GET /fast HTTP/1.1\r\nHost: {ADDRESS}\r\nConnection: close\r\n\r\n".encode())
    assert (await asyncio.wait_for(reader.read(), 30)).endswith(b"https"), "it keeps what it began with"
    writer.close()
    serving.authority = other
    assert (await serving.get("fast")).endswith(b"https")
    serving.server._context = lambda: None
    assert await is_closed(ADDRESS, serving.server.port)
