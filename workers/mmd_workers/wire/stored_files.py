"""Uploaded files on JetStream, for all gateways of a deployment: a log of entries, and chunks of bytes.

Independent of tenants' limits and of HTTP. An entry is the last message of its file's subject. Its writer names the last message of
the stream that it has read: of two gateways that write at once, one is refused, reads the new messages and decides again. So a
decision from all entries (whether there is room for one more file) holds for all gateways. A deletion is an entry as well, because
the removal of a message would reach nobody.

JetStream's object store is not used: it has no such comparison, its client reads uploads from a blocking file, and its list is
a consumer that delivers every entry again.
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
"""How long a deletion stays in the log. A gateway that has not read the log for half as long reads it from the beginning."""
BYTES_SLACK_SECONDS = 3600.0
"""How long bytes may outlive their entry, so that a request that has found the entry gets them."""
BEHIND_SECONDS = (0.1, 0.4, 1.0)
"""Pauses of a reader, in which servers of a cluster may catch up with the majority."""
_SECONDS = 10.0
_NAME_IN_USE = 10058
_NO_STREAM = 10059
_WRONG_LAST_SEQUENCE = {10070, 10071}
_FULL = {10023, 10047, 10077, 10123}  # the stream, the account or the server is full

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class StoredFile:
    """An entry. `digest`: SHA-256 of the bytes.

    `num_bytes`: size of the file, or the most that an upload may have. `expires_at`: Unix seconds at which the entry ends, or an upload
    is given up.
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
    """Limits of both streams."""

    entry_bytes: int
    bytes_bytes: int
    max_age_seconds: float


def lost(verb: str, error: Exception) -> MmdError:
    """The error that a client gets when the store fails."""
    if isinstance(error, js_errors.APIError) and error.err_code in _FULL:
        return FileQuotaError(
            f"the NATS server has no room for more files ({error.description}); delete files, or raise spec.gateway.files.maxMebibytes and "
            "spec.nats.storageMebibytes"
        )
    return PeerLostError(
        f"cannot {verb} the store of files: {type(error).__name__} {error}; retry, and check that JetStream is enabled on the NATS server"
    )


class FileLog:
    """The entries as this gateway has read them, for one caller at a time."""

    def __init__(self, bus: Bus, limits: StoreLimits) -> None:
        self._bus, self._limits = bus, limits
        self._stream = bus.subjects.files_stream
        self._manager = JetStreamManager(bus.client, timeout=_SECONDS)
        self._publisher = JetStreamContext(bus.client, timeout=_SECONDS)
        self._log = RateLimitedLog(_log)
        self._entries: dict[str, StoredFile] = {}
        self._stream_created_at: datetime | None = None  # the stream that has been read
        self._sequence = 0  # number of the last message that has been read
        self._last_sequence = 0  # number of the stream's last message
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
        """Create both streams, or raise their limits to these. Any number of gateways may call it at once.

        During a rollout some gateways have other limits. The largest stay, as do files that were promised more time; smaller limits
        are kept by those who write entries.

        Raises:
            PeerLostError: the server has no JetStream or does not answer.
            FileQuotaError: the server has no room for the streams.
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
        """Read the new messages of the log. A server that has lost its store has no files any more.

        Raises:
            PeerLostError: the log cannot be read now.
            FileQuotaError: the server lost its store and has no room for a new one.
        """
        try:
            info = await self._info()
            now = time.monotonic()
            if info.created != self._stream_created_at or now - self._read_at > DELETED_SECONDS / 2:
                self._entries.clear()
                self._stream_created_at, self._sequence = info.created, 0
                self._read_at = now  # an interrupted read resumes there
            self._last_sequence = info.state.last_seq
            while self._sequence < self._last_sequence and await self._read_next():
                pass
            self._sequence = max(self._sequence, self._last_sequence)
            self._read_at = time.monotonic()
        except (nats_errors.Error, TimeoutError) as error:
            raise lost("read", error) from error

    async def append(self, entry: StoredFile) -> bool:
        """Write an entry. False: another gateway has written meanwhile, so catch up and decide again.

        Raises:
            PeerLostError: the server did not confirm. It may have the entry.
            FileQuotaError: the server has no room.
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
        except WireError as error:  # an entry of another version; the server drops it at its age
            self._log.warning(
                "entry", f"entry {message.subject} of {self._stream} is skipped: {error.message}"
            )
        else:
            self._entries[entry.file_id] = entry
        return True


class FileBytes:
    """The chunks of files, used on the event loop of the bus."""

    def __init__(self, bus: Bus, limits: StoreLimits) -> None:
        self._bus, self._limits = bus, limits
        self._stream = bus.subjects.file_bytes_stream
        self._manager = JetStreamManager(bus.client, timeout=_SECONDS)
        self._publisher = JetStreamContext(bus.client, timeout=_SECONDS)

    async def write(self, file_id: str, number: int, chunk: bytes) -> None:
        """Store a chunk. A server that has lost the chunks of all files takes new ones.

        Raises:
            PeerLostError: the server did not confirm.
            FileQuotaError: the server has no room.
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
        """Read a chunk.

        Raises:
            FileNotFoundInStoreError: the chunk has been removed.
            PeerLostError: the server did not answer.
        """
        subject = self._bus.subjects.file_bytes(file_id, number)
        for pause in BEHIND_SECONDS if self._bus.stream_replicas > 1 else ():
            try:
                return await self._read(file_id, subject)
            except FileNotFoundInStoreError:  # perhaps this server has not received it yet
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
        """Remove all chunks of a file. There are none if the server has lost the stream.

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
    """The configuration of the stream of chunks."""
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
            current = (await manager.stream_info(config.name or "")).config
            largest = replace(
                config,
                max_bytes=max(current.max_bytes or 0, config.max_bytes or 0),
                max_age=max(current.max_age or 0.0, config.max_age or 0.0),
            )
            await _raise(manager, largest)
    except (nats_errors.Error, TimeoutError) as error:
        raise lost("set up", error) from error


async def _raise(manager: JetStreamManager, config: api.StreamConfig) -> None:
    """Raise the limits of a stream. If the server has no room for them, they stay, and existing files remain readable."""
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
