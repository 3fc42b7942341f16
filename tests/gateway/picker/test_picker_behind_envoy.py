"""The endpoint picker behind a real Envoy, in front of a server that answers at once: what happens to bodies and answers where it cannot choose."""

from __future__ import annotations

import asyncio
import hashlib
import os
import random
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import httpx
import pytest
from aiohttp import web

from mmd_cli.local.pods import free_port
from mmd_workers.gateway.picker import pick_process
from mmd_workers.gateway.picker.endpoint_picker import EndpointPicker
from mmd_workers.gateway.picker.pick_messages import Report, Setup, View
from mmd_workers.gateway.picker.pick_process import PickServer
from mmd_workers.gateway.picker.picks import GatewayLoad
from mmd_workers.observe.metrics import Metrics
from support.harness.waiting import until
from tests.gateway.envoy_proxy import Envoy, in_front_of
from tests.gateway.proxies import begun, channel_to, until_picked

BODY = random.Random(1).randbytes(2 << 20)


@pytest.fixture
async def upstream() -> AsyncIterator[str]:
    """`ip:port` of a server that answers with the digest of what it got."""

    async def digest(request: web.Request) -> web.Response:
        return web.Response(text=hashlib.sha256(await request.read()).hexdigest() * 100)

    app = web.Application(client_max_size=64 << 20)
    app.router.add_route("*", "/{path:.*}", digest)
    runner, port = web.AppRunner(app), free_port()
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", port).start()
    yield f"127.0.0.1:{port}"
    await runner.cleanup()


def view(upstream: str) -> View:
    return View([GatewayLoad("gateway-0", upstream, True, 0, 1000, 1.0)], 64 << 20)


@asynccontextmanager
async def picking(
    upstream: str, folder: Path, shown: View, memory_bytes: int = 1 << 30
) -> AsyncIterator[tuple[PickServer, Envoy]]:
    """A picker that is shown the same all the time, and Envoy."""
    server = PickServer(Setup("127.0.0.1", 0, False, request_seconds=600.0, memory_bytes=memory_bytes))

    async def show() -> None:
        while True:
            server.show(shown)
            await asyncio.sleep(0.25)

    showing = asyncio.create_task(show())
    await server.start()
    try:
        async with in_front_of([upstream], server.port, folder) as envoy:
            yield server, envoy
    finally:
        showing.cancel()
        await asyncio.wait([showing])
        await server.stop(0.0)


def is_whole(answer: httpx.Response, sent: bytes) -> bool:
    return (answer.status_code, answer.text) == (200, hashlib.sha256(sent).hexdigest() * 100)


async def test_answers_are_whole_however_soon_they_come(upstream: str, tmp_path: Path):
    async with picking(upstream, tmp_path, view(upstream)) as (_, envoy):
        for content in (None, b"small", BODY[: 1 << 20]):
            for _ in range(40):
                answers = await asyncio.gather(
                    *(
                        envoy.http.request("GET" if content is None else "POST", "/", content=content)
                        for _ in range(4)
                    )
                )
                assert all(is_whole(answer, content or b"") for answer in answers)


async def test_bodies_pass_unchanged_while_the_gateway_of_the_picker_is_cut_off(
    upstream: str, tmp_path: Path
):
    async with picking(upstream, tmp_path, replace(view(upstream), is_current=False)) as (server, envoy):
        answers = await asyncio.gather(*(envoy.http.post("/", content=BODY) for _ in range(8)))
        assert all(is_whole(answer, BODY) for answer in answers)
        assert Report.of(server.report()).outcomes == {"passed": 8}
        assert await envoy.stat("streams_failed") == await envoy.stat("failure_mode_allowed") == 0


async def test_bodies_pass_unchanged_while_silent_streams_take_all_turns(upstream: str, tmp_path: Path):
    memory_bytes = pick_process.OWN_BYTES + (12 << 20)
    async with (
        picking(upstream, tmp_path, view(upstream), memory_bytes) as (server, envoy),
        channel_to(server.port) as channel,
    ):
        _silent = [await begun(channel) for _ in range(server.max_bodies)]
        answers = await asyncio.gather(*(envoy.http.post("/", content=BODY) for _ in range(8)))
        assert all(is_whole(answer, BODY) for answer in answers)


async def test_a_request_beyond_every_bound_is_told_to_retry(upstream: str, tmp_path: Path):
    async with picking(upstream, tmp_path, view(upstream)) as (server, envoy):
        server.max_streams = 0
        for content in (b"", BODY):
            answer = await envoy.http.post("/", content=content)
            assert (answer.status_code, answer.json()["error"]["code"]) == (503, "overloaded")
            assert answer.headers["retry-after"] == "1"


async def test_requests_pass_again_once_a_picker_that_was_killed_is_back(upstream: str, tmp_path: Path):
    setup = Setup("127.0.0.1", free_port(), False, request_seconds=60.0)
    picker = EndpointPicker(setup, lambda: view(upstream), Metrics(("gateway",)))
    await picker.start()
    try:
        await until_picked(setup.port, [upstream])
        async with in_front_of([upstream], setup.port, tmp_path) as envoy:
            assert is_whole(await envoy.http.post("/", content=BODY), BODY)
            first = picker.pid
            os.kill(first, signal.SIGKILL)
            assert is_whole(await envoy.http.get("/"), b""), "without a body Envoy needs no picker"
            await until(lambda: picker.pid not in (0, first) and picker.answers)
            await until_picked(setup.port, [upstream])

            async def is_passed_on() -> bool:
                answer = await envoy.http.post("/", content=BODY)
                if is_whole(answer, BODY):
                    return True
                if answer.status_code != 500:
                    raise RuntimeError("it never sends a part of a body on")
                return False

            await until(is_passed_on)  # Envoy may wait a little before it connects again
    finally:
        await picker.stop()
