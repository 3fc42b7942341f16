"""Keeps answers to requests with an idempotency key, during and for a while after their generation, for all clients that repeat the request.

Independent of headers, of workers and of other gateways. An answer is a list of blocks: the events of a stream, or pieces of a body. The id of an
event names the run that made it and its block, so that no stream continues with events from another run of the same request.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import math
import time
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, MutableMapping
from dataclasses import dataclass, field
from typing import Any, Literal

from mmd_api.contract.errors import (
    AnswerGoneError,
    IdempotencyKeyReusedError,
    MmdError,
    TooManyRequestsError,
)

WINDOW_SECONDS = 300.0  # an answer is kept this long after its end
ABANDONED_SECONDS = 30.0  # an answer without a client is cancelled after this time
MAX_KEYS = 4096
MAX_KEYS_OF_TENANT = 1024
BUDGET_DIVISOR = 32  # the budget is the gateway's memory divided by this
TENANT_DIVISOR = 4  # one tenant's answers may take the budget divided by this
MAX_ANSWER_BYTES = 4 << 20
AHEAD_BYTES = 256 << 10  # an answer may be this far ahead of its fastest reader
PIECE_BYTES = 256 << 10
BLOCK_OVERHEAD_BYTES = 130  # measured
REMOTE_SECONDS = 5.0  # another gateway that has not asked for this long no longer counts as a reader
RETRY_SECONDS = 1.0
RUN_CHARACTERS = 8  # a run is named by the end of its request id, which is random

End = Literal["", "complete", "failed", "broken"]
"""How an answer ended. "failed": with an error as its response or last event. "broken": in the middle, and the rest will not arrive."""


@dataclass(frozen=True, slots=True)
class RequestName:
    """Identifies one tenant's request at one path by its key. `digest`: digest of all three, the name among gateways."""

    tenant: str
    digest: str

    @classmethod
    def of(cls, tenant: str, path: str, key: str) -> RequestName:
        """The name of the request with this key."""
        return cls(tenant, hashlib.sha256(json.dumps([tenant, path, key]).encode()).hexdigest())


@dataclass(frozen=True, slots=True)
class RetainedPiece:
    """Consecutive blocks of an answer.

    The first block may lack its beginning, and if `cut` is set the last lacks its end. `status`: 0 if the answer has not begun. `end`: how the
    answer ended after these blocks.
    """

    status: int
    headers: list[tuple[bytes, bytes]]
    blocks: list[bytes]
    cut: bool
    end: End


@dataclass(slots=True, eq=False)
class AnswerReader:
    """The position of a reader: block `at`, of which it has read `skip` bytes.

    `seen`: for another gateway, when it last asked (monotonic); None for a client.
    """

    at: int
    skip: int = 0
    seen: float | None = None


class _Signal:
    """Wakes all waiting tasks."""

    def __init__(self) -> None:
        self._event = asyncio.Event()

    def fire(self) -> None:
        self._event.set()
        self._event = asyncio.Event()

    async def wait(self, seconds: float | None = None) -> None:
        """Wait for the next `fire`, at most this long."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._event.wait()


@dataclass(frozen=True, slots=True)
class _Block:
    """A block of an answer. `end`: the answer's bytes up to here, including the overhead of each block."""

    end: int
    data: bytes


