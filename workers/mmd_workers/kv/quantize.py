"""KV in 8 or 4 bits while it travels: a row of bytes for each token, tensor (keys or values) and head. Pure.

Both sides derive the travelling layout from (format, layout of the pool's KV), and move it as any other. A row with a value that is not
finite becomes all NaN at the receiver, so the sequence fails there as it would have here. A pool that keeps KV in 8 bits already has rows,
which travel unchanged.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from mmd_api.spec.engine import KvDtype
from mmd_api.spec.transfer import KvWireFormat
from mmd_workers.basics import packing
from mmd_workers.kv.chunks import Layout, dtype_of, empty_range


class PoolLayout(Layout, Protocol):
    """Geometry of the KV of a pool."""

    @property
    def packed(self) -> KvDtype:
        """Format of the pool's rows, `head_dim` bytes each; `Model`: the pool has values."""
        ...


@dataclass(frozen=True, slots=True)
class PackedLayout:
    """Geometry of KV as it travels: `head_dim` is the bytes of a row."""

    num_kv_heads: list[int]
    head_dim: list[int]
    dtype: str = "uint8"


class KvWire:
    """Converts the KV of one pool to and from the format in which it travels; `Model`: unchanged."""

    def __init__(self, layout: PoolLayout, wire_format: KvWireFormat = "Model") -> None:
        """`wire_format`: format for KV that the pool has as values; packed KV stays unchanged."""
        self._format = wire_format = "Model" if layout.packed != "Model" else wire_format
        self._pool = layout
        self.layout: Layout = layout
        """Layout of the travelling tensors, uint8 [2, tokens, kv_heads, bytes of a row] unless the format is `Model`."""
        if wire_format != "Model":
            rows = [packing.row_bytes(dim, wire_format) for dim in layout.head_dim]
            self.layout = PackedLayout(list(layout.num_kv_heads), rows)

    @property
    def packs(self) -> bool:
        """Whether travelling KV differs from the engine's."""
        return self._format != "Model"

    @property
    def terms(self) -> dict[str, Any]:
        """The terms that both ends must agree on: geometry and format of the pool's KV and, unless it is `Model`, the wire format."""
        pool = self._pool
        terms = {
            "num_layers": len(pool.num_kv_heads),
            "num_kv_heads": list(pool.num_kv_heads),
            "head_dim": list(pool.head_dim),
            "dtype": pool.dtype,
        }
        if pool.packed != "Model":
            terms["packed"] = pool.packed
        return {**terms, "wire_format": self._format} if self.packs else terms

    @property
    def bytes_per_token(self) -> int:
        """Bytes that travel for one token, over all layers."""
        layout = self.layout
        heads = zip(layout.num_kv_heads, layout.head_dim, strict=True)
        return sum(2 * count * dim for count, dim in heads) * dtype_of(layout).itemsize

    def pack(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Pack per-layer tensors [2, tokens, kv_heads, head_dim] for the link; the packed layers are neighbours in one buffer."""
        if not self.packs or not tensors:
            return list(tensors)
        packed = empty_range(self.layout, tensors[0].shape[1], tensors[0].device)
        for rows, tensor in zip(packed, tensors, strict=True):
            packing.pack(tensor, rows, self._format)
        return packed

    def unpack(self, packed: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Restore per-layer tensors [2, tokens, kv_heads, head_dim] in the pool's type from the result of `pack`."""
        if not self.packs:
            return list(packed)
        dtype, dims = dtype_of(self._pool), self._pool.head_dim
        return [
            packing.unpack(rows, dim, dtype, self._format) for rows, dim in zip(packed, dims, strict=True)
        ]
