"""The probe endpoint: alive while the work advances, not while the process merely runs."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from aiohttp import web


@asynccontextmanager
async def health_endpoint(port: int, trouble: Callable[[], str | None]) -> AsyncIterator[None]:
    """Serve `/healthz` on every address: 200, or 503 with what is wrong as `trouble` says it. Port 0: no endpoint."""

    async def healthz(_: web.Request) -> web.Response:
        words = trouble()
        return web.Response(text=words or "ok\n", status=503 if words else 200)

    if port == 0:
        yield
        return
    app = web.Application()
    app.router.add_get("/healthz", healthz)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    try:
        await web.TCPSite(runner, port=port).start()
        yield
    finally:
        await runner.cleanup()
