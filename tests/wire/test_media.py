import asyncio
import hashlib
import os
import sys
import time

import pytest

from mmd_api.contract.errors import DeadlineError, LinkError, MediaGoneError, OverloadedError, PeerLostError
from mmd_workers.wire.media import MAX_SLICE_BYTES, MediaServer, SharedReads, read_medium


def digest_of(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


@pytest.fixture
async def held(connect):
    held: dict[str, bytes] = {}
    server = MediaServer(await connect("gw-0"), "gw-0", held.get)
    await server.start()
    return held


@pytest.mark.parametrize("size", [0, 1, MAX_SLICE_BYTES, MAX_SLICE_BYTES + 1, 20_000_000])
async def test_a_medium_is_read_completely(held, connect, size):
    data = os.urandom(size)
    held[digest_of(data)] = data
    got = await read_medium(await connect("encoder"), "gw-0", digest_of(data), size, time.time() + 10)
    assert got == data


async def test_a_medium_no_longer_held_is_a_typed_error(held, connect):
    with pytest.raises(MediaGoneError, match="request has ended"):
        await read_medium(await connect("encoder"), "gw-0", "0" * 64, 10, time.time() + 10)


async def test_an_absent_gateway_is_a_lost_peer(connect):
    with pytest.raises(PeerLostError):
        await read_medium(await connect("encoder"), "gw-9", "0" * 64, 10, time.time() + 10)


async def test_wrong_bytes_are_noticed(held, connect):
    data = os.urandom(100)
    held[digest_of(data)] = bytes(100)
    with pytest.raises(LinkError, match="do not match its digest"):
        await read_medium(await connect("encoder"), "gw-0", digest_of(data), 100, time.time() + 10)


async def test_a_wrong_size_is_noticed(held, connect):
    held["d"] = bytes(100)
    with pytest.raises(LinkError, match="of 100"):
        await read_medium(await connect("encoder"), "gw-0", "d", 90, time.time() + 10)


async def test_an_overloaded_gateway_is_left_alone_for_a_while(connect, monkeypatch):
    data, refusals, pauses, sleep = os.urandom(100), iter(range(2)), [], asyncio.sleep

    def get(_digest: str) -> bytes:
        if next(refusals, None) is not None:
            raise OverloadedError("busy")
        return data

    def noted(seconds: float, *more: object):
        if sys._getframe(1).f_code.co_name == "_read_slice":
            pauses.append(seconds)
        return sleep(seconds, *more)

    server = MediaServer(await connect("gw-0"), "gw-0", get)
    await server.start()
    encoder = await connect("encoder")
    monkeypatch.setattr(asyncio, "sleep", noted)
    got = await read_medium(encoder, "gw-0", digest_of(data), len(data), time.time() + 60)
    assert got == data
    assert len(pauses) == 2
    assert min(pauses) > 0


async def test_a_gateway_that_does_not_answer_is_a_deadline(connect):
    never = asyncio.Event()

    async def hang(_digest: str) -> None:
        await never.wait()

    server = MediaServer(await connect("gw-0"), "gw-0", hang)  # type: ignore[arg-type]
    await server.start()
    with pytest.raises(DeadlineError):
        await read_medium(await connect("encoder"), "gw-0", "d", 90, time.time() + 0.4)


async def test_the_deadline_includes_the_first_connection_for_bulk(own_nats_server, connect):
    bus = await connect("encoder")
    await asyncio.to_thread(own_nats_server.kill)
    reads = (read_medium(bus, "gw-0", "d", 90, time.time() + 0.2) for _ in range(3))
    ends = await asyncio.gather(*reads, return_exceptions=True)
    assert [type(end) for end in ends] == [DeadlineError] * 3
    await asyncio.to_thread(own_nats_server.start)
    assert (await bus.bulk()).bus.is_connected


class Gateway:
    """Counts reads, which end when they may."""

    def __init__(self) -> None:
        self.reads, self.may_end, self.cancelled = 0, asyncio.Event(), 0

    async def read(self, gateway: str, digest: str, num_bytes: int, deadline: float) -> bytes:
        self.reads += 1
        try:
            async with asyncio.timeout(max(0.0, deadline - time.time())):
                await self.may_end.wait()
        except TimeoutError:
            raise DeadlineError("too late") from None
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        if digest == "gone":
            raise MediaGoneError("gone")
        return f"{gateway} {digest}".encode()


async def test_what_several_read_at_once_is_read_once():
    gateway = Gateway()
    shared, until = SharedReads(gateway.read), time.time() + 60
    tasks = [
        asyncio.create_task(shared.read("gw-0", digest, 9, until))
        for digest in ("a", "a", "b", "a", "gone", "gone")
    ]
    await asyncio.sleep(0)
    gateway.may_end.set()
    results = await asyncio.gather(*tasks, return_exceptions=True)
    assert results[:4] == [b"gw-0 a", b"gw-0 a", b"gw-0 b", b"gw-0 a"]
    assert [type(one) for one in results[4:]] == [MediaGoneError] * 2
    assert gateway.reads == 3
    await shared.read("gw-0", "a", 9, until)
    assert gateway.reads == 4, "nothing is kept"


async def test_a_read_ends_with_the_last_who_waits_for_it():
    gateway = Gateway()
    shared, until = SharedReads(gateway.read), time.time() + 60
    one, other = (asyncio.create_task(shared.read("gw-0", "a", 9, until)) for _ in range(2))
    await asyncio.sleep(0.01)
    one.cancel()
    await asyncio.wait([one])
    assert not gateway.cancelled
    other.cancel()
    await asyncio.wait([other])
    await asyncio.sleep(0)
    assert gateway.cancelled == 1
    gateway.may_end.set()
    assert await shared.read("gw-0", "a", 9, until) == b"gw-0 a"


async def test_whoever_has_more_time_than_the_one_who_began_reads_on():
    gateway = Gateway()
    shared = SharedReads(gateway.read)
    short = asyncio.create_task(shared.read("gw-0", "a", 9, time.time() + 0.05))
    await asyncio.sleep(0)
    long = asyncio.create_task(shared.read("gw-0", "a", 9, time.time() + 60))
    with pytest.raises(DeadlineError):
        await short
    gateway.may_end.set()
    assert await long == b"gw-0 a"