class RetainedAnswer:
    """An answer of which the newest part is kept. Its maker sends it to `put`, and then calls `end`.

    `grown`: called with the number of added bytes, and with 0 when a reader has gone. `ahead_bytes`: returns how far the answer may now be ahead
    of all its readers.
    """

    def __init__(
        self,
        name: RequestName,
        digest: bytes,
        grown: Callable[[RetainedAnswer, int], None],
        ahead_bytes: Callable[[RetainedAnswer], int],
    ) -> None:
        self.name, self.digest = name, digest
        self.relayed = False  # another gateway makes it
        self.claim = ""  # other gateways find the answer by this claim
        self.is_beyond = False  # another gateway makes it, and has not made the client's event yet
        self.run = ""  # names the maker in the ids of events
        self.fault: MmdError | None = None  # why it is broken, if the reason is known
        self.status = 0
        self.headers: list[tuple[bytes, bytes]] = []
        self.state: End = ""
        self.ended_at = 0.0
        self.kept_bytes = 0
        self.is_stream = False
        self._grown, self._ahead_limit = grown, ahead_bytes
        self._blocks: deque[_Block] = deque()
        self._first = 0  # number of the first kept block
        self._num_bytes = 0  # the size of the answer so far, dropped blocks included
        self._readers: dict[str | AnswerReader, AnswerReader] = {}
        self._last_reader_left = time.monotonic()
        self._news, self._taken, self._crowd = _Signal(), _Signal(), _Signal()

    @property
    def next_block(self) -> int:
        """The number of the next block."""
        return self._first + len(self._blocks)

    def block(self, number: int) -> bytes:
        """The block with this number; empty if it is not kept."""
        at = number - self._first
        return self._blocks[at].data if 0 <= at < len(self._blocks) else b""

    def begin_at(self, block: int) -> None:
        """Begin at this block; earlier blocks are not kept here."""
        self._first = block

    async def put(self, message: MutableMapping[str, Any]) -> None:
        """Take a message of ASGI's `send`. Waits while every client is far behind."""
        if message["type"] == "http.response.start":
            self.begin(message["status"], list(message["headers"]))
        elif body := bytes(message.get("body", b"")):
            for block in list(self._events(body)) if self.is_stream else _cut(body):
                self.extend([block])
                await self.room()

    def begin(self, status: int, headers: list[tuple[bytes, bytes]]) -> None:
        """Take the status and the headers."""
        self.status, self.headers = status, headers
        self.is_stream = any(
            name.lower() == b"content-type" and value.startswith(b"text/event-stream")
            for name, value in headers
        )
        ids = [value for name, value in headers if name.lower() == b"x-request-id"]
        self.run = b"".join(ids).decode("latin-1")[-RUN_CHARACTERS:]
        self._news.fire()

    def extend(self, blocks: Iterable[bytes]) -> None:
        """Take blocks, in order."""
        before = self._num_bytes
        for data in blocks:
            self._num_bytes += len(data) + BLOCK_OVERHEAD_BYTES
            self._blocks.append(_Block(self._num_bytes, data))
        self.kept_bytes += self._num_bytes - before
        self._grown(self, self._num_bytes - before)
        self._news.fire()

    async def room(self, seconds: float = math.inf) -> None:
        """Wait until the fastest reader, if any, is close enough, at most this long."""
        deadline = time.monotonic() + seconds
        while self.is_full and (remaining := deadline - time.monotonic()) > 0:
            await self._taken.wait(min(remaining, RETRY_SECONDS))

    @property
    def is_full(self) -> bool:
        """True if all readers are far behind."""
        ahead = self._ahead_bytes()
        return ahead > 0 and ahead > self._ahead_limit(self)

    def shrink(self, to_bytes: int) -> int:
        """Drop the oldest blocks down to `to_bytes`, but only those that the fastest reader has; returns the dropped bytes."""
        before = self.kept_bytes
        first_unread = max((reader.at for reader in self._readers.values()), default=math.inf)
        while self.kept_bytes > to_bytes and len(self._blocks) > 1 and self._first < first_unread:
            self.kept_bytes -= len(self._blocks.popleft().data) + BLOCK_OVERHEAD_BYTES
            self._first += 1
        return before - self.kept_bytes

    def end(self, state: End) -> None:
        """Mark the answer as ended."""
        self.state, self.ended_at = state, time.monotonic()
        for signal in (self._news, self._taken, self._crowd):
            signal.fire()

    @contextlib.contextmanager
    def reader(self, at: int) -> Iterator[AnswerReader]:
        """Register a client that reads from this block on."""
        reader = AnswerReader(at)
        self._readers[reader] = reader
        try:
            yield reader
        finally:
            del self._readers[reader]
            self._last_reader_left = time.monotonic()
            self._taken.fire()
            self._crowd.fire()
            self._grown(self, 0)

    @property
    def has_readers(self) -> bool:
        """True if a client of this gateway or another gateway reads the answer."""
        self._forget_silent()
        return bool(self._readers)

    def is_read_by(self, name: str) -> bool:
        """True if the other gateway with this name reads the answer for one of its clients."""
        self._forget_silent()
        return name in self._readers

    def unread_elsewhere_bytes(self) -> int:
        """The bytes that a reading gateway does not yet have, plus one for the end; 0 if no other gateway reads the answer."""
        self._forget_silent()
        remote = [reader.at for reader in self._readers.values() if reader.seen is not None]
        return 1 + self._bytes_from(min(remote)) if remote else 0

    def remote_reader(self, name: str, at: int, skip: int) -> AnswerReader:
        """The reader for another gateway, which reads for its clients. It asks repeatedly, and is gone when it stops asking or has received the end."""
        self._forget_silent()
        reader = self._readers.setdefault(name, AnswerReader(at))
        reader.at, reader.skip, reader.seen = at, skip, time.monotonic()
        self._taken.fire()
        return reader

    def remote_has_all(self, name: str) -> None:
        """Remove the reader of another gateway, because it has received the end."""
        if self._readers.pop(name, None) is not None:
            self._grown(self, 0)

    async def read(
        self, reader: AnswerReader, seconds: float | None = None, most_bytes: int = PIECE_BYTES
    ) -> RetainedPiece:
        """Read the next blocks for a reader, at most `most_bytes`, waiting for them at most this long.

        Raises:
            AnswerGoneError: the next block is no longer kept.
        """
        if self._has_nothing_for(reader):
            await self._news.wait(seconds)
        if reader.at < self._first:
            raise AnswerGoneError(
                f"the first {self._first} parts of this answer are no longer retained; send the request with another idempotency-key, "
                "and without last-event-id"
            )
        blocks, size = [], 0
        while reader.at < self.next_block and size < most_bytes:
            data = self._blocks[reader.at - self._first].data
            part = data[reader.skip : reader.skip + most_bytes - size]
            blocks.append(part)
            size += len(part)
            reader.skip += len(part)
            if reader.skip == len(data):
                reader.at, reader.skip = reader.at + 1, 0
        self._taken.fire()
        is_last = reader.at >= self.next_block
        return RetainedPiece(
            self.status, self.headers, blocks, reader.skip > 0, self.state if is_last else ""
        )

    async def until_unwanted(self) -> None:
        """Wait until the answer has ended, or has had no reader for so long that none is expected. A later client finds it at its own gateway."""
        while not self.state:
            self._forget_silent()
            if self._readers:
                await self._crowd.wait(REMOTE_SECONDS)
            elif (
                not self.relayed
                and (remaining := self._last_reader_left + ABANDONED_SECONDS - time.monotonic()) > 0
            ):
                await self._crowd.wait(remaining)
            else:
                return

    def _has_nothing_for(self, reader: AnswerReader) -> bool:
        return reader.at >= self.next_block and not self.state

    def _events(self, body: bytes) -> Iterator[bytes]:
        """Split a part of a stream into its events and comments, and give events their ids. The part ends with one of them."""
        for number, block in enumerate(body.split(b"\n\n")[:-1], self.next_block):
            if block.startswith(b":"):
                # Without the empty line: once OpenAI's client knows an id, that would be an event to it, and not JSON.
                yield b"%b\n" % block
            else:
                yield b"id: %b-%d\n%b\n\n" % (self.run.encode(), number, block)

    def _ahead_bytes(self) -> int:
        self._forget_silent()
        if not self._readers or not self._blocks:
            return 0
        return self._bytes_from(max(reader.at for reader in self._readers.values()))

    def _bytes_from(self, at: int) -> int:
        """The kept bytes from this block on."""
        if at <= self._first:
            return self.kept_bytes
        return 0 if at >= self.next_block else self._num_bytes - self._blocks[at - self._first - 1].end

    def _forget_silent(self) -> None:
        now = time.monotonic()
        for key, reader in list(self._readers.items()):
            if reader.seen is not None and now - reader.seen > REMOTE_SECONDS:
                del self._readers[key]
                self._last_reader_left = now


