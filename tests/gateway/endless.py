"""A client that never stops sending, whatever it is answered."""

from __future__ import annotations

import asyncio

from mmd_workers.observe import unread

from .running import Running

PIECE = b"10000\r\n" + b"x" * 0x10000 + b"\r\n"
BUFFERED_BYTES = 32 << 20  # between client and server: in sockets, and in the client's own buffer


async def opened(gateway: Running) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """A connection to the port for clients."""
    return await asyncio.open_connection("127.0.0.1", int(gateway.url.rpartition(":")[2]))


async def assert_read_within_bounds(
    gateway: Running, method: str, path: str, status: int, *headers: str
) -> None:
    """A request with a body without end gets its answer and the end of its connection."""
    reader, writer = await opened(gateway)
    head = [f"{method} {path} HTTP/1.1", "host: 127.0.0.1", "transfer-encoding: chunked", *headers]
    writer.write("\r\n".join(head).encode() + b"\r\n\r\n")
    answer = (await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 30)).lower()
    assert int(answer.split()[1]) == status, answer
    assert b"\r\nconnection: close\r\n" in answer
    sent = 0
    try:
        async with asyncio.timeout(30):
            while sent < 4 * unread.DISCARD_BYTES:
                writer.write(PIECE)
                await writer.drain()
                sent += len(PIECE)
    except ConnectionError:
        pass
    finally:
        writer.transport.abort()
    assert sent <= unread.DISCARD_BYTES + BUFFERED_BYTES
