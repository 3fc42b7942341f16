"""A KV link over NCCL (device memory), one communicator per pair; mirrors `torch.distributed._dist2._nccl_factory`.

Needs CUDA on both sides, and two GPUs, or NCCL 2.30 and later with two ranks on one (testing only). To run its tests:

    pytest -q tests/kv/test_nccl.py                                   # two GPUs
    NCCL_MULTI_RANK_GPU_ENABLE=1 LD_PRELOAD=.../nvidia/nccl/lib/libnccl.so.2 pytest -q tests/kv/test_nccl.py   # one GPU

NCCL matches operations by order, not by tag: both sides must go through the chunks in the order announced, and one link
carries one direction (two ranks that send to each other on one communicator wait for each other for ever).
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
from torch._C._distributed_c10d import ProcessGroupNCCL, Store, Work

from mmd_api.contract.errors import BackendUnavailableError, LinkError

# With NCCL's own choice of channels, a communicator costs hundreds of megabytes of device memory.
MAX_CHANNELS = 4
_POLL_SECONDS = 0.0001
_ABORT_SECONDS = 5.0
_WATCHDOG_TIMEOUT = timedelta(minutes=30)  # torch's own; `NcclLink` enforces deadlines

# torch reads these when a group is made: clean up after an error, but never end the process, and start no second monitor that does.
_ENVIRONMENT = {
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "2",
    "TORCH_NCCL_ENABLE_MONITORING": "0",
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
}


def check_available(device: torch.device) -> None:
    """Raise BackendUnavailableError unless NCCL can run on `device`."""
    if device.type != "cuda" or not torch.cuda.is_available():
        raise BackendUnavailableError("NCCL requires a CUDA device; use transfer.kv.backend: Gloo")


class NcclLink:
    """One pair of workers over NCCL; see `KvLink`. Its first use decides its direction. Operations take turns.

    `send` reads its tensor after the work queued so far on the calling thread's current stream, on a stream of the link's own:
    what is computed afterwards overlaps with the transfer.
    """

    def __init__(
        self,
        store: Store,
        rank: int,
        device: torch.device,
        chunk_timeout_seconds: float,
        connect_timeout_seconds: float,
    ) -> None:
        """Connect eagerly as `rank` (0 or 1), both transports warmed up; blocks until both are there: call it in a thread.

        Raises:
            BackendUnavailableError: no CUDA device.
            LinkError: the peer did not answer within `connect_timeout_seconds`.
        """
        check_available(device)
        for name, value in _ENVIRONMENT.items():
            os.environ.setdefault(name, value)
        self._peer_rank = 1 - rank
        self._device = device = (
            device if device.index is not None else torch.device("cuda", torch.cuda.current_device())
        )
        self._chunk_timeout_seconds = chunk_timeout_seconds
        self._turn = threading.Lock()
        self._sends: bool | None = None
        self._dead = ""
        self._deadline: float | None = None
        self._changed = threading.Condition()
        # Tensors that a kernel may still write to, because it did not end in time.
        self._retained: list[torch.Tensor] = []
        self._store = store  # torch itself has only a weak reference to it
        options = ProcessGroupNCCL.Options()
        options._timeout = _WATCHDOG_TIMEOUT
        options.config.min_ctas = 1
        options.config.max_ctas = MAX_CHANNELS
        try:
            group: Any = ProcessGroupNCCL(store, rank, 2, options)  # torch's stubs lack send and recv
            self._group = group
            self._monitor = threading.Thread(target=self._watch_deadline, name="kv-nccl-monitor", daemon=True)
            self._monitor.start()
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
            # This call has no deadline: torch blocks in NCCL's initialization before it knows the communicator that abort could end. If the
            # peer dies just then, this thread may block for ever; `LinkManager.connecting_seconds` shows it, and liveness ends the process.
            self._group.eager_connect_single_device(device)
            probe = torch.zeros(1, dtype=torch.uint8, device=device)
            for turn in (0, 1):  # the first operation of a direction sets up its transport, which takes long
                operation = group.send if turn == rank else group.recv
                self._run("connect", operation, probe, 0, connect_timeout_seconds)
        except Exception as error:  # includes the store's errors, which torch passes on as they are
            self.abort("connect failed")
            if isinstance(error, LinkError):
                raise
            raise LinkError(f"NCCL could not connect: {error}; offer again at the next epoch") from error

    def send(self, tensor: torch.Tensor, tag: int) -> None:
        """Send a contiguous CUDA tensor; see `KvLink.send`."""
        self._go("send", True, tensor, tag)

    def recv(self, tensor: torch.Tensor, tag: int) -> None:
        """Receive into a contiguous CUDA tensor; see `KvLink.recv`."""
        self._go("recv", False, tensor, tag)

    def abort(self, reason: str) -> None:
        """End the operation in flight and refuse further ones; never blocks: the monitor thread aborts the communicator."""
        with self._changed:
            self._dead = self._dead or reason
            self._changed.notify_all()

    def close(self) -> None:
        """Abort the communicator, waiting at most a second for it; idempotent."""
        self.abort("the link was closed")
        if threading.current_thread() is not self._monitor:
            self._monitor.join(1.0)

    def _go(self, verb: str, sends: bool, tensor: torch.Tensor, tag: int) -> None:
        if tensor.device.type != "cuda":
            raise LinkError(f"NCCL {verb} requires a CUDA tensor, not one on {tensor.device}")
        if self._sends is None:
            self._sends = sends
        if self._sends != sends:
            raise LinkError(
                f"NCCL link cannot {verb}: it carries data in the other direction; use transfer.kv.backend: Gloo"
            )
        operation = self._group.send if sends else self._group.recv
        self._run(verb, operation, tensor, tag, self._chunk_timeout_seconds)

    def _run(
        self,
        verb: str,
        operation: Callable[[list[torch.Tensor], int, int], Work],
        tensor: torch.Tensor,
        tag: int,
        timeout_seconds: float,
    ) -> None:
        with self._turn:
            self._arm(timeout_seconds)
            done = torch.cuda.Event()  # type: ignore[no-untyped-call]
            try:
                self._stream.wait_stream(torch.cuda.current_stream(self._device))
                with torch.cuda.stream(self._stream):
                    operation([tensor], self._peer_rank, tag).wait()
                    done.record(self._stream)
                while not (done.query() or self._dead):  # type: ignore[no-untyped-call]
                    time.sleep(_POLL_SECONDS)
            except RuntimeError as error:
                self.abort(f"NCCL {verb} failed: {str(error)[:300]}")
            finally:
                self._arm(None)
            if self._dead:  # checked after every operation: an aborted one returns like a successful one
                self._await_end(done, tensor)
                raise LinkError(
                    f"NCCL {verb} of tag {tag} failed: {self._dead}; offer again at the next epoch"
                )

    def _await_end(self, done: torch.cuda.Event, tensor: torch.Tensor) -> None:
        """Wait for the aborted kernel; when it does not end, keep its tensor so that its memory is not reused."""
        deadline = time.monotonic() + _ABORT_SECONDS
        try:
            while not done.query():  # type: ignore[no-untyped-call]
                if time.monotonic() > deadline:
                    self._retained.append(tensor)
                    return
                time.sleep(_POLL_SECONDS)
        except RuntimeError:
            self._retained.append(tensor)

    def _arm(self, timeout_seconds: float | None) -> None:
        with self._changed:
            if self._dead and timeout_seconds is not None:
                raise LinkError(f"NCCL link is dead: {self._dead}; offer again at the next epoch")
            self._deadline = None if timeout_seconds is None else time.monotonic() + timeout_seconds
            self._changed.notify_all()

    def _watch_deadline(self) -> None:
        """The monitor thread: abort the communicator at a deadline or on request, then end."""
        with self._changed:
            while not self._dead:
                remaining = None if self._deadline is None else self._deadline - time.monotonic()
                if remaining is not None and remaining <= 0:
                    self._dead = "chunk deadline exceeded"
                else:
                    self._changed.wait(remaining)
        self._group.abort()
