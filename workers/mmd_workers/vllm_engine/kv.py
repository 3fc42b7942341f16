"""KV in vLLM's blocks, in the layout that pods exchange: for each layer [2, tokens, kv_heads, head_dim].

How a backend arranges a block is its own business, and on CPUs depends on the instruction set. Writing goes through the backend's own
function. For reading, that function is given numbers once: where each of them is found in a scratch block is the arrangement.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from mmd_api.contract.errors import UnsupportedModelError

DIGIT = 128  # what every floating-point type represents exactly


@dataclass(frozen=True)
class Half:
    """Where K, or V, of a block lies among the block's elements. `strides`: of (token, head, dim), where that describes it."""

    index: torch.Tensor  # int64 [block_tokens, kv_heads, head_dim]

    @cached_property
    def strides(self) -> tuple[int, int, int] | None:
        """Strides of (token, head, dim), if the elements are evenly spaced: then a view reads them, several times faster."""
        index = self.index
        found = tuple(
            int(index.select(axis, 1).flatten()[0] - index.flatten()[0]) if index.shape[axis] > 1 else 0
            for axis in range(3)
        )
        grids = torch.meshgrid(*(torch.arange(n) for n in index.shape), indexing="ij")
        even = sum(grid * stride for grid, stride in zip(grids, found, strict=True)) + index.flatten()[0]
        return (found[0], found[1], found[2]) if torch.equal(even, index) else None

    def of(self, blocks: torch.Tensor) -> torch.Tensor:
        """[blocks, block_tokens, kv_heads, head_dim] of contiguous blocks [blocks, elements]."""
        if self.strides is None:
            return blocks[:, self.index.to(blocks.device)]
        size, first = (blocks.shape[0], *self.index.shape), int(self.index.flatten()[0])
        return blocks.as_strided(size, (blocks.stride(0), *self.strides), blocks.storage_offset() + first)


class LayerKv:
    """One attention layer's KV."""

    def __init__(self, layer: Any) -> None:
        self.cache: torch.Tensor = (
            layer.kv_cache[0] if isinstance(layer.kv_cache, (list, tuple)) else layer.kv_cache
        )
        self.num_kv_heads = int(layer.impl.num_kv_heads)
        self.head_dim = int(layer.impl.head_size)
        self._layer = layer

    def halves(self, block_tokens: int) -> tuple[Half, Half]:
        """How a block of K and V is arranged.

        Raises:
            UnsupportedModelError: a block has anything besides K and V.
        """
        shape = (block_tokens, self.num_kv_heads, self.head_dim)
        count = block_tokens * self.num_kv_heads * self.head_dim
        numbers = torch.arange(2 * count)
        found = torch.zeros(self.cache[0].numel(), dtype=torch.int64)
        digits, remaining = 1, 2 * count
        while remaining:  # digit by digit: half-precision types cannot hold the numbers themselves
            written = self._scratch(((numbers // digits) % DIGIT).view(2, *shape), block_tokens)
            found += written.flatten().round().long() * digits
            digits, remaining = digits * DIGIT, remaining // DIGIT
        if not torch.equal(found.sort().values, numbers):
            raise UnsupportedModelError(
                f"spec.engine.type: a KV block of this model has {len(found)} elements for {2 * count} of K and V, so it cannot move between "
                "pods; omit spec.prefill, or set spec.engine.type: Native"
            )
        index = torch.empty_like(found)
        index[found] = numbers
        k, v = index.view(2, *shape)
        return Half(k), Half(v)

    def _scratch(self, values: torch.Tensor, block_tokens: int) -> torch.Tensor:
        scratch = torch.zeros_like(self.cache[:1])
        self._put(scratch, values.to(self.cache), torch.arange(block_tokens, device=self.cache.device))
        return scratch[0].cpu().float()

    def write(self, slots: torch.Tensor, values: torch.Tensor) -> None:
        """Write K and V [2, tokens, kv_heads, head_dim] to slots [tokens] of the pool."""
        self._put(self.cache, values.to(self.cache), slots.to(self.cache.device))

    def _put(self, cache: torch.Tensor, values: torch.Tensor, slots: torch.Tensor) -> None:
        self._layer.impl.do_kv_cache_update(
            self._layer, values[0].contiguous(), values[1].contiguous(), cache, slots
        )


class PagedKv:
    """The KV pool of one engine process, whose blocks have `block_tokens` tokens each."""

    def __init__(self, attention_layers: dict[str, Any], block_tokens: int) -> None:
        """`attention_layers`: vLLM's layers by name, in order; those that share another's KV have none of their own."""
        self.block_tokens = block_tokens
        own = [
            layer
            for layer in attention_layers.values()
            if hasattr(layer, "impl") and getattr(layer, "kv_sharing_target_layer_name", None) is None
        ]
        self.layers = [LayerKv(layer) for layer in own]
        arrangements: dict[tuple[int, ...], tuple[Half, Half]] = {}
        self._halves = [
            arrangements.setdefault(key, layer.halves(block_tokens))
            if (key := (*layer.cache.shape[1:], layer.num_kv_heads, layer.head_dim)) not in arrangements
            else arrangements[key]
            for layer in self.layers
        ]

    def read(self, block_ids: list[int], start: int, end: int) -> list[torch.Tensor]:
        """KV of tokens [start, end) of a sequence whose blocks these are; copies."""
        first, last = start // self.block_tokens, -(-end // self.block_tokens)
        skipped = start - first * self.block_tokens
        read = []
        for layer, halves in zip(self.layers, self._halves, strict=True):
            rows = torch.tensor(block_ids[first:last], device=layer.cache.device)
            blocks = layer.cache.index_select(0, rows).view(len(rows), -1)
            out = layer.cache.new_empty(2, end - start, layer.num_kv_heads, layer.head_dim)
            for half, target in zip(halves, out, strict=True):
                tokens = half.of(blocks).reshape(-1, layer.num_kv_heads, layer.head_dim)
                target.copy_(tokens[skipped : skipped + end - start])
            read.append(out)
        return read

    def write(self, block_ids: list[int], start: int, tensors: list[torch.Tensor]) -> None:
        """Write KV of the tokens from `start` on to a sequence's blocks."""
        positions = torch.arange(start, start + tensors[0].shape[1])
        blocks = torch.tensor(block_ids)[positions // self.block_tokens]
        slots = blocks * self.block_tokens + positions % self.block_tokens
        for layer, tensor in zip(self.layers, tensors, strict=True):
            layer.write(slots, tensor)

    def clear(self, block_ids: list[int]) -> None:
        """Zero blocks: what attention reads behind the last token must at least be finite."""
        for layer in self.layers:
            layer.cache[torch.tensor(block_ids, device=layer.cache.device)] = 0
