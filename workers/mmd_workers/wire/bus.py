"""Small messages over one NATS connection: publish, request, subscribe and serve with typed messages and typed errors.

Bulk bytes go over `Bus.bulk()`, a second connection on a dedicated thread, so that heartbeats and tokens never queue
behind them. This module is independent of the meaning and the senders of messages.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

from nats import errors as nats_errors
from nats.aio.msg import Msg
from nats.aio.subscription import Subscription as NatsSubscription

from mmd_api.contract.errors import MmdError, OverloadedError, WireError
from mmd_api.contract.subjects import DEFAULT_INBOX, Subjects
from mmd_workers.wire.bulk import Bulk
from mmd_workers.wire.codec import (
    MAX_MESSAGE_BYTES,
    MAX_REQUEST_BYTES,
    Frame,
    pack,
    pack_frame,
    unpack,
    unpack_frame,
)
from mmd_workers.wire.connection import Connection
from mmd_workers.wire.login import Login
from mmd_workers.wire.parts import PART_HEADER, Assembler, parts_of
from mmd_workers.wire.refusals import raise_refusal, refusal_of

T = TypeVar("T")
M = TypeVar("M")

CONCURRENT_REQUESTS = 256

_log = logging.getLogger(__name__)


class Subscription:
    """A live subscription; `unsubscribe` ends it and the handlers still running."""

    def __init__(self, subscription: NatsSubscription, tasks: set[asyncio.Task[None]]) -> None:
        self._subscription = subscription
        self._tasks = tasks

    async def unsubscribe(self) -> None:
        """Take no further message. Safe to call twice and after the connection closed."""
        try:
            await self._subscription.unsubscribe()
        except nats_errors.Error:
            _log.debug("already unsubscribed from %s", self._subscription.subject)
        for task in list(self._tasks):
            task.cancel()


class Bus(Connection):
    """Messages over a NATS connection. Use it on the event loop that connected it.

    `stream_replicas`: number of servers with a copy of each stream that is created over it.
    """

    def __init__(
        self,
        url: str,
        client_name: str,
        subjects: Subjects,
        inbox: str,
        login: Login | None = None,
        stream_replicas: int = 1,
    ) -> None:
        super().__init__(url, client_name, inbox, login)
        self.subjects = subjects
        self.bad_messages = 0
        self.stream_replicas = stream_replicas
        self._serving: set[asyncio.Task[None]] = set()
        self._bulk: Bulk[Bus] | None = None
        self._bulk_lock = asyncio.Lock()

    @classmethod
    async def connect(
        cls,
        url: str,
        client_name: str,
        subjects: Subjects,
        inbox: str = DEFAULT_INBOX,
        timeout: float = 30.0,  # noqa: ASYNC109 - the one deadline of connecting
        *,
        login: Login | None = None,
        stream_replicas: int = 1,
    ) -> Bus:
        """Connect, waiting up to `timeout` seconds for a server. `inbox`: prefix of the subjects of replies.

        Raises:
            PeerLostError: no server accepted the connection in time.
            ValueError: the URL contains credentials.
        """
        bus = cls(url, client_name, subjects, inbox, login, stream_replicas)
        await bus.open(timeout)
        return bus

    async def bulk(self) -> Bulk[Bus]:
        """The connection for large transfers, started on first use and closed with this bus."""
        async with self._bulk_lock:
            if self._bulk is None:
                name = f"{self.client_name}-bulk"
                connecting = Bus.connect(
                    self.url,
                    name,
                    self.subjects,
                    self._inbox,
                    login=self._login,
                    stream_replicas=self.stream_replicas,
                )
                self._bulk = await Bulk.start(name, connecting)
            return self._bulk

    async def publish(self, subject: str, message: object, reply: str = "") -> None:
        """Send a message, or a `Frame`; there may be no subscriber.

        Raises:
            WireError: the message cannot be packed.
            OverloadedError: disconnected, and the buffer for that case is full.
            PeerLostError: the bus is closed.
        """
        await self.send(subject, _packed(message), reply)

    async def request(
        self,
        subject: str,
        message: object,
        reply_type: type[T],
        timeout: float,  # noqa: ASYNC109
        max_bytes: int = MAX_REQUEST_BYTES,
    ) -> T:
        """Send a message and wait up to `timeout` seconds for its reply.

        A message that exceeds a NATS message is sent in parts, with `timeout` seconds for each.

        Raises:
            TooLongError: the message is larger than `max_bytes`.
            PeerLostError: the subject has no subscriber.
            DeadlineError: no reply in time.
            WireError: the reply is not a `reply_type`.
            MmdError: the error that the handler on the other side raised.
        """
        data = pack(message, max_bytes)
        if len(data) <= MAX_MESSAGE_BYTES:
            return unpack(reply_type, await self._request(subject, data, timeout))
        reply = b""
        for header, part in parts_of(data):
            reply = await self._request(subject, part, timeout, {PART_HEADER: header})
        return unpack(reply_type, reply)

    async def request_frame(
        self,
        subject: str,
        message: object,
        header_type: type[T],
        timeout: float,  # noqa: ASYNC109
    ) -> tuple[T, memoryview]:
        """Like `request`, for a reply followed by bytes."""
        return unpack_frame(header_type, await self._request(subject, pack(message), timeout))

    async def subscribe(
        self, subject: str, message_type: type[M], handler: Callable[[M], Awaitable[None]]
    ) -> Subscription:
        """Call `handler` for each message, one after the other and in order. Bad messages are counted and logged."""

        async def receive(message: Msg) -> None:
            try:
                decoded = unpack(message_type, message.data)
            except WireError as error:
                self._bad(subject, error)
                return
            await self.guarded(subject, handler, decoded)

        return Subscription(await self.listen(subject, receive), set())

    async def subscribe_frames(
        self,
        subject: str,
        header_type: type[M],
        handler: Callable[[M, memoryview, str], Awaitable[None]],
        pending_bytes: int,
    ) -> Subscription:
        """Like `subscribe`, for frames: `handler(header, payload, reply_subject)`. A bad frame is counted and dropped."""

        async def receive(message: Msg) -> None:
            try:
                header, payload = unpack_frame(header_type, message.data)
            except WireError as error:
                self._bad(subject, error)
                return
            await self.guarded(subject, handler, header, payload, message.reply)

        return Subscription(await self.listen(subject, receive, pending_bytes), set())

    async def serve(
        self, subject: str, request_type: type[M], handler: Callable[[M], Awaitable[object]]
    ) -> Subscription:
        """Answer each request with the message or `Frame` that `handler` returns; handlers run concurrently.

        An `MmdError` from the handler is raised at the requester; any other error arrives there as code `internal`.
        """
        tasks: set[asyncio.Task[None]] = set()
        assembler = Assembler()

        async def answer(message: Msg, data: bytes) -> None:
            try:
                reply = _packed(await handler(unpack(request_type, data, MAX_REQUEST_BYTES)))
            except WireError as error:
                self._bad(subject, error)
                await self._refuse(message, error)
            except MmdError as error:
                await self._refuse(message, error)
            except Exception as error:  # noqa: BLE001 - the requester must be notified
                self.handler_errors += 1
                _log.exception("handler of %s failed", subject)
                await self._refuse(
                    message, MmdError(f"{type(error).__name__} while serving {subject}: {error}")
                )
            else:
                if message.reply:
                    await self.send(message.reply, reply)

        async def receive(message: Msg) -> None:
            if len(tasks) >= CONCURRENT_REQUESTS:
                await self._refuse(
                    message,
                    OverloadedError(f"{subject} has {len(tasks)} requests in flight; retry elsewhere"),
                )
                return
            data: bytes | None = message.data
            if message.headers and (header := message.headers.get(PART_HEADER)):
                try:
                    data = assembler.take(header, message.data, time.monotonic())
                except (WireError, OverloadedError) as error:
                    await self._refuse(message, error)
                    return
            if data is None:
                await self.guarded(subject, self.send, message.reply, b"")
                return
            task = asyncio.create_task(self.guarded(subject, answer, message, data))
            for group in (tasks, self._serving):
                group.add(task)
                task.add_done_callback(group.discard)

        return Subscription(await self.listen(subject, receive), tasks)

    async def close(self, timeout: float = 5.0) -> None:  # noqa: ASYNC109
        """Finish the requests in progress and pending data within `timeout` seconds, then close. Safe to call twice."""
        if self._client.is_closed:
            return
        end = time.monotonic() + timeout
        if self._bulk is not None:
            await self._bulk.close(timeout)
        if self._serving:
            await asyncio.wait(self._serving, timeout=max(0.0, end - time.monotonic()))
        for task in list(self._serving):
            task.cancel()
        await super().close(max(0.0, end - time.monotonic()))

    async def _request(
        self,
        subject: str,
        data: bytes,
        timeout: float,  # noqa: ASYNC109
        headers: dict[str, str] | None = None,
    ) -> bytes:
        reply = await self.request_raw(subject, data, timeout, headers)
        raise_refusal(reply)
        return bytes(reply.data)

    async def _refuse(self, message: Msg, error: MmdError) -> None:
        if message.reply:
            data, headers = refusal_of(error)
            await self._client.publish(message.reply, data, headers=headers)

    def _bad(self, subject: str, error: WireError) -> None:
        self.bad_messages += 1
        self._log.warning(f"bad {subject}", f"invalid message on {subject} dropped: {error.message}")


def _packed(message: object) -> bytes:
    return pack_frame(message.header, message.payload) if isinstance(message, Frame) else pack(message)
