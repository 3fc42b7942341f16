"""Notices at once that the process at the other end of a link has ended: an idle TCP connection next to every link.

The kernel closes it when a process dies, however it dies, while gloo, NCCL and NIXL may wait on a half-received chunk. It is the
connection on which the two sides met; nothing is sent on it any more, and it is independent of what the link moves.
"""

from __future__ import annotations

import logging
import selectors
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress

log = logging.getLogger(__name__)

_PAUSE_SECONDS = 1.0
# A dead machine sends no FIN: three unanswered probes, one a second, end the connection.
_KEEPALIVE_SECONDS = 1


def keep_alive(sock: socket.socket) -> socket.socket:
    """Set up a connection to be watched; returns it."""
    sock.setblocking(False)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option in ("TCP_KEEPIDLE", "TCP_KEEPINTVL"):
        if hasattr(socket, option):
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), _KEEPALIVE_SECONDS)
    if hasattr(socket, "TCP_KEEPCNT"):
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3)
    return sock


class Watch:
    """One thread that watches the sentinel connections of all links of a process."""

    def __init__(self) -> None:
        self._closed = False
        self._wake, self._stop = socket.socketpair()
        opened: list[socket.socket | selectors.BaseSelector] = [self._wake, self._stop]
        try:
            self._selector = selectors.DefaultSelector()
            opened.append(self._selector)
            self._selector.register(self._stop, selectors.EVENT_READ)
            threading.Thread(target=self._loop, name="kv-sentinel", daemon=True).start()
        except BaseException:
            for resource in opened:
                resource.close()
            raise

    def add(self, sock: socket.socket, on_lost: Callable[[], None]) -> None:
        """Call `on_lost` (once, from the watching thread) when the other side has closed or died."""
        self._selector.register(sock, selectors.EVENT_READ, on_lost)

    def remove(self, sock: socket.socket) -> None:
        """Stop watching a connection and close it, which the other side notices; idempotent."""
        with suppress(KeyError, ValueError, OSError):  # the loop saw the end first, or it was closed before
            self._selector.unregister(sock)
        with suppress(OSError):  # the socket is closed nevertheless
            sock.close()

    def close(self) -> None:
        """End the thread; the sockets belong to their links."""
        self._closed = True
        self._wake.close()

    def _loop(self) -> None:
        while True:
            try:
                ready = [key for key, _ in self._selector.select()]
            except Exception:
                log.exception("links cannot be watched; trying again in %s s", _PAUSE_SECONDS)
                time.sleep(_PAUSE_SECONDS)
                ready = []
            if self._closed or any(key.fileobj is self._stop for key in ready):
                self._selector.close()
                self._stop.close()
                return
            for key in ready:
                assert isinstance(key.fileobj, socket.socket)
                try:
                    self.remove(key.fileobj)  # no data follows, so a readable socket has ended
                    key.data()
                except Exception:
                    log.exception("the end of a link was noticed, and what follows from it failed")
