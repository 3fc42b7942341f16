"""The files of tenants: what each may store, who may read them, and when they expire. Independent of HTTP and of how bytes are stored.

Space for a file is reserved before its first byte is stored, across all gateways (`wire.stored_files`). So limits hold exactly, whichever
gateway takes the upload. An upload at a gateway that crashes expires by itself.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterable
from dataclasses import replace
from typing import Any, TypeVar

from mmd_api.contract.errors import (
    FileNotFoundInStoreError,
    FileQuotaError,
    LinkError,
    MmdError,
    OverloadedError,
)
from mmd_api.spec.gateway import FilesSpec
from mmd_workers.basics.limited_log import RateLimitedLog
from mmd_workers.wire.bulk import Bulk
from mmd_workers.wire.bus import Bus
from mmd_workers.wire.stored_files import (
    CHUNK_BYTES,
    DELETED_SECONDS,
    FileBytes,
    FileLog,
    StoredFile,
    StoreLimits,
)

PERIOD_SECONDS = 5.0
ENTRY_BYTES = 1280  # more than any file's entry in the log
CHUNK_OVERHEAD_BYTES = 640  # maximum overhead of the server for a file of one chunk
UPLOAD_SLACK_SECONDS = 30.0  # from an upload's deadline to its expiry in the log
CONFLICTS = 64  # consecutive conflicts between gateways that write at once
CONCURRENT_READS = 4  # chunks of one file
CHUNK_SECONDS = 15.0
CLOSE_SECONDS = 3.0
_PREFIX = "file-"

T = TypeVar("T")

_log = logging.getLogger(__name__)


class Files:
    """The files of a deployment, as served by one of its gateways."""

    def __init__(self, bus: Bus, spec: FilesSpec) -> None:
        self.spec = spec
        self._bus = bus
        self._limits = StoreLimits(
            entry_bytes=(64 << 10) + spec.max_files * ENTRY_BYTES,
            bytes_bytes=(spec.max_mebibytes << 20)
            + (spec.max_mebibytes << 20) // 32
            + spec.max_files * CHUNK_OVERHEAD_BYTES,
            max_age_seconds=spec.lifetime_seconds + 2 * DELETED_SECONDS,
        )
        self._entries = FileLog(bus, self._limits)
        self._turn = asyncio.Lock()
        self._bulk: Bulk[Bus] | None = None
        self._bytes: FileBytes | None = None
        self._clearing: set[asyncio.Task[None]] = set()

    @property
    def max_bytes(self) -> int:
        """Maximum bytes of all files together."""
        return self.spec.max_mebibytes << 20

    @property
    def used_bytes(self) -> int:
        """Bytes taken by files and uploads, as last read."""
        return _taken(self._entries, time.time())

    @property
    def num_entries(self) -> int:
        """Number of files, uploads and recent deletions, as last read."""
        return len(self._entries)

    @property
    def max_file_bytes(self) -> int:
        """Maximum bytes of one file."""
        return self.spec.max_file_mebibytes << 20

    async def run(self) -> None:
        """Remove expired files, until cancelled."""
        limited = RateLimitedLog(_log)
        while True:
            try:
                await self._remove_ended()
            except MmdError as error:
                limited.warning("files", error.message)
            except Exception as error:  # noqa: BLE001 - logged; it must not end the requests that the gateway serves
                limited.warning("files", f"removing files failed: {type(error).__name__}: {error}", error)
            await asyncio.sleep(PERIOD_SECONDS)

    async def close(self) -> None:
        """Finish pending removals, within a few seconds."""
        if self._clearing:
            await asyncio.wait(self._clearing, timeout=CLOSE_SECONDS)

    async def begin(self, tenant: str, most_bytes: int, deadline: float) -> StoredFile:
        """Reserve space for an upload of at most `most_bytes`, which ends by `deadline` (Unix seconds).

        Raises:
            FileQuotaError: there is no space.
            PeerLostError, OverloadedError: the store cannot be reached.
        """
        now = time.time()
        entry = StoredFile(
            file_id=f"{_PREFIX}{secrets.token_hex(16)}",
            tenant=tenant,
            state="uploading",
            created_at=now,
            expires_at=deadline + UPLOAD_SLACK_SECONDS,
            num_bytes=most_bytes,
        )

        def checked() -> StoredFile:
            self._check_room(tenant, most_bytes, now)
            return entry

        return await self._write(checked)

    async def store(self, entry: StoredFile, number: int, chunk: bytes) -> None:
        """Store the next chunk of an upload.

        Raises:
            FileQuotaError: the server has no space.
            PeerLostError, OverloadedError: the store cannot be reached.
        """
        await self._on_bulk(lambda contents: contents.write(entry.file_id, number, chunk))

    async def finish(self, entry: StoredFile) -> StoredFile:
        """Make an upload available.

        Raises:
            FileNotFoundInStoreError: it took too long and has been removed.
            PeerLostError, OverloadedError: the store cannot be reached.
        """

        def present() -> StoredFile:
            current = self._entries.get(entry.file_id)
            if current is None or current.state != "uploading" or current.expires_at <= time.time():
                raise unknown(entry.file_id)
            return replace(entry, state="ready")

        return await self._write(present)

    async def give_up(self, entry: StoredFile) -> None:
        """Remove an upload, even if this call is cancelled. Anything that cannot be removed now expires at the upload's deadline."""
        task = asyncio.create_task(self._give_up(entry))
        self._clearing.add(task)
        task.add_done_callback(self._clearing.discard)
        await asyncio.shield(task)

    async def of_tenant(self, tenant: str) -> list[StoredFile]:
        """The tenant's files, the oldest first.

        Raises:
            PeerLostError, OverloadedError: the store cannot be reached.
        """
        await self._catch_up()
        now = time.time()
        files = [file for file in self._entries if file.tenant == tenant and _is_there(file, now)]
        return sorted(files, key=lambda file: (file.created_at, file.file_id))

    async def find_each(self, tenant: str, file_ids: set[str]) -> dict[str, StoredFile]:
        """The tenant's files among these, by id.

        Raises:
            PeerLostError, OverloadedError: the store cannot be reached.
        """
        await self._catch_up()
        now = time.time()
        entries = [entry for file_id in file_ids if (entry := self._entries.get(file_id)) is not None]
        return {entry.file_id: entry for entry in entries if entry.tenant == tenant and _is_there(entry, now)}

    async def find(self, tenant: str, file_id: str) -> StoredFile:
        """A file of a tenant.

        Raises:
            FileNotFoundInStoreError: the tenant has no file with this id.
            PeerLostError, OverloadedError: the store cannot be reached.
        """
        await self._catch_up()
        return self._of(tenant, file_id)

    async def delete(self, tenant: str, file_id: str) -> None:
        """Delete a file. Requests that have read it continue.

        Raises:
            FileNotFoundInStoreError: the tenant has no file with this id.
            PeerLostError, OverloadedError: the store cannot be reached.
        """
        await self._write(lambda: _deleted(self._of(tenant, file_id)))
        await self._remove_bytes(file_id)

    async def chunks(self, entry: StoredFile) -> AsyncIterator[bytes]:
        """The bytes of a file, one chunk at a time.

        Raises:
            FileNotFoundInStoreError: it has been deleted meanwhile.
            PeerLostError, OverloadedError: the store cannot be reached.
        """
        for number in range(_num_chunks(entry)):
            yield await self._chunk(entry, number)

    async def read(self, entry: StoredFile, reserve: Callable[[int], Awaitable[None]]) -> bytes:
        """All bytes of a file. `reserve(more_bytes)` is called first, for twice the file's size.

        Raises:
            FileNotFoundInStoreError: it has been deleted meanwhile.
            LinkError: the bytes differ from those that were uploaded.
            PeerLostError, OverloadedError: the store cannot be reached.
        """
        await reserve(2 * entry.num_bytes)  # there are two copies for a moment
        data = bytearray(entry.num_bytes)
        numbers = iter(range(_num_chunks(entry)))

        async def read_chunks() -> None:
            for number in numbers:
                chunk = await self._chunk(entry, number)
                data[number * CHUNK_BYTES : number * CHUNK_BYTES + len(chunk)] = chunk

        try:
            async with asyncio.TaskGroup() as group:
                for _ in range(CONCURRENT_READS):
                    group.create_task(read_chunks())
        except ExceptionGroup as faults:
            raise faults.exceptions[0] from faults
        digest = await asyncio.to_thread(lambda: hashlib.sha256(data).hexdigest())
        if digest != entry.digest or len(data) != entry.num_bytes:
            raise LinkError(
                f"the bytes that NATS has of {entry.file_id} are not those that were uploaded; upload it again"
            )
        return bytes(data)

    def _check_room(self, tenant: str, most_bytes: int, now: float) -> None:
        spec, files = self.spec, list(self._entries)
        tenant_files = [file for file in files if file.tenant == tenant]
        of_tenant, of_all = _taken(tenant_files, now), _taken(files, now)
        if len(tenant_files) >= spec.max_tenant_files:
            raise FileQuotaError(
                f"the tenant has {_counted(tenant_files)}, and its limit is {spec.max_tenant_files}; delete files and retry, or raise "
                "spec.gateway.files.maxFiles"
            )
        if len(files) >= spec.max_files:
            raise FileQuotaError(
                f"all tenants have {_counted(files)}, and the limit is {spec.max_files}; delete files and retry, or raise "
                "spec.gateway.files.maxFiles"
            )
        if of_tenant + most_bytes > spec.max_tenant_mebibytes << 20:
            raise FileQuotaError(
                f"the tenant's files have {of_tenant} bytes, and {most_bytes} more exceed its limit of {spec.max_tenant_mebibytes} MiB; "
                "delete files, or raise spec.gateway.files.maxTenantMebibytes"
            )
        if of_all + most_bytes > self.max_bytes:
            raise FileQuotaError(
                f"the files of all tenants have {of_all} bytes, and {most_bytes} more exceed the limit of {spec.max_mebibytes} MiB; "
                "delete files, or raise spec.gateway.files.maxMebibytes"
            )

    async def _give_up(self, entry: StoredFile) -> None:
        with contextlib.suppress(MmdError):
            await self._write(lambda: _deleted(entry))
        with contextlib.suppress(MmdError):
            await self._remove_bytes(entry.file_id)

    async def _remove_ended(self) -> None:
        """Remove expired files. Every gateway does this: removing twice does no harm, and no leader is needed."""
        await self._catch_up()
        now = time.time()
        for entry in [entry for entry in self._entries if entry.expires_at <= now]:
            await self._remove_bytes(entry.file_id)
            async with self._turn:
                await self._entries.forget(entry.file_id)

    def _of(self, tenant: str, file_id: str) -> StoredFile:
        entry = self._entries.get(file_id)
        if entry is None or entry.tenant != tenant or not _is_there(entry, time.time()):
            raise unknown(file_id)
        return entry

    async def _catch_up(self) -> None:
        async with self._turn:
            await self._entries.catch_up()

    async def _write(self, decide: Callable[[], StoredFile]) -> StoredFile:
        """Write the entry that `decide` returns, computed on the newest state, and repeat if another gateway wrote meanwhile."""
        async with self._turn:
            for _ in range(CONFLICTS):
                await self._entries.catch_up()
                entry = decide()
                if await self._entries.append(entry):
                    return entry
        raise OverloadedError(
            f"other gateways wrote to the store of files {CONFLICTS} times meanwhile; retry"
        )

    async def _remove_bytes(self, file_id: str) -> None:
        await self._on_bulk(lambda contents: contents.remove(file_id))

    async def _chunk(self, entry: StoredFile, number: int) -> bytes:
        return await self._on_bulk(lambda contents: contents.read(entry.file_id, number))

    async def _on_bulk(self, work: Callable[[FileBytes], Coroutine[Any, Any, T]]) -> T:
        """Run work on the bulk connection, so that heartbeats and tokens never wait behind bytes of files."""
        try:
            if self._bulk is None or self._bytes is None:
                self._bulk = await self._bus.bulk()
                self._bytes = FileBytes(self._bulk.bus, self._limits)
            return await self._bulk.run(work(self._bytes), timeout=CHUNK_SECONDS)
        except TimeoutError as error:
            raise OverloadedError(
                f"the NATS server took longer than {CHUNK_SECONDS:.0f} s for a chunk of a file; retry"
            ) from error


def _is_there(entry: StoredFile, now: float) -> bool:
    return entry.state == "ready" and entry.expires_at > now


def _num_chunks(entry: StoredFile) -> int:
    return -(-entry.num_bytes // CHUNK_BYTES)


def _taken(entries: Iterable[StoredFile], now: float) -> int:
    return sum(entry.num_bytes for entry in entries if entry.state != "deleted" and entry.expires_at > now)


def _counted(entries: list[StoredFile]) -> str:
    deleted = sum(entry.state == "deleted" for entry in entries)
    return f"{len(entries) - deleted} files and {deleted} deletions, which count for {DELETED_SECONDS:.0f} s"


def _deleted(entry: StoredFile) -> StoredFile:
    """The entry of a deleted file, without anything a client wrote."""
    now = time.time()
    return StoredFile(entry.file_id, entry.tenant, "deleted", entry.created_at, now + DELETED_SECONDS)


def unknown(file_id: str) -> FileNotFoundInStoreError:
    """The error for a file that a tenant does not have."""
    return FileNotFoundInStoreError(
        f"no file {file_id[:64]!r}: it has expired or been deleted, or was never uploaded with this key; upload it with POST /v1/files"
    )
