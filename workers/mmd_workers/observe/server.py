"""The small HTTP server of a worker: alive, ready, metrics, state. Independent of what it reports.

It runs in the worker's own event loop, so a stuck loop is a failed probe. On a loopback address it serves this machine's programs and not the
web pages that its browsers show.
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
from mmd_api.contract.errors import ForbiddenError, MmdError
from mmd_workers.basics.memory import host_bytes
from mmd_workers.observe import tls
from mmd_workers.observe.metrics import Metrics
from mmd_workers.observe.unread import UnreadBodyMiddleware

log = logging.getLogger(__name__)

START_TIMEOUT_SECONDS = 10.0
STOP_TIMEOUT_SECONDS = 3.0
HEAD_SECONDS = 30.0  # limit for a request's head to be complete
REFUSED_SECONDS = 2.0  # a client may read a refusal for this long; the rest of its head is discarded
# While an answer waits for its client, the client must read at this rate over this time: networks report what was read in large pieces.
WRITE_SECONDS = 60.0
LEAST_READ_BYTES_PER_SECOND = 1024  # a stream of three or four tokens a second
READER_LOOKS = 10  # checks of a reader in WRITE_SECONDS
# Limit for a whole answer, and the rate by which its size extends the limit.
ANSWER_SECONDS = 60.0
MIN_READ_BYTES_PER_SECOND = 128 << 10
MAX_HEAD_BYTES = 16 << 10  # limit of a request's head; a connection may hold one incomplete head
CONNECTION_BYTES = 40 << 10  # limit of memory for one connection: such a head, and what surrounds it
# Limit of one server's connections, which may also not exceed this share of the memory.
MAX_CONNECTIONS = 8192
CONNECTIONS_SHARE = 0.05
KEEP_ALIVE_SECONDS = 620
"""The side that times out first closes an idle connection, and a request in transit at that moment is lost. So this exceeds the
idle timeouts of clients (httpx: 5 s) and load balancers (Google's: 600 s)."""


@dataclass(frozen=True, slots=True)
class Progress:
    """A check whether the process counts as alive: seconds since the last progress, and their limit.

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
    """The answer to a scrape, in the requested format."""
    body, content_type = metrics.expose(request.headers.get("accept", ""))
    return Response(body, headers={"Content-Type": content_type})


class _Connections:
    """The connections of one server, no more than `limit()`: a new one takes the place of the one that has been idle for longest."""

    def __init__(self, limit: Callable[[], int]) -> None:
        self._limit = limit
        self._open: set[_Counted] = set()
        self._idle: dict[_Counted, None] = {}  # longest idle first

    def enter(self, connection: _Counted) -> None:
        """Take in a new connection, or abort it if all others are busy."""
        self._open.add(connection)
        self._idle[connection] = None
        if len(self._open) > self._limit():
            longest_idle = next(iter(self._idle))
            self.leave(longest_idle)
            longest_idle.abort()

    def busy(self, connection: _Counted) -> None:
        """Note that a request has come."""
        self._idle.pop(connection, None)

    def idle(self, connection: _Counted) -> None:
        """Note that an answer is complete."""
        if connection in self._open:
            self._idle[connection] = None

    def leave(self, connection: _Counted) -> None:
        """Forget a connection that is closed, or about to be."""
        self._open.discard(connection)
        self._idle.pop(connection, None)


class _Connection(H11Protocol):
    """uvicorn's connection, with deadlines for clients that do not finish a request's head or do not read an answer.

    A connection that misses one is aborted: the application sees a disconnect, and frees what it holds. `answer_seconds()`: limit from a
    request's head to the end of its answer, without the client's time to read it. `under`: the TLS below the connection, set before it
    begins.
    """

    under: tls.TlsConnection | None = None
    _head: asyncio.TimerHandle | None = None
    _reading: asyncio.TimerHandle | None = None
    _answered_cycle: object = None  # uvicorn's cycle: the request that the next two belong to
    _answer_due = 0.0
    _unread_bytes = 0  # bytes that the client let pile up, over all its pauses
    _refused = False  # whether the client sent something other than a request

    def __init__(
        self, connections: _Connections, answer_seconds: Callable[[], float], **options: Any
    ) -> None:
        super().__init__(**options)
        self._connections = connections
        self._answer_seconds = answer_seconds
        self._looks: deque[int] = deque(maxlen=READER_LOOKS + 1)

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Begin: the first head is due."""
        super().connection_made(transport)
        if self.under is not None:
            transport.set_write_buffer_limits(high=tls.BUFFER_BYTES)
            self.under.leave()
        self._head = self.loop.call_later(HEAD_SECONDS, self.abort)
        self._connections.enter(self)

    def on_response_complete(self) -> None:
        """Complete an answer: the next request may come."""
        super().on_response_complete()
        self._begin_answer()
        if self.cycle is None or self.cycle.response_complete:
            self._connections.idle(self)

    def data_received(self, data: bytes) -> None:
        """Take data; a head that has begun must be complete in time."""
        if self._refused:
            return
        super().data_received(data)
        if self._refused:
            return
        self._begin_answer()
        if self.cycle is not None and not self.cycle.response_complete:
            self._connections.busy(self)
            _cancel(self._head)
            self._head = None
        elif self._head is None:
            self._head = self.loop.call_later(HEAD_SECONDS, self.abort)

    def send_400_response(self, msg: str) -> None:
        """Refuse data that is no request, as uvicorn does, but close later.

        The kernel resets a connection that is closed before all was read, and a client that still sends may then lose the answer.
        """
        self._refused = True
        if self.cycle is not None and not self.cycle.response_complete:  # its body is invalid
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
        if self.cycle is not self._answered_cycle:
            self._answered_cycle, self._unread_bytes = self.cycle, 0
            self._answer_due = time.monotonic() + self._answer_seconds() + WRITE_SECONDS

    def pause_writing(self) -> None:
        """Watch a client that has stopped reading, or that reads more slowly than the answer comes.

        It must read on at `LEAST_READ_BYTES_PER_SECOND`, over the last `WRITE_SECONDS`. The whole answer has a deadline too: the longest
        time to make it, plus the time to read it at `MIN_READ_BYTES_PER_SECOND`.
        """
        super().pause_writing()
        self._unread_bytes += self.transport.get_write_buffer_size()
        self._looks.clear()
        self._look_at_reader()

    def _look_at_reader(self) -> None:
        """Abort if the client has read too little since the oldest look, or if the answer's deadline has come."""
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
        """Bytes sent and not yet received.

        The kernel's share is often minutes of a stream, and the kernel takes more only when much of it is gone.
        """
        size = int(self.transport.get_write_buffer_size())
        if self.under is not None:
            size += self.under.unsent_bytes()
        sent = self.transport.get_extra_info("socket")
        queued = array("i", [0])
        with contextlib.suppress(OSError, ValueError):  # closed meanwhile, or the kernel does not report it
            fcntl.ioctl(sent.fileno(), termios.TIOCOUTQ, queued)
        return size + queued[0]

    def resume_writing(self) -> None:
        """Stop watching: the client has read all that was there."""
        super().resume_writing()
        _cancel(self._reading)

    def connection_lost(self, exc: Exception | None) -> None:
        """End: nothing is due any more."""
        super().connection_lost(exc)
        self._connections.leave(self)
        _cancel(self._head)
        _cancel(self._reading)

    def abort(self) -> None:
        """Close the connection at once, sending nothing more."""
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
        """Capture none: signals belong to the worker."""
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start listening and report it."""
        await super().startup(sockets)
        self.listening.set()


ErrorBody = Callable[[str, MmdError], dict[str, Any]]
"""The JSON of an error at a path."""


def plain_error(_path: str, error: MmdError) -> dict[str, Any]:
    """The JSON of an error at a path that no client of an API uses."""
    return {"error": {"message": error.message, "code": error.code}}


class _LoopbackGuard:
    """Refuses requests that web pages of other sites make a local browser send to a server for this machine alone.

    A page whose own name resolves to this address (DNS rebinding) sends that name as Host, any other page its site as Origin; pages of
    `origins` may send requests. `body`: the JSON of an error at a path.
    """

    def __init__(self, application: Any, origins: Collection[str], body: ErrorBody) -> None:
        self._application, self._origins, self._body = application, origins, body

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Pass a request on, or answer it with 403."""
        if scope["type"] == "http" and (fault := _foreign(Headers(scope=scope), self._origins)):
            body = self._body(scope["path"], ForbiddenError(fault))
            await JSONResponse(body, ForbiddenError.status or 403)(scope, receive, send)
            return
        await self._application(scope, receive, send)


def _foreign(headers: Headers, origins: Collection[str]) -> str:
    """The reason why a request is not from this machine; empty if there is none."""
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
    """The limit of connections of one server in this much memory; None: in the memory of this pod."""
    bytes_per_connection = CONNECTION_BYTES + (tls.BYTES if encrypted else 0)
    available_bytes = host_bytes() if memory_bytes is None else memory_bytes
    return min(MAX_CONNECTIONS, int(CONNECTIONS_SHARE * available_bytes / bytes_per_connection))


def listen_address(pod_ip: str) -> str:
    """The address to listen on: the pod's if it is a loopback address, otherwise all.

    On a loopback address no other host is admitted; in a pod, port-forwarding comes over loopback as well.
    """
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

    `context()`: TLS context for the connections that come now; None: there is no certificate yet, and they are closed. Omitted: plain
    HTTP. `origins`: origins of web pages that may use the server even on a loopback address. `error_body`: the
    JSON of errors that the server itself answers with.
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
        error_body: ErrorBody = plain_error,
    ) -> None:
        guarded = _LoopbackGuard(application, origins, error_body) if is_loopback(host) else application
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
