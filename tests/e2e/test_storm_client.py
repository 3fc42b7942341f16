"""The storm's client sends a request again only where its connection broke."""

from __future__ import annotations

import asyncio
import json

import openai
import pytest

from e2e import storm_client

HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
ERROR = b"HTTP/1.1 500 Internal Server Error\r\nContent-Length: 2\r\n\r\n{}"


async def broke(answer: bytes | None, *, stays_open: bool = False) -> bool:
    """Whether the client calls a connection broken on which this is answered; None: nobody listens."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(answer or b"")
        await writer.drain()
        if stays_open:
            await asyncio.sleep(60)
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    if answer is None:
        server.close()
    client = openai.AsyncOpenAI(
        base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=0, timeout=1
    )
    with pytest.raises(openai.OpenAIError) as trouble:
        await _all_of(client)
    server.close()
    return storm_client._connection_broke(trouble.value)


async def _all_of(client: openai.AsyncOpenAI) -> None:
    stream = await client.chat.completions.create(
        model="m", messages=[{"role": "user", "content": "?"}], stream=True
    )
    async for _ in stream:
        pass


async def test_a_connection_breaks_without_a_listener_or_with_an_early_close():
    assert await broke(None)
    assert await broke(b"")
    assert await broke(HEAD + b"10\r\ndata: ")


async def test_neither_an_error_nor_a_late_answer_is_a_broken_connection():
    assert not await broke(ERROR)
    assert not await broke(b"", stays_open=True)
    assert not await broke(HEAD, stays_open=True)


@pytest.mark.parametrize(("kind", "is_broken"), [("long", True), ("text", False)])
@pytest.mark.parametrize("headed", [True, False])
async def test_silence_breaks_only_an_answer_read_at_a_pace(
    kind: str,
    is_broken: bool,
    headed: bool,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        if headed:
            writer.write(HEAD.replace(b"\r\n\r\n", b"\r\nx-mmd-gateway: g-1\r\n\r\n"))
        await reader.read()
        writer.close()

    monkeypatch.setattr(storm_client, "SILENCE_SECONDS", 0.3)
    monkeypatch.setattr(storm_client, "TIMEOUT_SECONDS", 1.0)
    monkeypatch.setattr(storm_client, "ASKERS", {})
    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        storm = storm_client.Storm(f"http://127.0.0.1:{port}", 1, 1)
        storm._model = "m"
        question = {"question": 0, "kind": kind, "seed": 1, "phase": "storm"}
        assert await storm._send(question, 0) is is_broken
    said = json.loads(capsys.readouterr().out)
    assert (said["silent"], said["broken"], said["gateway"]) == (
        is_broken,
        is_broken,
        "g-1" if headed else "",
    )
