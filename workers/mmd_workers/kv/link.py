"""The KV link, over which key and value bytes go from one worker to another. Independent of the model: it moves contiguous tensors."""

from __future__ import annotations

from typing import Protocol

import torch

PIECE_BYTES = 4 * 2**20  # limit of bytes under one tag and one deadline


class KvLink(Protocol):
    """One direction of one pair of workers, keyed by both pods' incarnations. After any error the link is dead: make a new one.

    Chunks are at most 4 MB and each has its own deadline. Tensors are contiguous and live on the link's device.
    """

    epoch: int

    def send(self, tensor: torch.Tensor, tag: int) -> None:
        """Send one tensor; blocks until it has left. Raises LinkError when the peer is lost or a deadline passed."""
        ...

    def recv(self, tensor: torch.Tensor, tag: int) -> None:
        """Receive into `tensor` ([...] of the agreed shape); blocks. Raises LinkError as `send` does."""
        ...

    def close(self) -> None:
        """Free the pair; idempotent, never blocks for longer than a second."""
        ...


def first_line(error: BaseException) -> str:
    """The message of a backend's error, bounded, without the C++ stack below it."""
    lines = str(error).strip().splitlines()
    return lines[0][:300] if lines else type(error).__name__
