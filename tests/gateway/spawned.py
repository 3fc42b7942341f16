"""The gateway as the process that its container runs, ready to be asked."""

from __future__ import annotations

import asyncio
import contextlib
import os
import ssl
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import httpx

from mmd_api.spec.model import ModelSpec
from mmd_cli.local.pods import free_port
from mmd_workers.process.identity import of_model
from mmd_workers.wire.server import NatsServer
from support.harness.waiting import until

from .running import pipeline_config

BODY = {"model": "builtin/demo", "messages": [{"role": "user", "content": "hello"}], "temperature": 0}
TEXT = "the red circle"
MESH = f"r1-{of_model(ModelSpec(id='builtin/demo'))}"


@contextlib.asynccontextmanager
async def running(
    server: NatsServer,
    tmp_path: Path,
    gateway: dict | None = None,
    trusted: ssl.SSLContext | None = None,
    **environment: str,
) -> AsyncIterator[tuple[asyncio.subprocess.Process, httpx.AsyncClient]]:
    """`trusted`: what its certificate is checked with, where it has one."""
    port = free_port()
    config = tmp_path / "pipeline.json"
    config.write_text(pipeline_config("own", gateway or {}).dump())
    child = await asyncio.create_subprocess_exec(
        str(Path(sys.executable).with_name("mmd")),
        "gateway",
        env={
            **os.environ,
            "MMD_PIPELINE_CONFIG": str(config),
            "MMD_POD_NAME": "gateway-0",
            "MMD_POD_IP": "127.0.0.1",
            "MMD_HTTP_PORT": str(port),
            "MMD_NATS_URL": server.url,
            "MMD_THREADS": "1",
            **environment,
        },
    )
    try:
        url = f"{'https' if trusted else 'http'}://127.0.0.1:{port}"
        async with httpx.AsyncClient(base_url=url, timeout=120, verify=trusted or True) as client:
            await until_ready(client, True)
            yield child, client
    finally:
        if child.returncode is None:
            child.kill()
            await child.wait()


async def until_ready(client: httpx.AsyncClient, ready: bool, path: str = "/readyz") -> None:
    """Wait until the gateway is ready, or is not."""

    async def is_so() -> bool:
        answer = await client.get(path)
        assert (answer.status_code == 200) == ready, f"{path} answers {answer.status_code}: {answer.text}"
        return True

    await until(is_so, f"{path} is {'' if ready else 'not '}200", retried=(httpx.HTTPError,))
    assert (await client.get("/livez")).status_code == 200
