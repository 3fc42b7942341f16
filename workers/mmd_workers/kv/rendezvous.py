"""The place where both sides of a link meet: one TCP connection per link, on which they exchange the data to connect.

Rank 0 listens on a port of its process, rank 1 calls it and names the link. Afterwards the connection stays open and idle, and
`sentinel` watches it. Nothing here waits without a deadline, whatever the peer does: it may be frozen, or no peer at all. The backend's own
connection, made with the exchanged data, may outlast that deadline: see `LinkManager.connecting_seconds`.
"""

from __future__ import annotations

import ipaddress
import logging
import selectors
import socket
import struct
import threading
import time
from collections import Counter, OrderedDict
from contextlib import suppress
from datetime import timedelta

from torch._C._distributed_c10d import Store

from mmd_api.contract.errors import LinkError

log = logging.getLogger(__name__)

MAX_NAME_BYTES = 4096
MAX_VALUE_BYTES = 2**20
MAX_VALUES = 256
MAX_CALLERS = 256
"""Limit of connections that have not named their link, or whose link the process has not asked for yet. Beyond it the oldest is
closed, and awaited ones last."""

_MAGIC = b"mmd-kv-1"
_GREETING = struct.Struct("!8sH")  # magic, bytes of the link's name, which follows
# Bytes of the key and of the value, which follow; no key: the sender has connected.
_VALUE = struct.Struct("!HI")
_READ_BYTES = 2**16
_SWEEP_SECONDS, _PAUSE_SECONDS = 1.0, 0.05


