"""A KV link over NIXL, which drives UCX: InfiniBand or RoCE between nodes that have it, else TCP. Host or device memory.

`recv` registers a slot of memory with its peer and announces (tag, slot, bytes). `send` copies its tensor into a slot of its own and
writes that into the announced slot, and NIXL reports the end to the receiver after the last byte. So no data arrives unless somebody
waits for it, and a slot is registered once.

Each side of each link has its own agent, and slots that no other link ever uses. A peer that stalled may go on writing long after this
side has given up. Over RDMA, the end of the agent takes its memory from the device; over TCP, the agent itself copies what arrives. Once
the agent has ended nothing comes in, and only then is its memory freed. Transports that could write without the agent are left out
(`LEFT_OUT`), unless the environment has UCX_TLS. Agents have no progress thread, which would take a tenth of a core per idle link: those
who wait poll.

Bytes over UCX are neither authenticated nor checked on arrival: whoever can reach its ports can write to this process. The
deployment's NetworkPolicy keeps other pods away from them.
"""

from __future__ import annotations

import importlib
import os
import re
import secrets
import struct
import threading
import time
import traceback
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from types import ModuleType
from typing import Any, TypeVar

import torch
from torch._C._distributed_c10d import Store

from mmd_api.contract.errors import BackendUnavailableError, LinkError
from mmd_workers.kv.chunks import bytes_of
from mmd_workers.kv.link import PIECE_BYTES, first_line

MAX_SLOTS = 4  # limit per side and direction: this many pieces move at once, others wait
MAX_METADATA_BYTES = 64 * 2**10
LEFT_OUT = ("cma", "xpmem", "knem", "cuda_ipc", "rocm_ipc", "ze_ipc")
"""UCX's transports with which a process writes into another one's memory on its own; the other one cannot stop it."""

_UCX = "UCX"
_INTRODUCTION = re.compile(r"(DRAM|VRAM) ([0-9]{1,3}) ((?:[0-9a-f]{2})+)")
_HELLO = b"hello"
_READY = struct.Struct("!cQQQ")  # tag, address of the slot, bytes; then the slot's metadata when it is new
_WRITTEN = struct.Struct("!cQQ")  # tag, bytes
_SHORTEST_SLEEP_SECONDS, _LONGEST_SLEEP_SECONDS = 0.00005, 0.002
_CLOSE_SECONDS = 1.0

Found = TypeVar("Found")


def check_available(device: torch.device) -> None:
    """Raise BackendUnavailableError unless NIXL and its UCX plugin can move memory of `device` here."""
    try:
        nixl = _load()
    except ImportError as error:
        raise BackendUnavailableError(
            f"NIXL cannot be loaded ({first_line(error)}); install {_distribution()} in the image, or use"
            " transfer.kv.backend: Gloo"
        ) from error
    try:
        memory_types = _agent(nixl, "check").get_backend_mem_types(_UCX)
    except Exception as error:
        raise BackendUnavailableError(
            f"UCX, which NIXL drives, cannot start ({first_line(error)}); reinstall {_distribution()} in"
            " the image, or use transfer.kv.backend: Gloo"
        ) from error
    if f"{_memory_type(device)}_SEG" not in memory_types:
        raise BackendUnavailableError(
            f"UCX, which NIXL drives, cannot move memory of {device} here, only {', '.join(memory_types)}; use"
            " transfer.kv.backend: Gloo"
        )


class _BrokenError(RuntimeError):
    """The reason why this link cannot go on."""


@dataclass(slots=True, eq=False)
class _Slot:
    """Memory registered for the life of the link. Each direction has its own slots: all that receive may be announced."""

    memory: torch.Tensor  # uint8 [PIECE_BYTES]
    registration: Any
    sends: bool
    announced: bool = False


