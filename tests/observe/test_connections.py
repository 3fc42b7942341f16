"""Connections that send nothing are bounded, and lock nobody out."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import sys
import time
import tracemalloc
from collections.abc import AsyncIterator
from typing import Any

import pytest
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from mmd_workers.observe import server as module
from mmd_workers.observe.server import HttpServer
from support.harness.waiting import until

LIMIT = 3
ADDRESS = "127.0.0.1"
BUFFER_BYTES = 8192
Stream = tuple[asyncio.StreamReader, asyncio.StreamWriter]


class Held:
    """A server whose `/slow` answers when `go` is set."""

    def __init__(self) -> None:
        self.go = asyncio.Event()
        self.begun = asyncio.Semaphore(0)
        table = [Route("/slow", self._slow), Route("/fast", self._fast)]
        self.server = HttpServer.of_routes(table, ADDRESS, 0)

    async def _slow(self, _: Request) -> Response:
        self.begun.release()
        await self.go.wait()
        return PlainTextResponse("slow")

    async def _fast(self, _: Request) -> Response:
        return PlainTextResponse("fast")

    async def connect(self) -> Stream:
        return await asyncio.open_connection(ADDRESS, self.server.port)

    async def ask(self, stream: Stream, path: str) -> None:
        stream[1].write(f"GET /{path} HTTP/1.1\r\nHost: {ADDRESS}\r\n\r\n".encode())
        await stream[1].drain()


@pytest.fixture
async def held(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Held]:
    monkeypatch.setattr(module, "MAX_CONNECTIONS", LIMIT, raising=False)
    monkeypatch.setattr(module, "HEAD_SECONDS", 3600.0)  # nothing else closes a connection
    one = Held()
    await one.server.start()
    yield one
    one.go.set()
    await one.server.stop()


async def answer(stream: Stream) -> bytes:
    """What comes until the body's last word, or the end."""
    async with asyncio.timeout(30):
        data = b""
        while not data.endswith((b"slow", b"fast")) and (more := await stream[0].read(4096)):
            data += more
    return data


async def test_a_new_connection_replaces_the_longest_idle_one(held: Held) -> None:
    busy, used, unused = [await held.connect() for _ in range(LIMIT)]
    await held.ask(busy, "slow")
    await held.begun.acquire()
    await held.ask(used, "fast")
    assert (await answer(used)).endswith(b"fast")
    fresh = await held.connect()
    assert await answer(unused) == b""
    for stream in (fresh, used):
        await held.ask(stream, "fast")
        assert (await answer(stream)).endswith(b"fast")
    held.go.set()
    assert (await answer(busy)).endswith(b"slow")
    for stream in (busy, used, unused, fresh):
        stream[1].close()


async def test_a_connection_is_closed_while_all_others_are_busy(held: Held) -> None:
    streams = [await held.connect() for _ in range(LIMIT)]
    for stream in streams:
        await held.ask(stream, "slow")
        await held.begun.acquire()
    late = await held.connect()
    assert await answer(late) == b""
    held.go.set()
    for stream in streams:
        assert (await answer(stream)).endswith(b"slow")
    for stream in (*streams, late):
        stream[1].close()


class _Drip:
    """A client that keeps reading, a little at a time."""

    def __init__(self, port: int) -> None:
        self._socket = socket.socket()
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        self._socket.connect((ADDRESS, port))
        self._socket.sendall(f"GET /large HTTP/1.1\r\nHost: {ADDRESS}\r\n\r\n".encode())
        self._socket.settimeout(30)

    def read_at(self, bytes_per_second: int, gone: asyncio.Event) -> None:
        """Read at this rate until the server has ended the connection."""
        with self._socket, contextlib.suppress(ConnectionResetError):
            while not gone.is_set():
                if bytes_per_second:
                    self._socket.recv(bytes_per_second // 10)
                time.sleep(0.1)

    def read(self, seconds: float, pause_seconds: float = 0.01) -> bool:
        """Whether the server has ended the connection meanwhile."""
        end = time.monotonic() + seconds
        with self._socket, contextlib.suppress(ConnectionResetError):
            while time.monotonic() < end:
                if not self._socket.recv(16_384):
                    return True
                time.sleep(pause_seconds)
            return False
        return True


def _listen_with_small_buffers(host: str, port: int) -> socket.socket:
    """So that the kernel does not take seconds of an answer at once; connections inherit it."""
    listening = socket.create_server((host, port))
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, BUFFER_BYTES)
    return listening


@contextlib.asynccontextmanager
async def endless(monkeypatch: pytest.MonkeyPatch, answer_seconds: float) -> AsyncIterator[_Endless]:
    one = _Endless()
    server = HttpServer(one.answer, ADDRESS, 0, answer_seconds=lambda: answer_seconds)
    monkeypatch.setattr(module, "_listen", _listen_with_small_buffers)
    await server.start()
    one.port = server.port
    try:
        yield one
    finally:
        await server.stop()


class _Endless:
    """Answers without end. `gone`: the client is known to have gone."""

    def __init__(self) -> None:
        self.port = 0
        self.gone = asyncio.Event()

    async def answer(self, scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        writing = asyncio.create_task(self._write(send))
        while (await receive())["type"] != "http.disconnect":
            pass
        writing.cancel()
        await asyncio.wait([writing])
        self.gone.set()

    async def _write(self, send: Any) -> None:
        while True:
            await send({"type": "http.response.body", "body": bytes(65_536), "more_body": True})
            await asyncio.sleep(0)


async def test_a_slow_reader_is_cut_off_at_the_answer_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "WRITE_SECONDS", 2.0)
    monkeypatch.setattr(module, "MIN_READ_BYTES_PER_SECOND", 10**9)
    async with endless(monkeypatch, answer_seconds=1.0) as server:
        client = await asyncio.to_thread(_Drip, server.port)
        assert await asyncio.to_thread(client.read, 20.0)
        async with asyncio.timeout(20):
            await server.gone.wait()


