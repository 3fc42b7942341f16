"""Uploaded files on JetStream, for all gateways of a deployment: a log of entries, and chunks of bytes. Independent of tenants' limits and of HTTP.

An entry is the last message of its file's subject, and whoever writes one names the last message of the stream that it has read: of two gateways
that write at once one is refused, reads what is new and decides again. So what a gateway decides from all entries (whether there is room for one
more file) holds for all gateways. A deletion is an entry as well, because the removal of a message would reach nobody.

This is no bucket of JetStream's object store: that has no such comparison, its client reads what it puts from a blocking file, and
its list is a consumer that delivers every entry again.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Literal

from nats import errors as nats_errors
from nats.js import JetStreamContext, api
from nats.js import errors as js_errors
from nats.js.manager import JetStreamManager

from mmd_api.contract.errors import (
    FileNotFoundInStoreError,
    FileQuotaError,
    MmdError,
    PeerLostError,
    WireError,
)
from mmd_api.contract.pools import Modality
from mmd_workers.basics.limited_log import RateLimitedLog
from mmd_workers.wire.bus import Bus
from mmd_workers.wire.codec import pack, unpack

CHUNK_BYTES = 512 << 10
DELETED_SECONDS = 120.0
"""For which a deletion stays in the log. A gateway that has not read it for half as long reads it from the beginning."""
BYTES_SLACK_SECONDS = 3600.0
"""For which bytes may outlive their entry, so that a request that has found the entry gets them."""
BEHIND_SECONDS = (0.1, 0.4, 1.0)
"""Pauses for which a reader gives servers of a cluster time to receive what a majority has."""
_SECONDS = 10.0
_NAME_IN_USE = 10058
_NO_STREAM = 10059
_WRONG_LAST_SEQUENCE = {10070, 10071}
_FULL = {10023, 10047, 10077, 10123}  # of a stream, of the account or of the server

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class StoredFile:
    """An entry. `num_bytes`: of an upload what it may have at most. `expires_at`: when the entry ends, in Unix seconds; that of an upload,
    when it is given up. `digest`: SHA-256 of the bytes.
    """

    file_id: str
    tenant: str
    state: Literal["uploading", "ready", "deleted"]
    created_at: float
    expires_at: float
    num_bytes: int = 0
    filename: str = ""
    purpose: str = ""
    modality: Modality | Literal["document"] = "image"
    digest: str = ""


@dataclass(frozen=True, slots=True)
class StoreLimits:
    """Bounds of both streams."""

    entry_bytes: int
    bytes_bytes: int
    max_age_seconds: float


def lost(verb: str, error: Exception) -> MmdError:
    """What a client learns of a store that does not do its work."""
    if isinstance(error, js_errors.APIError) and error.err_code in _FULL:
        return FileQuotaError(
            f"the NATS server has no room for more files ({error.description}); delete files, or raise spec.gateway.files.maxMebibytes and "
            "spec.nats.storageMebibytes"
        )
    return PeerLostError(
        f"cannot {verb} the store of files: {type(error).__name__} {error}; retry, and check that JetStream is enabled on the NATS server"
    )


class FileLog:
    """The entries, as this gateway has read them. For one caller at a time."""

    def __init__(self, bus: Bus, limits: StoreLimits) -> None:
        self._bus, self._limits = bus, limits
        self._stream = bus.subjects.files_stream
        self._manager = JetStreamManager(bus.client, timeout=_SECONDS)
        self._publisher = JetStreamContext(bus.client, timeout=_SECONDS)
        self._log = RateLimitedLog(_log)
        self._entries: dict[str, StoredFile] = {}
        self._created: datetime | None = None  # of the stream that has been read
        self._sequence = 0  # of the last message that has been read
        self._last_sequence = 0  # of the stream
        self._read_at = -DELETED_SECONDS
        self._is_ensured = False

    def get(self, file_id: str) -> StoredFile | None:
        """The entry of a file."""
        return self._entries.get(file_id)

    def __iter__(self) -> Iterator[StoredFile]:
        return iter(self._entries.values())

    def __len__(self) -> int:
        return len(self._entries)

    async def ensure(self) -> None:
        """Create both streams, or raise their limits to these. Any number of gateways may call it at once: during a rollout some have other
        limits, and the largest stay, as do files that were promised more time. What is less is kept by those who write entries.

        Raises:
            PeerLostError: the server has no JetStream or does not answer.
            FileQuotaError: it has no room for them.
        """
        subjects, limits = self._bus.subjects, self._limits
        entries = api.StreamConfig(
            name=self._stream,
            subjects=[subjects.file_entry("*")],
            max_msgs_per_subject=1,
            max_bytes=limits.entry_bytes,
            max_age=limits.max_age_seconds,
            discard=api.DiscardPolicy.NEW,
            storage=api.StorageType.FILE,
            num_replicas=self._bus.stream_replicas,
        )
        await _ensure(self._manager, _contents(self._bus, limits))
        await _ensure(self._manager, entries)
        self._is_ensured = True

    async def catch_up(self) -> None:
        """Read what is new in the log. A server that has lost its store has no file any more.

        Raises:
            PeerLostError: it cannot be read now.
            FileQuotaError: the server lost its store and has no room for a new one.
        """
        try:
            info = await self._info()
            now = time.monotonic()
            if info.created != self._created or now - self._read_at > DELETED_SECONDS / 2:
                self._entries.clear()
                self._created, self._sequence = info.created, 0
                self._read_at = now  # one who is interrupted goes on from there
            self._last_sequence = info.state.last_seq
            while self._sequence < self._last_sequence and await self._read_next():
                pass
            self._sequence = max(self._sequence, self._last_sequence)
            self._read_at = time.monotonic()
        except (nats_errors.Error, TimeoutError) as error:
            raise lost("read", error) from error

    async def append(self, entry: StoredFile) -> bool:
        """Write an entry; False: another gateway has written meanwhile, so catch up and decide again.

        Raises:
            PeerLostError: the server did not confirm. It may have the entry.
            FileQuotaError: it has no room.
        """
        subject = self._bus.subjects.file_entry(entry.file_id)
        expected = {api.Header.EXPECTED_LAST_SEQUENCE.value: str(self._last_sequence)}
        try:
            answer = await self._publisher.publish(
                subject, pack(entry), timeout=_SECONDS, stream=self._stream, headers=expected
            )
        except js_errors.BadRequestError as error:
            if error.err_code in _WRONG_LAST_SEQUENCE:
                return False
            raise lost("write to", error) from error
        except (nats_errors.Error, TimeoutError) as error:
            raise lost("write to", error) from error
        self._sequence = self._last_sequence = answer.seq
        self._entries[entry.file_id] = entry
        return True

    async def forget(self, file_id: str) -> None:
        """Remove an entry that has ended.

        Raises:
            PeerLostError: the server did not confirm.
        """
        try:
            await self._manager.purge_stream(self._stream, subject=self._bus.subjects.file_entry(file_id))
        except (nats_errors.Error, TimeoutError) as error:
            raise lost("remove from", error) from error
        self._entries.pop(file_id, None)

    async def _info(self) -> api.StreamInfo:
        if not self._is_ensured:
            await self.ensure()
        try:
            return await self._manager.stream_info(self._stream)
        except js_errors.NotFoundError as error:
            if error.err_code != _NO_STREAM:
                raise
        await self.ensure()
        return await self._manager.stream_info(self._stream)

    async def _read_next(self) -> bool:
        """Read the entry after the last one; False: there is none."""
        try:
            message = await self._manager.get_msg(
                self._stream, self._sequence + 1, self._bus.subjects.file_entry("*"), next=True
            )
        except js_errors.NotFoundError:
            return False
        self._sequence = message.seq or self._last_sequence
        try:
            entry = unpack(StoredFile, message.data or b"")
        except WireError as error:  # of another version; the server drops it at its age
            self._log.warning(
                "entry", f"entry {message.subject} of {self._stream} is skipped: {error.message}"
            )
        else:
            self._entries[entry.file_id] = entry
        return True


class FileBytes:
    """The chunks of files. Use it on the event loop of its bus."""

    def __init__(self, bus: Bus, limits: StoreLimits) -> None:
        self._bus, self._limits = bus, limits
        self._stream = bus.subjects.file_bytes_stream
        self._manager = JetStreamManager(bus.client, timeout=_SECONDS)
        self._publisher = JetStreamContext(bus.client, timeout=_SECONDS)

    async def write(self, file_id: str, number: int, chunk: bytes) -> None:
        """Store a chunk; a server that has lost the chunks of all files takes new ones.

        Raises:
            PeerLostError: the server did not confirm.
            FileQuotaError: it has no room.
        """
        subject = self._bus.subjects.file_bytes(file_id, number)
        try:
            try:
                await self._publish(subject, chunk)
            except js_errors.NoStreamResponseError:
                await _ensure(self._manager, _contents(self._bus, self._limits))
                await self._publish(subject, chunk)
        except (nats_errors.Error, TimeoutError) as error:
            raise lost("write to", error) from error

    async def read(self, file_id: str, number: int) -> bytes:
        """A chunk.

        Raises:
            FileNotFoundInStoreError: it has been removed.
            PeerLostError: the server did not answer.
        """
        subject = self._bus.subjects.file_bytes(file_id, number)
        for pause in BEHIND_SECONDS if self._bus.stream_replicas > 1 else ():
            try:
                return await self._read(file_id, subject)
            except FileNotFoundInStoreError:  # at a server that has not received it yet, perhaps
                await asyncio.sleep(pause)
        return await self._read(file_id, subject)

    async def _read(self, file_id: str, subject: str) -> bytes:
        try:
            message = await self._manager.get_msg(self._stream, subject=subject, direct=True)
        except js_errors.NotFoundError as error:
            raise FileNotFoundInStoreError(
                f"the file {file_id} has been deleted or has expired; upload it again"
            ) from error
        except (nats_errors.Error, TimeoutError) as error:
            raise lost("read", error) from error
        return bytes(message.data or b"")

    async def remove(self, file_id: str) -> None:
        """Remove all chunks of a file. There are none where the server has lost the stream.

        Raises:
            PeerLostError: the server did not confirm.
        """
        try:
            await self._manager.purge_stream(
                self._stream, subject=self._bus.subjects.file_bytes(file_id, "*")
            )
        except js_errors.NotFoundError as error:
            if error.err_code != _NO_STREAM:
                raise lost("remove from", error) from error
        except (nats_errors.Error, TimeoutError) as error:
            raise lost("remove from", error) from error

    async def _publish(self, subject: str, chunk: bytes) -> None:
        await self._publisher.publish(subject, chunk, timeout=_SECONDS, stream=self._stream)


def _contents(bus: Bus, limits: StoreLimits) -> api.StreamConfig:
    """Of the stream of chunks."""
    subjects = bus.subjects
    return api.StreamConfig(
        name=subjects.file_bytes_stream,
        subjects=[subjects.file_bytes("*", "*")],
        max_msgs_per_subject=1,
        max_bytes=limits.bytes_bytes,
        max_age=limits.max_age_seconds + BYTES_SLACK_SECONDS,
        discard=api.DiscardPolicy.NEW,
        storage=api.StorageType.FILE,
        num_replicas=bus.stream_replicas,
        allow_direct=True,
    )


async def _ensure(manager: JetStreamManager, config: api.StreamConfig) -> None:
    """Create a stream, or raise its limits; see `FileLog.ensure`."""
    try:
        try:
            await manager.add_stream(config)
        except js_errors.BadRequestError as error:
            if error.err_code != _NAME_IN_USE:
                raise
            held = (await manager.stream_info(config.name or "")).config
            largest = replace(
                config,
                max_bytes=max(held.max_bytes or 0, config.max_bytes or 0),
                max_age=max(held.max_age or 0.0, config.max_age or 0.0),
            )
            await _raise(manager, largest)
    except (nats_errors.Error, TimeoutError) as error:
        raise lost("set up", error) from error


async def _raise(manager: JetStreamManager, config: api.StreamConfig) -> None:
    """Files that are there can be read although the server has no room for more."""
    try:
        await manager.update_stream(config)
    except js_errors.APIError as error:
        if error.err_code not in _FULL:
            raise
        _log.warning(
            "stream %s keeps its limits: the NATS server has no room for %s bytes (%s); lower spec.gateway.files.maxMebibytes or raise "
            "the server's storage, and restart the gateways",
            config.name,
            config.max_bytes,
            error.description,
        )
