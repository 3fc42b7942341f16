"""The flood beside which `bench.fairness` measures another tenant lasts as long as its turn, and what came of it is counted."""

from __future__ import annotations

import asyncio
import multiprocessing
from dataclasses import replace
from typing import Any, cast

import pytest

from bench import openloop
from bench.fairness import BACKLOG, Flood, Served, _until_closed
from bench.isolation import Storm
from bench.openloop import Answered, keep_busy
from support.harness.waiting import DEADLINE_SECONDS

CLIENTS = 4
REFUSED = b"HTTP/1.1 429 Too Many Requests\r\ncontent-length: 7\r\n\r\nretry.."
STORM = Storm(0.0, [b"one", b"other"])


async def test_clients_that_are_refused_again_and_again_stay_busy(monkeypatch: pytest.MonkeyPatch) -> None:
    """The server refuses very many requests, and then answers none: each client waits for one at the end."""
    monkeypatch.setattr(openloop, "REFUSED_SECONDS", 0.0)
    bodies: list[bytes] = []
    all_wait = asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            head = await reader.readuntil(b"\r\n\r\n")
            length = int(head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0])
            bodies.append(await reader.readexactly(length))
            if len(bodies) >= 100 * CLIENTS:
                all_wait.set()
            if len(bodies) > 99 * CLIENTS:
                await asyncio.Event().wait()
            writer.write(REFUSED)

    asked, answered = list[None](), list[Answered]()
    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    flooding = asyncio.create_task(
        keep_busy(url, STORM.endless(0), CLIENTS, "", answered.append, lambda: asked.append(None))
    )
    try:
        async with asyncio.timeout(DEADLINE_SECONDS):
            await all_wait.wait()
    finally:
        flooding.cancel()
        await asyncio.wait({flooding})
        server.close()
    assert len(set(bodies)) == 100 * CLIENTS  # no file twice
    assert {one.error for one in answered} == {"retry.."}
    assert len(asked) - len(answered) == CLIENTS


def test_requests_without_an_answer_when_their_client_ends_are_counted() -> None:
    reader, writer = multiprocessing.Pipe(duplex=False)
    one = Answered(0.0, "video", "a", 0.5)
    for seen in (None, None, one, None, replace(one, ttft_seconds=None, error="overloaded"), None):
        writer.send(seen)
    writer.close()
    asked, answered = _until_closed(reader)
    assert (asked, len(answered)) == (4, 2)
    served = Served(cast(Any, None), ("", ""))
    served.floods[BACKLOG] = Flood(videos=answered, asked=asked, seconds=2.0)
    videos = served.report()["floods"][BACKLOG]["videos"]
    counts = (videos["answered"], videos["overloaded"], videos["given_up"])
    assert counts == (1, 1, 2)
    assert videos["a_second"] == {"answered": 0.5, "overloaded": 0.5}
