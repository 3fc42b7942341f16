"""The small HTTP server of a worker: alive, ready, metrics, state. Runs in the worker's own event loop, so a stuck loop is a
failed probe. Knows nothing of what it reports.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import socket
from collections.abc import Awaitable, Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from mmd_workers.observe.metrics import Metrics

log = logging.getLogger(__name__)

START_TIMEOUT_SECONDS = 10.0
STOP_TIMEOUT_SECONDS = 3.0
KEEP_ALIVE_SECONDS = 620
"""An idle connection is closed by whoever loses patience first, and a request that is just then on its way is lost: so this is
longer than the patience of clients (httpx: 5 s) and load balancers (Google's: 600 s)."""


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
    progress: Mapping[str, Progress],
    not_ready_because: Callable[[], str],
    state: Callable[[], Mapping[str, Any]],
) -> list[Route]:
    """`/livez`, `/readyz`, `/metrics` and `/state`; `not_ready_because` returns "" when the process is routable."""

    async def livez(_: Request) -> Response:
        ages = {name: check.age_seconds() for name, check in progress.items()}
        stuck = [name for name, age in ages.items() if not age <= progress[name].limit_seconds]
        body = {
            name: {
                "age_seconds": age if math.isfinite(age) else None,
                "limit_seconds": progress[name].limit_seconds,
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

    table: dict[str, Handler] = {"/livez": livez, "/readyz": readyz, "/metrics": exposed, "/state": current}
    return [Route(path, handler) for path, handler in table.items()]


def scraped(metrics: Metrics, request: Request) -> Response:
    """The answer to a scrape, in the format that it asks for."""
    body, content_type = metrics.expose(request.headers.get("accept", ""))
    return Response(body, headers={"Content-Type": content_type})


class _EmbeddedServer(uvicorn.Server):
    """A uvicorn server that leaves the process's signals alone and says when it listens."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.listening = asyncio.Event()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Signals belong to the worker."""
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start listening and say so."""
        await super().startup(sockets)
        self.listening.set()


class HttpServer:
    """Serves an ASGI application inside the running event loop; the gateway's and the workers' alike."""

    def __init__(self, application: Any, host: str, port: int) -> None:
        self._application = application
        self._address = (host, port)
        self._server: _EmbeddedServer | None = None
        self._task: asyncio.Task[None] | None = None
        self.port = port

    @classmethod
    def of_routes(cls, table: list[Route], host: str, port: int) -> HttpServer:
        """A server of plain routes. Port 0 takes a free one, found in `port` after `start`."""
        return cls(Starlette(routes=table), host, port)

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
                timeout_graceful_shutdown=int(STOP_TIMEOUT_SECONDS),
                timeout_keep_alive=KEEP_ALIVE_SECONDS,
            )
        )
        self._task = asyncio.create_task(self._server.serve([listening]), name="http-server")
        async with asyncio.timeout(START_TIMEOUT_SECONDS):
            await self._server.listening.wait()

    async def stop(self) -> None:
        """Stop accepting, let running answers end within the deadline, close the port."""
        if self._server is None or self._task is None:
            return
        self._server.should_exit = True
        done, _ = await asyncio.wait({self._task}, timeout=2 * STOP_TIMEOUT_SECONDS)
        if not done:
            log.warning("the http server did not stop in time and is cut off")
            self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)


def _listen(host: str, port: int) -> socket.socket:
    family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0][0]
    return socket.create_server((host, port), family=family, backlog=1024)
