"""Answers to requests with an idempotency key: kept while they are made and for a while afterwards, for every client that sends the same
request. Independent of headers, of workers and of other gateways.

An answer is a list of blocks: the events of a stream, or pieces of a body. The id of an event names the run that made it and its block, so that
no stream goes on with what another run of the same request made.
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

WINDOW_SECONDS = 300.0  # after its end
ABANDONED_SECONDS = 30.0  # without a client until its work is cancelled
MAX_KEYS = 4096
MAX_KEYS_OF_TENANT = 1024
BUDGET_DIVISOR = 32  # of the gateway's memory
TENANT_DIVISOR = 4  # of the budget: what one tenant may have retained
MAX_ANSWER_BYTES = 4 << 20
AHEAD_BYTES = 256 << 10  # of an answer that is made faster than any client reads it
PIECE_BYTES = 256 << 10
BLOCK_BYTES = 130  # that a block takes beside its data, as measured
REMOTE_SECONDS = 5.0  # after its last question another gateway no longer reads
RETRY_SECONDS = 1.0
RUN_CHARACTERS = 8  # of a request id, whose end is random

End = Literal["", "complete", "failed", "broken"]
"""How an answer ended: "failed": with an error as its response or last event; "broken": without its rest, which does not come."""


@dataclass(frozen=True, slots=True)
class RequestName:
    """What a key stands for: one of a tenant's requests at one path. `digest`: of all three, by which gateways know it."""

    tenant: str
    digest: str

    @classmethod
    def of(cls, tenant: str, path: str, key: str) -> RequestName:
        """The name of the request with this key."""
        return cls(tenant, hashlib.sha256(json.dumps([tenant, path, key]).encode()).hexdigest())


@dataclass(frozen=True, slots=True)
class RetainedPiece:
    """Blocks of an answer, of which the first may be cut at its beginning, and with `cut` the last at its end. `status` 0: it has not begun.
    `end`: of the answer, behind these blocks.
    """

    status: int
    headers: list[tuple[bytes, bytes]]
    blocks: list[bytes]
    cut: bool
    end: End


@dataclass(slots=True, eq=False)
class AnswerReader:
    """How far a reader has come: the block, and the bytes of it that have been read. `seen`: when it last asked (monotonic), of another
    gateway.
    """

    at: int
    skip: int = 0
    seen: float | None = None


