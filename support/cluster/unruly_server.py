"""A reverse proxy before the API server that misbehaves on request: refuses calls, ends watches, calls them
too old.
"""

from __future__ import annotations

import asyncio
import json
import re
import ssl
import threading
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp
from aiohttp import web

from support.cluster.control_plane import write_kubeconfig

HOP_HEADERS = {"connection", "transfer-encoding", "content-length", "content-encoding", "host", "keep-alive"}
STATUS_WORDS = {
    409: "Conflict",
    410: "Expired",
    429: "TooManyRequests",
    500: "InternalError",
    503: "ServiceUnavailable",
}


@dataclass(slots=True)
class Fault:
    """Answer the next `times` requests that match with this status; `headers` go with it."""

    method: str
    path: re.Pattern[str]
    status: int
    times: int
    headers: dict[str, str] = field(default_factory=dict)
    met: int = 0

    def meets(self, request: web.Request) -> bool:
        """Whether the fault applies to a request. A pattern may match the path alone, or its query too."""
        paths = (request.path, request.raw_path)
        return self.method == request.method and any(self.path.search(path) for path in paths)


class UnrulyServer:
    """Listens on loopback in a dedicated thread. `calls` counts requests by (method, path)."""

    def __init__(self, upstream: str, token: str, folder: Path) -> None:
        self._upstream, self._token = upstream, token
        self.kubeconfig = folder / "kubeconfig-unruly.yaml"
        self.faults: list[Fault] = []
        self.calls: Counter[tuple[str, str]] = Counter()
        self.queries: list[tuple[str, dict[str, str]]] = []
        self.watches: set[str] = set()
        self._cut = asyncio.Event()
        self._cuts = 0
        self._lagging: re.Pattern[str] | None = None
        self._loop = asyncio.new_event_loop()
        self._started = threading.Event()
        self._thread = threading.Thread(target=self._serve, daemon=True)

    def start(self) -> None:
        self._thread.start()
        assert self._started.wait(20)

    def stop(self) -> None:
        self._loop.call_soon_threadsafe(self._end.set)
        self._thread.join(20)

    def refuse(self, method: str, path: str, status: int, times: int = 1, **headers: str) -> Fault:
        fault = Fault(method, re.compile(path), status, times, headers)
        self.faults.append(fault)
        return fault

    def cut_watches(self, *, expired: bool = False) -> None:
        """End every watch.

        `expired`: the next watch of each path that resumes from a resourceVersion gets 410 (Expired), once.
        """

        def cut() -> None:
            self._cuts += 1
            if expired:
                self._expired_until = self._cuts
            self._cut.set()
            self._cut = asyncio.Event()

        self._loop.call_soon_threadsafe(cut)

    def hold_watches(self, path: str | None) -> None:
        """Let watches of these paths lag.

        Their events are passed on once other paths, or none (None), are held.
        """
        self._lagging = None if path is None else re.compile(path)

    # In the thread

    def _serve(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_until_complete(self._main())

    async def _main(self) -> None:
        self._end = asyncio.Event()
        self._cut = asyncio.Event()
        self._expired_until = -1
        self._expired_at: Counter[str] = Counter()
        unchecked = ssl.create_default_context()
        unchecked.check_hostname, unchecked.verify_mode = False, ssl.CERT_NONE
        connector = aiohttp.TCPConnector(ssl=unchecked, limit=0)
        async with aiohttp.ClientSession(connector=connector, auto_decompress=True) as self._session:
            app = web.Application(client_max_size=2**24)
            app.router.add_route("*", "/{path:.*}", self._handle)
            runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.2)
            await runner.setup()
            site = web.TCPSite(runner, "127.0.0.1", 0)
            await site.start()
            port = runner.addresses[0][1]
            self.url = f"http://127.0.0.1:{port}"
            write_kubeconfig(self.kubeconfig, self.url, self._token)
            self._started.set()
            await self._end.wait()
            self._cut.set()
            await runner.cleanup()

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        self.calls[request.method, request.path] += 1
        self.queries.append((request.path, dict(request.query)))
        for fault in self.faults:
            if fault.met < fault.times and fault.meets(request):
                fault.met += 1
                return web.json_response(
                    status_body(fault.status), status=fault.status, headers=fault.headers
                )
        headers = {k: v for k, v in request.headers.items() if k.lower() not in HOP_HEADERS}
        watching = request.query.get("watch") in ("true", "1")
        if (
            watching
            and self._expired_at[request.path] < self._expired_until
            and "resourceVersion" in request.query
        ):
            self._expired_at[request.path] = self._expired_until
            gone = {"type": "ERROR", "object": status_body(410)}
            return web.json_response(gone, dumps=lambda body: json.dumps(body) + "\n")
        async with self._session.request(
            request.method,
            self._upstream + request.raw_path,
            data=await request.read() or None,
            headers=headers,
            timeout=aiohttp.ClientTimeout(total=None if watching else 60),
        ) as answer:
            response_headers = {k: v for k, v in answer.headers.items() if k.lower() not in HOP_HEADERS}
            if not watching:
                return web.Response(body=await answer.read(), status=answer.status, headers=response_headers)
            response = web.StreamResponse(status=answer.status, headers=response_headers)
            await response.prepare(request)
            self.watches.add(request.path)
            cut = asyncio.ensure_future(self._cut.wait())
            try:
                while True:
                    piece = asyncio.ensure_future(answer.content.readany())
                    await asyncio.wait({piece, cut}, return_when=asyncio.FIRST_COMPLETED)
                    if cut.done() or not piece.result():
                        piece.cancel()
                        break
                    while self._lagging is not None and self._lagging.search(request.path) and not cut.done():
                        await asyncio.sleep(0.05)
                    await response.write(piece.result())
            except (ConnectionError, aiohttp.ClientError):
                pass
            finally:
                cut.cancel()
            return response


def status_body(code: int) -> dict[str, object]:
    reason = STATUS_WORDS[code]
    return {
        "kind": "Status",
        "apiVersion": "v1",
        "status": "Failure",
        "reason": reason,
        "code": code,
        "message": f"unruly: {reason}",
    }
