"""The processes of a replica that spans pods: the leader takes the work, the others follow, and they start, drain and end as one.

Each follower holds one connection to the leader, over which both report that they live and, finally, why they end. A message is a line of
JSON: an object with the keys below. A follower proves that it belongs to the deployment with the password of its NATS user, which all pods
of a pool have. Independent of engines and of the bus.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import json
import logging
import secrets
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from mmd_api.contract.errors import EngineDeadError, RevisionMismatchError
from mmd_api.contract.logs import RELAYED
from mmd_workers.basics.limited_log import RateLimitedLog
from mmd_workers.observe.server import listen_address
from mmd_workers.process.settings import WorkerSettings

log = logging.getLogger(__name__)

ALIVE_SECONDS = 1.0
SILENT_SECONDS = 15.0
"""A process that is silent for this long has ended, or its node has: one that ends in order closes its connection at once."""
HELLO_SECONDS = 10.0
"""How long a connection may take to show that it is a follower's."""
SEND_SECONDS = 2.0
RETRY_SECONDS = 0.5
MAX_MESSAGE_BYTES = 64 * 1024
MAX_STRANGERS = 8
"""Limit of connections beside those of followers; further ones are closed at once, and a follower tries again."""
NO_REASON = "its process ended without a reason; if it was killed for its memory, give the pod more"
NO_MESSAGE = "it sent something that is no message of a group"

_GONE = (OSError, RuntimeError)
"""Errors that uvloop raises for a connection that is closed, or closes during a write."""

_Message = dict[str, Any]


