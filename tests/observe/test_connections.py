"""Connections that send nothing are bounded, and lock nobody out."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from mmd_workers.observe import server as module
from mmd_workers.observe.server import HttpServer

LIMIT = 3
ADDRESS = "127.0.0.1"
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


async def test_a_new_connection_takes_the_place_of_the_one_that_was_idle_for_longest(held: Held) -> None:
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
