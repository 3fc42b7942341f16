"""The small HTTP server of a worker: alive, ready, metrics, state. Runs in the worker's own event loop, so a stuck loop is a
failed probe. On a loopback address it serves this machine's programs and not the web pages that its browsers show.
Independent of what it reports.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import ipaddress
import logging
import math
import socket
import ssl
import termios
import time
from array import array
from collections import deque
from collections.abc import Awaitable, Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import h11
import uvicorn
from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from uvicorn.protocols.http.h11_impl import H11Protocol

from mmd_api.contract import paths
from mmd_api.contract.errors import ForbiddenError
from mmd_workers.basics.memory import host_bytes
from mmd_workers.observe import tls
from mmd_workers.observe.metrics import Metrics
from mmd_workers.observe.unread import UnreadBodyMiddleware

log = logging.getLogger(__name__)

START_TIMEOUT_SECONDS = 10.0
STOP_TIMEOUT_SECONDS = 3.0
HEAD_SECONDS = 30.0  # until a request's head is complete
REFUSED_SECONDS = 2.0  # for a client to read that its head was refused, while the rest of it is discarded
WRITE_SECONDS = 60.0  # over which a client must read at this rate, while the answer waits for it; networks report it in large pieces:
LEAST_READ_BYTES_PER_SECOND = 1024  # a stream of three or four tokens a second
READER_LOOKS = 10  # in that time
ANSWER_SECONDS = 60.0  # for a whole answer; more for its size, at this rate:
MIN_READ_BYTES_PER_SECOND = 128 << 10
MAX_HEAD_BYTES = 16 << 10  # of a request; a connection may hold one that is not complete
CONNECTION_BYTES = 40 << 10  # of memory that one connection may hold: such a head, and what surrounds it
MAX_CONNECTIONS = 8192  # of one server, and no more than fit this share of the memory:
CONNECTIONS_SHARE = 0.05
KEEP_ALIVE_SECONDS = 620
"""The side that times out first closes an idle connection, and a request in transit at that moment is lost: so this exceeds
the idle timeouts of clients (httpx: 5 s) and load balancers (Google's: 600 s)."""


@dataclass(frozen=True, slots=True)
class Progress:
    """Something that must move for the process to count as alive: seconds since it last did, and how many are too many.

    `age_seconds` returns 0 while there is nothing to do.
    """

    age_seconds: Callable[[], float]
    limit_seconds: float


Handler = Callable[[Request], Awaitable[Response]]


def routes(
    metrics: Metrics,
    progress: Callable[[], Mapping[str, Progress]],
    not_ready_because: Callable[[], str],
    state: Callable[[], Mapping[str, Any]],
) -> list[Route]:
    """`/livez`, `/readyz`, `/metrics` and `/state`; `not_ready_because` returns "" when the process is routable."""

    async def livez(_: Request) -> Response:
        checks = progress()
        ages = {name: check.age_seconds() for name, check in checks.items()}
        stuck = [name for name, age in ages.items() if not age <= checks[name].limit_seconds]
        body = {
            name: {
                "age_seconds": age if math.isfinite(age) else None,
                "limit_seconds": checks[name].limit_seconds,
            }
            for name, age in ages.items()
        }
        return JSONResponse({"alive": not stuck, "stuck": stuck, "progress": body}, 503 if stuck else 200)

    async def readyz(_: Request) -> Response:
        reason = not_ready_because()
        return JSONResponse({"ready": not reason, "reason": reason}, 503 if reason else 200)

    async def exposed(request: Request) -> Response:
        return scraped(metrics, request)

    async def current(_: Request) -> Response:
        return JSONResponse(dict(state()))

    table: dict[str, Handler] = {
        paths.LIVEZ: livez,
        paths.READYZ: readyz,
        paths.METRICS: exposed,
        paths.WORKER_STATE: current,
    }
    return [Route(path, handler) for path, handler in table.items()]


def scraped(metrics: Metrics, request: Request) -> Response:
    """The answer to a scrape, in the format that it asks for."""
    body, content_type = metrics.expose(request.headers.get("accept", ""))
    return Response(body, headers={"Content-Type": content_type})


class _Connections:
    """The connections of one server, no more than `limit()`: a new one takes the place of the one that has been idle for longest."""

    def __init__(self, limit: Callable[[], int]) -> None:
        self._limit = limit
        self._open: set[_Counted] = set()
        self._idle: dict[_Counted, None] = {}  # the longest first

    def enter(self, connection: _Counted) -> None:
        """Take a new connection in, or abort it where all others are busy."""
        self._open.add(connection)
        self._idle[connection] = None
        if len(self._open) > self._limit():
            longest_idle = next(iter(self._idle))
            self.leave(longest_idle)
            longest_idle.abort()

    def busy(self, connection: _Counted) -> None:
        """A request has come."""
        self._idle.pop(connection, None)

    def idle(self, connection: _Counted) -> None:
        """An answer is complete."""
        if connection in self._open:
            self._idle[connection] = None

    def leave(self, connection: _Counted) -> None:
        """The connection is closed, or about to be."""
        self._open.discard(connection)
        self._idle.pop(connection, None)


class _Connection(H11Protocol):
    """uvicorn's connection, with deadlines for clients that do not finish a request's head or do not read an answer.

    A connection that misses one is aborted: the application sees a disconnect, and frees what it holds. `answer_seconds()`: from a
    request's head to the end of its answer, what the client may take to read it aside. `under`: the TLS that it runs over, set before it
    begins.
    """

    under: tls.TlsConnection | None = None
    _head: asyncio.TimerHandle | None = None
    _reading: asyncio.TimerHandle | None = None
    _answered: object = None  # the request, uvicorn's cycle, that the next two belong to
    _answer_due = 0.0
    _unread_bytes = 0  # that the client let pile up, over all its pauses
    _refused = False  # what it sends is no request

    def __init__(
        self, connections: _Connections, answer_seconds: Callable[[], float], **options: Any
    ) -> None:
        super().__init__(**options)
        self._others = connections
        self._answer_seconds = answer_seconds
        self._looks: deque[int] = deque(maxlen=READER_LOOKS + 1)

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """The first head is due."""
        super().connection_made(transport)
        if self.under is not None:
            transport.set_write_buffer_limits(high=tls.BUFFER_BYTES)
            self.under.leave()
        self._head = self.loop.call_later(HEAD_SECONDS, self.abort)
        self._others.enter(self)

    def on_response_complete(self) -> None:
        """The next request may come."""
        super().on_response_complete()
        self._begin_answer()
        if self.cycle is None or self.cycle.response_complete:
            self._others.idle(self)

    def data_received(self, data: bytes) -> None:
        """A head that has begun must be complete in time."""
        if self._refused:
            return
        super().data_received(data)
        if self._refused:
            return
        self._begin_answer()
        if self.cycle is not None and not self.cycle.response_complete:
            self._others.busy(self)
            _cancel(self._head)
            self._head = None
        elif self._head is None:
            self._head = self.loop.call_later(HEAD_SECONDS, self.abort)

    def send_400_response(self, msg: str) -> None:
        """Refuse what is no request, as uvicorn does, but close later: the kernel resets a connection that is closed before all was read,
        and a client that still sends may then lose the answer.
        """
        self._refused = True
        if self.cycle is not None and not self.cycle.response_complete:  # its body ends as no body does
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        headers = [(b"content-type", b"text/plain; charset=utf-8"), (b"connection", b"close")]
        answer = h11.Response(status_code=400, headers=headers, reason=b"Bad Request")
        for event in (answer, h11.Data(data=msg.encode()), h11.EndOfMessage()):
            self.transport.write(self.conn.send(event) or b"")
        if self.transport.can_write_eof():
            self.transport.write_eof()
        _cancel(self._head)
        self._head = self.loop.call_later(REFUSED_SECONDS, self.transport.close)

    def _begin_answer(self) -> None:
        if self.cycle is not self._answered:
            self._answered, self._unread_bytes = self.cycle, 0
            self._answer_due = time.monotonic() + self._answer_seconds() + WRITE_SECONDS

    def pause_writing(self) -> None:
        """The client has stopped reading, or is slower than the answer comes.

        It must read on at the least rate, over the last `WRITE_SECONDS`. The whole answer has a deadline too: the longest that it may
        take to make it, and what it takes to read it at the lowest rate.
        """
        super().pause_writing()
        self._unread_bytes += self.transport.get_write_buffer_size()
        self._looks.clear()
        self._look_at_reader()

    def _look_at_reader(self) -> None:
        """Abort where the client has read too little since the oldest of the looks, or the answer's deadline has come."""
        self._looks.append(self._undelivered_bytes())
        due = self._answer_due + self._unread_bytes / MIN_READ_BYTES_PER_SECOND
        least = min(LEAST_READ_BYTES_PER_SECOND * WRITE_SECONDS, self._looks[0])
        stalled = len(self._looks) == self._looks.maxlen and self._looks[0] - self._looks[-1] < least
        if stalled or time.monotonic() >= due:
            self.abort()
            return
        pause = min(WRITE_SECONDS / READER_LOOKS, due - time.monotonic())
        _cancel(self._reading)
        self._reading = self.loop.call_later(max(0.0, pause), self._look_at_reader)

    def _undelivered_bytes(self) -> int:
        """Sent, and not yet received. The kernel's share is often minutes of a stream, and it takes more only when much of it is gone."""
        size = int(self.transport.get_write_buffer_size())
        if self.under is not None:
            size += self.under.unsent_bytes()
        sent = self.transport.get_extra_info("socket")
        queued = array("i", [0])
        with contextlib.suppress(OSError, ValueError):  # closed meanwhile, or a kernel that does not tell
            fcntl.ioctl(sent.fileno(), termios.TIOCOUTQ, queued)
        return size + queued[0]

    def resume_writing(self) -> None:
        """The client has read what was there."""
        super().resume_writing()
        _cancel(self._reading)

    def connection_lost(self, exc: Exception | None) -> None:
        """Nothing is due any more."""
        super().connection_lost(exc)
        self._others.leave(self)
        _cancel(self._head)
        _cancel(self._reading)

    def abort(self) -> None:
        """Close it at once, sending nothing more."""
        self.transport.abort()


_Counted = _Connection | tls.TlsConnection


def _cancel(timer: asyncio.TimerHandle | None) -> None:
    if timer is not None:
        timer.cancel()


class _EmbeddedServer(uvicorn.Server):
    """A uvicorn server that leaves the process's signals alone and reports when it listens."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.listening = asyncio.Event()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Signals belong to the worker."""
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start listening and report it."""
        await super().startup(sockets)
        self.listening.set()


class _LoopbackGuard:
    """Refuses what a web page of another site makes a browser of this machine send to a server that is for this machine alone.

    A page whose own name resolves to this address (DNS rebinding) sends that name as Host, any other page its site as Origin; those of
    `origins` may send requests.
    """

    def __init__(self, application: Any, origins: Collection[str]) -> None:
        self._application, self._origins = application, origins

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Pass a request on, or answer it with 403."""
        if scope["type"] == "http" and (fault := _foreign(Headers(scope=scope), self._origins)):
            error = {
                "message": fault,
                "type": "invalid_request_error",
                "param": None,
                "code": ForbiddenError.code,
            }
            await JSONResponse({"error": error}, ForbiddenError.status or 403)(scope, receive, send)
            return
        await self._application(scope, receive, send)


def _foreign(headers: Headers, origins: Collection[str]) -> str:
    """What shows that a request is not from this machine; empty if nothing does."""
    for host in headers.getlist("host") or [""]:
        if not _of_loopback(f"//{host}"):
            return f"this server is only for this machine: address it as localhost or 127.0.0.1, not as {host[:253]!r}"
    for origin in headers.getlist("origin"):
        if origin not in origins and not _of_loopback(origin):
            return f"this server is only for this machine, not for pages of {origin[:253]!r}"
    return ""


def _of_loopback(url: str) -> bool:
    try:
        return is_loopback((urlsplit(url).hostname or "").rstrip("."))
    except ValueError:
        return False


def is_loopback(host: str) -> bool:
    """Whether an address or name stands for this machine alone."""
    try:
        return host == "localhost" or host.endswith(".localhost") or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def most_connections(memory_bytes: int | None = None, *, encrypted: bool = False) -> int:
    """Of one server in so much memory; None: in that of this pod."""
    each = CONNECTION_BYTES + (tls.BYTES if encrypted else 0)
    present = host_bytes() if memory_bytes is None else memory_bytes
    return min(MAX_CONNECTIONS, int(CONNECTIONS_SHARE * present / each))


def listen_address(pod_ip: str) -> str:
    """On a loopback address no other host is admitted; in a pod, port-forwarding comes over loopback as well."""
    return pod_ip if ipaddress.ip_address(pod_ip).is_loopback else "0.0.0.0"  # noqa: S104


def host_and_port(ip: str, port: int) -> str:
    """`ip:port`, with an IPv6 address in brackets."""
    return f"[{ip}]:{port}" if ipaddress.ip_address(ip).version == 6 else f"{ip}:{port}"


def is_host_and_port(text: str) -> bool:
    """Whether it is `ip:port` as `host_and_port` writes it."""
    host, _, port = text.rpartition(":")
    try:
        return text == host_and_port(host.strip("[]"), int(port)) and 0 < int(port) < 1 << 16
    except ValueError:
        return False


class HttpServer:
    """Serves an ASGI application inside the running event loop; the gateway's and the workers' alike.

    `context()`: TLS of the connections that come now; None: there is no certificate yet, and they are closed. Omitted: plain HTTP.
    `origins`: of web pages that may use it even on a loopback address.
    """

    def __init__(
        self,
        application: Any,
        host: str,
        port: int,
        max_connections: Callable[[], int] = most_connections,
        answer_seconds: Callable[[], float] = lambda: ANSWER_SECONDS,
        context: Callable[[], ssl.SSLContext | None] | None = None,
        origins: Collection[str] = (),
    ) -> None:
        guarded = _LoopbackGuard(application, origins) if is_loopback(host) else application
        self._application = UnreadBodyMiddleware(guarded)
        self._address = (host, port)
        self._connections, self._handshakes = _Connections(max_connections), tls.Handshakes()
        self._answer_seconds, self._context = answer_seconds, context
        self._server: _EmbeddedServer | None = None
        self._task: asyncio.Task[None] | None = None
        self.port = port

    @classmethod
    def of_routes(cls, table: list[Route], host: str, port: int) -> HttpServer:
        """A server of plain routes. Port 0 takes a free one, found in `port` after `start`."""
        application = Starlette(routes=table)
        application.router.redirect_slashes = False
        return cls(application, host, port)

    async def start(self) -> None:
        """Listen; returns once connections are accepted.

        Raises:
            OSError: the address is taken or not ours.
        """
        listening = await asyncio.to_thread(_listen, *self._address)
        self.port = listening.getsockname()[1]
        self._server = _EmbeddedServer(
            uvicorn.Config(
                self._application,
                log_config=None,
                access_log=False,
                lifespan="off",
                http=self._accepted,  # type: ignore[arg-type]
                h11_max_incomplete_event_size=MAX_HEAD_BYTES,
                ws="none",
                timeout_graceful_shutdown=int(STOP_TIMEOUT_SECONDS),
                timeout_keep_alive=KEEP_ALIVE_SECONDS,
            )
        )
        self._task = asyncio.create_task(self._server.serve([listening]), name="http-server")
        async with asyncio.timeout(START_TIMEOUT_SECONDS):
            await self._server.listening.wait()

    def _accepted(self, **options: Any) -> asyncio.BaseProtocol:
        """The protocol of a new connection, with uvicorn's `options`."""
        connection = _Connection(self._connections, self._answer_seconds, **options)
        if self._context is None:
            return connection
        if (context := self._context()) is None:
            return tls.Refused()
        connection.under = tls.TlsConnection(context, connection, self._connections, self._handshakes)
        return connection.under

    async def stop(self) -> None:
        """Stop accepting, let running answers end within the deadline, close the port."""
        if self._server is None or self._task is None:
            return
        self._server.should_exit = True
        done, _ = await asyncio.wait({self._task}, timeout=2 * STOP_TIMEOUT_SECONDS)
        if not done:
            log.warning("the HTTP server did not stop in time; closing its connections")
            self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)


def _listen(host: str, port: int) -> socket.socket:
    family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0][0]
    return socket.create_server((host, port), family=family, backlog=1024)
