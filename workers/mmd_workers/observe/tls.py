"""TLS of a server with a changing certificate: every connection takes the context that is current as it is accepted.

Independent of where certificates come from, and of HTTP.
"""

from __future__ import annotations

import asyncio
import ssl
import time
from asyncio.sslproto import SSLProtocol
from collections import deque
from collections.abc import Callable
from typing import Protocol

HANDSHAKE_SECONDS = 10
TURN_SECONDS = 0.002  # limit for handshakes in one event loop iteration; a step that has begun is finished
SHUTDOWN_SECONDS = 2.0  # the client may answer the end of TLS for this long before the close
BUFFER_BYTES = 64 << 10  # limit of received bytes; a record has 16 KiB
BYTES = 192 << 10
"""Memory that TLS adds to a connection's limit: its state, and buffers in both directions."""


class Connections(Protocol):
    """The registry that counts connections."""

    def enter(self, connection: TlsConnection) -> None:
        """Count a connection that has been accepted."""

    def leave(self, connection: TlsConnection) -> None:
        """Stop counting a connection that has ended, or that is counted as another from now on."""


class Handshakes:
    """Runs the steps of handshakes in order of arrival: a few at a time, in no more than half of the event loop's time.

    A step costs its server a signature, and a client nothing but a message that it may send again and again.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._steps: deque[Callable[[], None]] = deque()
        self._scheduled = False

    def add(self, step: Callable[[], None]) -> None:
        """Queue a step, which runs when its turn comes."""
        self._steps.append(step)
        if not self._scheduled:
            self._scheduled = True
            asyncio.get_running_loop().call_soon(self._take_turn)

    def _take_turn(self) -> None:
        start, spent = self._clock(), 0.0
        try:
            while self._steps and spent < TURN_SECONDS:
                self._steps.popleft()()
                spent = self._clock() - start
        finally:
            self._scheduled = bool(self._steps)
            if self._scheduled:
                asyncio.get_running_loop().call_later(spent, self._take_turn)


class TlsConnection(SSLProtocol):
    """A TLS connection under its application's. It counts from its acceptance: an endless handshake holds memory as well.

    It is asyncio's own, as a protocol of a plain server: `create_server(ssl=...)` would show it only after the handshake, and fix its context.
    """

    max_size = BUFFER_BYTES

    def __init__(
        self,
        context: ssl.SSLContext,
        application: asyncio.Protocol,
        connections: Connections,
        handshakes: Handshakes,
    ) -> None:
        super().__init__(
            asyncio.get_running_loop(),
            application,
            context,
            None,  # type: ignore[arg-type]  # nobody waits for the handshake
            server_side=True,
            ssl_handshake_timeout=HANDSHAKE_SECONDS,
            ssl_shutdown_timeout=SHUTDOWN_SECONDS,  # type: ignore[call-arg, unused-ignore]
        )
        self._connections, self._handshakes = connections, handshakes
        self._raw: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Count the accepted connection, and begin the handshake."""
        self._raw = transport  # type: ignore[assignment]
        self._connections.enter(self)
        super().connection_made(transport)

    def _do_handshake(self) -> None:
        """Queue a step for data that the handshake waits for. Until its turn nothing more is read, so that no more is kept."""
        if self._raw is not None and not self._raw.is_closing():
            self._raw.pause_reading()
            self._handshakes.add(self._take_step)

    def _take_step(self) -> None:
        if self._raw is not None and not self._raw.is_closing():
            self._raw.resume_reading()
            super()._do_handshake()  # type: ignore[misc, unused-ignore]

    def connection_lost(self, exc: BaseException | None) -> None:
        """Stop counting: the connection has ended, perhaps before its handshake did."""
        self.leave()
        super().connection_lost(exc)

    def leave(self) -> None:
        """Stop counting: the application's connection counts from now on, or nothing does."""
        self._connections.leave(self)

    def unsent_bytes(self) -> int:
        """Encrypted bytes that the kernel has not taken yet."""
        return self._raw.get_write_buffer_size() if self._raw is not None else 0

    def abort(self) -> None:
        """Close the connection at once, sending nothing more."""
        if self._raw is not None:
            self._raw.abort()


class Refused(asyncio.Protocol):
    """A connection that comes before there is a certificate."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Close the connection."""
        transport.abort()  # type: ignore[attr-defined]
