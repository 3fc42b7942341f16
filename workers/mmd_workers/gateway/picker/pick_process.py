"""The process of the endpoint picker: a gRPC server open to any peer.

`endpoint_picker` starts it. It knows only what its gateway writes to its standard input, and ends when that input ends. Its counts go to standard
output (`pick_messages`). It is given no secret and imports neither the model nor NATS; but it runs as its gateway's user, whose files and
processes it could read.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import datetime
import ipaddress
import json
import logging
import math
import os
import random
import resource
import signal
import socket
import stat
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import grpc
import grpc.aio
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from mmd_api.contract.errors import MmdError, OverloadedError, RequestTimeoutError
from mmd_workers.gateway.picker.ext_proc import ProxyExchange, refusal
from mmd_workers.gateway.picker.ext_proc_messages import (
    MAX_MESSAGE_BYTES,
    METHOD,
    SERVICE,
    InvalidMessageError,
)
from mmd_workers.gateway.picker.pick_messages import (
    MAX_OUTPUT_BYTES,
    MAX_SAMPLES,
    PickOutcome,
    Report,
    Setup,
    View,
    line_of,
)
from mmd_workers.gateway.picker.picks import Picks

PDEATHSIG = 1
NICENESS = 10
MAX_OPEN_FILES = 1024
MAX_CONNECTIONS = 64
"""Each connection takes some memory and a file; connections beyond this number are closed at once."""
STREAMS_OF_A_CONNECTION = 100
"""For more streams than this, proxies open another connection."""
WINDOW_BYTES = 16 << 10
"""The bytes that a peer may send on a stream before the stream is read."""
OWN_BYTES = 160 << 20
"""The part of the memory for the process itself."""
MESSAGE_BYTES = 2 * MAX_MESSAGE_BYTES
"""The memory for a stream that is being read: gRPC receives a message before this process sees it, and then copies it."""
STREAM_BYTES = 64 << 10
"""The memory for a stream that waits to be read."""
FIRST_SHARE = 8
"""The turns for reading divided by this are for first messages, which have no body, so that no choice waits for an upload."""
STREAMS_SHARE = 4
"""The remaining memory divided by this is for waiting streams."""
PIECE_BYTES = 62_000
"""The size of body pieces sent back: some proxies take no more than 64 KiB at once, and a peer that does not read holds no more in memory."""
PEER_SECONDS = 10.0
"""The limit for a handshake, for taking an answer, for waiting for a turn to be read, and for the next message of a stream during a drain."""
CROWDED_SECONDS = 2.0
"""The limit for the next message of a stream while other streams wait for their turn."""
PAUSE_SECONDS = 0.5
"""A timer that fires later than this was delayed by a pause of this process."""
END_SECONDS = 2.0
"""The limit for taking the end of a stream."""
AGE_SECONDS = 60.0
"""The age at which a connection takes no more streams; its open streams may still last as long as a request at the gateway.

