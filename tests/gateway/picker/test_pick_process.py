"""The gRPC server of the endpoint picker, with messages of Envoy's protocol: good, out of order, hostile."""

from __future__ import annotations

import asyncio
import contextlib
import random
import ssl
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from dataclasses import replace
from typing import Any

import grpc
import grpc.aio
import pytest

from mmd_workers.gateway.picker import pick_process
from mmd_workers.gateway.picker.ext_proc_messages import (
    MAX_HEAD_BYTES,
    MAX_MESSAGE_BYTES,
    ProcessingRequest,
)
from mmd_workers.gateway.picker.pick_messages import Report, Setup, View
from mmd_workers.gateway.picker.pick_process import PickServer
from mmd_workers.gateway.picker.picks import GatewayLoad
from support.harness.waiting import DEADLINE_SECONDS, until
from tests.gateway.proxies import (
    PATH,
    Proxy,
    asking,
    begun,
    body,
    channel_to,
    endpoints,
    has_no_choice,
    headers,
    listed,
    refused,
    returned,
    stream,
    until_closed,
)

ONE, TWO = "10.0.0.1:8000", "10.0.0.2:8000"
Start = Callable[..., Awaitable[PickServer]]


def view(*endpoints: str, max_body_bytes: int = 4 << 20, max_requests: int = 10) -> View:
    loads = [GatewayLoad(e, e, True, 0, max_requests, 1.0) for e in endpoints]
    return View(loads, max_body_bytes)


@pytest.fixture
async def start() -> AsyncIterator[Start]:
    """Starts servers, on free ports."""
    async with AsyncExitStack() as stack:

        async def started(shown: View | None = None, **more: Any) -> PickServer:
            server = PickServer(setup(**more))
            server.show(shown or view(ONE))
            await server.start()
            stack.push_async_callback(server.stop, 0.0)
            return server

        yield started


def setup(**more: Any) -> Setup:
    return replace(Setup("127.0.0.1", 0, False, request_seconds=600.0), **more)


FEW = pick_process.OWN_BYTES + (12 << 20)
"""Of memory, so that four streams may be read at once, and 48 may be open."""


async def until_streams(server: PickServer, number: int) -> None:
    await until(lambda: server.streams == number)


def outcomes(server: PickServer) -> dict[str, int]:
    return dict(Report.of(server.report()).outcomes)


async def until_outcomes(server: PickServer, wanted: dict[str, int]) -> None:
    """The server counts when it has ended a stream, which a client may learn before."""
    found: dict[str, int] = {}

    def are_counted() -> bool:
        for outcome, count in outcomes(server).items():
            found[outcome] = found.get(outcome, 0) + count
        return found == wanted

    await until(are_counted, lambda: f"outcomes {wanted}, of which were counted {found}")


async def still_answers(server: PickServer) -> None:
    async with asking(server.port) as proxy:
        assert endpoints(await proxy.ask(headers(ends=True))) == [ONE]


async def test_headers_are_answered_with_an_endpoint_and_bodies_pass_unchanged(start: Start):
    server = await start()
    async with asking(server.port) as proxy:
        assert endpoints(await proxy.ask(headers())) == [ONE]
        for piece, ends in ((b"one", False), (random.Random(1).randbytes(1 << 20), False), (b"", True)):
            await proxy.send(body(piece, ends))
            assert await proxy.passed(len(piece)) == (piece, ends)
        assert await proxy.ends() == grpc.StatusCode.OK, "the answer goes to the client without it"
    report = Report.of(server.report())
    assert report.outcomes == {"picked": 1}
    assert len(report.seconds) == 1


@pytest.mark.parametrize(
    "last", [headers(ends=True), body(b"", ends=True), ProcessingRequest(request_trailers={})]
)
async def test_a_stream_ends_with_its_request(start: Start, last: Any):
    server = await start()
    async with asking(server.port) as proxy:
        if last != headers(ends=True):
            endpoints(await proxy.ask(headers()))
        await proxy.ask(last)
        assert await proxy.ends() == grpc.StatusCode.OK
    await until_streams(server, 0)


