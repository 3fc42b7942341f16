"""Host names to addresses, each lookup in a dedicated thread: clients choose the names, and a name server that does not answer
must not hold up the event loop's own lookups, which reconnect this process. Independent of URLs and policies.
"""

from __future__ import annotations

import asyncio
import socket
import threading
from collections import OrderedDict
from concurrent.futures import Future

from mmd_api.contract.errors import OverloadedError

MAX_LOOKUPS = 64
"""Lookups in flight at once. An abandoned one counts until the system's resolver gives it up."""
MAX_WAITING = 1024
"""Lookups that may wait for one of those to end."""
Target = tuple[str, int]

_lock = threading.Lock()
_under_way: dict[Target, Future[list[str]]] = {}
_waiting: OrderedDict[Future[None], None] = OrderedDict()


async def lookup(host: str, port: int) -> list[str]:
    """The addresses of a host, for TCP. Waits, without its own deadline, while too many lookups are in flight; those of one host
    and port are made once.

    Raises:
        OSError, UnicodeError: the name has none.
        OverloadedError: too many wait already.
    """
    target = (host, port)
    woken = False
    while True:
        turn: Future[None] = Future()
        with _lock:
            found = _under_way.get(target)
            if found is not None:
                if woken:
                    _wake_next()  # the place that has become free is not needed here
            elif len(_under_way) < MAX_LOOKUPS:
                found = _begun(target)
            elif len(_waiting) < MAX_WAITING:
                _waiting[turn] = None
            else:
                raise OverloadedError(
                    f"{MAX_LOOKUPS} host names are being resolved and {MAX_WAITING} more are waiting; retry later, or send the file as a "
                    "data URL; if this persists, check the cluster's DNS"
                )
        if found is not None:
            return await asyncio.wrap_future(found)
        try:
            await asyncio.wrap_future(turn)
        except asyncio.CancelledError:
            with _lock:
                if _waiting.pop(turn, turn) is turn:  # its turn had come
                    _wake_next()
            raise
        woken = True


def _begun(target: Target) -> Future[list[str]]:
    found: Future[list[str]] = Future()
    found.set_running_or_notify_cancel()  # a lookup cannot be stopped
    thread = threading.Thread(target=_resolve, args=(target, found), name="lookup", daemon=True)
    try:
        thread.start()
    except RuntimeError as error:
        raise OverloadedError(f"no thread available for a DNS lookup ({error}); retry later") from error
    _under_way[target] = found
    return found


def _resolve(target: Target, found: Future[list[str]]) -> None:
    try:
        entries = socket.getaddrinfo(*target, type=socket.SOCK_STREAM, proto=socket.IPPROTO_TCP)
    except Exception as error:  # noqa: BLE001 - raised to the waiters
        _ended(target)
        found.set_exception(error)
    else:
        _ended(target)
        found.set_result([str(entry[4][0]) for entry in entries])


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
