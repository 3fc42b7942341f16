"""The processes of a replica that spans pods: the leader takes the work, the others follow, and they start, drain and end as one.

Each follower holds one connection to the leader, over which both report that they live, and at last why they end. A message is a line of
JSON with one key. Independent of engines and of the bus.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from mmd_api.contract.errors import EngineDeadError, RevisionMismatchError
from mmd_workers.observe.server import listen_address
from mmd_workers.settings import WorkerSettings

log = logging.getLogger(__name__)

ALIVE_SECONDS = 1.0
SILENT_SECONDS = 15.0
"""A process that is not heard of for this long has ended, or its node has: those that end close their connections at once."""
RETRY_SECONDS = 0.5
MAX_MESSAGE_BYTES = 64 * 1024
NO_REASON = "its process ended without a reason; if it was killed for its memory, give the pod more"

_Message = dict[str, Any]


class _Peer:
    """The connection to one other process of the group. `heard`: monotonic seconds at which it last sent something."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer
        self.heard = time.monotonic()
        self._alive = asyncio.create_task(self._report(), name="group-alive")

    async def receive(self) -> _Message:
        """The next message that is more than a sign of life.

        Raises:
            EngineDeadError: the other process has ended, or is silent.
        """
        while True:
            try:
                async with asyncio.timeout(SILENT_SECONDS):
                    line = await self._reader.readline()
                message: _Message = json.loads(line) if line else {"ended": NO_REASON}
            except TimeoutError:
                raise EngineDeadError(f"nothing was heard of it for {SILENT_SECONDS:.0f} s") from None
            except (OSError, ValueError):
                message = {"ended": NO_REASON}
            self.heard = time.monotonic()
            if message:
                return message

    async def send(self, message: _Message) -> None:
        """Send a message; that the other has gone is noticed by `receive`."""
        with suppress(OSError):
            self._writer.write(json.dumps(message).encode() + b"\n")
            await self._writer.drain()

    async def close(self) -> None:
        """Close the connection."""
        self._alive.cancel()
        self._writer.close()
        with suppress(OSError):
            await self._writer.wait_closed()

    async def _report(self) -> None:
        while True:
            await asyncio.sleep(ALIVE_SECONDS)
            await self.send({})


class Leader:
    """The leader's side. `lost`: called with which follower has ended, and why; `drain`: with which one is asked to stop."""

    def __init__(
        self, settings: WorkerSettings, lost: Callable[[str], object], drain: Callable[[str], object]
    ) -> None:
        assert settings.group is not None
        self._settings, self._group = settings, settings.group
        self._lost, self._drain = lost, drain
        self._followers: dict[int, _Peer] = {}
        self._all_joined = asyncio.Event()
        self._closing = False
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    async def gather(self) -> None:
        """Wait for all followers, and let them start."""
        address, port = listen_address(self._settings.pod_ip), self._settings.group_port
        self._server = await asyncio.start_server(self._joins, address, port, limit=MAX_MESSAGE_BYTES)
        log.info("waiting for %d followers of the group", self._group.size - 1)
        await self._all_joined.wait()
        for peer in self._followers.values():
            await peer.send({"start": True})

    async def close(self, reason: str) -> None:
        """End the followers. `reason`: why; empty where all is well."""
        self._closing = True
        if self._server is not None:
            self._server.close()
        for peer in self._followers.values():
            await peer.send({"ended": reason})
            await peer.close()
        for task in self._tasks:
            task.cancel()

    async def _joins(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if (task := asyncio.current_task()) is not None:
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        peer = _Peer(reader, writer)
        try:
            hello = await peer.receive()
            if refusal := self._refusal(hello):
                await peer.send({"refused": refusal})
                return
            rank = int(hello["joins"])
            self._followers[rank] = peer
            if len(self._followers) == self._group.size - 1:
                self._all_joined.set()
            await self._follow(rank, peer)
        except EngineDeadError:
            return  # one that said nothing
        finally:
            await peer.close()

    def _refusal(self, hello: _Message) -> str:
        rank, runs = hello.get("joins"), hello.get("runs")
        if runs != self._settings.mesh:
            return (
                f"the leader runs {self._settings.mesh} (revision, code and weights) and this follower {runs}"
            )
        if rank in self._followers or rank not in range(1, self._group.size):
            return f"follower {rank} has joined the group of {self._group.size} before; its pods must start together"
        return ""

    async def _follow(self, rank: int, peer: _Peer) -> None:
        while True:
            try:
                message = await peer.receive()
            except EngineDeadError as error:
                message = {"ended": error.message}
            if self._closing:
                return
            if "drain" in message:
                self._drain(f"follower {rank} of the group is asked to stop")
            if "ended" in message:
                self._lost(f"follower {rank} of the group ended: {message['ended']}")
                return


class Follower:
    """A follower's side."""

    def __init__(self, settings: WorkerSettings) -> None:
        assert settings.group is not None
        self._settings, self._group = settings, settings.group
        self._leader: _Peer | None = None

    @property
    def silent_seconds(self) -> float:
        """How long the leader has not been heard of; 0 while it is still waited for."""
        return time.monotonic() - self._leader.heard if self._leader is not None else 0.0

    async def join(self) -> None:
        """Connect with the leader, whose pod may still have to start, and wait until all have joined.

        Raises:
            EngineDeadError: the leader has ended.
            RevisionMismatchError: it refuses this process, which runs something else.
        """
        address, port = self._group.leader, self._settings.group_port
        log.info("joining the group of %s as %d of %d", address, self._group.rank, self._group.size)
        while True:
            try:
                streams = await asyncio.open_connection(address, port, limit=MAX_MESSAGE_BYTES)
                break
            except OSError:  # no such name yet, or nobody listens
                await asyncio.sleep(RETRY_SECONDS)
        peer = self._leader = _Peer(*streams)
        await peer.send({"joins": self._group.rank, "runs": self._settings.mesh})
        answer = await peer.receive()
        if "refused" in answer:
            raise RevisionMismatchError(f"the leader of the group refuses this pod: {answer['refused']}")
        if "start" not in answer:
            raise EngineDeadError(f"the leader of the group ended: {answer.get('ended', NO_REASON)}")

    async def ended(self) -> str:
        """Wait for the leader's end. Returns its reason; empty where all is well."""
        assert self._leader is not None
        while True:
            try:
                message = await self._leader.receive()
            except EngineDeadError as error:
                return error.message
            if "ended" in message:
                return str(message["ended"])

    async def drain(self) -> None:
        """Ask the leader to drain: this pod is asked to stop."""
        if self._leader is not None:
            await self._leader.send({"drain": True})

    async def close(self, reason: str) -> None:
        """Report why this process ends."""
        if self._leader is not None:
            await self._leader.send({"ended": reason})
            await self._leader.close()