async def test_a_response_that_begins_before_its_request_ends_passes_whole(
    start: Start,
):
    server = await start()
    async with asking(server.port) as proxy:
        endpoints(await proxy.ask(headers()))
        assert returned(await proxy.ask(body(b"half"))) == (b"half", False)
        answer = await proxy.ask(ProcessingRequest(response_headers={}))
        assert answer.HasField("response_headers")
        assert returned(await proxy.ask(body(b"rest", ends=True))) == (b"rest", True)
        assert returned(await proxy.ask(body(b"no", side="response")), "response") == (b"no", False)
        assert returned(await proxy.ask(body(b"", ends=True, side="response")), "response") == (b"", True)
        assert await proxy.ends() == grpc.StatusCode.OK


async def test_in_other_modes_the_proxy_keeps_the_body(start: Start):
    server = await start()
    streamed, none = 1, 0
    async with asking(server.port) as proxy:
        endpoints(await proxy.ask(headers(modes=(streamed, none))))
        answer = await proxy.ask(body(b"piece", ends=True))
        assert answer.HasField("request_body")
        assert not answer.request_body.HasField("response")
        assert await proxy.ends() == grpc.StatusCode.OK
    async with asking(server.port) as proxy:
        endpoints(await proxy.ask(headers(modes=(none, streamed))))
        assert await proxy.ends() == grpc.StatusCode.OK, "no body will come"


async def test_a_last_piece_that_comes_twice_goes_on_once(start: Start):
    server = await start()
    async with asking(server.port) as proxy:
        endpoints(await proxy.ask(headers()))
        await proxy.ask(ProcessingRequest(response_headers={}))  # so that the stream goes on
        assert returned(await proxy.ask(body(b"all", ends=True))) == (b"all", True)
        await proxy.send(body(b"all", ends=True))
        answer = await proxy.ask(ProcessingRequest(response_trailers={}))
        assert answer.HasField("response_trailers"), "nothing has come between"


async def test_the_subset_hint_of_the_proxy_is_respected(start: Start):
    server = await start(view(ONE, TWO))
    for hint in (listed(TWO), {"string_value": f"10.9.9.9:8000, {TWO}"}):
        async with asking(server.port) as proxy:
            assert endpoints(await proxy.ask(headers(subset=hint))) == [TWO]
    for hint in (listed(), listed("10.9.9.9:8000"), {}):
        async with asking(server.port) as proxy:
            status, error = refused(await proxy.ask(headers(subset=hint)))
            assert (status, error["code"]) == (503, "overloaded")
            assert await proxy.ends() == grpc.StatusCode.OK
    await until_outcomes(server, {"picked": 2, "no_gateway": 3})


@pytest.mark.parametrize("views", [0, 3], ids=["silent", "cut-off"])
async def test_without_a_current_view_requests_pass_for_the_proxy_to_choose(
    start: Start, monkeypatch: pytest.MonkeyPatch, views: int
):
    monkeypatch.setattr(pick_process, "STALE_SECONDS", 0.2)
    server = await start()
    await asyncio.sleep(0.2)
    for _ in range(views):
        server.show(replace(view(ONE), is_current=False))
    async with asking(server.port) as proxy:
        assert has_no_choice(await proxy.ask(headers()))
        assert returned(await proxy.ask(body(b"piece"))) == (b"piece", False)
        assert (await proxy.ask(ProcessingRequest(request_trailers={}))).HasField("request_trailers")
        assert await proxy.ends() == grpc.StatusCode.OK
    await until_outcomes(server, {"passed": 1})


async def test_it_speaks_tls_with_a_certificate_of_its_own(start: Start):
    server = await start(tls=True)
    pem = await asyncio.to_thread(ssl.get_server_certificate, ("127.0.0.1", server.port))
    credentials = grpc.ssl_channel_credentials(pem.encode())
    options = [("grpc.ssl_target_name_override", "endpoint-picker")]
    async with grpc.aio.secure_channel(f"127.0.0.1:{server.port}", credentials, options) as channel:
        assert endpoints(await stream(channel).ask(headers())) == [ONE]


