"""Tensors of the KV pool, per layer, with reading and writing of token ranges. Independent of sequences and scheduling."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import torch

from mmd_api.contract.errors import CapacityError, CountMismatchError
from mmd_workers.basics import packing
from mmd_workers.engine.cpu.library import PoolStruct
from mmd_workers.engine.cpu.pages import use_huge_pages
from mmd_workers.model.prompt import KvLayout


class KvPool:
    """Keys and values of every layer.

    `keys[layer]` and `values[layer]` are [blocks + 1, block_tokens, kv_heads, head_dim]. In a packed layout they
    are uint8, with the bytes of a row in place of `head_dim`. The last block, `zero_block`, is never written and
    belongs to no sequence: attention reads it in place of tokens that a row does not see. KV moves between pools of any block size in the
    canonical layout: a list with one contiguous [2, tokens, kv_heads, head_dim] tensor per layer (keys
    first).
    """

    def __init__(self, layout: KvLayout, num_blocks: int, block_tokens: int, device: torch.device) -> None:
        self.layout = layout
        self.num_blocks = num_blocks
        self.block_tokens = block_tokens
        self.device = device
        dtype: torch.dtype = getattr(torch, layout.dtype)
        shapes = [
            (num_blocks + 1, block_tokens, heads, dim)
            for heads, dim in zip(layout.num_kv_heads, layout.head_dim, strict=True)
        ]
        self.keys, self.values = (
            [use_huge_pages(torch.empty(shape, dtype=dtype, device=device)).zero_() for shape in shapes]
            for _ in range(2)
        )

    @property
    def zero_block(self) -> int:
        """Number of the block of zeros."""
        return self.num_blocks

    @classmethod
    def of_bytes(cls, layout: KvLayout, num_bytes: int, block_tokens: int, device: torch.device) -> KvPool:
        """Make a pool of as many blocks as fit into `num_bytes`.

        The block of zeros comes on top: `profile.activation_bytes` includes it.

        Raises:
            CapacityError: not one block fits.
        """
        block_bytes = layout.bytes_per_token() * block_tokens
        if num_bytes < block_bytes:
            raise CapacityError(
                f"kv_cache_bytes is {num_bytes}, but one block needs {block_bytes} bytes; raise it"
            )
        return cls(layout, num_bytes // block_bytes, block_tokens, device)

    def put(self, layer: int, slots: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Write a step's keys and values, each [slots, kv_heads, head_dim], to these flat slots."""
        for pool, tensor in ((self.keys[layer], keys), (self.values[layer], values)):
            rows = tensor
            if self.layout.packed != "Model":
                rows = pool.new_empty(*tensor.shape[:-1], pool.shape[-1])
                packing.pack(tensor, rows, self.layout.packed)
            pool.flatten(0, 1).index_copy_(0, slots, rows)

    def at(self, tensor: torch.Tensor, slots: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Return a copy of a layer's keys or values at flat slots: [*slots, kv_heads, head_dim].

        `tensor`: a tensor of this pool. `dtype`: the model's.
        """
        rows = tensor.flatten(0, 1)[slots]
        if self.layout.packed == "Model":
            return rows
        return packing.unpack(rows, packing.values_of(rows.shape[-1]), dtype, self.layout.packed)

    def struct(self, layer: int) -> PoolStruct:
        """Return a layer in the form that the CPU kernels read. It must not outlive the pool."""
        return PoolStruct.of(self.keys[layer], self.values[layer], self.layout.packed)

    def slots(self, blocks: Sequence[int], start: int, end: int) -> list[int]:
        """Return the flat slots (block * block_tokens + offset) of tokens [start, end) of a sequence with these blocks."""
        size = self.block_tokens
        return [blocks[position // size] * size + position % size for position in range(start, end)]

    def read(self, blocks: Sequence[int], start: int, end: int) -> list[torch.Tensor]:
        """Copy the KV of tokens [start, end) in the canonical layout. The layers are adjacent in one buffer."""
        index = torch.tensor(self.slots(blocks, start, end), device=self.device)
        shapes = [(2, end - start, *keys.shape[2:]) for keys in self.keys]
        sizes = [prod(shape) for shape in shapes]
        buffer = torch.empty(sum(sizes), dtype=self.keys[0].dtype, device=self.device)
        layers = [part.view(shape) for part, shape in zip(torch.split(buffer, sizes), shapes, strict=True)]
        for keys, values, out in zip(self.keys, self.values, layers, strict=True):
            torch.index_select(keys.flatten(0, 1), 0, index, out=out[0])
            torch.index_select(values.flatten(0, 1), 0, index, out=out[1])
        return layers

    def write(self, blocks: Sequence[int], start: int, tensors: Sequence[torch.Tensor]) -> int:
        """Write canonical tensors on this pool's device to the tokens from `start` on. Returns the number of
        tokens written.

        Raises:
            CountMismatchError: the tensors do not have this pool's layers, heads or dimensions.
        """
        num_tokens = int(tensors[0].shape[1]) if tensors else 0
        expected = [
            (2, num_tokens, heads, dim)
            for heads, dim in zip(self.layout.num_kv_heads, self.layout.head_dim, strict=True)
        ]
        got = [tuple(tensor.shape) for tensor in tensors]
        dtypes = {tensor.dtype for tensor in tensors} - {keys.dtype for keys in self.keys}
        if got != expected or dtypes:
            raise CountMismatchError(
                f"KV of shapes {got} {dtypes or ''} does not fit this pool ({expected}, {self.layout.dtype}); both peers must "
                "run the same model"
            )
        index = torch.tensor(self.slots(blocks, start, start + num_tokens), device=self.device)
        for layer, tensor in enumerate(tensors):
            self.keys[layer].flatten(0, 1).index_copy_(0, index, tensor[0])
            self.values[layer].flatten(0, 1).index_copy_(0, index, tensor[1])
        return num_tokens

    def clear(self, blocks: Sequence[int]) -> None:
        """Zero these blocks, which is their initial state."""
        index = torch.tensor(list(blocks), device=self.device)
        for tensor in (*self.keys, *self.values):
            tensor.index_fill_(0, index, 0)
