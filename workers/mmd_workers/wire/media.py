"""Encoders read the bytes of media from the gateway that holds them, slice by slice on the bulk connection. Independent of codecs."""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import Callable, Coroutine
from typing import Any

from mmd_api.contract.errors import DeadlineError, LinkError, MediaGoneError, MmdError, OverloadedError
from mmd_workers.basics.backoff import Backoff
from mmd_workers.wire.bulk import Bulk
from mmd_workers.wire.bus import Bus, Subscription
from mmd_workers.wire.codec import Frame
from mmd_workers.wire.messages.gateway import MediaRead, MediaSlice

MAX_SLICE_BYTES = 768 << 10
_WINDOW_SLICES = 6
_SLICE_SECONDS = 3.0
_RETRY_SECONDS = (0.1, 1.0)  # first and longest pause
_ATTEMPTS = 3


class MediaServer:
    """Serves the media that `lookup(digest)` returns (None: not held). `lookup` runs on the bus's loop and must be quick."""

    def __init__(
        self, bus: Bus, gateway_pod: str, lookup: Callable[[str], memoryview | bytes | None]
    ) -> None:
        self._bus = bus
        self._pod = gateway_pod
        self._lookup = lookup
        self._bulk: Bulk[Bus] | None = None
        self._subscription: Subscription | None = None

    async def start(self) -> None:
        """Serve from now on."""
        self._bulk = await self._bus.bulk()
        await self._bulk.run(self._start(self._bulk.bus))

    async def close(self) -> None:
        """Stop serving."""
        if self._bulk is not None and self._subscription is not None and self._bus.is_connected:
            await self._bulk.run(self._subscription.unsubscribe())

    async def _start(self, bus: Bus) -> None:
        self._subscription = await bus.serve(bus.subjects.media(self._pod), MediaRead, self._read)
        await bus.flush()

    async def _read(self, request: MediaRead) -> Frame:
        if self._bulk is None:
            raise OverloadedError("this media server has not started; retry")
        try:
            data = await self._bulk.home(_SLICE_SECONDS, self._lookup, request.digest)
        except TimeoutError as error:
            raise OverloadedError(
                f"{self._pod} was too busy to look a medium up within {_SLICE_SECONDS} s; read it again"
            ) from error
        if data is None:
            return Frame(MediaSlice(request.digest, request.offset, -1), b"")
        view = memoryview(data).cast("B") if len(data) else memoryview(b"")
        start = max(0, request.offset)
        end = start + max(0, min(request.length, MAX_SLICE_BYTES))
        return Frame(MediaSlice(request.digest, start, view.nbytes), view[start:end])


async def read_medium(bus: Bus, gateway: str, digest: str, num_bytes: int, deadline: float) -> bytes:
    """Read all bytes of a medium from the gateway that holds it, several slices at once. `deadline` is in Unix seconds.

    Raises:
        MediaGoneError: the gateway does not hold it.
        PeerLostError: the gateway is lost.
        LinkError: slices did not arrive, or the bytes do not match `digest` (sha256, hex).
        DeadlineError: `deadline` passed.
    """
    try:
        remaining = max(0.0, deadline - time.time())
        async with asyncio.timeout(remaining):
            bulk = await bus.bulk()  # the first use connects, which waits for an absent server
            data = await bulk.run(_read_all(bulk.bus, gateway, digest, num_bytes), timeout=remaining)
            actual = await asyncio.to_thread(lambda: hashlib.sha256(data).hexdigest())
    except TimeoutError as error:
        raise DeadlineError(
            f"medium {digest[:16]} was not read from {gateway} before the job deadline"
        ) from error
    if actual != digest:
        raise LinkError(
            f"the bytes {gateway} sent for medium {digest[:16]} do not match its digest; read them again"
        )
    return data


class SharedReads:
    """Shares one read of a medium among all concurrent readers.

    Every page of a document is a medium with the same bytes.
    """

    def __init__(self, read: Callable[[str, str, int, float], Coroutine[Any, Any, bytes]]) -> None:
        """`read(gateway, digest, num_bytes, deadline)` reads one medium, as `read_medium` does."""
        self._read = read
        self._reading: dict[tuple[str, str], tuple[asyncio.Task[bytes], list[None]]] = {}

    async def read(self, gateway: str, digest: str, num_bytes: int, deadline: float) -> bytes:
        """Read all bytes of a medium.

        Raises:
            MediaGoneError, PeerLostError, LinkError, DeadlineError: as `read_medium`.
        """
        while True:
            try:
                return await self._joined(gateway, digest, num_bytes, deadline)
            except DeadlineError:
                if time.time() >= deadline:  # otherwise the deadline of the reader that began
                    raise

    async def _joined(self, gateway: str, digest: str, num_bytes: int, deadline: float) -> bytes:
        key = gateway, digest
        if key not in self._reading:
            task = asyncio.create_task(self._read(gateway, digest, num_bytes, deadline))
            self._reading[key] = task, []
        task, waiting = self._reading[key]
        waiting.append(None)
        try:
            async with asyncio.timeout(max(0.0, deadline - time.time())):
                return await asyncio.shield(task)
        except TimeoutError as error:
            raise DeadlineError(
                f"medium {digest[:16]} was not read from {gateway} before the job deadline"
            ) from error
        finally:
            waiting.pop()
            if (task.done() or not waiting) and self._reading.get(key, (None,))[0] is task:
                task.cancel()
                del self._reading[key]


async def _read_all(bus: Bus, gateway: str, digest: str, num_bytes: int) -> bytes:
    buffer = bytearray(num_bytes)
    offsets = iter(range(0, max(num_bytes, 1), MAX_SLICE_BYTES))

    async def read_slices() -> None:
        for offset in offsets:
            piece = await _read_slice(bus, gateway, digest, offset, num_bytes)
            buffer[offset : offset + piece.nbytes] = piece

    readers = [asyncio.create_task(read_slices()) for _ in range(_WINDOW_SLICES)]
    try:
        await asyncio.gather(*readers)
    finally:
        for reader in readers:
            reader.cancel()
    return bytes(buffer)


async def _read_slice(bus: Bus, gateway: str, digest: str, offset: int, num_bytes: int) -> memoryview:
    length = min(MAX_SLICE_BYTES, num_bytes - offset)
    fault: MmdError | None = None
    pauses = Backoff(*_RETRY_SECONDS)
    for _ in range(_ATTEMPTS):
        try:
            header, piece = await bus.request_frame(
                bus.subjects.media(gateway),
                MediaRead(digest, offset, length),
                MediaSlice,
                timeout=_SLICE_SECONDS,
            )
        except (DeadlineError, OverloadedError) as error:
            fault = error
            await asyncio.sleep(pauses.next())
            continue
        if header.total_bytes < 0:
            raise MediaGoneError(f"{gateway} no longer holds medium {digest[:16]}: its request has ended")
        if (header.digest, header.offset, header.total_bytes, piece.nbytes) != (
            digest,
            offset,
            num_bytes,
            length,
        ):
            raise LinkError(
                f"{gateway} sent {piece.nbytes} bytes at {header.offset} of {header.total_bytes}; requested were {length} at "
                f"{offset} of {num_bytes}"
            )
        return piece
    raise LinkError(f"{gateway} did not send bytes {offset}.. of medium {digest[:16]}: {fault}")