class NixlLink:
    """One pair of workers over NIXL; see `KvLink`. Several threads may use it at once with different tags."""

    def __init__(
        self,
        store: Store,
        rank: int,
        device: torch.device,
        chunk_timeout_seconds: float,
        connect_timeout_seconds: float,
        name: str = "kv",
    ) -> None:
        """Connect as `rank` (0 or 1) with whoever uses the same store; blocks until bytes have gone both ways. NIXL and UCX log `name`.

        Raises:
            LinkError: the peer did not answer within `connect_timeout_seconds`.
        """
        nixl = _load()
        self._device = device
        self._chunk_timeout_seconds = chunk_timeout_seconds
        self._dead = ""
        self._lock = threading.Lock()  # guards everything below; nobody waits while holding it
        self._agent: Any = None
        self._peer = ""
        self._slots: list[_Slot] = []
        """Freed only by the end of the agent."""
        self._free: list[_Slot] = []
        self._ready: dict[int, tuple[int, int]] = {}
        """Tags that the peer waits for, with the address and bytes of its slot."""
        self._awaited: dict[int, int] = {}
        """Tags that we wait for, with their bytes."""
        self._written: set[int] = set()
        """Tags that have arrived."""
        self._writes: dict[int, Any] = {}
        """Handles of transfers by tag, held nowhere else: a handle that outlives the agent keeps its sockets."""
        self._greeted = False
        deadline = time.monotonic() + connect_timeout_seconds
        try:
            with self._on_device():
                self._agent = _agent(nixl, f"{name}-{secrets.token_hex(8)}")
                weakref.finalize(self._agent.agent, self._slots.clear)
                self._meet(store, rank, deadline)
        except Exception as error:
            _release_frames(error)
            self.close()
            raise LinkError(
                f"NIXL could not connect: {first_line(error)}; offer again at the next epoch"
            ) from error

    def send(self, tensor: torch.Tensor, tag: int) -> None:
        """Send a contiguous tensor; see `KvLink.send`."""
        content = bytes_of(tensor)
        with self._operation("send", tag) as deadline:
            address, size = self._until(lambda: self._ready.pop(tag, None), deadline)
            if size != len(content):
                raise _BrokenError(f"the peer expects {size} bytes, not {len(content)}")
            slot = self._until(lambda: self._take_slot(sends=True), deadline)
            slot.memory[:size].copy_(content)
            self._synchronize()
            self._until(lambda: self._write(tag, slot, address, size), deadline)
            with self._lock:
                self._free.append(slot)

    def recv(self, tensor: torch.Tensor, tag: int) -> None:
        """Receive into a contiguous tensor; see `KvLink.recv`."""
        content = bytes_of(tensor)
        with self._operation("recv", tag) as deadline:
            slot = self._until(lambda: self._take_slot(sends=False), deadline)
            self._until(lambda: self._announce(tag, slot, len(content)), deadline)
            self._until(lambda: self._take_written(tag), deadline)
            content.copy_(slot.memory[: len(content)])
            self._synchronize()  # before the next write into this slot
            with self._lock:
                self._free.append(slot)

    def abort(self, reason: str) -> None:
        """Release every caller with a LinkError and refuse further operations; never blocks."""
        self._dead = self._dead or reason

    def close(self) -> None:
        """Cancel operations in flight and free the agent and its memory, waiting at most a second for it; idempotent."""
        self.abort("the link was closed")
        closing = threading.Thread(target=self._free_agent, name="kv-nixl-close", daemon=True)
        closing.start()
        closing.join(_CLOSE_SECONDS)

    def _meet(self, store: Store, rank: int, deadline: float) -> None:
        """Exchange addresses, then a message each way, so that UCX settles its connection here and not in the first chunk."""
        own_key, peer_key = f"nixl-{rank}", f"nixl-{1 - rank}"
        metadata = self._agent.get_agent_metadata().hex()
        store.set(own_key, f"{_memory_type(self._device)} {self._device.index or 0} {metadata}")
        introduction = store.get(peer_key).decode(errors="replace")
        if (match := _INTRODUCTION.fullmatch(introduction)) is None:
            raise _BrokenError(
                f"the peer introduced itself as {introduction[:40]!r}, not as memory type, device and metadata"
            )
        self._peer_memory = match[1], int(match[2])
        self._peer = self._agent.add_remote_agent(bytes.fromhex(match[3])).decode()
        self._agent.send_notif(self._peer, _HELLO)
        self._until(lambda: self._greeted or None, deadline)
        store.set(f"{own_key}-greeted", "")
        while not store.check([f"{peer_key}-greeted"]):  # until then the peer may need us to poll
            self._until(lambda: True, deadline)
            _pause(deadline, time.monotonic())

    def _free_agent(self) -> None:
        with self._lock, self._on_device(), suppress(Exception):
            agent, self._agent = self._agent, None
            if agent is None:
                return
            while self._writes:
                with suppress(Exception):
                    self._writes.popitem()[1].release()
            self._free.clear()
            for slot in self._slots:
                with suppress(Exception):
                    agent.deregister_memory(slot.registration, [_UCX])

    @contextmanager
    def _operation(self, verb: str, tag: int) -> Iterator[float]:
        """Run one operation, given its deadline; any error in it ends the link."""
        if self._dead:
            raise LinkError(f"NIXL link is dead: {self._dead}; offer again at the next epoch")
        try:
            with self._on_device():
                yield time.monotonic() + self._chunk_timeout_seconds
        except Exception as error:
            _release_frames(error)
            self.abort(first_line(error))
            raise LinkError(
                f"NIXL {verb} of tag {tag} failed: {self._dead}; offer again at the next epoch"
            ) from error

    def _until(self, poll: Callable[[], Found | None], deadline: float) -> Found:
        """The first result of `poll` other than None. `poll` is called with the lock held, after the peer's messages were read."""
        start = time.monotonic()
        while True:
            with self._lock:
                if self._dead:
                    raise _BrokenError(self._dead)
                self._read_notifications()
                if (result := poll()) is not None:
                    return result
            _pause(deadline, start)

    def _read_notifications(self) -> None:
        for message in self._agent.get_new_notifs().get(self._peer, ()):
            kind = message[:1]
            if message == _HELLO and not self._greeted:
                self._greeted = True
            elif kind == b"R" and _READY.size <= len(message) <= _READY.size + MAX_METADATA_BYTES:
                _, tag, address, size = _READY.unpack_from(message)
                self._note_ready(tag, address, size, message[_READY.size :])
            elif kind == b"W" and len(message) == _WRITTEN.size:
                _, tag, size = _WRITTEN.unpack(message)
                self._note_written(tag, size)
            else:
                raise _BrokenError(f"the peer sent an unknown message of {len(message)} bytes")

    def _note_ready(self, tag: int, address: int, size: int, metadata: bytes) -> None:
        if tag in self._ready or len(self._ready) == MAX_SLOTS:
            raise _BrokenError(f"the peer announced too many slots, the last for tag {tag}")
        if size > PIECE_BYTES:
            raise _BrokenError(
                f"the peer expects {size} bytes for tag {tag}, and a piece has {PIECE_BYTES} at most"
            )
        if metadata and self._agent.add_remote_agent(metadata).decode() != self._peer:
            raise _BrokenError("the peer announced a slot of another agent")
        self._ready[tag] = (address, size)

    def _note_written(self, tag: int, size: int) -> None:
        if self._awaited.pop(tag, None) != size:
            raise _BrokenError(f"the peer wrote {size} bytes for tag {tag}, which were not awaited")
        self._written.add(tag)

    def _take_slot(self, *, sends: bool) -> _Slot | None:
        for slot in self._free:
            if slot.sends == sends:
                self._free.remove(slot)
                return slot
        if sum(slot.sends == sends for slot in self._slots) == MAX_SLOTS:
            return None
        memory = torch.empty(PIECE_BYTES, dtype=torch.uint8, device=self._device)
        slot = _Slot(memory, self._agent.register_memory(memory, backends=[_UCX]), sends)
        self._slots.append(slot)
        return slot

    def _announce(self, tag: int, slot: _Slot, size: int) -> bool:
        if tag in self._awaited or tag in self._written:
            raise _BrokenError("another thread receives it")
        metadata = b""
        if not slot.announced:
            metadata = self._agent.get_partial_agent_metadata(slot.registration, False, [_UCX])
            slot.announced = True
        self._awaited[tag] = size
        message = _READY.pack(b"R", tag, slot.memory.data_ptr(), size) + metadata
        self._agent.send_notif(self._peer, message)
        return True

    def _take_written(self, tag: int) -> bool | None:
        if tag not in self._written:
            return None
        self._written.remove(tag)
        return True

    def _write(self, tag: int, slot: _Slot, address: int, size: int) -> bool | None:
        """Write the slot to the peer and report it, in as many calls as it takes; True once the data has arrived."""
        agent = self._agent
        if tag not in self._writes:
            local = agent.get_xfer_descs(slot.memory[:size])
            remote = agent.get_xfer_descs([(address, size, self._peer_memory[1])], self._peer_memory[0])
            message = _WRITTEN.pack(b"W", tag, size)
            self._writes[tag] = agent.initialize_xfer("WRITE", local, remote, self._peer, message, [_UCX])
            state = agent.transfer(self._writes[tag])
        else:
            state = agent.check_xfer_state(self._writes[tag])
        if state == "PROC":
            return None
        if state != "DONE":
            raise _BrokenError("the write failed")
        self._writes.pop(tag).release()
        return True

    def _on_device(self) -> AbstractContextManager[object]:
        """Make the link's device current: UCX takes the current CUDA device of the calling thread."""
        return torch.cuda.device(self._device) if self._device.type == "cuda" else nullcontext()

    def _synchronize(self) -> None:
        """Wait for the copies that this thread has queued: UCX knows no streams."""
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()