class _Peer:
    """The connection to one other process of the group. `heard`: monotonic seconds at which it last sent something."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer
        self.heard = time.monotonic()
        self._alive = asyncio.create_task(self._report(), name="group-alive")

    async def receive(self) -> _Message:
        """The next message other than a sign of life.

        Raises:
            EngineDeadError: the other process is silent.
        """
        while True:
            try:
                async with asyncio.timeout(SILENT_SECONDS):
                    line = await self._reader.readline()
            except TimeoutError:
                raise EngineDeadError(f"nothing was heard of it for {SILENT_SECONDS:.0f} s") from None
            except (OSError, ValueError):  # the peer is gone, or sends without end
                line = b""
            self.heard = time.monotonic()
            if message := _message_in(line):
                return message

    async def send(self, message: _Message) -> None:
        """Send a message; `receive` notices if the other process has gone."""
        if self._writer.is_closing():
            return
        with suppress(*_GONE):
            self._writer.write(json.dumps(message).encode() + b"\n")
            async with asyncio.timeout(SEND_SECONDS):
                await self._writer.drain()

    async def close(self) -> None:
        """Close the connection."""
        self._alive.cancel()
        self._writer.close()
        with suppress(*_GONE):
            async with asyncio.timeout(SEND_SECONDS):
                await self._writer.wait_closed()

    async def _report(self) -> None:
        while True:
            await asyncio.sleep(ALIVE_SECONDS)
            await self.send({})


class Leader:
    """The leader's side. `lost` is called when a follower ends, with the reason; `drain` when a follower is asked to stop."""

    def __init__(
        self, settings: WorkerSettings, lost: Callable[[str], object], drain: Callable[[str], object]
    ) -> None:
        assert settings.group is not None
        self._settings, self._group = settings, settings.group
        self._lost, self._drain = lost, drain
        self._followers: dict[int, _Peer] = {}
        self._all_joined = asyncio.Event()
        self._closing = False
        self._log = RateLimitedLog(log)
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    async def gather(self, seconds: float) -> None:
        """Wait for all followers, and let them start.

        Raises:
            EngineDeadError: some followers have not joined within `seconds`; the message names their pods.
        """
        address, port = listen_address(self._settings.pod_ip), self._settings.group_port
        self._server = await asyncio.start_server(self._joins, address, port, limit=MAX_MESSAGE_BYTES)
        log.info("waiting for %d followers of the group", self._group.size - 1)
        try:
            async with asyncio.timeout(seconds):
                await self._all_joined.wait()
        except TimeoutError:
            missing = [
                f"{self._settings.pod}-{rank}"
                for rank in range(1, self._group.size)
                if rank not in self._followers
            ]
            raise EngineDeadError(
                f"{', '.join(missing)} did not join the group within {seconds:.0f} s, and it starts over; check that these pods have nodes, "
                "and raise the pool's startDeadlineSeconds if they need longer to fetch the weights"
            ) from None
        finally:
            self._server.close()  # nobody else may join
        await asyncio.gather(*(peer.send({"start": True}) for peer in self._followers.values()))

    async def close(self, reason: str) -> None:
        """End the followers. `reason`: why; empty if all is well."""
        self._closing = True
        if self._server is not None:
            self._server.close()
        await asyncio.gather(*(_end(peer, reason) for peer in self._followers.values()))
        for task in self._tasks:
            task.cancel()

    async def _joins(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if len(self._tasks) >= len(self._followers) + MAX_STRANGERS:
            writer.close()
            return
        if (task := asyncio.current_task()) is not None:
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        peer = _Peer(reader, writer)
        try:
            async with asyncio.timeout(HELLO_SECONDS):
                rank = await self._admitted(peer)
            if rank is not None:
                await self._follow(rank, peer)
        except (EngineDeadError, TimeoutError):
            return  # the connection sent nothing
        finally:
            await peer.close()

    async def _admitted(self, peer: _Peer) -> int | None:
        """Admit a follower; returns its rank in the group, or None if the connection is refused."""
        challenge = secrets.token_hex(16)
        await peer.send({"challenge": challenge})
        hello = await peer.receive()
        if refusal := self._refusal(challenge, hello):
            self._log.warning("refused", f"refused a follower of the group: {refusal}")
            await peer.send({"refused": refusal})
            return None
        rank: int = hello["joins"]
        self._followers[rank] = peer
        if len(self._followers) == self._group.size - 1:
            self._all_joined.set()
        return rank

    def _refusal(self, challenge: str, hello: _Message) -> str:
        rank = hello.get("joins")
        proof = _proof(self._settings, challenge, self._group.leader, rank, hello.get("runs"))
        if not hmac.compare_digest(proof.encode(), str(hello.get("proof")).encode()):
            return "it does not belong to this group, or has another password of NATS; its pods must start together"
        if hello.get("runs") != self._settings.mesh:
            return "it runs another revision, other code or other weights than the leader"
        if not isinstance(rank, int) or rank in self._followers or rank not in range(1, self._group.size):
            return f"follower {rank} has joined the group of {self._group.size} before; its pods must start together"
        return ""

    async def _follow(self, rank: int, peer: _Peer) -> None:
        asked_to_stop = False
        while True:
            try:
                message = await peer.receive()
            except EngineDeadError as error:
                message = {"ended": error.message}
            if self._closing:
                return
            if "drain" in message:
                asked_to_stop = True
                self._drain(f"follower {rank} of the group is asked to stop")
            if message.get("ended") == "" and asked_to_stop:
                return  # before the group started
            if "ended" in message:
                self._lost(f"follower {rank} {RELAYED}{message['ended']}")
                with suppress(EngineDeadError):
                    await peer.receive()  # the follower may wait for the leader's reason, and closes
                return


class Follower:
    """A follower's side."""

    def __init__(self, settings: WorkerSettings) -> None:
        assert settings.group is not None
        self._settings, self._group = settings, settings.group
        self._leader: _Peer | None = None

    @property
    def silent_seconds(self) -> float:
        """Seconds since the leader was last heard of; 0 before it is connected."""
        return time.monotonic() - self._leader.heard if self._leader is not None else 0.0

    async def join(self, seconds: float) -> bool:
        """Connect with the leader, whose pod may still have to start, and wait until all have joined.

        Returns False if the leader was asked to stop before.

        Raises:
            EngineDeadError: the leader has ended, or not all pods of the group were there within `seconds`.
            RevisionMismatchError: the leader refuses this process, which is of another group or runs something else.
        """
        address = self._group.leader
        log.info("joining the group of %s as %d of %d", address, self._group.rank, self._group.size)
        try:
            async with asyncio.timeout(seconds):
                peer = self._leader = await self._introduced()
                answer = await peer.receive()
        except TimeoutError:
            raise EngineDeadError(
                f"the leader {address} did not start the group within {seconds:.0f} s, and it starts over; check that all of its pods have "
                "nodes, and raise the pool's startDeadlineSeconds if they need longer to fetch the weights"
            ) from None
        if "refused" in answer:
            raise RevisionMismatchError(
                f"the leader of the group refuses this pod, which runs {self._settings.mesh} (revision, code and weights): {answer['refused']}"
            )
        if answer.get("ended") == "":
            return False
        if "start" not in answer:
            raise EngineDeadError(f"the leader {RELAYED}{answer.get('ended', NO_REASON)}")
        return True

    async def _introduced(self) -> _Peer:
        """Connect to the leader and introduce this process."""
        while True:
            try:
                streams = await asyncio.open_connection(
                    self._group.leader, self._settings.group_port, limit=MAX_MESSAGE_BYTES
                )
            except OSError:  # no such name yet, or nobody listens
                await asyncio.sleep(RETRY_SECONDS)
                continue
            peer = _Peer(*streams)
            try:
                greeting = await peer.receive()
            except EngineDeadError:
                greeting = {}
            if isinstance(challenge := greeting.get("challenge"), str):
                break
            await peer.close()  # the leader has too many connections, or is about to end
            await asyncio.sleep(RETRY_SECONDS)
        rank, runs = self._group.rank, self._settings.mesh
        proof = _proof(self._settings, challenge, self._group.leader, rank, runs)
        await peer.send({"joins": rank, "runs": runs, "proof": proof})
        return peer

    async def ended(self) -> str:
        """Wait for the leader's end. Returns the reason; empty if all is well."""
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

    async def report(self, reason: str) -> None:
        """Report why this process ends."""
        if self._leader is not None:
            await self._leader.send({"ended": reason})

    async def close(self, reason: str) -> None:
        """Report why this process ends, and close the connection."""
        if self._leader is not None:
            await _end(self._leader, reason)


async def _end(peer: _Peer, reason: str) -> None:
    await peer.send({"ended": reason})
    await peer.close()


def _message_in(line: bytes) -> _Message:
    """A line as a message; empty for a sign of life."""
    if not line:
        return {"ended": NO_REASON}
    try:
        message = json.loads(line)
    except ValueError:
        message = None
    return message if isinstance(message, dict) else {"ended": NO_MESSAGE}


def _proof(settings: WorkerSettings, challenge: str, group: str, rank: object, runs: object) -> str:
    """Proof that a process with the deployment's NATS password takes this place in this group.

    Without a login it proves nothing: the network must keep others away.
    """
    password = settings.nats_login.password if settings.nats_login is not None else ""
    claim = json.dumps([challenge, group, rank, runs])
    return hmac.new(password.encode(), claim.encode(), hashlib.sha256).hexdigest()
