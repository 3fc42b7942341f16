"""The NATS client, with its faults fixed. Independent of this project."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.aio.subscription import Subscription


class NatsClient(Client):  # type: ignore[misc]
    """`nats.aio.client.Client`, with four of its faults fixed.

    It can swallow a cancellation while it connects or flushes, or when a reply comes at the same moment, and its caller would go on
    as if it had not been cancelled: here the cancellation is raised after all. Its flush writes the PING ahead of commands that
    still wait to be written, so that the PONG does not cover them: here they are written first. A request that could not be
    sent stays in its table of requests for ever: here it is removed.
    """

    async def _connect_to_server(self, *args: Any, **options: Any) -> None:
        async with cancellable():
            await super()._connect_to_server(*args, **options)

    async def _process_connect_init(self) -> None:
        async with cancellable():
            await super()._process_connect_init()

    async def publish(self, subject: str, payload: bytes = b"", reply: str = "", **options: Any) -> None:
        """Send, or be cancelled. A request that was not sent waits for no reply."""
        try:
            async with cancellable():
                await super().publish(subject, payload, reply, **options)
        except BaseException:
            self._resp_map.pop(reply.rpartition(".")[2], None)
            raise

    async def request(self, *args: Any, **options: Any) -> Msg:
        """Send and wait for the reply, or be cancelled."""
        async with cancellable():
            return await super().request(*args, **options)

    async def subscribe(self, *args: Any, **options: Any) -> Subscription:
        """Subscribe, or be cancelled."""
        async with cancellable():
            return await super().subscribe(*args, **options)

    async def flush(self, *args: Any, **options: Any) -> None:
        """Wait until the server has everything sent so far, or be cancelled."""
        async with cancellable():
            if not self.is_closed:
                await self._flush_pending(force_flush=True)
            await super().flush(*args, **options)

    async def close(self) -> None:
        """Close. Data waiting for a lost server is dropped: writing it would raise ConnectionResetError."""
        if not self.is_connected:
            self._pending: list[bytes] = []
            self._pending_data_size = 0
        await super().close()


@asynccontextmanager
async def cancellable() -> AsyncIterator[None]:
    """Raise a cancellation that came inside and was swallowed there.

    An earlier cancellation belongs to a caller's clean-up and is left alone.
    """
    task = asyncio.current_task()
    before = task.cancelling() if task is not None else 0
    try:
        yield
    except Exception as error:
        if task is not None and task.cancelling() > before:
            raise asyncio.CancelledError from error
        raise
    if task is not None and task.cancelling() > before:
        raise asyncio.CancelledError
