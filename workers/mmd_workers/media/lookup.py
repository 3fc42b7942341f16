"""Resolves host names to addresses, each lookup in a dedicated thread. Independent of URLs and policies.

Clients choose the names, and an unresponsive name server must not hold up the event loop's own lookups, which reconnect this
process.
"""

from __future__ import annotations

import asyncio
import socket
import threading
from collections import OrderedDict
from concurrent.futures import Future

from mmd_api.contract.errors import OverloadedError

MAX_LOOKUPS = 64
"""Lookups in flight at once. An abandoned lookup counts until the system's resolver gives it up."""
MAX_WAITING = 1024
"""Lookups that may wait for another to end."""
Target = tuple[str, int]

_lock = threading.Lock()
_under_way: dict[Target, Future[list[str]]] = {}
_waiting: OrderedDict[Future[None], None] = OrderedDict()


async def lookup(host: str, port: int) -> list[str]:
    """Look up the addresses of a host, for TCP.

    Waits, without a deadline of its own, while too many lookups are in flight. Concurrent lookups of one host and port are made
    once.

    Raises:
        OSError, UnicodeError: the name has no address.
        OverloadedError: too many lookups wait already.
    """
    target = (host, port)
    woken = False
    while True:
        turn: Future[None] = Future()
        with _lock:
            addresses = _under_way.get(target)
            if addresses is not None:
                if woken:
                    _wake_next()  # the free place is not needed here
            elif len(_under_way) < MAX_LOOKUPS:
                addresses = _begun(target)
            elif len(_waiting) < MAX_WAITING:
                _waiting[turn] = None
            else:
                raise OverloadedError(
                    f"{MAX_LOOKUPS} host names are being resolved and {MAX_WAITING} more are waiting; retry later, or send the file as a "
                    "data URL; if this persists, check the cluster's DNS"
                )
        if addresses is not None:
            return await asyncio.wrap_future(addresses)
        try:
            await asyncio.wrap_future(turn)
        except asyncio.CancelledError:
            with _lock:
                if _waiting.pop(turn, turn) is turn:  # its turn had come
                    _wake_next()
            raise
        woken = True


def _begun(target: Target) -> Future[list[str]]:
    addresses: Future[list[str]] = Future()
    addresses.set_running_or_notify_cancel()  # a lookup cannot be stopped
    thread = threading.Thread(target=_resolve, args=(target, addresses), name="lookup", daemon=True)
    try:
        thread.start()
    except RuntimeError as error:
        raise OverloadedError(f"no thread available for a DNS lookup ({error}); retry later") from error
    _under_way[target] = addresses
    return addresses


def _resolve(target: Target, addresses: Future[list[str]]) -> None:
    try:
        entries = socket.getaddrinfo(*target, type=socket.SOCK_STREAM, proto=socket.IPPROTO_TCP)
    except Exception as error:  # noqa: BLE001 - raised to the waiters
        _ended(target)
        addresses.set_exception(error)
    else:
        _ended(target)
        addresses.set_result([str(entry[4][0]) for entry in entries])


def _ended(target: Target) -> None:
    with _lock:
        _under_way.pop(target, None)
        _wake_next()


def _wake_next() -> None:
    while _waiting:
        turn, _ = _waiting.popitem(last=False)
        if turn.set_running_or_notify_cancel():
            turn.set_result(None)
            return