def _pause(deadline: float, start: float) -> None:
    """Sleep between two polls: the longer they go on, the longer."""
    now = time.monotonic()
    if now > deadline:
        raise _BrokenError("deadline exceeded")
    time.sleep(min(max((now - start) / 8, _SHORTEST_SLEEP_SECONDS), _LONGEST_SLEEP_SECONDS))


def _release_frames(error: Exception) -> None:
    """Clear the frames of an error: NIXL's hold the agent, which would live for as long as somebody keeps the error."""
    chain: BaseException | None = error
    while chain is not None:
        traceback.clear_frames(chain.__traceback__)
        chain = chain.__context__


def _load() -> ModuleType:
    """Import the package that was built for torch's version of CUDA. Raises ImportError."""
    os.environ.setdefault("NIXL_LOG_LEVEL", "WARN")
    os.environ.setdefault("UCX_TLS", f"^{','.join(LEFT_OUT)}")
    return importlib.import_module(f"nixl_cu{_cuda_major()}._api")


def _cuda_major() -> str:
    return (torch.version.cuda or "13").partition(".")[0]


def _distribution() -> str:
    """The distribution of the package that `_load` imports; the extra installs the one for the project's version of torch."""
    return "multimodal-operator[nixl]" if _cuda_major() == "13" else f"nixl-cu{_cuda_major()}"


def _agent(nixl: ModuleType, name: str) -> Any:
    config = nixl.nixl_agent_config(enable_prog_thread=False, backends=[])
    agent = nixl.nixl_agent(name, config)
    agent.create_backend(_UCX)
    return agent


def _memory_type(device: torch.device) -> str:
    return "VRAM" if device.type == "cuda" else "DRAM"
