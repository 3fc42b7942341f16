"""The log of uploaded files: of two gateways that write at once one decides again, and a server without its store has no files."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace
from types import SimpleNamespace

import pytest

from mmd_api.contract.errors import FileNotFoundInStoreError, FileQuotaError
from mmd_workers.wire import stored_files
from mmd_workers.wire.bus import Bus
from mmd_workers.wire.stored_files import (
    CHUNK_BYTES,
    DELETED_SECONDS,
    FileBytes,
    FileLog,
    StoredFile,
    StoreLimits,
)

Connect = Callable[..., Awaitable[Bus]]
LIMITS = StoreLimits(entry_bytes=1 << 20, bytes_bytes=3 * CHUNK_BYTES, max_age_seconds=600.0)


def entry(file_id: str, **more: object) -> StoredFile:
    return replace(StoredFile(file_id, "search", "ready", 1.0, 2.0, 3), **more)


@pytest.fixture
async def logs(connect: Connect) -> tuple[FileLog, FileLog]:
    first, second = FileLog(await connect("g-0"), LIMITS), FileLog(await connect("g-1"), LIMITS)
    for log in (first, second):
        await log.catch_up()
    return first, second


async def test_a_writer_is_refused_until_it_has_read_the_others_entry(
    logs: tuple[FileLog, FileLog],
) -> None:
    first, second = logs
    assert await first.append(entry("file-1"))
    assert not await second.append(entry("file-2")), "it has not read file-1"
    await second.catch_up()
    assert [one.file_id for one in second] == ["file-1"]
    assert await second.append(entry("file-2"))
    await first.catch_up()
    assert {one.file_id for one in first} == {"file-1", "file-2"}


async def test_a_files_later_entry_replaces_it_for_present_and_future_readers(
    logs: tuple[FileLog, FileLog], connect: Connect
) -> None:
    first, second = logs
    assert await first.append(entry("file-1", state="uploading"))
    assert await first.append(entry("file-1", state="deleted"))
    late = FileLog(await connect("g-2"), LIMITS)
    for log in (second, late):
        await log.catch_up()
        assert [(one.file_id, one.state) for one in log] == [("file-1", "deleted")]
    await first.forget("file-1")
    again = FileLog(await connect("g-3"), LIMITS)
    await again.catch_up()
    assert not list(again)
    assert await again.append(entry("file-2")), "although the last message it could read is gone"


async def test_a_full_store_refuses_a_chunk_and_has_room_again(
    logs: tuple[FileLog, FileLog], connect: Connect
) -> None:
    contents = FileBytes(await connect("g-4"), LIMITS)
    chunk = bytes(CHUNK_BYTES)
    await contents.write("file-1", 0, chunk)
    await contents.write("file-1", 1, chunk)
    with pytest.raises(FileQuotaError, match=r"maxMebibytes and spec\.nats\.storageMebibytes"):
        await contents.write("file-2", 0, chunk)
    await contents.remove("file-1")
    await contents.write("file-2", 0, chunk)
    assert await contents.read("file-2", 0) == chunk
    with pytest.raises(FileNotFoundInStoreError, match="upload it again"):
        await contents.read("file-1", 0)


async def test_a_gateway_raises_stream_limits_but_never_lowers_them(
    logs: tuple[FileLog, FileLog], connect: Connect
) -> None:
    bus = await connect("g-5")
    context = bus.client.jetstream()

    async def limits() -> list[tuple[int | None, float | None]]:
        names = bus.subjects.files_stream, bus.subjects.file_bytes_stream
        held = [(await context.stream_info(name)).config for name in names]
        return [(one.max_bytes, one.max_age) for one in held]

    larger = replace(LIMITS, entry_bytes=2 << 20, bytes_bytes=4 * CHUNK_BYTES, max_age_seconds=900.0)
    await FileLog(bus, larger).catch_up()
    after = await limits()
    assert after == [(2 << 20, 900.0), (4 * CHUNK_BYTES, 4500.0)]
    await FileLog(bus, LIMITS).catch_up()
    assert await limits() == after


async def test_chunks_are_stored_and_removed_although_the_server_has_lost_their_stream(
    logs: tuple[FileLog, FileLog], connect: Connect
) -> None:
    bus = await connect("g-6")
    contents = FileBytes(bus, LIMITS)
    await bus.client.jetstream().delete_stream(bus.subjects.file_bytes_stream)
    await contents.remove("file-1")
    await contents.write("file-2", 0, b"abc")
    assert await contents.read("file-2", 0) == b"abc"


async def test_a_read_that_is_interrupted_goes_on_where_it_was(
    logs: tuple[FileLog, FileLog], connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(5):
        assert await logs[0].append(entry(f"file-{number}"))
    late = FileLog(await connect("g-7"), LIMITS)
    read, reads = late._read_next, 0

    async def counted() -> bool:
        nonlocal reads
        reads += 1
        if reads == 3:
            raise asyncio.CancelledError
        return await read()

    monkeypatch.setattr(late, "_read_next", counted)
    with pytest.raises(asyncio.CancelledError):
        await late.catch_up()
    await late.catch_up()
    assert reads == 3 + 3, "the two that were read are not read again"
    assert len(list(late)) == 5


async def test_a_read_that_takes_long_is_not_begun_again(
    logs: tuple[FileLog, FileLog], connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert await logs[0].append(entry("file-1"))
    late = FileLog(await connect("g-8"), LIMITS)
    read, now, reads = late._read_next, 0.0, 0

    async def slow() -> bool:
        nonlocal now, reads
        reads, now = reads + 1, now + DELETED_SECONDS
        return await read()

    monkeypatch.setattr(late, "_read_next", slow)
    monkeypatch.setattr(stored_files, "time", SimpleNamespace(monotonic=lambda: now))
    await late.catch_up()
    await late.catch_up()
    assert reads == 1