Proxies learn of this in time, unlike when gRPC closes an idle connection: a stream that is just being opened then fails. A proxy that reaches all
pickers by one address may reach another picker after that, so a picker that is about to end loses its streams gradually."""
STALE_SECONDS = 5.0
"""After this time without a new view, the choice is left to the proxy."""
STOP_SECONDS = 1.0
REPORT_SECONDS = 0.25
MAX_LINE_BYTES = 1 << 20
MAX_UNREAD_BYTES = 64 << 10
CERTIFICATE_DAYS = 3650


@dataclass(slots=True)
class _Tally:
    """The outcomes since the last report."""

    outcomes: Counter[PickOutcome] = field(default_factory=Counter)
    seconds: list[float] = field(default_factory=list)

    def picked(self, outcome: PickOutcome, seconds: float) -> None:
        """Count an answered request."""
        self.outcomes[outcome] += 1
        if len(self.seconds) < MAX_SAMPLES:
            self.seconds.append(round(seconds, 6))


class _RefusedError(Exception):
    """The stream ends with an error response for the client, which proxies accept at any time."""

    def __init__(self, outcome: PickOutcome, error: MmdError) -> None:
        self.outcome, self.error = outcome, error


class _Turns:
    """Limits the streams that are read at once to the messages that fit in memory.

    Other streams wait in line, each for a turn to read one message. Each waiting stream shortens the timeout of one silent stream, beginning with
    the longest silent one. So the line moves on, whatever the peers of the streams with a turn do.
    """

    def __init__(self, number: int) -> None:
        self._free, self._waiting = asyncio.Semaphore(number), 0
        self._patient: dict[asyncio.Timeout, float] = {}
        self._drains = False

    @asynccontextmanager
    async def turn(self) -> AsyncIterator[None]:
        """Wait for a turn, during which one message may be in memory.

        Raises:
            _RefusedError: there was no turn in time.
        """
        if self._free.locked() and self._patient:
            self._hasten(next(iter(self._patient)), CROWDED_SECONDS)
        self._waiting += 1
        try:
            async with asyncio.timeout(PEER_SECONDS):
                await self._free.acquire()
        except TimeoutError:
            raise _crowded() from None
        finally:
            self._waiting -= 1
        try:
            yield
        finally:
            self._free.release()

    async def read(self, context: grpc.aio.ServicerContext, last: float) -> Any:
        """Read the next message, during a turn; `EOF` if the proxy has ended the stream. `last`: latest time of its arrival, by the loop's clock.

        Raises:
            _RefusedError: the message did not arrive in time.
        """
        now = asyncio.get_running_loop().time
        started = now()
        max_seconds = CROWDED_SECONDS if self._waiting else PEER_SECONDS if self._drains else math.inf
        try:
            async with asyncio.timeout_at(min(last, started + max_seconds)) as patience:
                if not self._waiting:
                    self._patient[patience] = started
                try:
                    return await context.read()
                finally:
                    self._patient.pop(patience, None)
        except TimeoutError:
            if now() < last:
                raise (_leaving() if self._drains and not self._waiting else _crowded()) from None
            words = "the request did not arrive before its deadline (spec.gateway.requestTimeoutSeconds); send it faster"
            raise _RefusedError("late", RequestTimeoutError(words)) from None

    def drain(self) -> None:
        """From now on, limit how long a stream may be silent."""
        self._drains = True
        for patience in list(self._patient):
            self._hasten(patience, PEER_SECONDS)

    def _hasten(self, patience: asyncio.Timeout, seconds: float) -> None:
        """Shorten a timeout so that it ends this many seconds after its start."""
        started, deadline = self._patient.pop(patience), patience.when()
        if patience.expired():
            return
        patience.reschedule(min(deadline if deadline is not None else math.inf, started + seconds))


def _crowded() -> _RefusedError:
    words = (
        "too many requests arrive through this endpoint picker; retry later, or raise spec.gateway.replicas"
    )
    return _RefusedError("too_many", OverloadedError(words, retry_after_seconds=1.0))


def _leaving() -> _RefusedError:
    words = f"this endpoint picker ends, and nothing of the request has arrived for {PEER_SECONDS:g} s; send it again"
    return _RefusedError("late", OverloadedError(words, retry_after_seconds=1.0))


class PickServer:
    """The gRPC server.

    Its streams last as long as requests take to arrive, and the gateway limits that with deadlines. A peer that does not take an answer or the
    end of a stream in time loses its connection, because gRPC cannot end a stream unless its peer takes the end.
    """

    def __init__(self, setup: Setup) -> None:
        self._setup = setup
        self._picks = Picks(random.Random())  # noqa: S311 - spreads load, guards nothing
        self._max_body_bytes = 0
        stream_bytes = max(0, setup.memory_bytes - OWN_BYTES)
        self.max_streams = max(1, stream_bytes // STREAMS_SHARE // STREAM_BYTES)
        self.max_messages = max(1, (stream_bytes - stream_bytes // STREAMS_SHARE) // MESSAGE_BYTES)
        num_first_turns = -(-self.max_messages // FIRST_SHARE)
        self.max_bodies = max(1, self.max_messages - num_first_turns)
        self._first_turns, self._turns = _Turns(num_first_turns), _Turns(self.max_bodies)
        self.streams = 0
        self._viewed_at = -STALE_SECONDS
        self._server: grpc.aio.Server | None = None
        self.port = setup.port
        self._tally = _Tally()

    def show(self, view: View) -> None:
        """Choose by this view from now on."""
        self._picks.gateways = view.gateways
        self._max_body_bytes = view.max_body_bytes
        if view.is_current:
            self._viewed_at = time.monotonic()

    async def start(self) -> None:
        """Start to answer.

        Raises:
            RuntimeError: the port cannot be opened.
        """
        milliseconds = {
            "grpc.server_handshake_timeout_ms": PEER_SECONDS,
            "grpc.keepalive_time_ms": PEER_SECONDS,
            "grpc.keepalive_timeout_ms": PEER_SECONDS,
            "grpc.http2.min_ping_interval_without_data_ms": PEER_SECONDS,
            "grpc.max_connection_age_ms": AGE_SECONDS,
            "grpc.max_connection_age_grace_ms": self._setup.request_seconds,
        }
        server = grpc.aio.server(
            options=(
                *((name, int(1000 * seconds)) for name, seconds in milliseconds.items()),
                ("grpc.keepalive_permit_without_calls", 1),
                ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
                ("grpc.max_concurrent_streams", STREAMS_OF_A_CONNECTION),
                ("grpc.max_allowed_incoming_connections", MAX_CONNECTIONS),
                ("grpc.http2.lookahead_bytes", WINDOW_BYTES),
                ("grpc.http2.bdp_probe", 0),  # would widen the window of every stream
                ("grpc.so_reuseport", 0),
            )
        )
        # Bytes in, bytes out. A unary handler's result and the end of the stream are written together; those of a streaming handler are not.
        method = grpc.stream_unary_rpc_method_handler(self._process)
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, {METHOD: method}),))
        listen_on = f"{self._setup.address}:{self._setup.port}"
        if self._setup.tls:
            self.port = server.add_secure_port(listen_on, grpc.ssl_server_credentials([_self_signed()]))
        else:
            self.port = server.add_insecure_port(listen_on)
        await server.start()
        self._server = server

    async def stop(self, seconds: float) -> None:
        """Stop taking streams, and return when the open ones have ended, at most after this many seconds."""
        if self._server is not None:
            for turns in (self._first_turns, self._turns):
                turns.drain()
            await self._server.stop(seconds)

    def report(self) -> bytes:
        """The report since the last one, as a line."""
        tally, self._tally = self._tally, _Tally()
        return line_of(Report(self.port, self.streams, dict(tally.outcomes), tally.seconds))

    async def _process(self, _messages: object, context: grpc.aio.ServicerContext) -> bytes:
        """Serve one stream; returns the last message to it."""
        if self.streams >= self.max_streams:
            self._end(context)
            return self._refusal(_crowded())
        self.streams += 1
        context.add_done_callback(self._forget)
        fault: tuple[PickOutcome, grpc.StatusCode, str] | None = None
        try:
            last = await self._follow(context)
        except _RefusedError as refused:
            last = self._refusal(refused)
        except InvalidMessageError as error:
            fault = "invalid", grpc.StatusCode.INVALID_ARGUMENT, str(error)
        except grpc.aio.BaseError:
            raise  # the peer has gone
        except Exception:  # noqa: BLE001 - counted
            fault = "failed", grpc.StatusCode.INTERNAL, "the endpoint picker has failed"
        self._end(context)
        if fault is not None:  # outside the handlers, because their exceptions keep a message in memory
            outcome, code, words = fault
            self._tally.outcomes[outcome] += 1
            await context.abort(code, words)
        return last

    def _forget(self, _context: object) -> None:
        """Count a stream out, because its peer has taken the end or has gone."""
        self.streams -= 1

    async def _follow(self, context: grpc.aio.ServicerContext) -> bytes:
        """Answer each message before reading the next, so that only one per stream is in memory; returns the last answer.

        Raises:
            InvalidMessageError: the peer sent an invalid message.
            _RefusedError: the stream takes longer than a request may, or too long while others wait.
        """
        is_current = time.monotonic() - self._viewed_at < STALE_SECONDS
        exchange = ProxyExchange(self._picks if is_current else None, self._max_body_bytes)
        outcome: PickOutcome | None = None
        last = asyncio.get_running_loop().time() + self._setup.request_seconds + PEER_SECONDS
        turns = self._first_turns
        while True:
            async with turns.turn():
                data = await turns.read(context, last)
                if data is grpc.aio.EOF:
                    return b""
                received = time.perf_counter()
                answers = exchange.answers(data, PIECE_BYTES)
                del data  # otherwise it is in memory twice while the peer reads nothing
                answer = b""
                for following in answers:
                    if answer:
                        await self._write(context, answer)
                    answer = following.SerializeToString()
                if exchange.outcome != outcome and exchange.outcome is not None:
                    outcome = exchange.outcome
                    self._tally.picked(outcome, time.perf_counter() - received)
                if exchange.is_over:
                    return answer
                if answer:
                    await self._write(context, answer)
            turns = self._turns

    async def _write(self, context: grpc.aio.ServicerContext, answer: bytes) -> None:
        """Write an answer, and cut the peer off if it does not take it in time.

        Cancelling does not help: gRPC would keep a cancelled write, and the end of the stream after it.
        """
        deadline = _Deadline(PEER_SECONDS, partial(self._cut_off, context.peer()))
        try:
            await context.write(answer)
        finally:
            deadline.cancel()

    def _refusal(self, refused: _RefusedError) -> bytes:
        self._tally.outcomes[refused.outcome] += 1
        last: bytes = refusal(refused.error).SerializeToString()
        return last

    def _end(self, context: grpc.aio.ServicerContext) -> None:
        """Cut the peer off if it does not take the end of the stream in time."""
        deadline = _Deadline(END_SECONDS, partial(self._cut_off, context.peer()))
        context.add_done_callback(lambda _context: deadline.cancel())

    def _cut_off(self, peer: str) -> None:
        self._tally.outcomes["unread"] += 1
        close_connection(peer)


class _Deadline:
    """Calls back after a time that excludes pauses of this process: whatever arrived during a pause is handled first."""

    def __init__(self, seconds: float, callback: Callable[[], None]) -> None:
        self._seconds, self._callback = seconds, callback
        self._loop = asyncio.get_running_loop()
        self._begin()

    def cancel(self) -> None:
        """Cancel the deadline."""
        self._handle.cancel()

    def _begin(self) -> None:
        self._handle = self._loop.call_at(self._loop.time() + self._seconds, self._end)

    def _end(self) -> None:
        if self._loop.time() - self._handle.when() > PAUSE_SECONDS:
            self._begin()
        else:
            self._callback()


def close_connection(peer: str) -> None:
    """Close the connection to a peer with this gRPC name (`ipv4:…` or `ipv6:…`), because gRPC cannot."""
    ip, _, port = unquote(peer).partition(":")[2].rpartition(":")
    peer_address = _address(ip.strip("[]"), int(port))
    for descriptor in map(int, os.listdir("/proc/self/fd")):
        with contextlib.suppress(OSError):
            if stat.S_ISSOCK(os.fstat(descriptor).st_mode):
                with socket.socket(fileno=os.dup(descriptor)) as connection:
                    is_ip = connection.family in (socket.AF_INET, socket.AF_INET6)
                    if is_ip and _address(*connection.getpeername()[:2]) == peer_address:
                        connection.shutdown(socket.SHUT_RDWR)


def _address(ip: str, port: int) -> tuple[str, int]:
    """The normalized address: equal for an IPv4 address and its IPv4-mapped IPv6 form."""
    address = ipaddress.ip_address(ip.partition("%")[0])
    return str(getattr(address, "ipv4_mapped", None) or address), port


def _self_signed() -> tuple[bytes, bytes]:
    """A key and its certificate in PEM, created at each start because proxies do not verify it."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "endpoint-picker")])
    now = datetime.datetime.now(datetime.UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(hours=1))
        .not_valid_after(now + datetime.timedelta(days=CERTIFICATE_DAYS))
        .add_extension(x509.SubjectAlternativeName([x509.DNSName("endpoint-picker")]), critical=False)
        .sign(key, hashes.SHA256())
    )
    pem = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    return pem, certificate.public_bytes(serialization.Encoding.PEM)


