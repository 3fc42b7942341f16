"""A KV link over gloo (TCP, host memory). Pairwise: no global process group, one socket pair and one event thread per link.

Mirrors `torch.distributed._dist2._gloo_factory`. What gloo cannot do: a pending wait is freed by neither abort nor close, only
by the bytes, a reset socket (a killed peer: at once) or the chunk's own deadline (a silent peer).
"""

from __future__ import annotations

from datetime import timedelta

import torch
from torch.distributed import ProcessGroupGloo, Store

from mmd_workers.errors import LinkError


class GlooLink:
    """One pair of workers over gloo; see `KvLink`. Several threads may use it at once with different tags.

    CUDA tensors are staged through host memory.
    """

    def __init__(
        self,
        store: Store,
        rank: int,
        epoch: int,
        host: str,
        chunk_timeout_seconds: float,
        connect_timeout_seconds: float,
    ) -> None:
        """Connect as `rank` (0 or 1) with whoever uses the same store prefix; blocks until both are there.

        Raises:
            LinkError: the peer did not come within `connect_timeout_seconds`.
        """
        self.epoch = epoch
        self._peer_rank = 1 - rank
        self._chunk_timeout = timedelta(seconds=chunk_timeout_seconds)
        self._dead = ""
        options = ProcessGroupGloo._Options()
        options._devices = [ProcessGroupGloo.create_device(hostname=host)]
        options._threads = 1
        options._timeout = timedelta(seconds=connect_timeout_seconds)
        try:
            self._group: ProcessGroupGloo | None = ProcessGroupGloo(store, rank, 2, options)  # type: ignore[call-arg, arg-type]
        except RuntimeError as error:
            raise LinkError(
                f"gloo could not connect: {_first_line(error)}; make the pair at the next epoch"
            ) from error

    def send(self, tensor: torch.Tensor, tag: int) -> None:
        """Send a contiguous tensor; see `KvLink.send`."""
        host_tensor = tensor.cpu()
        try:
            self._wait(self._alive().send([host_tensor], self._peer_rank, tag))
        except RuntimeError as error:
            raise self._broken("send", tag, error) from error

    def recv(self, tensor: torch.Tensor, tag: int) -> None:
        """Receive into a contiguous tensor; see `KvLink.recv`."""
        host_tensor = tensor if tensor.device.type == "cpu" else torch.empty_like(tensor, device="cpu")
        try:
            self._wait(self._alive().recv([host_tensor], self._peer_rank, tag))
        except RuntimeError as error:
            raise self._broken("recv", tag, error) from error
        if host_tensor is not tensor:
            tensor.copy_(host_tensor)

    def abort(self, reason: str) -> None:
        """Refuse every further operation. One in flight ends with its socket or its chunk's deadline."""
        self._dead = self._dead or reason

    def close(self) -> None:
        """Let the sockets go once no operation holds them; idempotent."""
        self.abort("the link was closed")
        self._group = None

    def _alive(self) -> ProcessGroupGloo:
        group = self._group
        if self._dead or group is None:
            raise LinkError(f"gloo link is dead: {self._dead}; make the pair at the next epoch")
        return group

    def _wait(self, work: torch.distributed.Work) -> None:
        if not work.wait(self._chunk_timeout):
            raise RuntimeError("the operation was aborted")
        if self._dead:
            raise RuntimeError(self._dead)

    def _broken(self, verb: str, tag: int, error: RuntimeError) -> LinkError:
        self.abort(_first_line(error))
        return LinkError(
            f"gloo {verb} of tag {tag} failed: {_first_line(error)}; make the pair at the next epoch"
        )


def _first_line(error: BaseException) -> str:
    """The part of a torch error that says something, bounded: its text carries a C++ stack below."""
    return str(error).strip().splitlines()[0][:300] if str(error).strip() else type(error).__name__
