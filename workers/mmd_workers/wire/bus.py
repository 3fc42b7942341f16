"""One NATS connection for small messages: publish, request, subscribe and serve with typed messages and typed errors.

Bulk bytes go over `Bus.bulk()`, a second connection on a thread of its own, so that heartbeats and tokens never queue
behind them. This module knows neither what the messages mean nor who sends them.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
import weakref
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from nats import errors as nats_errors
from nats.aio.client import Client, Server
from nats.aio.msg import Msg
from nats.aio.subscription import Subscription as NatsSubscription

from mmd_api.subjects import DEFAULT_INBOX, Subjects
from mmd_workers.errors import DeadlineError, MmdError, OverloadedError, PeerLostError
from mmd_workers.wire.codec import Frame, WireError, pack, pack_frame, unpack, unpack_frame

if TYPE_CHECKING:
    from mmd_workers.wire.bulk import Bulk

T = TypeVar("T")
M = TypeVar("M")

PENDING_MESSAGES = 65_536
PENDING_BYTES = 64 << 20
CONCURRENT_REQUESTS = 256
RECONNECT_SECONDS = (0.05, 0.5)
_LOG_KINDS = 1024
_REFUSED_HEADER = "Mmd-Refused"

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Refusal:
    """What a server answers instead of a reply when its handler raised: an `MmdError` as data."""

    code: str
    message: str


class RateLimitedLog:
    """Logs the first of a kind at once, then at most once every `period_seconds` with the number it kept back."""

    def __init__(self, logger: logging.Logger, period_seconds: float = 5.0) -> None:
        self._logger = logger
        self._period = period_seconds
        self._last: dict[str, float] = {}
        self._kept_back: dict[str, int] = {}

    def warning(self, kind: str, message: str) -> None:
        """Log `message` unless one of the same `kind` was logged within the period."""
        now = time.monotonic()
        if now - self._last.get(kind, -self._period) < self._period:
            self._kept_back[kind] = self._kept_back.get(kind, 0) + 1
            return
        if len(self._last) >= _LOG_KINDS:
            self._last.clear()
            self._kept_back.clear()
        self._last[kind] = now
        more = self._kept_back.pop(kind, 0)
        self._logger.warning("%s%s", message, f" ({more} more like it)" if more else "")


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


class _Client(Client):  # type: ignore[misc]
    """The client, without two of its faults.

    It can swallow a cancellation, while it flushes or when a reply comes at the same moment, and its caller would go on as if
    nobody had asked it to stop: here the cancellation is raised after all. And its flush writes the PING ahead of commands that
    still wait to be written, so that the PONG says nothing about them: here they are written first.
    """

    async def publish(self, *args: Any, **options: Any) -> None:
        async with _cancellable():
            await super().publish(*args, **options)

    async def request(self, *args: Any, **options: Any) -> Msg:
        async with _cancellable():
            return await super().request(*args, **options)

    async def subscribe(self, *args: Any, **options: Any) -> NatsSubscription:
        async with _cancellable():
            return await super().subscribe(*args, **options)

    async def flush(self, *args: Any, **options: Any) -> None:
        async with _cancellable():
            if not self.is_closed:
                await self._flush_pending(force_flush=True)
            await super().flush(*args, **options)


@asynccontextmanager
async def _cancellable() -> AsyncIterator[None]:
    """Raise a cancellation that came inside and was swallowed there. One from before is somebody's clean-up: left alone."""
    task = asyncio.current_task()
    before = task.cancelling() if task is not None else 0
    yield
    if task is not None and task.cancelling() > before:
        raise asyncio.CancelledError


