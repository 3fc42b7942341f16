"""A NATS connection that reconnects for ever: bytes out, bytes in, and the client's errors as ours. Independent of messages.

`Bus` sends and receives messages over it.
"""

from __future__ import annotations

import asyncio
import logging
import random
import weakref
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, ParamSpec

from nats import errors as nats_errors
from nats.aio.client import Server
from nats.aio.msg import Msg
from nats.aio.subscription import Subscription

from mmd_api.contract.errors import DeadlineError, MmdError, OverloadedError, PeerLostError
from mmd_workers.basics.limited_log import RateLimitedLog
from mmd_workers.wire.client import NatsClient
from mmd_workers.wire.login import Login, refuse_credentials_in

PENDING_MESSAGES = 65_536
PENDING_BYTES = 64 << 20
RECONNECT_SECONDS = (0.05, 0.5)
OTHER_SERVER_SECONDS = (0.0, 0.05)
_BUFFER_FULL = "the message bus (NATS) is unreachable and the send buffer is full; retry once it is back"

P = ParamSpec("P")

_log = logging.getLogger(__name__)


class Connection:
    """A connection, used on the event loop that opened it.

    `url`: URL of one server, or the URLs of a cluster's servers, separated by commas.
    """

    def __init__(self, url: str, client_name: str, inbox: str, login: Login | None = None) -> None:
        refuse_credentials_in(url)
        self.url = url
        self.client_name = client_name
        self.dropped_messages = 0
        self.handler_errors = 0
        self._login = login
        self._attempts = 0  # logins since the last accepted one
        self._server = ""  # host and port of the last server that accepted a login
        self._inbox = inbox
        self._log = RateLimitedLog(_log)
        self._client = NatsClient()
        self._reconnect_hooks: list[Callable[[], Awaitable[None]]] = []
        self._hook_tasks: set[asyncio.Task[None]] = set()
        self._subscriptions: weakref.WeakSet[Subscription] = weakref.WeakSet()

    @property
    def is_connected(self) -> bool:
        """Whether the client is connected to a server now."""
        return bool(self._client.is_connected)

    @property
    def client(self) -> NatsClient:
        """The NATS client, for the JetStream modules of this package."""
        return self._client

    async def open(self, timeout: float) -> None:  # noqa: ASYNC109 - the one deadline of connecting
        """Connect, waiting up to `timeout` seconds for a server.

        Raises:
            PeerLostError: no server accepted the connection in time.
        """
        try:
            async with asyncio.timeout(timeout):
                await self._open()
        except TimeoutError as error:
            raise PeerLostError(
                f"no NATS server at {self.url} within {timeout:.0f} s ({self._client.last_error}); check that it is running and reachable"
            ) from error
        except nats_errors.Error as error:
            raise PeerLostError(f"NATS server at {self.url} refused {self.client_name}: {error}") from error

    def on_reconnect(self, hook: Callable[[], Awaitable[None]]) -> None:
        """Run `hook` after each reconnect; subscriptions are already restored by then."""
        self._reconnect_hooks.append(hook)

    async def send(self, subject: str, data: bytes, reply: str = "") -> None:
        """Send bytes; there may be no subscriber.

        Raises:
            OverloadedError: disconnected, and the buffer for that case is full.
            PeerLostError: the connection is closed.
        """
        try:
            await self._client.publish(subject, data, reply=reply)
        except nats_errors.OutboundBufferLimitError as error:
            raise OverloadedError(_BUFFER_FULL) from error
        except nats_errors.Error as error:
            raise PeerLostError(f"cannot publish to {subject}: {type(error).__name__} {error}") from error

    async def request_raw(
        self,
        subject: str,
        data: bytes,
        timeout: float,  # noqa: ASYNC109
        headers: dict[str, str] | None = None,
    ) -> Msg:
        """Send bytes and wait for the reply, up to `timeout` seconds for both.

        Raises:
            PeerLostError: the subject has no subscriber.
            DeadlineError: no reply in time.
            OverloadedError: disconnected, and the buffer for that case is full.
        """
        try:
            async with asyncio.timeout(timeout):
                return await self._client.request(subject, data, timeout=timeout, headers=headers)
        except nats_errors.NoRespondersError as error:
            raise PeerLostError(f"no subscriber on {subject}: the pod is lost or not Ready yet") from error
        except (nats_errors.TimeoutError, TimeoutError) as error:
            raise DeadlineError(f"no reply on {subject} within {timeout:.3g} s") from error
        except nats_errors.OutboundBufferLimitError as error:
            raise OverloadedError(_BUFFER_FULL) from error
        except nats_errors.Error as error:
            raise PeerLostError(f"cannot request {subject}: {type(error).__name__} {error}") from error

    async def listen(
        self, subject: str, receive: Callable[[Msg], Awaitable[None]], pending_bytes: int = PENDING_BYTES
    ) -> Subscription:
        """Call `receive` for each message, one after the other and in order.

        Raises:
            PeerLostError: the connection is closed.
        """
        try:
            subscription = await self._client.subscribe(
                subject, cb=receive, pending_msgs_limit=PENDING_MESSAGES, pending_bytes_limit=pending_bytes
            )
        except nats_errors.Error as error:
            raise PeerLostError(f"cannot subscribe to {subject}: {type(error).__name__} {error}") from error
        self._subscriptions.add(subscription)
        return subscription

    async def flush(self, timeout: float = 2.0) -> None:  # noqa: ASYNC109
        """Wait until the server has received everything sent so far, subscriptions included.

        Raises:
            DeadlineError: the server did not confirm this within `timeout` seconds.
        """
        try:
            async with asyncio.timeout(timeout):
                await self._client.flush()
        except (TimeoutError, nats_errors.Error) as error:
            raise DeadlineError(f"NATS server at {self.url} did not confirm within {timeout} s") from error

    def new_inbox(self) -> str:
        """A unique subject."""
        return str(self._client.new_inbox())

    async def guarded(
        self, subject: str, handler: Callable[P, Awaitable[None]], *args: P.args, **kwargs: P.kwargs
    ) -> None:
        """Run a handler; its error is counted and logged, not raised. If cancelled before its turn, it does not begin."""
        try:
            await handler(*args, **kwargs)
        except (MmdError, nats_errors.Error) as error:
            self.handler_errors += 1
            self._log.warning(subject, f"handler of {subject}: {type(error).__name__}: {error}")
        except Exception:  # noqa: BLE001 - a handler's error must not end the subscription
            self.handler_errors += 1
            _log.exception("handler of %s failed", subject)

    async def close(self, timeout: float = 5.0) -> None:  # noqa: ASYNC109
        """Finish pending data within `timeout` seconds, then close. Safe to call twice."""
        if self._client.is_closed:
            return
        for task in list(self._hook_tasks):
            task.cancel()
        if self.is_connected:
            await self._drain(max(0.05, timeout))
        if not self._client.is_closed:
            await self._client.close()

    async def _drain(self, seconds: float) -> None:
        """Let every subscription finish the messages that have arrived. (The client's own drain has no reliable deadline.)"""
        drains = [asyncio.create_task(subscription.drain()) for subscription in list(self._subscriptions)]
        if drains:
            done, late = await asyncio.wait(drains, timeout=seconds)
            for drain in late:
                drain.cancel()
            if late:
                _log.warning("closing %s with %d handlers still running", self.client_name, len(late))
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
                    f"{self.client_name} dropped a message on {error.subject}: its handler is too slow",
                )
            else:
                self._log.warning(
                    type(error).__name__, f"{self.client_name}: {type(error).__name__}: {error}"
                )

        async def reconnected() -> None:
            self._connected()
            _log.info("%s reconnected to NATS", self.client_name)
            for hook in self._reconnect_hooks:
                task = asyncio.create_task(self.guarded("on_reconnect", hook))
                self._hook_tasks.add(task)
                task.add_done_callback(self._hook_tasks.discard)

        def choose(servers: list[Server], _info: dict[str, Any]) -> tuple[Server, float]:
            return next_server(servers, self._server)

        def user() -> str:
            assert self._login is not None
            return self._login.at_attempt(self._attempts).user

        def password() -> str:
            assert self._login is not None
            presented = self._login.at_attempt(self._attempts).password
            self._attempts += 1
            return presented

        await self._client.connect(
            self.url.split(","),
            user=None if self._login is None else user,
            password=None if self._login is None else password,
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
        self._connected()

    def _connected(self) -> None:
        self._attempts = 0
        url = self._client.connected_url
        self._server = url.netloc if url is not None else ""


def next_server(servers: Sequence[Server], lost: str) -> tuple[Server, float]:
    """The server to connect to now that the one at `lost` (host:port) is gone, and the seconds until then.

    Another server is tried almost at once; one that has failed since, or the lost one, after a moment.
    """
    fewest = min(server.reconnects for server in servers)
    best = [server for server in servers if server.reconnects == fewest]
    others = [server for server in best if server.uri.netloc != lost]
    pause = RECONNECT_SECONDS if fewest or not others else OTHER_SERVER_SECONDS
    return random.choice(others or best), random.uniform(*pause)  # noqa: S311
