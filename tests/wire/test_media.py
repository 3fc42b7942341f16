import asyncio
import hashlib
import os
import time

import pytest

from mmd_workers.errors import DeadlineError, LinkError, PeerLostError
from mmd_workers.wire.media import MAX_SLICE_BYTES, MediaGoneError, MediaServer, read_medium


def digest_of(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


@pytest.fixture
async def held(connect):
    held: dict[str, bytes] = {}
    server = MediaServer(await connect("gw-0"), "gw-0", held.get)
    await server.start()
    return held


@pytest.mark.parametrize("size", [0, 1, MAX_SLICE_BYTES, MAX_SLICE_BYTES + 1, 20_000_000])
async def test_a_medium_is_read_whole(held, connect, size):
    data = os.urandom(size)
    held[digest_of(data)] = data
    got = await read_medium(await connect("encoder"), "gw-0", digest_of(data), size, time.time() + 10)
    assert got == data


async def test_a_medium_no_longer_held_is_a_typed_error(held, connect):
    with pytest.raises(MediaGoneError, match="request has ended"):
        await read_medium(await connect("encoder"), "gw-0", "0" * 64, 10, time.time() + 10)


async def test_a_gateway_that_is_gone_is_a_lost_peer(connect):
    with pytest.raises(PeerLostError):
        await read_medium(await connect("encoder"), "gw-9", "0" * 64, 10, time.time() + 10)


async def test_wrong_bytes_are_noticed(held, connect):
    data = os.urandom(100)
    held[digest_of(data)] = bytes(100)
    with pytest.raises(LinkError, match="another digest"):
        await read_medium(await connect("encoder"), "gw-0", digest_of(data), 100, time.time() + 10)


async def test_a_wrong_size_is_noticed(held, connect):
    held["d"] = bytes(100)
    with pytest.raises(LinkError, match="of 100"):
        await read_medium(await connect("encoder"), "gw-0", "d", 90, time.time() + 10)


async def test_a_gateway_that_does_not_answer_is_a_deadline(connect):
    never = asyncio.Event()

    async def hang(_digest: str) -> None:
        await never.wait()

    server = MediaServer(await connect("gw-0"), "gw-0", hang)  # type: ignore[arg-type]
    await server.start()
    begin = time.monotonic()
    with pytest.raises(DeadlineError):
        await read_medium(await connect("encoder"), "gw-0", "d", 90, time.time() + 0.4)
    assert time.monotonic() - begin < 4
