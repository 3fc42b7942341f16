"""Buses that are joined in memory.

A message takes a few turns of the event loop and no time, so a test on a `FakeClock` is exact. What becomes of a handler's errors is the
same as on a `Bus`: `tests/wire/test_handler_errors.py` runs against both.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any, cast

from mmd_api.contract.errors import DeadlineError, MmdError, PeerLostError, WireError, error_of
from mmd_api.contract.subjects import Subjects
from mmd_workers.basics.clock import SYSTEM_CLOCK, Clock
from mmd_workers.wire.bus import Bus
from mmd_workers.wire.codec import pack, unpack

Handler = Callable[[Any], Awaitable[Any]]

_log = logging.getLogger(__name__)


class _Served:
    """A subject, and the handler of its messages.

    A `*` as its last token matches any. Messages are handled in order, requests side by side. `bus` counts errors.
    """

    def __init__(self, bus: _MemoryBus, subject: str, kind: type, handler: Handler) -> None:
        self.bus, self.subject, self.kind, self.handler = bus, subject, kind, handler
        self._waiting: deque[bytes] = deque()
        self._tasks: set[asyncio.Task[Any]] = set()

    def takes(self, subject: str) -> bool:
        prefix, star, _ = self.subject.partition("*")
        return subject.startswith(prefix) if star else subject == self.subject

    def put(self, data: bytes) -> None:
        self._waiting.append(data)
        if len(self._waiting) == 1:
            self._start(self._work())

    def answer(self, data: bytes) -> asyncio.Task[Any]:
        return self._start(self._answer(data))

    def end(self) -> None:
        for task in self._tasks:
            task.cancel()

    async def _work(self) -> None:
        while self._waiting:
            await self._handle(self._waiting[0])
            self._waiting.popleft()

    async def _handle(self, data: bytes) -> None:
        try:
            message = unpack(self.kind, data)
        except WireError:
            self.bus.bad_messages += 1
            return
        try:
            await self.handler(message)
        except Exception:  # noqa: BLE001 - a handler's error must not end the subscription
            self.bus.handler_errors += 1
            _log.warning("handler of %s failed", self.subject, exc_info=True)

    async def _answer(self, data: bytes) -> Any:
        try:
            return await self.handler(unpack(self.kind, data))
        except WireError:
            self.bus.bad_messages += 1
            raise
        except MmdError:
            raise
        except Exception as error:
            self.bus.handler_errors += 1
            _log.warning("handler of %s failed", self.subject, exc_info=True)
            raise MmdError(f"{type(error).__name__} while serving {self.subject}: {error}") from error

    def _start(self, work: Any) -> asyncio.Task[Any]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task


class MemoryNet:
    """Joins the buses. `clock`: for the timeouts of requests."""

    def __init__(self, clock: Clock = SYSTEM_CLOCK) -> None:
        self.clock = clock
        self.subjects = Subjects("test", "memory", "r1")
        self.subscribed: list[_Served] = []
        self.served: list[_Served] = []

    def bus(self, name: str) -> Bus:
        return cast(Bus, _MemoryBus(self, name))


class _MemoryBus:
    """The part of a `Bus` that clients need to publish, subscribe, request and serve."""

    is_connected = True

    def __init__(self, net: MemoryNet, name: str) -> None:
        self.client_name, self.subjects = name, net.subjects
        self.client = SimpleNamespace(is_closed=False)
        self.bad_messages = self.handler_errors = 0
        self._net = net
        self._listeners: list[_Served] = []

    def on_reconnect(self, _: object) -> None:
        pass

    async def flush(self) -> None:
        pass

    async def publish(self, subject: str, message: object, reply: str = "") -> None:
        for listener in [listener for listener in self._net.subscribed if listener.takes(subject)]:
            listener.put(pack(message))

    async def subscribe(self, subject: str, kind: type, handler: Handler) -> Any:
        return self._listen(self._net.subscribed, _Served(self, subject, kind, handler))

    async def serve(self, subject: str, kind: type, handler: Handler) -> Any:
        return self._listen(self._net.served, _Served(self, subject, kind, handler))

    async def request(
        self,
        subject: str,
        message: object,
        reply_type: type,
        timeout: float,
        max_bytes: int = 1 << 30,
    ) -> Any:
        for listener in [listener for listener in self._net.subscribed if listener.takes(subject)]:
            listener.put(pack(message, max_bytes))
        served = next((server for server in self._net.served if server.takes(subject)), None)
        if served is None:
            raise PeerLostError(f"no subscriber on {subject}")
        answering = served.answer(pack(message, max_bytes))
        answering.add_done_callback(lambda task: task.cancelled() or task.exception())
        try:
            async with self._net.clock.timeout(timeout):
                await asyncio.wait([answering])
        except TimeoutError as error:
            raise DeadlineError(f"no reply on {subject} within {timeout:.3g} s") from error
        if answering.cancelled():
            await self._net.clock.sleep(timeout)
            raise DeadlineError(f"no reply on {subject} within {timeout:.3g} s")
        try:
            reply = pack(answering.result())
        except MmdError as error:
            raise error_of(error.code, error.message) from error
        return unpack(reply_type, reply)

    async def close(self) -> None:
        self.client.is_closed = True
        for listener in list(self._listeners):
            self._forget(listener)

    def _listen(self, group: list[_Served], listener: _Served) -> Any:
        group.append(listener)
        self._listeners.append(listener)

        async def unsubscribe() -> None:
            self._forget(listener)

        return SimpleNamespace(unsubscribe=unsubscribe)

    def _forget(self, listener: _Served) -> None:
        listener.end()
        for group in (self._net.subscribed, self._net.served, self._listeners):
            if listener in group:
                group.remove(listener)
