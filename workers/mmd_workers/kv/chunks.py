"""Cuts the KV of a range of tokens into pieces for a link. Both sides derive the same plan from (layout, tokens).

The layers' tensors, laid end to end in C order, are one string of bytes; piece i is its i-th stretch of `PIECE_BYTES`.
The receiver holds that string in one buffer on the link's device; the sender copies only pieces that span several layers.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache
from math import prod
from typing import Protocol

import torch

from mmd_api.contract.errors import LinkError
from mmd_workers.kv.link import PIECE_BYTES, KvLink


class Layout(Protocol):
    """Geometry of the KV, one entry per layer; `dtype` is torch's name without `torch.`."""

    @property
    def num_kv_heads(self) -> list[int]:
        """KV heads of each layer."""
        ...

    @property
    def head_dim(self) -> list[int]:
        """Width of a head of each layer."""
        ...

    @property
    def dtype(self) -> str:
        """Element type of all layers."""
        ...


def num_pieces(layout: Layout, num_tokens: int) -> int:
    """The number of pieces, and so of tags, for a range of `num_tokens`."""
    total = sum(prod(shape) for shape in _shapes(layout, num_tokens)) * dtype_of(layout).itemsize
    return -(-total // PIECE_BYTES)


def empty_range(layout: Layout, num_tokens: int, device: torch.device) -> list[torch.Tensor]:
    """Uninitialised per-layer tensors [2, tokens, kv_heads, head_dim] on `device`, neighbours in one buffer."""
    return _empty(layout, num_tokens, device)[1]


def split(tensors: Sequence[torch.Tensor]) -> Iterator[torch.Tensor]:
    """The pieces of contiguous per-layer tensors as uint8 [at most PIECE_BYTES], in order.

    Pieces that span layers are copies, unless the layers are neighbours in one buffer, as those of `empty_range`. Lazy: at most one
    copied piece lives at a time if the caller keeps none.

    Raises:
        LinkError: a tensor is not contiguous.
    """
    flat = [bytes_of(tensor) for tensor in tensors]
    if (whole := _joined(flat)) is not None:
        yield from torch.split(whole, PIECE_BYTES)
        return
    for segments in _plan(tuple(part.numel() for part in flat)):
        parts = [flat[layer][start:stop] for layer, start, stop in segments]
        yield parts[0] if len(parts) == 1 else torch.cat(parts)


def _joined(parts: Sequence[torch.Tensor]) -> torch.Tensor | None:
    """A view of all parts, if each begins where the one before it ends."""
    if not any(part.numel() for part in parts):
        return None
    first, end = parts[0], parts[0].storage_offset()
    for part in parts:
        if part.storage_offset() != end or part.untyped_storage()._cdata != first.untyped_storage()._cdata:
            return None
        end += part.numel()
    return first.as_strided((end - first.storage_offset(),), (1,))


def send_range(link: KvLink, tensors: Sequence[torch.Tensor], first_tag: int) -> int:
    """Send the KV of one token range, tensors [2, tokens, kv_heads, head_dim] per layer; blocks until it has left.

    Returns the first tag not used. Raises LinkError as `KvLink.send`.
    """
    tag = first_tag
    for piece in split(tensors):
        link.send(piece, tag)
        tag += 1
    return tag


def recv_range(
    link: KvLink, layout: Layout, num_tokens: int, first_tag: int, device: torch.device
) -> list[torch.Tensor]:
    """Receive what `send_range` sent: per-layer tensors [2, tokens, kv_heads, head_dim].

    They are views of one new buffer on `device`, which must be the link's own.

    Raises LinkError as `KvLink.recv`.
    """
    buffer, tensors = _empty(layout, num_tokens, device)
    for tag, piece in enumerate(torch.split(bytes_of(buffer), PIECE_BYTES), first_tag):
        if piece.numel():
            link.recv(piece, tag)
    return tensors


def _empty(layout: Layout, num_tokens: int, device: torch.device) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """One flat buffer, and the layers' tensors as views of it."""
    shapes = _shapes(layout, num_tokens)
    sizes = [prod(shape) for shape in shapes]
    buffer = torch.empty(sum(sizes), dtype=dtype_of(layout), device=device)
    return buffer, [part.view(shape) for part, shape in zip(torch.split(buffer, sizes), shapes, strict=True)]


@lru_cache(maxsize=256)
def _plan(sizes: tuple[int, ...]) -> tuple[tuple[tuple[int, int, int], ...], ...]:
    """For every piece its segments (layer, first byte, last byte + 1) of layers of these sizes."""
    pieces: list[tuple[tuple[int, int, int], ...]] = []
    segments: list[tuple[int, int, int]] = []
    room = PIECE_BYTES
    for layer, size in enumerate(sizes):
        start = 0
        while start < size:
            stop = min(size, start + room)
            segments.append((layer, start, stop))
            room -= stop - start
            start = stop
            if room == 0:
                pieces.append(tuple(segments))
                segments, room = [], PIECE_BYTES
    if segments:
        pieces.append(tuple(segments))
    return tuple(pieces)


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """A view of a contiguous tensor as uint8. Raises LinkError if it is not contiguous."""
    if not tensor.is_contiguous():
        raise LinkError(
            f"KV tensor of shape {tuple(tensor.shape)} is not contiguous; call `contiguous()` first"
        )
    return tensor.view(-1).view(torch.uint8)


def _shapes(layout: Layout, num_tokens: int) -> list[tuple[int, int, int, int]]:
    return [
        (2, num_tokens, heads, dim) for heads, dim in zip(layout.num_kv_heads, layout.head_dim, strict=True)
    ]


def dtype_of(layout: Layout) -> torch.dtype:
    """Element type of a layout. Raises LinkError for one that torch does not have."""
    dtype = getattr(torch, layout.dtype, None)
    if not isinstance(dtype, torch.dtype):
        raise LinkError(
            f"KV layout has an unknown dtype {layout.dtype!r}; peers must run the same pipeline revision"
        )
    return dtype