async def test_a_body_that_is_too_large_is_refused_whatever_its_pieces(start: Start):
    server = await start(view(ONE, max_body_bytes=1 << 20))
    async with asking(server.port) as proxy:
        endpoints(await proxy.ask(headers()))
        for _ in range(16):
            await proxy.send(body(bytes(64 << 10)))
            assert (await proxy.passed(64 << 10))[0]
        status, error = refused(await proxy.ask(body(b"x")))
        assert (status, error["code"]) == (413, "request_too_large")
        assert await proxy.ends() == grpc.StatusCode.OK
    await until_outcomes(server, {"picked": 1, "too_large": 1})


NOTHING = ProcessingRequest()
ANSWERED = ProcessingRequest(response_headers={})


@pytest.mark.parametrize(
    "messages",
    [
        [body(b"first")],
        [NOTHING],
        [ANSWERED],
        [ProcessingRequest(request_trailers={})],
        [headers(), headers()],
        [headers(), NOTHING],
        [headers(), body(b"early", side="response")],
        [headers(), ANSWERED, ANSWERED],
    ],
    ids=["body", "empty", "answer", "trailers", "headers-twice", "then-empty", "early", "answered-twice"],
)
async def test_messages_out_of_order_end_the_stream_and_nothing_else(start: Start, messages: list[Any]):
    server = await start()
    async with channel_to(server.port) as channel:
        proxy = stream(channel)
        for message in messages[:-1]:
            await proxy.ask(message)
        await proxy.send(messages[-1])
        assert await proxy.ends() == grpc.StatusCode.INVALID_ARGUMENT
        assert endpoints(await stream(channel).ask(headers())) == [ONE]


def field(number: int, content: bytes) -> bytes:
    """A field with a length, on the wire."""
    length, size = len(content), b""
    while True:
        length, low = length >> 7, length & 0x7F
        size += bytes([low | (0x80 if length else 0)])
        if not length:
            return _key(number) + size + content


def _key(number: int) -> bytes:
    key = number << 3 | 2
    return bytes([key]) if key < 0x80 else bytes([key & 0x7F | 0x80, key >> 7])


def nested(depth: int) -> bytes:
    """A subset hint of structs within structs."""
    value = b""
    for _ in range(depth):
        value = field(5, field(1, field(2, value)))
    return field(2, b"") + field(8, field(1, field(2, field(1, field(2, value)))))


