"""Notices at once that the process at the other end of a link has ended: an idle TCP connection next to every link.

The kernel closes it when a process dies, however it dies, while gloo, NCCL and NIXL may wait on a half-received chunk. It carries
nothing but a nonce, and independent of what the link moves.
"""

from __future__ import annotations

import secrets
import selectors
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress

from torch._C._distributed_c10d import Store

from mmd_api.contract.errors import LinkError

_NONCE_BYTES = 16
_KEEPALIVE_SECONDS = (
    1  # a dead machine sends no FIN: three unanswered probes, one a second, end the connection
)


def meet(store: Store, rank: int, own_host: str, peer_host: str, timeout_seconds: float) -> socket.socket:
    """Connect the two sides of a link: rank 0 listens and publishes port and nonce in `store`, rank 1 calls.

    Raises:
        LinkError: the other side did not come within `timeout_seconds`.
        RuntimeError: the store cannot be reached.
    """
    deadline = time.monotonic() + timeout_seconds
    try:
        sock = _listen(store, own_host, deadline) if rank == 0 else _call(store, peer_host, deadline)
    except OSError as error:
        raise LinkError(
            f"the peer did not connect within {timeout_seconds} s ({error}); offer again"
        ) from error
    sock.setblocking(False)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option in ("TCP_KEEPIDLE", "TCP_KEEPINTVL"):
        if hasattr(socket, option):
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), _KEEPALIVE_SECONDS)
    if hasattr(socket, "TCP_KEEPCNT"):
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3)
    return sock


def listen(host: str) -> socket.socket:
    """A listening socket on this address (IPv4 or IPv6) alone, on a free port. Raises OSError when it is not ours."""
    return socket.create_server((host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET)


def _listen(store: Store, host: str, deadline: float) -> socket.socket:
    nonce = secrets.token_bytes(_NONCE_BYTES)
    with listen(host) as listener:
        store.set("sentinel", f"{listener.getsockname()[1]} {nonce.hex()}")
        while True:
            listener.settimeout(_left(deadline))
            sock, _ = listener.accept()
            sock.settimeout(_left(deadline))
            try:
                greeting = sock.recv(_NONCE_BYTES, socket.MSG_WAITALL)
            except OSError:
                greeting = b""
            if secrets.compare_digest(greeting, nonce):
                return sock
            sock.close()  # not the peer, which may still connect


def _call(store: Store, host: str, deadline: float) -> socket.socket:
    port, nonce = store.get("sentinel").decode().split()
    sock = socket.create_connection((host, int(port)), timeout=_left(deadline))
    sock.sendall(bytes.fromhex(nonce))
    return sock


def _left(deadline: float) -> float:
    left = deadline - time.monotonic()
    if left <= 0:
        raise TimeoutError("deadline exceeded")
    return left


class Watch:
    """One thread that watches the sentinel connections of all links of a process."""

    def __init__(self) -> None:
        self._selector = selectors.DefaultSelector()
        self._wake, self._stop = socket.socketpair()
        self._selector.register(self._stop, selectors.EVENT_READ)
        threading.Thread(target=self._loop, name="kv-sentinel", daemon=True).start()

    def add(self, sock: socket.socket, on_lost: Callable[[], None]) -> None:
        """Call `on_lost` (once, from the watching thread) when the other side has closed or died."""
        self._selector.register(sock, selectors.EVENT_READ, on_lost)

    def remove(self, sock: socket.socket) -> None:
        """Stop watching and close, which the other side notices; idempotent."""
        with suppress(KeyError, ValueError):  # the loop saw its end first, or it was closed before
            self._selector.unregister(sock)
        sock.close()

    def close(self) -> None:
        """End the thread; the sockets belong to their links."""
        self._wake.close()

    def _loop(self) -> None:
        while True:
            for key, _ in self._selector.select():
                if key.fileobj is self._stop:
                    self._selector.close()
                    self._stop.close()
                    return
                assert isinstance(key.fileobj, socket.socket)
                self.remove(key.fileobj)  # nothing is ever sent after the nonce, so readable means over
                key.data()
