"""Reads a JSON body under limits: size and depth are checked while it arrives, before anything is parsed. Knows no field."""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from pydantic_core import from_json
from starlette.datastructures import Headers

from mmd_workers.gateway.api import ApiError
from mmd_workers.gateway.hold import Reservation

Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]

MAX_DEPTH = 32
STALL_SECONDS = 30.0
DISCARD_BYTES = 32 << 20
DISCARD_SECONDS = 5.0
PARSE_IN_THREAD_BYTES = 1 << 20
UNKNOWN_LENGTH_BYTES = 1 << 20
_OUTSIDE = re.compile(rb'["\[\]{}]')


class ClientGoneError(Exception):
    """The client closed the connection; there is nobody to answer."""


class DepthScanner:
    """Counts open brackets outside of strings, chunk by chunk; long strings (base64) are skipped at the speed of a search."""

    def __init__(self, limit: int = MAX_DEPTH) -> None:
        self._limit = limit
        self._depth = 0
        self._in_string = False
        self._skip = 0  # bytes of the next chunk that an escape covers

    def feed(self, chunk: bytes) -> bool:
        """False: deeper than the limit."""
        if not chunk:
            return True
        at, self._skip = self._skip, 0
        while at < len(chunk):
            if self._in_string:
                at = self._leave_string(chunk, at)
                continue
            found = _OUTSIDE.search(chunk, at)
            if found is None:
                break
            at = found.end()
            mark = found.group()
            if mark == b'"':
                self._in_string = True
            elif mark in (b"[", b"{"):
                self._depth += 1
                if self._depth > self._limit:
                    return False
            else:
                self._depth -= 1
        return True

    def _leave_string(self, chunk: bytes, at: int) -> int:
        """Where the string that `at` stands in has ended, or the chunk; an escape may reach into the next one."""
        end = chunk.find(b'"', at)
        while (escape := chunk.find(b"\\", at, end if end >= 0 else len(chunk))) >= 0:
            at = escape + 2
            if 0 <= end < at:
                end = chunk.find(b'"', at)
        self._in_string = end < 0
        self._skip = max(0, at - len(chunk))
        return len(chunk) if end < 0 else end + 1


async def read_json(headers: Headers, receive: Receive, max_bytes: int, reservation: Reservation) -> Any:
    """The decoded body. `reservation` is grown to what holding and parsing it takes: twice its size.

    Raises:
        ApiError: 408, 413, 415, 400 (no JSON, too deep, NaN), 503 (no memory for it now).
        ClientGoneError: the client hung up.
    """
    chunks = _Chunks(receive)
    try:
        body = await _read(headers, chunks, max_bytes, reservation)
    except ApiError:
        await chunks.discard()
        raise
    try:
        if len(body) > PARSE_IN_THREAD_BYTES:
            return await asyncio.to_thread(from_json, body, allow_inf_nan=False)
        return from_json(body, allow_inf_nan=False)
    except ValueError as error:
        raise ApiError(400, f"the body is not valid JSON: {str(error)[:200]}", code="invalid_json") from error


class _Chunks:
    """A body as it arrives."""

    def __init__(self, receive: Receive) -> None:
        self._receive = receive
        self.ended = False

    async def next(self) -> bytes:
        """The next chunk, which may be empty; `ended` says whether it was the last."""
        message = await self._receive()
        if message["type"] == "http.disconnect":
            raise ClientGoneError
        self.ended = not message.get("more_body", False)
        return bytes(message.get("body", b""))

    async def discard(self) -> None:
        """Read on for a while: most clients send everything before they read, and a connection closed now would hide the answer."""
        left = DISCARD_BYTES
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(DISCARD_SECONDS):
                while left > 0 and not self.ended:
                    left -= len(await self.next())


async def _read(headers: Headers, chunks: _Chunks, max_bytes: int, reservation: Reservation) -> bytes:
    _check_headers(headers)
    declared = _declared_length(headers, max_bytes)
    room = declared if declared is not None else UNKNOWN_LENGTH_BYTES
    await reservation.grow(2 * room)
    scanner = DepthScanner()
    parts: list[bytes] = []
    size = 0
    while not chunks.ended:
        try:
            async with asyncio.timeout(STALL_SECONDS):
                part = await chunks.next()
        except TimeoutError as error:
            raise ApiError(
                408, f"the body stalled for {STALL_SECONDS:.0f} s: send it again", code="request_timeout"
            ) from error
        size += len(part)
        if size > max_bytes:
            raise _too_large(max_bytes)
        if size > room:  # its length was not declared
            await reservation.grow(2 * max_bytes - reservation.num_bytes)
            room = max_bytes
        if not scanner.feed(part):
            raise ApiError(
                400, f"the JSON body is nested deeper than {MAX_DEPTH} levels", code="invalid_json"
            )
        parts.append(part)
    reservation.shrink(2 * size)
    return b"".join(parts)


def _check_headers(headers: Headers) -> None:
    kind = headers.get("content-type", "application/json").partition(";")[0].strip().lower()
    if kind != "application/json":
        raise ApiError(
            415,
            f"content-type {kind[:64]!r} is not served: send application/json",
            code="unsupported_media_type",
        )
    if headers.get("content-encoding", "identity").strip().lower() != "identity":
        raise ApiError(415, "send the body without content-encoding", code="unsupported_media_type")


def _declared_length(headers: Headers, max_bytes: int) -> int | None:
    declared = headers.get("content-length", "")
    if not declared.isdigit():
        return None
    if int(declared) > max_bytes:
        raise _too_large(max_bytes)
    return int(declared)


def _too_large(max_bytes: int) -> ApiError:
    return ApiError(
        413,
        f"the body is larger than {max_bytes} bytes: send media by URL, or raise spec.gateway.maxBodyMebibytes",
        code="request_too_large",
    )