async def _serve(setup: Setup) -> None:
    loop = asyncio.get_running_loop()
    lines = asyncio.StreamReader(limit=MAX_LINE_BYTES)
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(lines), sys.stdin)
    output, _ = await loop.connect_write_pipe(asyncio.BaseProtocol, sys.stdout)
    server = PickServer(setup)
    server.show(View.of(await lines.readline()))
    await server.start()
    reporting = asyncio.create_task(_report(server, output), name="reporting")
    reporting.add_done_callback(_end_with)
    ending: asyncio.Task[None] | None = None

    async def end(seconds: float) -> None:
        await server.stop(seconds)
        output.write(server.report())
        os._exit(0)  # does not wait for gRPC's threads

    while line := await lines.readline():
        view = View.of(line)
        server.show(view)
        if view.drain_seconds is not None and ending is None:
            ending = asyncio.create_task(end(view.drain_seconds), name="the drain")
            ending.add_done_callback(_end_with)
    reporting.cancel()
    await end(STOP_SECONDS)


async def _report(server: PickServer, output: asyncio.WriteTransport) -> None:
    while True:
        if output.get_write_buffer_size() < MAX_UNREAD_BYTES:
            output.write(server.report())
        await asyncio.sleep(REPORT_SECONDS)


def _end_with(task: asyncio.Task[None]) -> None:
    """End the process if the task failed: without reports it would count as hung, and without an end it would delay its gateway."""
    if not task.cancelled():
        sys.stderr.write(f"{task.get_name()} has failed: {task.exception()!r}\n")
        os._exit(1)


def _first_line() -> bytes:
    """Read the first line and not a byte beyond it, because the event loop reads the rest."""
    line = b""
    while not line.endswith(b"\n"):
        line += os.read(0, 1) or b"\n"
    return line


def main() -> None:
    """Serve until standard input ends or a drain is over."""
    # When the gateway dies, this process is killed, even if it is stopped.
    ctypes.CDLL(None).prctl(PDEATHSIG, signal.SIGKILL)
    os.nice(NICENESS)
    # If the pod runs out of memory, this process ends and not the gateway.
    Path("/proc/self/oom_score_adj").write_text("1000")
    logging.disable()  # whatever a peer causes is counted, and the gateway logs the counts
    setup = Setup(**json.loads(_first_line()))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_DATA, (setup.memory_bytes, setup.memory_bytes))
    resource.setrlimit(resource.RLIMIT_FSIZE, (MAX_OUTPUT_BYTES, MAX_OUTPUT_BYTES))
    files = min(MAX_OPEN_FILES, resource.getrlimit(resource.RLIMIT_NOFILE)[1])
    resource.setrlimit(resource.RLIMIT_NOFILE, (files, files))
    asyncio.run(_serve(setup))


if __name__ == "__main__":
    main()
