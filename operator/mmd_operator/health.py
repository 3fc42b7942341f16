"""The operator's HTTP port: probes and metrics. A probe fails only if a restart of the process can help, never for a single deployment."""

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
    """Serve `/healthz` (200, or 503 with the problem from `trouble`) and `/metrics` on all addresses. Port 0 serves neither."""

    async def healthz(_: web.Request) -> web.Response:
        problem = trouble()
        return web.Response(text=problem or "ok\n", status=503 if problem else 200)

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
