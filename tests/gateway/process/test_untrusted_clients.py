"""Clients that send too much, too slowly or never read: each is refused by name or ended at a deadline, and nobody else notices."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError
from pydantic_core import from_json
from starlette.datastructures import Headers

from mmd_api.contract.errors import InvalidJsonError, InvalidTypeError, RequestTooLargeError
from mmd_api.spec.media import MediaPolicy
from mmd_cli.samples import draw
from mmd_workers.gateway.api.messages.messages_request import parse_messages_request
from mmd_workers.gateway.api.responses.responses_request import parse_responses_request
from mmd_workers.gateway.basics import body as body_module
from mmd_workers.gateway.basics import media_hold as hold_module
from mmd_workers.gateway.basics.api_errors import ApiError
from mmd_workers.gateway.basics.body import MAX_MARKS, JsonScanner, read_json
from mmd_workers.gateway.basics.media_hold import MediaHold
from mmd_workers.gateway.content.chat_request import parse_chat_request
from mmd_workers.gateway.content.conversation import MAX_PARTS
from mmd_workers.gateway.process import gateway_process
from mmd_workers.media.fetch import fetch
from mmd_workers.observe import server as server_module
from mmd_workers.observe import unread
from support.harness.memory import peak_bytes
from support.harness.waiting import DEADLINE_SECONDS
from tests.gateway.endless import assert_read_within_bounds, opened
from tests.gateway.running import Launch, Running
from tests.gateway.scripted import ScriptedWorker

MEBIBYTE = 1 << 20
TEXT = "the red circle"
CHAT = {"model": "builtin/demo", "messages": [{"role": "user", "content": "hello"}], "temperature": 0}
WIDE = {
    "empty objects": (b"[", b"{}", b"]"),
    "empty arrays": (b"[", b"[]", b"]"),
    "numbers": (b"[", b"0", b"]"),
    "keys": (b"{", b'"":0', b"}"),
    "strings": (b"[", b'""', b"]"),
    "strings without commas": (b"", b'"" ', b""),
    "messages": (b'{"messages":[', b"{}", b"]}"),
}

VALID = {
    "image parts": (
        b'{"model":"m","messages":[{"role":"user","content":[',
        b'{"type":"image_url","image_url":{"url":"a"}}',
        b"]}]}",
    ),
    "messages of one part": (
        b'{"model":"m","messages":[',
        b'{"role":"user","content":[{"type":"text","text":"a"}]}',
        b"]}",
    ),
    "messages of text": (b'{"model":"m","messages":[', b'{"role":"user","content":"a"}', b"]}"),
}


OF_ANTHROPIC = {
    "turns": (b'{"model":"m","max_tokens":1,"messages":[', b'{"role":"user","content":"a"}', b"]}"),
    "turns of one block": (
        b'{"model":"m","max_tokens":1,"messages":[',
        b'{"role":"user","content":[{"type":"text","text":"a"}]}',
        b"]}",
    ),
    "images": (
        b'{"model":"m","max_tokens":1,"messages":[{"role":"user","content":[',
        b'{"type":"image","source":{"type":"url","url":"a"}}',
        b"]}]}",
    ),
}
OF_RESPONSES = {
    "items": (b'{"model":"m","input":[', b'{"role":"user","content":"a"}', b"]}"),
    "items of one part": (
        b'{"model":"m","input":[',
        b'{"role":"assistant","content":[{"type":"output_text","text":"a"}]}',
        b"]}",
    ),
    "input images": (
        b'{"model":"m","input":[{"role":"user","content":[',
        b'{"type":"input_image","image_url":"a"}',
        b"]}]}",
    ),
}
PARSED: list[tuple[str, Callable[[object], object]]] = [
    *((kind, parse_chat_request) for kind in [*WIDE, *VALID]),
    *((kind, parse_messages_request) for kind in [*WIDE, *OF_ANTHROPIC]),
    *((kind, parse_responses_request) for kind in [*WIDE, *OF_RESPONSES]),
]


def wide(kind: str, num_bytes: int) -> bytes:
    start, item, end = {**WIDE, **VALID, **OF_ANTHROPIC, **OF_RESPONSES}[kind]
    return start + b",".join([item] * (num_bytes // (len(item) + 1))) + end


def arriving(data: bytes, chunk_bytes: int = 65_536) -> Callable[[], Awaitable[dict]]:
    pieces = iter(range(0, len(data), chunk_bytes))

    async def receive() -> dict:
        at = next(pieces)
        return {
            "type": "http.request",
            "body": data[at : at + chunk_bytes],
            "more_body": at + chunk_bytes < len(data),
        }

    return receive


# --- how many elements ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", WIDE)
async def test_a_wide_body_is_refused_before_it_is_complete(kind: str) -> None:
    data, taken, headers = wide(kind, 16 * MEBIBYTE), 0, Headers({"content-type": "application/json"})
    receive = arriving(data)

    async def counted() -> dict:
        nonlocal taken
        message = await receive()
        taken += len(message["body"])
        return message

    hold = MediaHold(1 << 40)
    with pytest.raises(
        InvalidJsonError, match="more than 65536 strings, brackets, commas and colons"
    ) as refused:
        await read_json(headers, counted, 1 << 40, hold.reservation(), deadline=2**40)
    assert (refused.value.status, refused.value.code) == (400, "invalid_json")
    assert hold.used_bytes == 0
    assert taken <= 4 * MAX_MARKS


def elements(value: object) -> int:
    if isinstance(value, dict):
        return 1 + sum(1 + elements(item) for item in value.values())
    return 1 + sum(map(elements, value)) if isinstance(value, list) else 1


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-9, 9)
    | st.text(alphabet='a"\\[{,:\u00e9\U0001f600\n', max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=3), inner, max_size=4),
    max_leaves=20,
)


def scanned(data: bytes, cuts: list[int]) -> JsonScanner:
    scanner, at = JsonScanner(max_depth=10**9, max_marks=10**9), 0
    for size in [*cuts, len(data)]:
        scanner.feed(data[at : at + size])
        at += size
    return scanner


@given(JSON, st.booleans(), st.sampled_from([None, 1]), st.lists(st.integers(0, 7), max_size=30))
def test_marks_cover_keys_and_values_wherever_chunks_are_cut(
    value: object, ascii_only: bool, indent: int | None, cuts: list[int]
) -> None:
    data = json.dumps(value, ensure_ascii=ascii_only, indent=indent).encode()
    scanner = scanned(data, cuts)
    assert elements(value) <= 1 + scanner.marks <= 1 + 3 * elements(value)
    assert scanner._depth == 0
    assert not scanner._in_string
    assert scanner.marks == scanned(data, []).marks


@given(st.binary(max_size=40) | st.text(alphabet='a"\\[]{},: 0', max_size=40).map(str.encode))
@settings(max_examples=500)
def test_whatever_the_parser_accepts_has_no_more_elements_than_were_counted(data: bytes) -> None:
    try:
        value = from_json(data, allow_inf_nan=False)
    except ValueError:
        return
    assert elements(value) <= 1 + scanned(data, [1] * len(data)).marks


@given(JSON, st.booleans(), st.lists(st.integers(0, 7), max_size=30))
def test_every_string_beyond_ascii_is_reserved_at_its_full_width(
    value: object, ascii_only: bool, cuts: list[int]
) -> None:
    def wide_strings(item: object) -> list[str]:
        if isinstance(item, str):
            return [item] if not item.isascii() else []
        if isinstance(item, dict):
            return [s for pair in item.items() for one in pair for s in wide_strings(one)]
        return [s for one in item for s in wide_strings(one)] if isinstance(item, list) else []

    data = json.dumps(value, ensure_ascii=ascii_only).encode()
    assert scanned(data, cuts).wide_bytes >= sum(len(s.encode()) for s in wide_strings(value))


@pytest.mark.parametrize(("kind", "read"), PARSED)
def test_parsing_a_wide_body_takes_no_more_memory_than_was_reserved(
    kind: str, read: Callable[[object], object]
) -> None:
    data = wide(kind, 60_000 if kind in WIDE else 160_000)
    scanner = JsonScanner()
    scanner.feed(data)

    def parse() -> None:
        with contextlib.suppress(ValueError, ApiError, InvalidTypeError):
            read(from_json(data))

    assert peak_bytes(parse) <= 2 * len(data) + scanner.parsed_bytes + 65_536


@given(JSON, st.booleans(), st.lists(st.integers(0, 7), max_size=30))
def test_escapes_are_counted_wherever_the_chunks_are_cut(
    value: object, slashes: bool, cuts: list[int]
) -> None:
    data = json.dumps(value).encode()
    if slashes:
        data = data.replace(b"a", b"\\/")  # as some encoders write base64
    strings = re.findall(rb'"((?:[^"\\]|\\.)*)"', data)
    scanner = scanned(data, cuts)
    assert scanner.escapes == data.count(b"\\")
    assert scanner.longest_escaped == max((len(s) for s in strings if b"\\" in s), default=0)


async def read(data: bytes) -> object:
    headers, hold = Headers({"content-type": "application/json"}), MediaHold(1 << 40)
    return await read_json(headers, arriving(data), 1 << 40, hold.reservation(), deadline=2**40)


async def test_escapes_are_limited_whatever_they_escape(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(body_module, "MAX_ESCAPES", 1 << 16)
    mime = ("iVBOR/w0" * 9 + "\n") * (1 << 12)  # base64 with line breaks, as MIME has it
    assert await read(json.dumps([mime]).encode()) == [mime]
    for escaped in ("\\n", "\\/", "\\u002b", '\\"', "\\\\"):
        body = f'["{escaped * (1 << 15)}", "{escaped * ((1 << 15) + 1)}"]'
        with pytest.raises(RequestTooLargeError, match="more than 65536 escapes") as refused:
            await read(body.encode())
        assert (refused.value.status, refused.value.code) == (413, "request_too_large")


async def turns_during(work: Awaitable[object]) -> int:
    """How often the event loop comes round to another request until `work` is done."""
    turns, ended = 0, asyncio.Event()

    async def other() -> None:
        nonlocal turns
        while not ended.is_set():
            await asyncio.sleep(0)
            turns += 1

    counting = asyncio.create_task(other())
    await work
    ended.set()
    await counting
    return turns


async def test_others_have_their_turn_while_a_chunk_of_many_elements_is_scanned() -> None:
    data, headers = wide("numbers", MAX_MARKS), Headers({"content-type": "application/json"})
    receive = arriving(data, len(data))
    reading = read_json(headers, receive, 1 << 40, MediaHold(1 << 40).reservation(), deadline=2**40)
    assert await turns_during(reading) >= 16


async def test_others_have_their_turn_while_a_data_url_is_decoded() -> None:
    async def unbounded(_: int) -> None:
        """There is always room."""

    assert await turns_during(fetch("data:," + "%41" * MEBIBYTE, MediaPolicy(), "image", unbounded)) > 1


UNKNOWN = {f"field{n}": 0 for n in range(16_000)}


@pytest.mark.parametrize(
    "more",
    [
        UNKNOWN,
        {"stream": True, "stream_options": UNKNOWN},
        {"messages": [{"role": "user", "content": "x", **UNKNOWN}]},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "x", **UNKNOWN}]}]},
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": UNKNOWN}]}]},
        {"stop": [1] * 30_000},
        {"messages": [{}] * 4097},
        {"messages": [{"role": "user", "content": [{"type": "text"}] * 6000}]},
    ],
)
def test_a_body_of_thousands_of_faults_costs_no_more_than_one(more: dict) -> None:
    with pytest.raises(ApiError) as refused:
        parse_chat_request({**CHAT, **more})
    faults = refused.value.__cause__
    assert isinstance(faults, ValidationError)
    assert faults.error_count() <= 2
    assert len(refused.value.message) < 200


TURN = {"role": "user", "content": "x"}
ANTHROPIC = {"model": "m", "max_tokens": 1, "messages": [TURN]}
RESPONSE = {"model": "m", "input": "x"}


@pytest.mark.parametrize(
    ("read", "body"),
    [
        (parse_messages_request, {**ANTHROPIC, **UNKNOWN}),
        (parse_messages_request, {**ANTHROPIC, "messages": [{**TURN, **UNKNOWN}]}),
        (parse_messages_request, {**ANTHROPIC, "messages": [{}] * 4097}),
        (parse_messages_request, {**ANTHROPIC, "messages": [{**TURN, "content": [{"type": "text"}] * 6000}]}),
        (parse_messages_request, {**ANTHROPIC, "system": [{"type": "text"}] * 6000}),
        (parse_messages_request, {**ANTHROPIC, "stop_sequences": [1] * 30_000}),
        (parse_messages_request, {**ANTHROPIC, "metadata": UNKNOWN}),
        (parse_responses_request, {**RESPONSE, **UNKNOWN}),
        (parse_responses_request, {**RESPONSE, "input": [{}] * 4097}),
        (parse_responses_request, {**RESPONSE, "input": [{**TURN, "content": [{"type": "text"}] * 6000}]}),
        (parse_responses_request, {**RESPONSE, "metadata": UNKNOWN}),
        (parse_responses_request, {**RESPONSE, "text": {"format": UNKNOWN}}),
    ],
)
def test_thousands_of_faults_cost_no_more_than_one_on_other_surfaces(
    read: Callable[[object], object], body: dict
) -> None:
    with pytest.raises(ApiError) as refused:
        read(body)
    faults = refused.value.__cause__
    assert isinstance(faults, ValidationError)
    assert faults.error_count() <= 2
    assert len(refused.value.message) < 200


def test_a_string_of_escapes_is_one_element() -> None:
    scanner = JsonScanner()
    text = json.dumps('\\"' * MEBIBYTE).encode()
    for at in range(0, len(text), 65_537):
        scanner.feed(text[at : at + 65_537])
    assert scanner.marks == 1
    assert not scanner._in_string


def test_the_longest_message_of_parts_has_few_enough_elements() -> None:
    parts = [{"type": "image_url", "image_url": {"url": "u"}}] * MAX_PARTS
    scanner = JsonScanner()
    scanner.feed(json.dumps({**CHAT, "messages": [{"role": "user", "content": parts}]}).encode())
    assert scanner.marks <= MAX_MARKS


# --- memory of those who do not send --------------------------------------------------------------------------------------


@contextlib.asynccontextmanager
async def upload(
    gateway: Running, declared: int, sent: bytes = b"", *, wait: bool = True
) -> AsyncIterator[asyncio.StreamReader]:
    """A request whose body begins and does not go on."""
    address = gateway.http.base_url
    reader, writer = await asyncio.open_connection(address.host, address.port)
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\nContent-Length: {declared}\r\n\r\n"
    writer.write(head.encode() + sent)
    if wait:
        await writer.drain()
    try:
        yield reader
    finally:
        writer.transport.abort()


async def ask(gateway: Running) -> str:
    answer = await gateway.http.post("/v1/chat/completions", json=CHAT)
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]["message"]["content"]


async def test_uploads_that_declare_much_and_send_nothing_do_not_block_others(launch: Launch) -> None:
    gateway = await launch()
    await gateway.worker(TEXT)
    async with contextlib.AsyncExitStack() as stack:
        for _ in range(8):
            await stack.enter_async_context(upload(gateway, 256 * MEBIBYTE, b'{"model": "'))
        await gateway.until_metric("mmd_requests_running", 8)
        assert await ask(gateway) == TEXT
        await gateway.until_metric("mmd_media_held_bytes", 0)


async def test_text_is_answered_while_the_memory_for_media_is_full(
    launch: Launch, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hold_module, "WAIT_SECONDS", 3600.0)
    monkeypatch.setattr(gateway_process, "MIN_HOLD_BYTES", 8 * MEBIBYTE)
    gateway = await launch(maxBodyMebibytes=2)
    await gateway.worker(TEXT)
    filler = b'{"model": "' + b"x" * (MEBIBYTE * 15 // 8)
    async with contextlib.AsyncExitStack() as stack:
        for _ in range(8):
            await stack.enter_async_context(upload(gateway, 2 * MEBIBYTE, filler, wait=False))
        await gateway.until_metric("mmd_media_waiting_requests", lambda waiting: waiting >= 2)
        assert await ask(gateway) == TEXT
        long = {**CHAT, "messages": [{"role": "user", "content": "circle " * 50_000}]}
        refused = await gateway.http.post("/v1/chat/completions", json=long)
        assert refused.json()["error"]["code"] == "context_length_exceeded"


async def test_a_body_that_stalls_or_trickles_is_ended_at_its_deadline(
    launch: Launch, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(body_module, "STALL_SECONDS", 0.3)
    gateway = await launch()
    address = gateway.http.base_url
    reader, writer = await asyncio.open_connection(address.host, address.port)
    head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
    writer.write(head + b"Content-Length: 1000000\r\n\r\n{")

    async def trickle() -> None:
        while True:
            writer.write(b" ")
            await asyncio.sleep(0.02)

    sending = asyncio.create_task(trickle())
    async with asyncio.timeout(DEADLINE_SECONDS):
        answer = await reader.read(65_536)
    sending.cancel()
    writer.close()
    assert b"408" in answer.split(b"\r\n")[0]
    assert b"send it faster" in answer
    await gateway.until_metric("mmd_requests_running", 0)


async def test_a_body_must_be_complete_at_the_deadline_of_its_request(launch: Launch) -> None:
    gateway = await launch(requestTimeoutSeconds=1)
    async with upload(gateway, 1000, b"{") as reader, asyncio.timeout(DEADLINE_SECONDS):
        answer = await reader.read(65_536)
    assert b"requestTimeoutSeconds" in answer


async def test_a_head_that_is_not_finished_ends_the_connection(
    launch: Launch, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server_module, "HEAD_SECONDS", 0.2)
    gateway = await launch()
    address = gateway.http.base_url
    for sent in (b"", b"POST /v1/chat/completions HTTP/1.1\r\nHost: "):
        reader, writer = await asyncio.open_connection(address.host, address.port)
        writer.write(sent)
        with contextlib.suppress(ConnectionResetError):
            async with asyncio.timeout(DEADLINE_SECONDS):
                assert await reader.read() == b""
        writer.close()


# --- those who do not read ------------------------------------------------------------------------------------------------


async def test_a_client_that_never_reads_is_cut_off_and_frees_everything(
    launch: Launch, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server_module, "WRITE_SECONDS", 0.3)
    monkeypatch.setattr(server_module, "MIN_READ_BYTES_PER_SECOND", 10**9)
    gateway = await launch()

    async def talk_on(worker: ScriptedWorker, request: object) -> None:
        for first in range(0, 20_000, 50):
            await worker.tokens(request, list(range(first, first + 50)))
            await asyncio.sleep(0.01)

    worker = await gateway.worker(list(range(300, 400)) * 200, talk_on)
    address = gateway.http.base_url
    quiet = socket.socket()
    quiet.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    quiet.connect((address.host, address.port))
    data = json.dumps(
        {**CHAT, "stream": True, "logprobs": True, "top_logprobs": 20, "ignore_eos": True}
    ).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
    quiet.sendall(head.encode() + data)
    await worker.until(lambda: bool(worker.requests))
    await worker.until(lambda: bool(worker.cancels))
    await gateway.until_metric("mmd_gateway_sequences", 0)
    await gateway.until_metric("mmd_requests_running", 0)
    quiet.close()


async def test_a_slow_reader_holds_its_answer_for_a_bounded_time(
    launch: Launch, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The request timeout and the size of the answer set the bound."""
    monkeypatch.setattr(server_module, "WRITE_SECONDS", 6.0)
    monkeypatch.setattr(server_module, "MIN_READ_BYTES_PER_SECOND", 10**9)
    monkeypatch.setattr(server_module, "_listen", listen_with_small_buffers)
    gateway = await launch(requestTimeoutSeconds=10)

    async def soon(worker: ScriptedWorker, request: object) -> None:
        for first in range(0, 2000, 50):
            await worker.tokens(request, list(range(first, first + 50)))
            await asyncio.sleep(0.01)

    await gateway.worker(list(range(300, 400)) * 20, soon)
    address = gateway.http.base_url
    slow = socket.socket()
    slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    slow.connect((address.host, address.port))
    data = json.dumps({**CHAT, "logprobs": True, "top_logprobs": 20, "ignore_eos": True}).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
    slow.sendall(head.encode() + data)
    got = await asyncio.to_thread(read_slowly, slow)
    head_end = got.index(b"\r\n\r\n") + 4
    length = next(int(line.split()[1]) for line in got.splitlines() if line.startswith(b"content-length:"))
    assert got.startswith(b"HTTP/1.1 200 ")
    assert len(got) - head_end < length, "the whole answer was sent"
    await gateway.until_metric("mmd_requests_running", 0)
    await gateway.until_metric("mmd_answer_reserved_bytes", 0)


