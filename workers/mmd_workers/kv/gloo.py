"""A KV link over gloo (TCP, host memory). Pairwise: nothing global, one socket pair and one event thread per link.

Mirrors `torch.distributed._dist2._gloo_factory`. A wait inside gloo cannot be interrupted: not by abort, not by close, and
when its peer dies in the middle of a chunk not even by the reset socket, only by its timeout. So each operation waits in
a thread of the link's own, and the caller is released by whatever comes first: the bytes, gloo's error, or `abort`.
"""

from __future__ import annotations

import struct
import threading
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError, ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import torch
from torch._C._distributed_c10d import ProcessGroupGloo, Store, Work

from mmd_api.contract.errors import LinkError
from mmd_workers.kv.link import first_line

MAX_OPERATIONS = 32  # at the same time on one link
MAX_ADDRESS_BYTES = 4096
_SIZE = struct.Struct("@Q")


def _shape(value: bytes) -> tuple[int, int] | None:
    """The shape of a value that gloo gives its peer: the bytes of all but the host name, and those of the address.

    The value has the host name and the address, each after its size, then numbers. None: the value is something else.
    """
    if not 2 * _SIZE.size <= len(value) <= MAX_ADDRESS_BYTES:
        return None
    (name,) = _SIZE.unpack_from(value)
    rest_bytes = len(value) - name
    if rest_bytes < 2 * _SIZE.size:
        return None
    (address,) = _SIZE.unpack_from(value, _SIZE.size + name)
    return (rest_bytes, address) if address <= rest_bytes - 2 * _SIZE.size else None


class _Addresses(Store):
    """The store that gloo gets; it returns only values with the shape of gloo's own.

    gloo reads its peer's value without looking at the size, and ends the process if the value is too short.
    """

    def __init__(self, store: Store) -> None:
        super().__init__()
        self._store = store
        self._shape: tuple[int, int] | None = None

    def set(self, key: str, value: str | bytes) -> None:
        content = value.encode() if isinstance(value, str) else value
        self._shape = _shape(content)
        self._store.set(key, content)  # type: ignore[arg-type]  # torch's stubs know text alone

    def get(self, key: str) -> bytes:
        value = self._store.get(key)
        if self._shape is None or _shape(value) != self._shape:
            raise LinkError(
                "the peer sent something else than gloo's address; run the same image in both pods"
            )
        return value

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        self._store.wait(keys) if timeout is None else self._store.wait(keys, timeout)

    def check(self, keys: list[str]) -> bool:
        return self._store.check(keys)

    def add(self, key: str, amount: int) -> int:
        return self._store.add(key, amount)

    def delete_key(self, key: str) -> bool:
        return self._store.delete_key(key)

    deleteKey = delete_key  # noqa: N815  # torch's C++ calls it so


class GlooLink:
    """One pair of workers over gloo; see `KvLink`. Several threads may use it at once with different tags.

    CUDA tensors are staged through host memory. After an error the tensor of a `recv` may still be written to until the chunk's
    timeout: drop it, do not reuse it.
    """

    def __init__(
        self,
        store: Store,
        rank: int,
        host: str,
        chunk_timeout_seconds: float,
        connect_timeout_seconds: float,
    ) -> None:
        """Connect as `rank` (0 or 1) with whoever uses the same store prefix; blocks until both are there.

        Once they have met, gloo takes about 30 s to give up on a peer that does not answer, whatever its timeout.

        Raises:
            LinkError: the peer did not come within `connect_timeout_seconds`.
        """
        self._peer_rank = 1 - rank
        self._chunk_timeout = timedelta(seconds=chunk_timeout_seconds)
        self._lock = threading.Lock()
        self._pending: set[Future[None]] = set()
        self._dead = ""
        gloo: Any = ProcessGroupGloo  # torch's stubs lack its options and its point-to-point operations
        options = gloo._Options()
        options._devices = [gloo.create_device(hostname=host, lazy_init=False)]
        options._threads = 1
        options._timeout = timedelta(seconds=connect_timeout_seconds)
        self._store = _Addresses(store)  # gloo itself has only a weak reference to it
        try:
            self._group: Any = gloo(self._store, rank, 2, options)
        except LinkError:
            raise
        except Exception as error:
            raise LinkError(
                f"gloo could not connect: {first_line(error)}; offer again at the next epoch"
            ) from error
        self._threads = ThreadPoolExecutor(MAX_OPERATIONS, "kv-gloo")

    def send(self, tensor: torch.Tensor, tag: int) -> None:
        """Send a contiguous tensor; see `KvLink.send`."""
        host_tensor = tensor.cpu()
        group = self._live_group()
        self._run("send", tag, lambda: group.send([host_tensor], self._peer_rank, tag))

    def recv(self, tensor: torch.Tensor, tag: int) -> None:
        """Receive into a contiguous tensor; see `KvLink.recv`."""
        host_tensor = tensor if tensor.device.type == "cpu" else torch.empty_like(tensor, device="cpu")
        group = self._live_group()
        self._run("recv", tag, lambda: group.recv([host_tensor], self._peer_rank, tag))
        if host_tensor is not tensor:
            tensor.copy_(host_tensor)

    def abort(self, reason: str) -> None:
        """Release every caller with a LinkError and refuse further operations; never blocks."""
        with self._lock:
            self._dead = self._dead or reason
            pending, self._pending = self._pending, set()
        for outcome in pending:
            _settle(outcome, LinkError(f"gloo operation ended: {reason}; offer again at the next epoch"))

    def close(self) -> None:
        """Release the sockets once no operation holds them (the chunk timeout at the latest); idempotent."""
        self.abort("the link was closed")
        self._threads.shutdown(wait=False, cancel_futures=True)
        self._group = None

    def _live_group(self) -> Any:
        group = self._group
        if self._dead or group is None:
            raise LinkError(f"gloo link is dead: {self._dead}; offer again at the next epoch")
        return group

    def _run(self, verb: str, tag: int, operation: Callable[[], Work]) -> None:
        outcome: Future[None] = Future()
        with self._lock:
            if self._dead:
                raise LinkError(f"gloo link is dead: {self._dead}; offer again at the next epoch")
            self._pending.add(outcome)
        try:
            self._threads.submit(self._perform, outcome, verb, tag, operation)
            outcome.result()  # bounded: the thread gives up after the chunk timeout
        except RuntimeError as error:  # no thread can be started, or the link was closed just now
            raise LinkError(
                f"gloo {verb} of tag {tag} failed: {first_line(error)}; offer again at the next epoch"
            ) from error
        finally:
            with self._lock:
                self._pending.discard(outcome)

    def _perform(self, outcome: Future[None], verb: str, tag: int, operation: Callable[[], Work]) -> None:
        try:
            done = operation().wait(self._chunk_timeout)
        except RuntimeError as error:
            failure = f"gloo {verb} of tag {tag} failed: {first_line(error)}; offer again at the next epoch"
            _settle(outcome, LinkError(failure))
            return
        _settle(outcome, None if done else LinkError(f"gloo {verb} of tag {tag} was aborted; offer again"))


def _settle(outcome: Future[None], error: LinkError | None) -> None:
    """Settle an outcome, once: the operation's end and `abort` may race."""
    try:
        if error is None:
            outcome.set_result(None)
        else:
            outcome.set_exception(error)
    except InvalidStateError:
        return