class Rendezvous:
    """Takes the calls of peers to this process. Thread-safe."""

    def __init__(self, host: str, patience_seconds: float) -> None:
        """Listen on `host` alone, at a free port. A peer that calls early is kept for `patience_seconds`.

        Raises:
            OSError: `host` is not an address of this machine.
        """
        self._patience_seconds = patience_seconds
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._listener = socket.create_server((host, 0), family=family, backlog=MAX_CALLERS)
        self.endpoint = f"{host}:{self._listener.getsockname()[1]}"
        self._changed = threading.Condition()
        self._callers: OrderedDict[str, tuple[socket.socket, float]] = OrderedDict()
        """Connections by the name of their link, with the time when they are given up, oldest first."""
        self._greetings: dict[socket.socket, tuple[bytearray, float]] = {}
        """Incomplete greetings, with the time when they are given up, oldest first; only the thread uses them."""
        self._awaited: Counter[str] = Counter()
        self._closed = False
        opened: list[socket.socket | selectors.BaseSelector] = [self._listener]
        try:
            self._listener.setblocking(False)
            self._wake, self._woken = socket.socketpair()
            opened += self._wake, self._woken
            self._selector = selectors.DefaultSelector()
            opened.append(self._selector)
            self._selector.register(self._listener, selectors.EVENT_READ)
            self._selector.register(self._woken, selectors.EVENT_READ)
            self._thread = threading.Thread(target=self._loop, name="kv-rendezvous", daemon=True)
            self._thread.start()
        except BaseException:
            for resource in opened:
                resource.close()
            raise

    def accept(self, name: str, deadline: float, given_up: threading.Event | None = None) -> socket.socket:
        """The connection of the peer that names this link; blocks until the peer has called. After setting `given_up`, call `look_again`.

        Raises:
            LinkError: the peer did not call in time, or nobody wants the link any more.
        """

        def ended() -> bool:
            return self._closed or (given_up is not None and given_up.is_set())

        with self._changed:
            self._awaited[name] += 1
            try:
                remaining = max(0.0, deadline - time.monotonic())
                self._changed.wait_for(lambda: ended() or name in self._callers, remaining)
            finally:
                self._awaited -= Counter([name])
            if self._closed:
                raise LinkError("this worker has closed its KV links; place the request elsewhere")
            if ended():
                raise LinkError("the link was given up while its peer was awaited; offer again")
            if name not in self._callers:
                raise LinkError("the peer did not call within the connect deadline; offer again")
            sock, _ = self._callers.pop(name)
        return sock

    def look_again(self) -> None:
        """Make those who wait in `accept` check whether they were given up."""
        with self._changed:
            self._changed.notify_all()

    def close(self) -> None:
        """Stop listening and close connections that nobody has accepted; idempotent."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._wake.close()
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _loop(self) -> None:
        while True:
            waiting = bool(self._greetings or self._callers)
            try:
                ready = [key.fileobj for key, _ in self._selector.select(_SWEEP_SECONDS if waiting else None)]
            except Exception:
                log.exception("callers cannot be watched; trying again in %s s", _SWEEP_SECONDS)
                time.sleep(_SWEEP_SECONDS)
                ready = []
            if self._closed or self._woken in ready:
                self._end()
                return
            for sock in ready:
                assert isinstance(sock, socket.socket)
                self._serve(sock)
            self._sweep()

    def _serve(self, sock: socket.socket) -> None:
        """Serve one connection; any failure affects this caller alone."""
        try:
            if sock is self._listener:
                self._take_call()
            else:
                self._read(sock)
        except Exception:
            log.exception("a caller was hung up on")
            if sock is not self._listener:
                self._forget(sock)

    def _end(self) -> None:
        with self._changed:
            callers = [sock for sock, _ in self._callers.values()]
            self._callers.clear()
        for sock in (self._listener, self._woken, *self._greetings, *callers):
            _hang_up(sock)
        self._selector.close()

    def _take_call(self) -> None:
        try:
            sock, _ = self._listener.accept()
        except OSError:  # the caller has gone already, or there are no descriptors
            time.sleep(_PAUSE_SECONDS)
            return
        try:
            sock.setblocking(False)
            self._greetings[sock] = bytearray(), time.monotonic() + self._patience_seconds
            self._selector.register(sock, selectors.EVENT_READ)
        except BaseException:
            self._forget(sock)
            raise

    def _read(self, sock: socket.socket) -> None:
        """Read no more than the greeting: later bytes are for whoever accepts the connection."""
        greeting, _ = self._greetings[sock]
        try:
            content = sock.recv(_missing(greeting))
        except BlockingIOError:
            return
        except OSError:
            content = b""
        greeting += content
        if not content or not _may_greet(greeting):
            self._forget(sock)
        elif not _missing(greeting):
            self._introduce(sock, bytes(greeting[_GREETING.size :]).decode(errors="replace"))

    def _introduce(self, sock: socket.socket, name: str) -> None:
        _, until = self._greetings.pop(sock)
        self._selector.unregister(sock)
        with self._changed:
            former = self._callers.pop(name, None)
            self._callers[name] = sock, until
            self._changed.notify_all()
        if former is not None:
            _hang_up(former[0])

    def _sweep(self) -> None:
        """Close connections that have waited too long, and the oldest if there are too many."""
        now = time.monotonic()
        for sock, (_, until) in list(self._greetings.items()):
            if until < now or len(self._greetings) > MAX_CALLERS:
                self._forget(sock)
        with self._changed:
            oldest = sorted(self._callers.items(), key=lambda caller: caller[0] in self._awaited)
            for name, (sock, until) in oldest:
                if until < now or len(self._callers) > MAX_CALLERS:
                    del self._callers[name]
                    _hang_up(sock)

    def _forget(self, sock: socket.socket) -> None:
        self._greetings.pop(sock, None)
        with suppress(KeyError, ValueError, OSError):
            self._selector.unregister(sock)
        _hang_up(sock)


def _hang_up(sock: socket.socket) -> None:
    with suppress(OSError):  # the socket is closed nevertheless
        sock.close()


def _missing(greeting: bytearray) -> int:
    """Bytes missing from the greeting, as far as is known."""
    if len(greeting) < _GREETING.size:
        return _GREETING.size - len(greeting)
    _, size = _GREETING.unpack_from(greeting)
    return _GREETING.size + int(size) - len(greeting)


def _may_greet(start: bytearray) -> bool:
    """Whether these bytes may become a greeting."""
    if len(start) < _GREETING.size:
        return _MAGIC.startswith(bytes(start[: len(_MAGIC)]))
    magic, size = _GREETING.unpack_from(start)
    return bool(magic == _MAGIC and 0 < size <= MAX_NAME_BYTES)


def call(endpoint: str, name: str, deadline: float) -> socket.socket:
    """Connect to a peer's `Rendezvous` and name the link. The host is an address: a name would be looked up without a deadline.

    Raises:
        LinkError: the peer cannot be reached in time.
    """
    host, _, port = endpoint.rpartition(":")
    content = name.encode()
    try:
        ipaddress.ip_address(host)
        sock = socket.create_connection((host, int(port)), timeout=_left(deadline))
        try:
            sock.sendall(_GREETING.pack(_MAGIC, len(content)) + content)
        except BaseException:
            sock.close()
            raise
    except (OSError, OverflowError, ValueError) as error:
        raise LinkError(f"cannot call {endpoint} ({error}); offer again") from error
    return sock


class PairStore(Store):
    """The store through which both sides of a link exchange values while they connect, as torch's backends expect it.

    All operations share one deadline. Once the peers have connected, all requests are answered on this side alone.

    The backend has only a weak reference to the store, and its later calls fail without it: keep it for as long as the backend.
    """

    def __init__(self, sock: socket.socket, deadline: float) -> None:
        super().__init__()
        self._sock: socket.socket | None = sock
        self._deadline = deadline
        self._lock = threading.RLock()
        self._values: dict[str, bytes] = {}
        self._unread = bytearray()
        self._peer_connected = False

    def set(self, key: str, value: str | bytes) -> None:
        """Set a value on both sides. After `finish` it stays on this one."""
        content = value.encode() if isinstance(value, str) else value
        with self._lock:
            self._values[key] = content
            self._send(key.encode(), content)

    def get(self, key: str) -> bytes:
        """The value that either side has set; blocks until there is one.

        Raises:
            LinkError: there was no value in time, or the peer has closed the connection.
        """
        with self._lock:
            self._until(key)
            return self._values[key]

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        """Block until all keys are set, whatever the `timeout`. Raises LinkError as `get` does."""
        with self._lock:
            for key in keys:
                self._until(key)

    def check(self, keys: list[str]) -> bool:
        """Whether all keys are set; never blocks. Raises LinkError if the peer has closed the connection."""
        with self._lock:
            while self._receive(wait=False):
                pass
            return all(key in self._values for key in keys)

    def add(self, key: str, amount: int) -> int:
        """Count on this side alone."""
        with self._lock:
            total = int(self._values.get(key, b"0")) + amount
            self._values[key] = str(total).encode()
            return total

    def delete_key(self, key: str) -> bool:
        """Forget a key on this side alone; returns whether it was set."""
        with self._lock:
            return self._values.pop(key, None) is not None

    deleteKey = delete_key  # noqa: N815  # torch's C++ calls it so

    def finish(self) -> socket.socket:
        """Wait until the peer has connected too; returns the connection, on which nothing is sent any more.

        Raises:
            LinkError: the peer has not connected in time, or has given up.
        """
        with self._lock:
            self._send(b"", b"")
            while not self._peer_connected:
                self._receive(wait=True)
            sock, self._sock = self._sock, None
            assert sock is not None
            return sock

    def abort(self) -> None:
        """End all waits for the peer, from another thread, unless `finish` has returned."""
        if (sock := self._sock) is not None:
            with suppress(OSError):  # the connection is closed already, or the peer has gone
                sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close the connection, unless `finish` has returned it; idempotent."""
        if (sock := self._sock) is not None:
            _hang_up(sock)

    def _until(self, key: str) -> None:
        while key not in self._values:
            self._receive(wait=True)

    def _send(self, key: bytes, value: bytes) -> None:
        if (sock := self._sock) is None:
            return
        try:
            sock.settimeout(_left(self._deadline))
            sock.sendall(_VALUE.pack(len(key), len(value)) + key + value)
        except OSError as error:
            raise _lost(error) from error

    def _receive(self, *, wait: bool) -> bool:
        """Take what the peer has sent; returns whether there was anything."""
        if self._sock is None:
            if wait:
                raise LinkError("the peers have connected and exchange nothing any more; offer again")
            return False
        try:
            self._sock.settimeout(_left(self._deadline) if wait else 0)
            content = self._sock.recv(_READ_BYTES)
        except BlockingIOError:
            return False
        except OSError as error:
            raise _lost(error) from error
        if not content:
            raise LinkError("the peer gave up or died while it connected; offer again")
        self._unread += content
        while self._take():
            pass
        return True

    def _take(self) -> bool:
        """Take one value from the received bytes, if it is complete."""
        if len(self._unread) < _VALUE.size:
            return False
        key_size, size = _VALUE.unpack_from(self._unread)
        if key_size > MAX_NAME_BYTES or size > MAX_VALUE_BYTES or len(self._values) >= MAX_VALUES:
            raise LinkError("the peer sent something else than a peer does; run the same image in both pods")
        end = _VALUE.size + key_size + size
        if len(self._unread) < end:
            return False
        key = bytes(self._unread[_VALUE.size : _VALUE.size + key_size])
        if key:
            self._values[key.decode(errors="replace")] = bytes(self._unread[_VALUE.size + key_size : end])
        else:
            self._peer_connected = True
        del self._unread[:end]
        return True


def _lost(error: OSError) -> LinkError:
    what = (
        "did not answer within the connect deadline"
        if isinstance(error, TimeoutError)
        else f"was lost ({error})"
    )
    return LinkError(f"the peer {what}; offer again")


def _left(deadline: float) -> float:
    remaining = deadline - time.monotonic()
    if remaining <= 0:
        raise TimeoutError("deadline exceeded")
    return remaining