async def test_a_client_that_keeps_reading_is_not_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its reading shows in the kernel's buffer alone, until a third of that is free."""
    monkeypatch.setattr(module, "WRITE_SECONDS", 1.0)
    monkeypatch.setattr(module, "MIN_READ_BYTES_PER_SECOND", 10**9)
    monkeypatch.setattr(sys.modules[__name__], "BUFFER_BYTES", 1 << 18)
    async with endless(monkeypatch, answer_seconds=600.0) as server:
        client = await asyncio.to_thread(_Drip, server.port)
        reading = asyncio.create_task(asyncio.to_thread(client.read, 6.0, 0.2))
        await asyncio.sleep(5.0)
        assert not server.gone.is_set()
        await reading


@pytest.mark.parametrize("bytes_per_second", [0, 400])
async def test_a_client_that_hardly_reads_or_stops_reading_is_cut_off(
    monkeypatch: pytest.MonkeyPatch, bytes_per_second: int
) -> None:
    monkeypatch.setattr(module, "WRITE_SECONDS", 3.0)
    async with endless(monkeypatch, answer_seconds=600.0) as server:
        client = await asyncio.to_thread(_Drip, server.port)
        begun = time.monotonic()
        reading = asyncio.create_task(asyncio.to_thread(client.read_at, bytes_per_second, server.gone))
        async with asyncio.timeout(60):
            await server.gone.wait()
        assert time.monotonic() - begun > 2.5
        await reading


async def test_unfinished_heads_take_no_more_memory_than_a_connection_is_counted_for(held: Held) -> None:
    count = 100
    held.server._connections._limit = lambda: count
    head = f"GET /fast HTTP/1.1\r\nHost: {ADDRESS}\r\nX: ".encode().ljust(module.MAX_HEAD_BYTES - 64, b"x")
    tracemalloc.start()
    try:
        streams = [await held.connect() for _ in range(count)]
        before = tracemalloc.get_traced_memory()[0]
        for _, writer in streams:
            writer.write(head)
            await writer.drain()
        await until(
            lambda: (
                sum(len(c.conn.trailing_data[0]) for c in held.server._connections._open) == count * len(head)
            )
        )
        assert (tracemalloc.get_traced_memory()[0] - before) / count < module.CONNECTION_BYTES
    finally:
        tracemalloc.stop()
    for _, writer in streams:
        writer.close()


async def test_a_head_longer_than_the_limit_is_refused(held: Held) -> None:
    stream = await held.connect()
    stream[1].write(
        f"GET /fast HTTP/1.1\r\nHost: {ADDRESS}\r\nX: ".encode() + b"x" * 2 * module.MAX_HEAD_BYTES
    )
    assert (await answer(stream)).startswith(b"HTTP/1.1 400 ")
    stream[1].close()


async def test_a_client_still_sending_a_refused_head_gets_the_whole_answer(held: Held) -> None:
    reader, writer = await held.connect()
    head = f"GET /fast HTTP/1.1\r\nHost: {ADDRESS}\r\nX: ".encode() + b"x" * 2 * module.MAX_HEAD_BYTES
    writer.write(head)
    async with asyncio.timeout(30):
        begin = await reader.readexactly(12)
        for _ in range(8):  # to a closed connection the second piece would fail
            writer.write(head)
            await writer.drain()
            await asyncio.sleep(0.01)
        rest = await reader.read()
    assert begin == b"HTTP/1.1 400"
    assert rest.endswith(b"Invalid HTTP request received.")
    writer.close()
    await until(lambda: not held.server._connections._open)


async def test_a_request_with_an_invalid_body_is_refused_and_its_answer_dropped(
    held: Held, caplog: pytest.LogCaptureFixture
) -> None:
    reader, writer = await held.connect()
    writer.write(f"GET /slow HTTP/1.1\r\nHost: {ADDRESS}\r\nTransfer-Encoding: chunked\r\n\r\n".encode())
    await held.begun.acquire()
    writer.write(b"no size\r\n")
    async with asyncio.timeout(30):
        refused = await reader.read()
    assert refused.startswith(b"HTTP/1.1 400 ")
    held.go.set()
    writer.close()
    await until(lambda: not held.server._connections._open)
    assert [record for record in caplog.records if record.levelname == "ERROR"] == []


async def test_the_server_closes_a_connection_whose_head_was_refused(
    held: Held, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "REFUSED_SECONDS", 0.1)
    _, writer = await held.connect()
    writer.write(b"no request\r\n\r\n")
    await until(lambda: held.server._connections._open)
    await until(lambda: not held.server._connections._open)
    writer.close()


def test_all_connections_together_may_hold_a_small_share_of_the_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "host_bytes", lambda: 1 << 30)
    assert module.most_connections() * module.MAX_HEAD_BYTES < (1 << 30) // 20
    monkeypatch.setattr(module, "host_bytes", lambda: 1 << 40)
    assert module.most_connections() == module.MAX_CONNECTIONS