def filled(*path: int, piece: bytes, num_bytes: int) -> bytes:
    """As many of a piece as fit into so many bytes, in the field that a path leads to."""
    content = piece * ((num_bytes - 32) // len(piece))
    for number in reversed(path):
        content = field(number, content)
    return content


HOSTILE = {
    "no message": b"\xff\xff\xff\xff not a message",
    "cut": headers().SerializeToString()[:-3],
    "a head that is too large": headers(cookie="x" * MAX_HEAD_BYTES).SerializeToString(),
    "no UTF-8": field(2, field(1, field(1, field(1, b"\xff\xfe")))),
    "deep": nested(40),
    "deeper than the stack": nested(20_000),
    "as many headers as fit": filled(2, 1, piece=field(1, b""), num_bytes=MAX_HEAD_BYTES),
    "more headers than a head has": filled(2, 1, piece=field(1, b""), num_bytes=MAX_MESSAGE_BYTES),
    "as much metadata as fits": field(2, b"") + filled(8, piece=field(1, b""), num_bytes=MAX_HEAD_BYTES - 64),
    "millions of bodies in one message": filled(piece=field(4, b""), num_bytes=MAX_MESSAGE_BYTES),
    "a huge unknown field": filled(99, piece=b"x", num_bytes=MAX_MESSAGE_BYTES),
    "tiny unknown fields": filled(piece=field(99, b""), num_bytes=MAX_MESSAGE_BYTES),
    "a long subset": field(2, b"")
    + field(
        8,
        field(
            1,
            field(1, b"envoy.lb.subset_hint")
            + field(
                2,
                field(
                    1,
                    field(1, b"x-gateway-destination-endpoint-subset")
                    + field(2, filled(6, piece=field(1, b""), num_bytes=MAX_HEAD_BYTES - 256)),
                ),
            ),
        ),
    ),
}  # fmt: skip


@pytest.mark.parametrize("message", HOSTILE.values(), ids=HOSTILE)
async def test_a_hostile_message_ends_its_stream_alone(start: Start, message: bytes):
    server = await start()
    assert len(message) <= MAX_MESSAGE_BYTES
    async with channel_to(server.port) as channel:
        proxy = stream(channel)
        await proxy.send(message)
        assert await proxy.ends() == grpc.StatusCode.INVALID_ARGUMENT
        assert endpoints(await stream(channel).ask(headers())) == [ONE]
    await until_outcomes(server, {"invalid": 1, "picked": 1})


@pytest.mark.parametrize("seed", range(8))
async def test_whatever_bytes_come_the_stream_has_an_answer_or_an_end(start: Start, seed: int):
    server, rng = await start(), random.Random(seed)
    good = headers(idempotency_key="a", subset=listed(ONE), modes=(4, 4)).SerializeToString()
    async with channel_to(server.port) as channel:
        for _ in range(100):
            message = bytearray(good)
            for _ in range(rng.randint(1, 8)):
                message[rng.randrange(len(message))] = rng.randrange(256)
            proxy = stream(channel)
            await proxy.send(bytes(message))
            assert await proxy.finish() in {grpc.StatusCode.OK, grpc.StatusCode.INVALID_ARGUMENT}
    await still_answers(server)


async def test_a_message_that_is_too_large_is_never_in_memory(start: Start):
    server = await start()
    async with asking(server.port) as proxy:
        endpoints(await proxy.ask(headers()))
        await proxy.send(body(bytes(MAX_MESSAGE_BYTES + 1)))
        assert await proxy.ends() == grpc.StatusCode.RESOURCE_EXHAUSTED
    await still_answers(server)


async def test_a_request_that_takes_longer_than_its_gateway_allows_is_refused(
    start: Start, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(pick_process, "PEER_SECONDS", 0.5)
    server = await start(request_seconds=0.5)
    async with asking(server.port) as proxy:
        endpoints(await proxy.ask(headers()))
        status, error = refused(await proxy.answer())
        assert (status, error["code"]) == (408, "request_timeout")
        assert await proxy.ends() == grpc.StatusCode.OK
    await until_outcomes(server, {"picked": 1, "late": 1})


async def test_a_silent_stream_keeps_its_turn_until_another_one_waits_for_it(
    start: Start, monkeypatch: pytest.MonkeyPatch
):
    server = await start(memory_bytes=FEW)
    async with channel_to(server.port) as channel:
        silent = [await begun(channel) for _ in range(server.max_bodies)]
        monkeypatch.setattr(pick_process, "CROWDED_SECONDS", 0.2)
        await asyncio.sleep(0.5)
        await until_streams(server, len(silent))
        async with asking(server.port) as proxy:
            endpoints(await proxy.ask(headers()))
            status, error = refused(await silent[0].answer())
            assert (status, error["code"]) == (503, "overloaded")
            for other in silent[1:]:
                assert returned(await other.ask(body(b"more"))) == (b"more", False)
            assert returned(await proxy.ask(body(b"rest", ends=True))) == (b"rest", True)
    await until_outcomes(server, {"picked": server.max_bodies + 1, "too_many": 1})


async def test_more_streams_than_are_read_at_once_take_turns(start: Start):
    server = await start(memory_bytes=FEW)
    pieces = [random.Random(n).randbytes(1 << 20) for n in range(3)]

    async def pass_all(proxy: Proxy) -> bytes:
        endpoints(await proxy.ask(headers()))
        content = b""
        for piece in pieces:
            await proxy.send(body(piece, ends=piece is pieces[-1]))
            content += (await proxy.passed(len(piece)))[0]
        assert await proxy.ends() == grpc.StatusCode.OK
        return content

    async with channel_to(server.port) as channel:
        passed = await asyncio.gather(*(pass_all(stream(channel)) for _ in range(5 * server.max_messages)))
    assert set(passed) == {b"".join(pieces)}
    await until_outcomes(server, {"picked": 5 * server.max_messages})


async def test_whoever_waits_too_long_for_a_turn_is_told_to_retry(
    start: Start, monkeypatch: pytest.MonkeyPatch
):
    server = await start(memory_bytes=FEW)
    async with channel_to(server.port) as channel:
        silent = [await begun(channel) for _ in range(server.max_bodies)]
        monkeypatch.setattr(pick_process, "PEER_SECONDS", 0.2)
        waiting = await begun(channel)
        status, error = refused(await waiting.answer())
        await until_streams(server, len(silent))
        assert (status, error["code"]) == (503, "overloaded")


async def test_streams_beyond_the_bound_are_refused_at_once_and_others_continue(start: Start):
    server = await start()
    server.max_streams = 4
    async with channel_to(server.port) as one, channel_to(server.port) as other:
        held = [stream(one) for _ in range(4)]
        for proxy in held:
            endpoints(await proxy.ask(headers()))
        assert server.streams == 4
        beyond = stream(other)
        status, error = refused(await beyond.answer())
        assert (status, error["code"]) == (503, "overloaded")
        assert await beyond.ends() == grpc.StatusCode.OK
        assert returned(await held[0].ask(body(b"piece"))) == (b"piece", False)
        for proxy in held:
            assert await proxy.finish() == grpc.StatusCode.OK
        await until_streams(server, 0)
        assert endpoints(await stream(other).ask(headers())) == [ONE]
    await until_outcomes(server, {"picked": 5, "too_many": 1})


@pytest.mark.parametrize("mebibytes", [384, 1024])
def test_the_bounds_on_streams_and_messages_fit_into_memory(mebibytes: int):
    server = PickServer(setup(memory_bytes=mebibytes << 20))
    needed = server.max_messages * 2 * MAX_MESSAGE_BYTES + server.max_streams * (64 << 10)
    assert needed < (mebibytes - 128) << 20
    assert server.max_messages >= 64
    assert server.max_streams >= 800


async def test_thousands_of_streams_at_once_are_all_answered(start: Start, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(pick_process, "CROWDED_SECONDS", 0.1)
    server = await start()
    async with AsyncExitStack() as stack:
        each, num_channels = pick_process.STREAMS_OF_A_CONNECTION, 20
        channels = [await stack.enter_async_context(channel_to(server.port)) for _ in range(num_channels)]
        proxies = [stream(channel) for channel in channels for _ in range(each)]

        async def outcome(proxy: Proxy) -> str:
            try:
                await proxy.send(headers())
                return "picked" if (await proxy.answer()).HasField("request_headers") else "too_many"
            except grpc.aio.AioRpcError:
                return "too_many"  # before it has sent anything: this client then does not read why

        async with asyncio.timeout(DEADLINE_SECONDS):
            came = await asyncio.gather(*map(outcome, proxies))
        assert came.count("picked") > server.max_messages
        counted = outcomes(server)
        assert counted.keys() == {"picked", "too_many"}
        assert counted["picked"] == came.count("picked")
    await until_streams(server, 0)
    await still_answers(server)


@pytest.mark.parametrize("ip", ["127.0.0.1", "[::1]"])
async def test_a_peer_that_reads_no_answer_loses_only_its_own_connection(
    start: Start, monkeypatch: pytest.MonkeyPatch, ip: str
):
    monkeypatch.setattr(pick_process, "PEER_SECONDS", 3.0)
    server = await start(view(ONE, max_body_bytes=1 << 30), address="0.0.0.0")

    async def send_on(proxy: Proxy) -> None:
        with contextlib.suppress(Exception):  # of gRPC's own kinds, where it has ended
            while True:
                await proxy.send(body(bytes(32 << 10)))

    async with channel_to(server.port, ip) as one, channel_to(server.port) as another:
        stalled = stream(one)
        endpoints(await stalled.ask(headers()))
        sending = asyncio.create_task(send_on(stalled))
        await until_outcomes(server, {"picked": 1, "unread": 1})
        other = stream(another)
        endpoints(await other.ask(headers()))
        await other.send(body(bytes(1 << 20), ends=True))
        assert await other.passed(1 << 20) == (bytes(1 << 20), True)
        await until_streams(server, 0)
        sending.cancel()
        await asyncio.wait([sending])
        assert await stalled.ends() != grpc.StatusCode.OK


async def test_an_error_of_its_own_is_counted_and_tells_peers_nothing(
    start: Start, monkeypatch: pytest.MonkeyPatch
):
    def broken(*_: object) -> None:
        raise OSError("too many open files: /proc/self/secret")

    server = await start()
    monkeypatch.setattr(pick_process.ProxyExchange, "answers", broken)
    async with asking(server.port) as proxy:
        await proxy.send(headers())
        assert await proxy.ends() == grpc.StatusCode.INTERNAL
        assert "secret" not in await proxy.call.details()
    await until_outcomes(server, {"failed": 1})


async def test_connections_beyond_the_bound_are_closed_and_the_others_go_on(
    start: Start, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(pick_process, "MAX_CONNECTIONS", 8)
    server = await start()
    async with channel_to(server.port) as channel:
        endpoints(await stream(channel).ask(headers()))
        preface = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\0\0\0\4\0\0\0\0\0"
        opened = []
        for _ in range(30):
            reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
            writer.write(preface)
            opened.append((reader, writer))

        async def stays(reader: asyncio.StreamReader) -> bool:
            try:
                return bool(await reader.read(1))
            except ConnectionError:
                return False

        async with asyncio.timeout(DEADLINE_SECONDS):
            stay = await asyncio.gather(*(stays(reader) for reader, _ in opened))
        assert 0 < sum(stay) < 8
        assert endpoints(await stream(channel).ask(headers())) == [ONE]
        for _, writer in opened:
            writer.close()


async def test_connections_that_never_speak_are_closed(start: Start, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(pick_process, "PEER_SECONDS", 0.5)
    server = await start()
    idle = [await asyncio.open_connection("127.0.0.1", server.port) for _ in range(50)]
    await still_answers(server)
    async with asyncio.timeout(DEADLINE_SECONDS):
        for reader, _ in idle:
            while await reader.read(1 << 16):
                pass
    for _, writer in idle:
        writer.close()


async def test_other_methods_are_not_there(start: Start):
    server = await start()
    async with channel_to(server.port) as channel:
        call = channel.stream_stream(PATH.replace("Process", "Other"))()
        assert await call.code() == grpc.StatusCode.UNIMPLEMENTED


async def test_a_choice_waits_for_no_upload(start: Start):
    server = await start(memory_bytes=pick_process.OWN_BYTES + (24 << 20))
    async with channel_to(server.port) as channel:
        uploads = [await begun(channel) for _ in range(server.max_bodies)]
        for upload in uploads:
            assert returned(await upload.ask(body(b"some"))) == (b"some", False)
        for _ in range(3):
            assert endpoints(await stream(channel).ask(headers(ends=True))) == [ONE]
        assert server.streams == len(uploads)


async def test_after_a_pause_pending_input_is_read_before_a_deadline_ends():
    ended = asyncio.Event()
    deadline = pick_process._Deadline(1.0, ended.set)
    time.sleep(1.7)
    for _ in range(3):
        await asyncio.sleep(0)
    assert not ended.is_set()
    async with asyncio.timeout(DEADLINE_SECONDS):
        await ended.wait()
    deadline.cancel()


async def test_a_drain_lets_streams_end_and_takes_no_new_one(start: Start):
    server = await start()
    async with channel_to(server.port) as channel:
        held = stream(channel)
        endpoints(await held.ask(headers()))
        stopping = asyncio.create_task(server.stop(60.0))
        await until_closed(server.port)
        async with asking(server.port) as proxy:
            assert await proxy.finish() == grpc.StatusCode.UNAVAILABLE
        assert returned(await held.ask(body(b"more"))) == (b"more", False)
        assert not stopping.done()
        assert returned(await held.ask(body(b"the rest", ends=True))) == (b"the rest", True)
        assert await held.ends() == grpc.StatusCode.OK
        async with asyncio.timeout(DEADLINE_SECONDS):
            await stopping


async def test_a_silent_stream_does_not_keep_a_drain_from_ending(
    start: Start, monkeypatch: pytest.MonkeyPatch
):
    server = await start()
    async with asking(server.port) as proxy:
        endpoints(await proxy.ask(headers()))
        monkeypatch.setattr(pick_process, "PEER_SECONDS", 0.2)
        async with asyncio.timeout(DEADLINE_SECONDS):
            await server.stop(600.0)
        assert refused(await proxy.answer())[0] == 503
    await until_outcomes(server, {"picked": 1, "late": 1})