def _cut(body: bytes) -> Iterator[bytes]:
    for at in range(0, len(body), PIECE_BYTES):
        yield body[at : at + PIECE_BYTES]


@dataclass(slots=True)
class RetainedAnswers:
    """All retained answers of a gateway.

    If the budget, a tenant's part of it, or the number of keys is exceeded, ended answers are dropped, in the order of their ends: those of the
    tenant itself, and for the budget those of tenants with more than the average.

    If that is not enough, an answer that is still being made loses its beginning, and then grows no faster than it is read. A dropped answer can no
    longer be found, but counts until its readers have it, whether these are clients or another gateway on behalf of its clients.

    `on_drop`: called with an answer that can no longer be found.
    """

    budget_bytes: int
    used_bytes: int = 0
    on_drop: Callable[[RetainedAnswer], None] = field(default=lambda _answer: None)
    _answers: dict[str, RetainedAnswer] = field(default_factory=dict)  # by digest of the name
    _keys: Counter[str] = field(default_factory=Counter)  # by tenant
    _bytes: Counter[str] = field(default_factory=Counter)
    _ended: dict[str, OrderedDict[str, RetainedAnswer]] = field(default_factory=dict)  # by tenant
    _dropped: dict[RetainedAnswer, None] = field(default_factory=dict)  # still being read

    def __len__(self) -> int:
        return len(self._answers)

    def find(self, name_digest: str, digest: bytes) -> RetainedAnswer | None:
        """The answer to the request with this name, if there is one. `digest`: digest of the request's body.

        Raises:
            IdempotencyKeyReusedError: the key belongs to a request with another body.
        """
        answer = self._answers.get(name_digest)
        if answer is not None and _is_old(answer):
            self._drop(answer)
            answer = None
        if answer is not None and answer.digest != digest:
            raise IdempotencyKeyReusedError(
                "idempotency-key: a request with this key had another body; send the same body, or another key"
            )
        return answer

    def find_for(self, reader: str, name_digest: str, digest: bytes) -> RetainedAnswer | None:
        """Find an answer for another gateway; an answer that it has begun to read is found even if it has been dropped since."""
        for answer in self._dropped:
            if answer.name.digest == name_digest and answer.digest == digest and answer.is_read_by(reader):
                return answer
        return self.find(name_digest, digest)

    def begin(self, name: RequestName, digest: bytes) -> RetainedAnswer:
        """Begin a new answer, which its maker must `finish`.

        Raises:
            TooManyRequestsError: too many answers are being made.
        """
        while (is_tenant_full := self._has_all_keys(name.tenant)) or len(self._answers) >= MAX_KEYS:
            if not (self._drop_oldest(name.tenant) if is_tenant_full else self._drop_of_most(self._keys)):
                whose, count = (
                    ("of this tenant", self._keys[name.tenant])
                    if is_tenant_full
                    else ("of all", len(self._answers))
                )
                raise TooManyRequestsError(
                    f"{count} requests {whose} with an idempotency-key are running, as many as may; retry, or send no key",
                    retry_after_seconds=RETRY_SECONDS,
                )
        answer = RetainedAnswer(name, digest, self._grown, self._ahead_limit)
        self._answers[name.digest] = answer
        self._keys[name.tenant] += 1
        return answer

    def unread_elsewhere_bytes(self) -> int:
        """The bytes of answers that other gateways are reading and do not yet have; above 0 until they have everything."""
        return sum(answer.unread_elsewhere_bytes() for answer in [*self._answers.values(), *self._dropped])

    def finish(self, answer: RetainedAnswer, state: End, *, keep: bool) -> None:
        """End an answer. Only an answer that is kept can be repeated. Safe to call twice."""
        if not answer.state:
            answer.end(state)
            if self._answers.get(answer.name.digest) is answer:
                self._ended.setdefault(answer.name.tenant, OrderedDict())[answer.name.digest] = answer
        if not keep:
            self._drop(answer)

    def forget_one(self) -> bool:
        """Drop one expired answer, or release a dropped answer without readers. Returns True if there was one."""
        for answer in list(self._dropped):
            if self._release(answer):
                return True
        for ended in self._ended.values():
            if _is_old(oldest := next(iter(ended.values()))):
                self._drop(oldest)
                return True
        return False

    def _grown(self, answer: RetainedAnswer, num_bytes: int) -> None:
        self._release(answer)
        if self._answers.get(answer.name.digest) is not answer:
            return
        tenant = answer.name.tenant
        self._count(tenant, num_bytes)
        self._count(tenant, -answer.shrink(MAX_ANSWER_BYTES))
        while self._tenant_excess(tenant) > 0 and self._drop_oldest(tenant):
            pass
        while self.used_bytes > self.budget_bytes and self._drop_of_most(self._bytes):
            pass
        if self._answers.get(answer.name.digest) is answer and (excess := self._excess(tenant)) > 0:
            self._count(tenant, -answer.shrink(max(0, answer.kept_bytes - excess)))

    def _ahead_limit(self, answer: RetainedAnswer) -> int:
        return AHEAD_BYTES if self._excess(answer.name.tenant) <= 0 else 0

    def _excess(self, tenant: str) -> int:
        """The bytes by which this tenant exceeds its part, or all exceed the budget while this tenant has at least the average."""
        total_excess = self.used_bytes - self.budget_bytes
        average = self.used_bytes / max(1, len(self._bytes))
        return max(self._tenant_excess(tenant), total_excess if self._bytes[tenant] >= average else 0)

    def _has_all_keys(self, tenant: str) -> bool:
        """True if the tenant has as many keys as it may. Without API keys all requests belong to one tenant without a name, which has no limit."""
        return bool(tenant) and self._keys[tenant] >= MAX_KEYS_OF_TENANT

    def _tenant_excess(self, tenant: str) -> int:
        return self._bytes[tenant] - self.budget_bytes // TENANT_DIVISOR if tenant else 0

    def _drop_oldest(self, tenant: str) -> bool:
        """Drop a tenant's answer that ended first. Returns True if there was one."""
        if ended := self._ended.get(tenant):
            self._drop(next(iter(ended.values())))
            return True
        return False

    def _drop_of_most(self, share: Counter[str]) -> bool:
        """Drop an answer of the tenant with the largest share, among those with at least the average. Returns True if there was one."""
        average = share.total() / max(1, len(share))
        tenants = [tenant for tenant in self._ended if share[tenant] >= average]
        return bool(tenants) and self._drop_oldest(max(tenants, key=share.__getitem__))

    def _drop(self, answer: RetainedAnswer) -> None:
        name = answer.name
        if self._answers.get(name.digest) is not answer:
            return
        del self._answers[name.digest]
        if (ended := self._ended.get(name.tenant)) is not None:
            ended.pop(name.digest, None)
            if not ended:
                del self._ended[name.tenant]
        self._keys[name.tenant] -= 1
        if not self._keys[name.tenant]:
            del self._keys[name.tenant]
        self._dropped[answer] = None
        self._release(answer)
        self.on_drop(answer)

    def _release(self, answer: RetainedAnswer) -> bool:
        """Stop counting a dropped answer when nobody reads it. Returns True if it was released."""
        if answer not in self._dropped or answer.has_readers:
            return False
        del self._dropped[answer]
        self._count(answer.name.tenant, -answer.kept_bytes)
        return True

    def _count(self, tenant: str, num_bytes: int) -> None:
        self.used_bytes += num_bytes
        self._bytes[tenant] += num_bytes
        if not self._bytes[tenant]:
            del self._bytes[tenant]


def _is_old(answer: RetainedAnswer) -> bool:
    return bool(answer.state) and time.monotonic() - answer.ended_at >= WINDOW_SECONDS
