"""Reads a JSON body under limits of size, depth, elements and time, which are checked before anything is parsed. Independent of fields."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from pydantic_core import from_json
from starlette.datastructures import Headers

from mmd_api.contract.errors import (
    ClientGoneError,
    InvalidJsonError,
    MmdError,
    RequestTimeoutError,
    RequestTooLargeError,
    UnsupportedMediaTypeError,
)
from mmd_workers.gateway.basics.media_hold import RequestReservation

Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]

MAX_DEPTH = 32
MAX_MARKS = 65_536
"""Opening quotes and brackets, commas and colons: at least one for each value and key of the body."""
MAX_DIGITS = 400  # digits of a number; the time to read a long integer grows with the square of its length
MARK_BYTES = 112  # memory of a parsed and validated value, without its text
MAX_WIDE_STRING_BYTES = 16 << 20
MAX_ESCAPES = 4 << 20  # parsing these takes some 50 ms, during which nothing else runs
STALL_SECONDS = 30.0
MIN_BYTES_PER_SECOND = 128 << 10
SCAN_BYTES = 4096  # bytes per scan
SCAN_MARKS = 1024  # marks, some milliseconds, after which other requests get a turn
JOIN_IN_THREAD_BYTES = 1 << 20  # joining bytes lets other threads run, parsing them does not
_OUTSIDE = re.compile(rb'["\[\]{},:]')
LONG_NUMBER = re.compile(rb"[0-9]{%d}" % (MAX_DIGITS + 1))
MAX_SURROGATES = 131_072  # a body with more is not searched for halves, which takes some 0.2 µs for each
_HIGH, _LOW = rb"\\u[dD][89abAB][0-9a-fA-F]{2}", rb"\\u[dD][c-fC-F][0-9a-fA-F]{2}"
HALF_SURROGATE = re.compile(
    rb"\\u[dD](?:[89abAB][0-9a-fA-F]{2}(?!%b)|[c-fC-F][0-9a-fA-F]{2}(?<!%b%b))" % (_LOW, _HIGH, _LOW)
)
"""Begins with a literal, which is searched for at the speed of memory."""
BYTE_ORDER_MARK = b"\xef\xbb\xbf"


class TooDeepError(Exception):
    """The body is nested deeper than the limit."""


class TooWideError(Exception):
    """The body has more elements than the limit."""


class LongNumberError(Exception):
    """A number of the body has more digits than the limit."""


class JsonScanner:
    """Measures JSON text chunk by chunk without building a value: depth, `marks`, `wide_bytes` and `escapes`.

    Each mark costs one step of Python. Everything else (long strings, white space, escapes) is skipped at the speed of a search. The counts are
    right for every prefix that is valid JSON, and a parser reads no more than that.

    `marks`: opening quotes, `[`, `{`, `,` and `:`, an upper bound of the keys and values.
    `wide_bytes`: length of the strings with a character beyond ASCII, which take up to four bytes per character once decoded.
    `escapes`: number of backslashes.
    `longest_escaped`: length of the longest string with an escape, which the parser copies before it makes the value.
    """

    def __init__(self, max_depth: int = MAX_DEPTH, max_marks: int = MAX_MARKS) -> None:
        self._max_depth = max_depth
        self._max_marks = max_marks
        self._depth = 0
        self._in_string = False
        self._escaped = False  # the first byte of the next chunk belongs to an escape
        self._string_bytes = 0  # length of the present string
        self._wide = False  # the present string has a character beyond ASCII
        self._escapes = False  # the present string has an escape
        self._plain_end = b""  # end of the text outside strings, which may begin a number
        self.marks = 0
        self.wide_bytes = 0
        self.longest_wide = 0
        self.longest_escaped = 0
        self.escapes = 0

    def feed(self, chunk: bytes) -> None:
        """Measure the next chunk, of any size.

        Raises:
            TooDeepError, TooWideError, LongNumberError: a limit is exceeded; no more chunks may be fed.
        """
        if not chunk:
            return
        self.escapes += chunk.count(b"\\")
        text, self._escaped = self._without_escapes(chunk)
        plain = chunk.isascii() and b"\\u" not in text and not self._escaped
        at = 0
        while at < len(text):
            if self._in_string:
                at = self._leave_string(chunk, text, at, plain)
                continue
            mark = _OUTSIDE.search(text, at)
            end = len(text) if mark is None else mark.start()
            self._check_number(text[at:end], ends=mark is not None)
            if mark is None:
                return
            at = mark.end()
            self._mark(mark.group())

    def _check_number(self, part: bytes, *, ends: bool) -> None:
        """Check a part without a mark for a long number, which may continue in the next chunk."""
        part = self._plain_end + part
        if len(part) > MAX_DIGITS and LONG_NUMBER.search(part):
            raise LongNumberError
        self._plain_end = b"" if ends else part[-MAX_DIGITS:]

    def _without_escapes(self, chunk: bytes) -> tuple[bytes, bool]:
        """Blank each escaped quote and backslash of the chunk. Also returns whether an escape reaches into the next chunk."""
        text = chunk
        if self._escaped:
            text = b" " + text[1:]
        if b"\\" not in text:
            return text, False
        text = text.replace(b"\\\\", b"  ").replace(b'\\"', b"  ")
        return text, text.endswith(b"\\")

    def _mark(self, mark: bytes) -> None:
        if mark in b"]}":
            self._depth -= 1
            return
        self.marks += 1
        if self.marks > self._max_marks:
            raise TooWideError
        if mark == b'"':
            self._in_string, self._string_bytes, self._wide, self._escapes = True, 0, False, False
        elif mark in b"[{":
            self._depth += 1
            if self._depth > self._max_depth:
                raise TooDeepError

    def _leave_string(self, chunk: bytes, text: bytes, at: int, plain: bool) -> int:
        """The position after the string that contains `at`, or the end of the chunk. `text`: the chunk with some escapes blanked."""
        end = text.find(b'"', at)
        stop = len(text) if end < 0 else end
        self._string_bytes += stop - at
        self._escapes = self._escapes or chunk.find(b"\\", at, stop) >= 0
        if self._escapes:
            self.longest_escaped = max(self.longest_escaped, self._string_bytes)
        if not plain and not self._wide:
            part = text[at:stop]
            self._wide = not part.isascii() or b"\\u" in part or part.endswith(b"\\")
        if self._wide:
            self.longest_wide = max(self.longest_wide, self._string_bytes)
        if end < 0:
            return stop
        self.wide_bytes += self._string_bytes if self._wide else 0
        self._in_string = False
        return end + 1

    @property
    def parsed_bytes(self) -> int:
        """Upper bound of the memory for the values, in addition to the body itself."""
        open_string = self._string_bytes if self._in_string and self._wide else 0
        return MARK_BYTES * self.marks + 3 * (self.wide_bytes + open_string) + self.longest_escaped


async def read_json(
    headers: Headers,
    receive: Receive,
    max_bytes: int,
    reservation: RequestReservation,
    deadline: float,
    seen: Callable[[bytes], None] = lambda _part: None,
) -> Any:
    """Read and decode a body. `reservation` grows with the bytes that have arrived, to the memory for holding and parsing them.

    A byte order mark is skipped. A half of a surrogate pair, as JavaScript leaves it where it cuts a string, is read as U+FFFD.
    `seen`: called with each part of the body. `deadline`: Unix time at which the body must be complete. Until then, the gateway waits
    for `STALL_SECONDS`, then requires at least `MIN_BYTES_PER_SECOND`. Time in which it waits for memory does not count.

    Raises:
        RequestTimeoutError, RequestTooLargeError, UnsupportedMediaTypeError: the headers or the size are at fault.
        InvalidJsonError: the body is invalid JSON, too deep, has too many elements, or has NaN.
        OverloadedError: there is no memory for it now.
        ClientGoneError: the client hung up.
    """
    chunks = Chunks(receive)
    parts: list[bytes] = []
    try:
        _check_headers(headers)
        _check_declared_length(headers, max_bytes)
        try:
            async with asyncio.timeout(max(0.0, deadline - time.time())):
                await _read(chunks, max_bytes, reservation, parts, seen)
        except TimeoutError as error:
            raise RequestTimeoutError(
                "the body was incomplete at the request deadline (x-request-timeout or spec.gateway.requestTimeoutSeconds); send it faster"
            ) from error
    except MmdError:
        parts.clear()
        reservation.release()
        raise
    is_large = sum(map(len, parts)) > JOIN_IN_THREAD_BYTES
    body = await asyncio.to_thread(b"".join, parts) if is_large else b"".join(parts)
    parts.clear()
    if body.startswith(BYTE_ORDER_MARK):
        body = body.removeprefix(BYTE_ORDER_MARK)
    try:
        return _parsed(body)
    except InvalidJsonError:
        if not 0 < body.count(rb"\ud") + body.count(rb"\uD") <= MAX_SURROGATES:
            raise
    # One copy at a time, as the reservation has it. NUL, which valid JSON never has, stands for an escaped backslash meanwhile.
    body = body.replace(b"\0", b"\1")
    body = body.replace(rb"\\", b"\0\0")
    body = HALF_SURROGATE.sub(rb"\\ufffd", body)
    body = body.replace(b"\0\0", rb"\\")
    return _parsed(body)


def _parsed(body: bytes) -> Any:
    try:
        return from_json(body, allow_inf_nan=False)
    except ValueError as error:
        raise InvalidJsonError(f"the body is not valid JSON: {str(error)[:200]}") from error


class Chunks:
    """A body as it arrives. Its client may take `STALL_SECONDS`, and then must send at least `MIN_BYTES_PER_SECOND`."""

    def __init__(self, receive: Receive) -> None:
        self._receive = receive
        self._seconds = 0.0  # time spent waiting for the client
        self._size = 0
        self.ended = False

    async def next(self) -> bytes:
        """Wait for the next chunk, which may be empty; `ended` is set with the last one.

        Raises:
            RequestTimeoutError: the client is too slow.
            ClientGoneError: the client hung up.
        """
        patience = STALL_SECONDS + self._size / MIN_BYTES_PER_SECOND - self._seconds
        started_at = time.monotonic()
        try:
            async with asyncio.timeout(min(STALL_SECONDS, max(0.0, patience))):
                message = await self._receive()
        except TimeoutError as error:
            raise RequestTimeoutError(
                f"{self._size} bytes of the body arrived in {self._seconds + time.monotonic() - started_at:.0f} s; the gateway waits "
                f"{STALL_SECONDS:.0f} s, then requires at least {MIN_BYTES_PER_SECOND} bytes/s; send it faster"
            ) from error
        self._seconds += time.monotonic() - started_at
        if message["type"] == "http.disconnect":
            raise ClientGoneError("the client hung up")
        self.ended = not message.get("more_body", False)
        data = bytes(message.get("body", b""))
        self._size += len(data)
        return data


async def _read(
    chunks: Chunks,
    max_bytes: int,
    reservation: RequestReservation,
    parts: list[bytes],
    seen: Callable[[bytes], None],
) -> None:
    scanner = JsonScanner()
    size = 0
    while not chunks.ended:
        part = await chunks.next()
        size += len(part)
        if size > max_bytes:
            raise _too_large(max_bytes)
        try:
            await _scan(scanner, part)
        except TooDeepError as error:
            raise InvalidJsonError(f"the JSON body is nested deeper than {MAX_DEPTH} levels") from error
        except LongNumberError as error:
            raise InvalidJsonError(f"a number in the JSON body has more than {MAX_DIGITS} digits") from error
        except TooWideError as error:
            raise InvalidJsonError(
                f"the JSON body has more than {MAX_MARKS} strings, brackets, commas and colons; send fewer messages or parts"
            ) from error
        if scanner.longest_wide > MAX_WIDE_STRING_BYTES:
            raise RequestTooLargeError(
                f"a string with non-ASCII characters is longer than {MAX_WIDE_STRING_BYTES} bytes; send less text, or media as base64"
            )
        if scanner.escapes > MAX_ESCAPES:
            raise RequestTooLargeError(
                f"the body has more than {MAX_ESCAPES} escapes such as \\n; send less text, or media as base64 without line breaks"
            )
        await reservation.resize(2 * size + scanner.parsed_bytes)
        parts.append(part)
        seen(part)


async def _scan(scanner: JsonScanner, part: bytes) -> None:
    """Feed a part of any size without blocking the event loop."""
    marks_before = scanner.marks
    for begin in range(0, len(part), SCAN_BYTES):
        scanner.feed(part[begin : begin + SCAN_BYTES])
        if scanner.marks - marks_before >= SCAN_MARKS:
            marks_before = scanner.marks
            await asyncio.sleep(0)


def _check_headers(headers: Headers) -> None:
    kind = headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        raise UnsupportedMediaTypeError(f"content-type {kind[:64]!r} is not supported; send application/json")
    if headers.get("content-encoding", "identity").strip().lower() != "identity":
        raise UnsupportedMediaTypeError("content-encoding is not supported; send the body uncompressed")


def _check_declared_length(headers: Headers, max_bytes: int) -> None:
    declared = headers.get("content-length", "")
    if declared.isdigit() and int(declared[:19]) > max_bytes:
        raise _too_large(max_bytes)


def _too_large(max_bytes: int) -> RequestTooLargeError:
    return RequestTooLargeError(
        f"the body is larger than {max_bytes} bytes; send media by URL, or raise spec.gateway.maxBodyMebibytes"
    )