def listen_with_small_buffers(host: str, port: int) -> socket.socket:
    """So that the kernel does not take a whole answer; connections inherit it."""
    listening = socket.create_server((host, port))
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 8192)
    return listening


def read_slowly(slow: socket.socket) -> bytes:
    """What comes until the server ends the connection, or the answer is complete; read a little at a time."""
    got = b""
    slow.settimeout(30)
    with slow, contextlib.suppress(ConnectionResetError):
        while more := slow.recv(4096):
            got += more
            if got.endswith(b"}") and b"usage" in got[-4096:]:
                break
            time.sleep(0.04)
    return got


# --- media by URL ---------------------------------------------------------------------------------------------------------


@contextlib.asynccontextmanager
async def slow_files(seconds_of: Callable[[str], asyncio.Event], data: bytes) -> AsyncIterator[str]:
    """A server whose files begin at once and end when an event comes."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            head = (await reader.readuntil(b"\r\n\r\n")).decode()
            length = f"HTTP/1.1 200 OK\r\nContent-Length: {len(data)}\r\nConnection: close\r\n\r\n"
            writer.write(length.encode() + data[:100])
            await writer.drain()
            await seconds_of(head).wait()
            writer.write(data[100:])
            await writer.drain()
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        server.close()


def with_videos(url: str, count: int) -> dict:
    parts = [{"type": "video_url", "video_url": {"url": f"{url}/{n}"}} for n in range(count)]
    return {**CHAT, "messages": [{"role": "user", "content": [*parts, {"type": "text", "text": "?"}]}]}


async def test_small_videos_by_url_reserve_only_their_size_and_arrive_together(
    launch: Launch,
) -> None:
    """Five times the largest video would not fit, and none ends before all have begun."""
    gateway = await launch(maxBodyMebibytes=64, media={"allowPrivateAddresses": True})
    worker = await gateway.worker(TEXT)
    video = draw("video", 1).bytes
    begun: list[str] = []
    go = asyncio.Event()

    def arrived(head: str) -> asyncio.Event:
        begun.append(head)
        if len(begun) == 5:
            go.set()
        return go

    async with slow_files(arrived, video) as url:
        answer = await gateway.http.post("/v1/chat/completions", json=with_videos(url, 5))
    assert answer.status_code == 200, answer.text
    assert len(worker.requests[0].features) == 5


async def test_slow_urls_do_not_hold_up_text(launch: Launch) -> None:
    gateway = await launch(media={"allowPrivateAddresses": True})
    await gateway.worker(TEXT)
    begun, go = asyncio.Semaphore(0), asyncio.Event()

    def arrived(_: str) -> asyncio.Event:
        begun.release()
        return go

    async with slow_files(arrived, draw("video", 1).bytes) as url, asyncio.TaskGroup() as group:
        slow = [
            group.create_task(gateway.http.post("/v1/chat/completions", json=with_videos(url, 2)))
            for _ in range(4)
        ]
        for _ in range(8):
            await begun.acquire()
        assert await ask(gateway) == TEXT
        go.set()
    assert [task.result().status_code for task in slow] == [200] * 4


async def test_a_file_that_never_ends_costs_no_more_than_the_deadline(launch: Launch) -> None:
    gateway = await launch(media={"allowPrivateAddresses": True}, requestTimeoutSeconds=1)
    await gateway.worker(TEXT)
    async with slow_files(lambda _: asyncio.Event(), draw("video", 1).bytes) as url:
        answer = await gateway.http.post("/v1/chat/completions", json=with_videos(url, 1))
    assert answer.status_code == 504, answer.text
    assert "requestTimeoutSeconds" in answer.json()["error"]["message"]


UNREAD = {
    "an unknown path": ("POST", "/unknown", 404),
    "an unknown method": ("PUT", "/v1/chat/completions", 405),
    "a path that takes no body": ("GET", "/health", 200),
    "another type of body": ("POST", "/v1/chat/completions", 415),
}


@pytest.mark.parametrize(("method", "path", "status"), UNREAD.values(), ids=list(UNREAD))
async def test_a_body_that_no_answer_waits_for_is_not_read_without_limit(
    launch: Launch, method: str, path: str, status: int
) -> None:
    gateway = await launch()
    await assert_read_within_bounds(gateway, method, path, status)


async def test_after_an_early_answer_the_connection_ends_with_the_body(
    launch: Launch, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(unread, "DISCARD_SECONDS", 600.0)
    gateway = await launch()
    reader, writer = await opened(gateway)
    writer.write(b"POST /unknown HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-length: 4\r\n\r\nab")
    async with asyncio.timeout(DEADLINE_SECONDS):  # it does not wait for the rest
        head = await reader.readuntil(b"\r\n\r\n")
    assert b" 404 " in head
    writer.write(b"cd")
    async with asyncio.timeout(DEADLINE_SECONDS):  # the connection ends with the body
        await reader.read()
    writer.close()
