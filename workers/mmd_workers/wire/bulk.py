"""A second NATS connection on a dedicated thread and event loop, for chunks and media. Independent of messages and of how to connect.

Code that moves bulk data runs on that loop (`run`), and calls back to the loop that started it through `home`.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import logging
import threading
from collections.abc import Callable, Coroutine
from typing import Any, Generic, Protocol, TypeVar

import uvloop

_log = logging.getLogger(__name__)

RUN_SECONDS = 40.0  # limit for work on the bulk loop without its own deadline; connecting takes up to 30 s

STOP_SECONDS = 2.0

T = TypeVar("T")


class Closable(Protocol):
    """The part of a connection that this module uses."""

    async def close(self, timeout: float) -> None:  # noqa: ASYNC109
        """Close it within `timeout` seconds."""


C = TypeVar("C", bound=Closable)


class Bulk(Generic[C]):
    """A connection with its own thread and event loop.

    `bus` belongs to the bulk loop: touch it only in code started by `run` or `post`.
    """

    def __init__(self, home: asyncio.AbstractEventLoop, name: str) -> None:
        self.bus: C
        self._home = home
        self._loop = uvloop.new_event_loop()  # 1.5 times as fast for chunks
        self._thread = threading.Thread(target=self._loop.run_forever, name=name, daemon=True)
        self._closed = False

    @classmethod
    async def start(cls, name: str, connecting: Coroutine[Any, Any, C]) -> Bulk[C]:
        """Start the thread and connect there.

        Raises:
            PeerLostError: no server accepted the connection.
        """
        bulk = cls(asyncio.get_running_loop(), name)
        bulk._thread.start()
        try:
            bulk.bus = await bulk.run(connecting)
        except BaseException:
            with contextlib.suppress(TimeoutError):
                await bulk.run(bulk._cancel_rest(), timeout=STOP_SECONDS)
            bulk._stop_thread()
            raise
        return bulk

    async def run(self, work: Coroutine[Any, Any, T], timeout: float = RUN_SECONDS) -> T:  # noqa: ASYNC109
        """Run `work` on the bulk loop and wait for it; cancelling the wait cancels the work.

        Raises:
            TimeoutError: the work was not done within `timeout` seconds, and is cancelled.
        """
        async with asyncio.timeout(timeout):
            return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, self._loop))

    def post(self, function: Callable[..., object], *args: object) -> None:
        """Schedule `function` on the bulk loop, from any thread. Once closed, this does nothing."""
        if not self._closed:
            self._loop.call_soon_threadsafe(function, *args)

    async def home(self, timeout: float, function: Callable[..., Any], *args: object) -> Any:  # noqa: ASYNC109
        """Call `function` (plain or async) on the starting loop, from the bulk loop, and wait for its result.

        Raises:
            TimeoutError: there is no result within `timeout` seconds, because the starting loop is busy.
        """

        async def call() -> Any:
            result = function(*args)
            return await result if inspect.isawaitable(result) else result

        async with asyncio.timeout(timeout):
            return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(call(), self._home))

    async def close(self, timeout: float = 5.0) -> None:  # noqa: ASYNC109
        """Drain and close the connection, cancel the remaining tasks, end the thread. Safe to call twice."""
        if self._closed:
            return
        self._closed = True
        try:
            async with asyncio.timeout(timeout + 2.0):
                await self.run(self.bus.close(timeout))
                await self.run(self._cancel_rest())
        except TimeoutError:
            _log.warning("bulk connection of %s did not close in time", self._thread.name)
        finally:
            self._stop_thread()

    async def _cancel_rest(self) -> None:
        rest = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        for task in rest:
            task.cancel()
        if rest:
            await asyncio.wait(rest, timeout=1.0)

    def _stop_thread(self) -> None:
        self._closed = True
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(timeout=2.0)
        if not self._thread.is_alive():
            self._loop.close()