class _Signal:
    """Wakes all who wait."""

    def __init__(self) -> None:
        self._event = asyncio.Event()

    def fire(self) -> None:
        self._event.set()
        self._event = asyncio.Event()

    async def wait(self, seconds: float | None = None) -> None:
        """Wait for the next `fire`, at most so long."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._event.wait()


@dataclass(frozen=True, slots=True)
class _Block:
    """`end`: bytes of the answer up to here, as they are counted: each block with what it takes beside its data."""

    end: int
    data: bytes


class RetainedAnswer:
    """An answer, the newest part of which is kept. Its maker sends it to `put`, and calls `end`.

    `grown`: is called with the bytes that have come, and with 0 when a reader has gone. `ahead_bytes`: how far it may now be ahead of all
    that read it.
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
        self.claim = ""  # under which other gateways find it
        self.is_beyond = False  # another gateway makes it, which has not made the event that the client names
        self.run = ""  # of its maker, in the ids of events
        self.fault: MmdError | None = None  # why it is broken, if there was a reason
        self.status = 0
        self.headers: list[tuple[bytes, bytes]] = []
        self.state: End = ""
        self.ended_at = 0.0
        self.kept_bytes = 0
        self.is_stream = False
        self._grown, self._ahead_limit = grown, ahead_bytes
        self._blocks: deque[_Block] = deque()
        self._first = 0  # number of the first block that is kept
        self._num_bytes = 0  # of the answer so far
        self._readers: dict[str | AnswerReader, AnswerReader] = {}
        self._left = time.monotonic()  # when the last reader went
        self._news, self._taken, self._crowd = _Signal(), _Signal(), _Signal()

    @property
    def next_block(self) -> int:
        """Number of the block that comes next."""
        return self._first + len(self._blocks)

    def block(self, number: int) -> bytes:
        """The block with this number; empty where it is not kept."""
        at = number - self._first
        return self._blocks[at].data if 0 <= at < len(self._blocks) else b""

    def begin_at(self, block: int) -> None:
        """What comes before this block is not kept here."""
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
        """Take the head."""
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
            self._num_bytes += len(data) + BLOCK_BYTES
            self._blocks.append(_Block(self._num_bytes, data))
        self.kept_bytes += self._num_bytes - before
        self._grown(self, self._num_bytes - before)
        self._news.fire()

    async def room(self, seconds: float = math.inf) -> None:
        """Wait until the fastest reader, if there is one, is close enough, at most so long."""
        until = time.monotonic() + seconds
        while self.is_full and (left := until - time.monotonic()) > 0:
            await self._taken.wait(min(left, RETRY_SECONDS))

    @property
    def is_full(self) -> bool:
        """Whether all readers are far behind."""
        ahead = self._ahead_bytes()
        return ahead > 0 and ahead > self._ahead_limit(self)

    def shrink(self, to_bytes: int) -> int:
        """Drop the oldest blocks, but none that the fastest reader does not have; returns the bytes dropped."""
        before = self.kept_bytes
        read = max((reader.at for reader in self._readers.values()), default=math.inf)
        while self.kept_bytes > to_bytes and len(self._blocks) > 1 and self._first < read:
            self.kept_bytes -= len(self._blocks.popleft().data) + BLOCK_BYTES
            self._first += 1
        return before - self.kept_bytes

    def end(self, state: End) -> None:
        """It grows no more."""
        self.state, self.ended_at = state, time.monotonic()
        for signal in (self._news, self._taken, self._crowd):
            signal.fire()

    @contextlib.contextmanager
    def reader(self, at: int) -> Iterator[AnswerReader]:
        """A client that reads from this block on."""
        reader = AnswerReader(at)
        self._readers[reader] = reader
        try:
            yield reader
        finally:
            del self._readers[reader]
            self._left = time.monotonic()
            self._taken.fire()
            self._crowd.fire()
            self._grown(self, 0)

    @property
    def has_readers(self) -> bool:
        """Whether a client of this gateway reads it, or another gateway."""
        self._forget_silent()
        return bool(self._readers)

    def is_read_by(self, name: str) -> bool:
        """Whether this other gateway reads it for one of its clients."""
        self._forget_silent()
        return name in self._readers

    def unread_elsewhere_bytes(self) -> int:
        """Bytes that another gateway, which reads it, does not have, and one for its end; 0: none reads it."""
        self._forget_silent()
        remote = [reader.at for reader in self._readers.values() if reader.seen is not None]
        return 1 + self._bytes_from(min(remote)) if remote else 0

    def remote_reader(self, name: str, at: int, skip: int) -> AnswerReader:
        """Another gateway that reads for its clients. It asks again and again, and is gone once it no longer does, or has been told the end."""
        self._forget_silent()
        reader = self._readers.setdefault(name, AnswerReader(at))
        reader.at, reader.skip, reader.seen = at, skip, time.monotonic()
        self._taken.fire()
        return reader

    def remote_has_all(self, name: str) -> None:
        """Another gateway has the end."""
        if self._readers.pop(name, None) is not None:
            self._grown(self, 0)

    async def read(
        self, reader: AnswerReader, seconds: float | None = None, most_bytes: int = PIECE_BYTES
    ) -> RetainedPiece:
        """What comes next for a reader, at most so many bytes; waits for it, at most so long.

        Raises:
            AnswerGoneError: it is no longer kept.
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
        """Wait until it has ended, or has had no reader for so long that none will come. One who comes later finds it at its own gateway."""
        while not self.state:
            self._forget_silent()
            if self._readers:
                await self._crowd.wait(REMOTE_SECONDS)
            elif not self.relayed and (left := self._left + ABANDONED_SECONDS - time.monotonic()) > 0:
                await self._crowd.wait(left)
            else:
                return

    def _has_nothing_for(self, reader: AnswerReader) -> bool:
        return reader.at >= self.next_block and not self.state

    def _events(self, body: bytes) -> Iterator[bytes]:
        """The events and comments in a part of a stream, which ends with one of them."""
        for number, block in enumerate(body.split(b"\n\n")[:-1], self.next_block):
            mark = b"" if block.startswith(b":") else b"id: %b-%d\n" % (self.run.encode(), number)
            yield b"%b%b\n\n" % (mark, block)

    def _ahead_bytes(self) -> int:
        self._forget_silent()
        if not self._readers or not self._blocks:
            return 0
        return self._bytes_from(max(reader.at for reader in self._readers.values()))

    def _bytes_from(self, at: int) -> int:
        """Bytes that are kept, from this block on."""
        if at <= self._first:
            return self.kept_bytes
        return 0 if at >= self.next_block else self._num_bytes - self._blocks[at - self._first - 1].end

    def _forget_silent(self) -> None:
        now = time.monotonic()
        for key, reader in list(self._readers.items()):
            if reader.seen is not None and now - reader.seen > REMOTE_SECONDS:
                del self._readers[key]
                self._left = now


def _cut(body: bytes) -> Iterator[bytes]:
    for at in range(0, len(body), PIECE_BYTES):
        yield body[at : at + PIECE_BYTES]


@dataclass(slots=True)
class RetainedAnswers:
    """All of a gateway. What is over the budget, over a tenant's part of it, or over the number of keys, makes answers go that have ended, the
    first of them first: those of the tenant itself, and for the budget those of tenants that have more than all have on average.

    Of one that is being made the beginning goes, and it then comes no faster than it is read. An answer that is being read, by clients or by
    another gateway for its own, counts until they have it, although no other can find it any more.

    `on_drop`: is called with an answer that no other can find any more.
    """

    budget_bytes: int
    used_bytes: int = 0
    on_drop: Callable[[RetainedAnswer], None] = field(default=lambda _answer: None)
    _answers: dict[str, RetainedAnswer] = field(default_factory=dict)  # by the digest of the name
    _keys: Counter[str] = field(default_factory=Counter)  # by tenant
    _bytes: Counter[str] = field(default_factory=Counter)
    _ended: dict[str, OrderedDict[str, RetainedAnswer]] = field(default_factory=dict)  # by tenant
    _dropped: dict[RetainedAnswer, None] = field(default_factory=dict)  # that are still read

    def __len__(self) -> int:
        return len(self._answers)

    def find(self, name_digest: str, digest: bytes) -> RetainedAnswer | None:
        """The answer to the request of this name, if there is one. `digest`: of its body.

        Raises:
            IdempotencyKeyReusedError: the key stands for a request with another body.
        """
        found = self._answers.get(name_digest)
        if found is not None and _is_old(found):
            self._drop(found)
            found = None
        if found is not None and found.digest != digest:
            raise IdempotencyKeyReusedError(
                "idempotency-key: a request with this key had another body; send the same body, or another key"
            )
        return found

    def find_for(self, reader: str, name_digest: str, digest: bytes) -> RetainedAnswer | None:
        """As `find`, for another gateway: the answer that it has begun to read, if it has, although it may have been dropped meanwhile."""
        for answer in self._dropped:
            if answer.name.digest == name_digest and answer.digest == digest and answer.is_read_by(reader):
                return answer
        return self.find(name_digest, digest)

    def begin(self, name: RequestName, digest: bytes) -> RetainedAnswer:
        """A new answer, which its maker must `finish`.

        Raises:
            TooManyRequestsError: too many are being made.
        """
        while (of_tenant := self._has_all_keys(name.tenant)) or len(self._answers) >= MAX_KEYS:
            if not (self._drop_oldest(name.tenant) if of_tenant else self._drop_of_most(self._keys)):
                whose, count = (
                    ("of this tenant", self._keys[name.tenant])
                    if of_tenant
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
        """Bytes of answers here that other gateways are reading and do not have; above 0 until they have all of them."""
        return sum(answer.unread_elsewhere_bytes() for answer in [*self._answers.values(), *self._dropped])

    def finish(self, answer: RetainedAnswer, state: End, *, keep: bool) -> None:
        """The answer grows no more; only one that was kept can be repeated. Safe to call twice."""
        if not answer.state:
            answer.end(state)
            if self._answers.get(answer.name.digest) is answer:
                self._ended.setdefault(answer.name.tenant, OrderedDict())[answer.name.digest] = answer
        if not keep:
            self._drop(answer)

    def forget_one(self) -> bool:
        """Drop one answer whose time is over, or that was dropped and is read no more. Returns whether there was one."""
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
        """Bytes by which this tenant has too many, or by which all have while this one has more than the average."""
        of_all = self.used_bytes - self.budget_bytes
        average = self.used_bytes / max(1, len(self._bytes))
        return max(self._tenant_excess(tenant), of_all if self._bytes[tenant] >= average else 0)

    def _has_all_keys(self, tenant: str) -> bool:
        """Where the gateway needs no API keys, all requests are of one tenant, which has no name."""
        return bool(tenant) and self._keys[tenant] >= MAX_KEYS_OF_TENANT

    def _tenant_excess(self, tenant: str) -> int:
        return self._bytes[tenant] - self.budget_bytes // TENANT_DIVISOR if tenant else 0

    def _drop_oldest(self, tenant: str) -> bool:
        """Drop the answer of a tenant that ended first. Returns whether there was one."""
        if ended := self._ended.get(tenant):
            self._drop(next(iter(ended.values())))
            return True
        return False

    def _drop_of_most(self, share: Counter[str]) -> bool:
        """Drop an answer of the tenant that has most, of those that have no less than the average. Returns whether there was one."""
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
        """Count a dropped answer no more, once nobody reads it."""
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