class Bus:
    """A NATS connection that reconnects for ever. Use it on the event loop that connected it."""

    def __init__(self, url: str, client_name: str, subjects: Subjects, inbox: str) -> None:
        self.url = url
        self.client_name = client_name
        self.subjects = subjects
        self.bad_messages = 0
        self.dropped_messages = 0
        self.handler_errors = 0
        self._inbox = inbox
        self._log = RateLimitedLog(_log)
        self._client: Client = _Client()
        self._reconnect_hooks: list[Callable[[], Awaitable[None]]] = []
        self._hook_tasks: set[asyncio.Task[None]] = set()
        self._serving: set[asyncio.Task[None]] = set()
        self._subscriptions: weakref.WeakSet[NatsSubscription] = weakref.WeakSet()
        self._bulk: Bulk | None = None
        self._bulk_lock = asyncio.Lock()

    @classmethod
    async def connect(
        cls,
        url: str,
        client_name: str,
        subjects: Subjects,
        inbox: str = DEFAULT_INBOX,
        timeout: float = 30.0,  # noqa: ASYNC109 - the one deadline of connecting
    ) -> Bus:
        """Connect, waiting up to `timeout` seconds for a server. `inbox`: prefix of the subjects on which replies come.

        Raises:
            PeerLostError: no server took the connection in time.
        """
        bus = cls(url, client_name, subjects, inbox)
        try:
            async with asyncio.timeout(timeout):
                await bus._open()
        except TimeoutError as error:
            raise PeerLostError(
                f"no NATS server at {url} within {timeout:.0f} s ({bus._client.last_error}): is it running and reachable?"
            ) from error
        except nats_errors.Error as error:
            raise PeerLostError(f"NATS server at {url} refused {client_name}: {error}") from error
        return bus

    @property
    def is_connected(self) -> bool:
        """Whether a server is there right now."""
        return bool(self._client.is_connected)

    @property
    def client(self) -> Client:
        """The connection itself, for the JetStream part of this package."""
        return self._client

    def on_reconnect(self, hook: Callable[[], Awaitable[None]]) -> None:
        """Run `hook` each time the connection came back (subscriptions are already restored by then)."""
        self._reconnect_hooks.append(hook)

    async def bulk(self) -> Bulk:
        """The connection for large transfers, started on first use and closed with this bus."""
        from mmd_workers.wire.bulk import Bulk

        async with self._bulk_lock:
            if self._bulk is None:
                self._bulk = await Bulk.start(
                    self.url, f"{self.client_name}-bulk", self.subjects, self._inbox
                )
            return self._bulk

    async def publish(self, subject: str, message: object, reply: str = "") -> None:
        """Send a message, or a `Frame`; nobody may be listening.

        Raises:
            WireError: cannot be packed.
            OverloadedError: disconnected, and the buffer for that case is full.
            PeerLostError: the bus is closed.
        """
        await self._publish(subject, _packed(message), reply)

    async def request(self, subject: str, message: object, reply_type: type[T], timeout: float) -> T:  # noqa: ASYNC109
        """Send a message and wait up to `timeout` seconds for its reply.

        Raises:
            PeerLostError: nobody serves the subject.
            DeadlineError: no reply in time.
            WireError: the reply is not a `reply_type`.
            MmdError: the very error that the handler on the other side raised.
        """
        return unpack(reply_type, await self._request(subject, pack(message), timeout))

    async def request_frame(
        self,
        subject: str,
        message: object,
        header_type: type[T],
        timeout: float,  # noqa: ASYNC109
    ) -> tuple[T, memoryview]:
        """As `request`, for a reply with bytes behind it."""
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
            await self._guarded(subject, handler(decoded))

        return Subscription(await self._subscribe(subject, receive), set())

    async def subscribe_frames(
        self,
        subject: str,
        header_type: type[M],
        handler: Callable[[M, memoryview, str], Awaitable[None]],
        pending_bytes: int,
    ) -> Subscription:
        """As `subscribe`, for frames: `handler(header, payload, reply_subject)`. A bad frame is counted and dropped."""

        async def receive(message: Msg) -> None:
            try:
                header, payload = unpack_frame(header_type, message.data)
            except WireError as error:
                self._bad(subject, error)
                return
            await self._guarded(subject, handler(header, payload, message.reply))

        return Subscription(await self._subscribe(subject, receive, pending_bytes), set())

    async def serve(
        self, subject: str, request_type: type[M], handler: Callable[[M], Awaitable[object]]
    ) -> Subscription:
        """Answer each request with what `handler` returns (a message or a `Frame`); handlers run side by side.

        An `MmdError` that the handler raises is raised at the requester; anything else arrives there as code `internal`.
        """
        tasks: set[asyncio.Task[None]] = set()

        async def answer(message: Msg) -> None:
            try:
                reply = _packed(await handler(unpack(request_type, message.data)))
            except WireError as error:
                self._bad(subject, error)
                await self._refuse(message, error)
            except MmdError as error:
                await self._refuse(message, error)
            except Exception as error:  # noqa: BLE001 - the requester must hear of it
                self.handler_errors += 1
                _log.exception("handler of %s failed", subject)
                await self._refuse(
                    message, MmdError(f"{type(error).__name__} while serving {subject}: {error}")
                )
            else:
                if message.reply:
                    await self._publish(message.reply, reply)

        async def receive(message: Msg) -> None:
            if len(tasks) >= CONCURRENT_REQUESTS:
                await self._refuse(
                    message, OverloadedError(f"{subject} has {len(tasks)} requests in hand: try elsewhere")
                )
                return
            task = asyncio.create_task(self._guarded(subject, answer(message)))
            for group in (tasks, self._serving):
                group.add(task)
                task.add_done_callback(group.discard)

        return Subscription(await self._subscribe(subject, receive), tasks)

    async def flush(self, timeout: float = 2.0) -> None:  # noqa: ASYNC109
        """Wait until the server has taken everything sent so far (subscriptions included).

        Raises:
            DeadlineError: it has not within `timeout` seconds.
        """
        try:
            async with asyncio.timeout(timeout):
                await self._client.flush()
        except (TimeoutError, nats_errors.Error) as error:
            raise DeadlineError(f"NATS server at {self.url} did not confirm within {timeout} s") from error

    def new_inbox(self) -> str:
        """A subject that nobody else has."""
        return str(self._client.new_inbox())

    async def close(self, timeout: float = 5.0) -> None:  # noqa: ASYNC109
        """Finish the requests being served and what is pending, within `timeout` seconds; then close. Safe to call twice."""
        if self._client.is_closed:
            return
        end = time.monotonic() + timeout
        if self._bulk is not None:
            await self._bulk.close(timeout)
        if self._serving:
            await asyncio.wait(self._serving, timeout=max(0.0, end - time.monotonic()))
        for task in (*self._serving, *self._hook_tasks):
            task.cancel()
        if self.is_connected:
            await self._drain(max(0.05, end - time.monotonic()))
        if not self._client.is_closed:
            await self._client.close()

    async def _drain(self, seconds: float) -> None:
        """Let every subscription finish what has arrived. (The client's own drain has no deadline that holds.)"""
        drains = [asyncio.create_task(subscription.drain()) for subscription in list(self._subscriptions)]
        if drains:
            done, late = await asyncio.wait(drains, timeout=seconds)
            for drain in late:
                drain.cancel()
            if late:
                _log.warning("closing %s with %d handlers still busy", self.client_name, len(late))
            for drain in done:
                if (error := drain.exception()) and not isinstance(error, nats_errors.BadSubscriptionError):
                    _log.warning("closing %s without draining: %s", self.client_name, error)
        try:
            await self.flush(min(seconds, 2.0))
        except DeadlineError as error:
            _log.warning("closing %s: %s", self.client_name, error.message)

    async def _open(self) -> None:
        async def error_callback(error: Exception) -> None:
            if isinstance(error, nats_errors.SlowConsumerError):
                self.dropped_messages += 1
                self._log.warning(
                    "slow",
                    f"{self.client_name} dropped a message of {error.subject}: its handler is too slow",
                )
            else:
                self._log.warning(
                    type(error).__name__, f"{self.client_name}: {type(error).__name__}: {error}"
                )

        async def reconnected() -> None:
            _log.info("%s reconnected to NATS", self.client_name)
            for hook in self._reconnect_hooks:
                task = asyncio.create_task(self._guarded("on_reconnect", hook()))
                self._hook_tasks.add(task)
                task.add_done_callback(self._hook_tasks.discard)

        def choose(servers: list[Server], _info: dict[str, Any]) -> tuple[Server, float]:
            return random.choice(servers), random.uniform(*RECONNECT_SECONDS)  # noqa: S311

        await self._client.connect(
            self.url,
            name=self.client_name,
            error_cb=error_callback,
            reconnected_cb=reconnected,
            reconnect_to_server_handler=choose,
            max_reconnect_attempts=-1,
            reconnect_time_wait=0.2,
            connect_timeout=2,
            ping_interval=5,
            max_outstanding_pings=2,
            pending_size=4 << 20,
            flush_timeout=5.0,
            inbox_prefix=self._inbox,
        )

    async def _subscribe(
        self, subject: str, receive: Callable[[Msg], Awaitable[None]], pending_bytes: int = PENDING_BYTES
    ) -> NatsSubscription:
        try:
            subscription = await self._client.subscribe(
                subject, cb=receive, pending_msgs_limit=PENDING_MESSAGES, pending_bytes_limit=pending_bytes
            )
        except nats_errors.Error as error:
            raise PeerLostError(f"cannot subscribe to {subject}: {type(error).__name__} {error}") from error
        self._subscriptions.add(subscription)
        return subscription

    async def _publish(self, subject: str, data: bytes, reply: str = "") -> None:
        try:
            await self._client.publish(subject, data, reply=reply)
        except nats_errors.OutboundBufferLimitError as error:
            raise OverloadedError(
                f"NATS at {self.url} is gone and the send buffer is full: retry once it is back"
            ) from error
        except nats_errors.Error as error:
            raise PeerLostError(f"cannot publish to {subject}: {type(error).__name__} {error}") from error

    async def _request(self, subject: str, data: bytes, timeout: float) -> bytes:  # noqa: ASYNC109
        try:
            message = await self._client.request(subject, data, timeout=timeout)
        except nats_errors.NoRespondersError as error:
            raise PeerLostError(f"nobody serves {subject}: the pod is gone or not ready yet") from error
        except (nats_errors.TimeoutError, TimeoutError) as error:
            raise DeadlineError(f"no reply on {subject} within {timeout:.3g} s") from error
        except nats_errors.OutboundBufferLimitError as error:
            raise OverloadedError(
                f"NATS at {self.url} is gone and the send buffer is full: retry once it is back"
            ) from error
        except nats_errors.Error as error:
            raise PeerLostError(f"cannot request {subject}: {type(error).__name__} {error}") from error
        if message.headers and _REFUSED_HEADER in message.headers:
            refusal = unpack(Refusal, message.data)
            raise _error_types().get(refusal.code, MmdError)(refusal.message)
        return bytes(message.data)

    async def _refuse(self, message: Msg, error: MmdError) -> None:
        if message.reply:
            refusal = pack(Refusal(error.code, error.message[:4096]))
            await self._client.publish(message.reply, refusal, headers={_REFUSED_HEADER: error.code})

    async def _guarded(self, subject: str, work: Awaitable[None]) -> None:
        try:
            await work
        except (MmdError, nats_errors.Error) as error:
            self.handler_errors += 1
            self._log.warning(subject, f"handler of {subject}: {type(error).__name__}: {error}")
        except Exception:  # noqa: BLE001 - a handler's fault must not end the subscription
            self.handler_errors += 1
            _log.exception("handler of %s failed", subject)

    def _bad(self, subject: str, error: WireError) -> None:
        self.bad_messages += 1
        self._log.warning(f"bad {subject}", f"message on {subject} refused: {error.message}")


def _packed(message: object) -> bytes:
    return pack_frame(message.header, message.payload) if isinstance(message, Frame) else pack(message)


def _error_types() -> dict[str, type[MmdError]]:
    found: dict[str, type[MmdError]] = {}
    todo: list[type[MmdError]] = [MmdError]
    while todo:
        kind = todo.pop()
        found.setdefault(kind.code, kind)
        todo.extend(kind.__subclasses__())
    return found
