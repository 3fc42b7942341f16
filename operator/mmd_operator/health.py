"""The operator's HTTP port: probes and metrics. A probe fails for what a restart of the process can fix, never for one deployment."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from aiohttp import web

from mmd_api.contract import paths
from mmd_operator.kube.metrics import OperatorMetrics


@asynccontextmanager
async def health_endpoint(
    port: int, trouble: Callable[[], str | None], metrics: OperatorMetrics
) -> AsyncIterator[None]:
    """Serve `/healthz` (200, or 503 with the problem that `trouble` returns) and `/metrics` on every address. Port 0: neither."""

    async def healthz(_: web.Request) -> web.Response:
        words = trouble()
        return web.Response(text=words or "ok\n", status=503 if words else 200)

    async def scraped(request: web.Request) -> web.Response:
        body, content_type = metrics.expose(request.headers.get("accept", ""))
        return web.Response(body=body, headers={"Content-Type": content_type})

    if port == 0:
        yield
        return
    app = web.Application()
    app.router.add_get("/healthz", healthz)
    app.router.add_get(paths.METRICS, scraped)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    try:
        await web.TCPSite(runner, port=port).start()
        yield
    finally:
        await runner.cleanup()
