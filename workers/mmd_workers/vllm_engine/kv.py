"""Reads and writes KV in vLLM's blocks, in the layout that pods exchange: [2, tokens, kv_heads, head_dim] per layer.

Each backend arranges blocks in its own way, which on CPUs depends on the instruction set. So the backend's
own function writes numbers to a scratch block once, and their places show the arrangement. KV in 8 bits moves
unchanged, as bytes.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from mmd_api.contract.errors import UnsupportedModelError
from mmd_workers.kv.chunks import empty_range
from mmd_workers.model.prompt import KvLayout

DIGIT = 128  # numbers below it are exact in every floating-point type of 16 bits
SMALL_DIGIT = 8  # numbers below it are exact in those of 8 bits


@dataclass(frozen=True)
class Half:
    """Places of a block's K, or of its V, among the block's elements."""

    index: torch.Tensor  # int64 [block_tokens, kv_heads, head_dim]

    @cached_property
    def strides(self) -> tuple[int, int, int] | None:
        """Strides of (token, head, dim) if the elements are evenly spaced. A view then reads them, several times faster."""
        index = self.index
        strides = tuple(
            int(index.select(axis, 1).flatten()[0] - index.flatten()[0]) if index.shape[axis] > 1 else 0
            for axis in range(3)
        )
        grids = torch.meshgrid(*(torch.arange(n) for n in index.shape), indexing="ij")
        even = sum(grid * stride for grid, stride in zip(grids, strides, strict=True)) + index.flatten()[0]
        return (strides[0], strides[1], strides[2]) if torch.equal(even, index) else None

    def within(self, pool: torch.Tensor) -> torch.Tensor | None:
        """Return a view [blocks, block_tokens, kv_heads, head_dim] of a pool with any strides.

        None: the elements are not evenly spaced.
        """
        block = pool[0]
        places = torch.zeros(block.shape, dtype=torch.int64)
        for axis, (size, stride) in enumerate(zip(block.shape, block.stride(), strict=True)):
            steps = torch.arange(size) * stride
            places += steps.view([-1 if axis == other else 1 for other in range(block.dim())])
        spaced = Half(places.flatten()[self.index])
        if spaced.strides is None:
            return None
        shape, first = (len(pool), *self.index.shape), int(spaced.index.flatten()[0])
        return pool.as_strided(shape, (pool.stride(0), *spaced.strides), pool.storage_offset() + first)

    def of(self, blocks: torch.Tensor) -> torch.Tensor:
        """Return [blocks, block_tokens, kv_heads, head_dim] of contiguous blocks [blocks, elements]."""
        if self.strides is None:
            return blocks[:, self.index.to(blocks.device)]
        size, first = (blocks.shape[0], *self.index.shape), int(self.index.flatten()[0])
        return blocks.as_strided(size, (blocks.stride(0), *self.strides), blocks.storage_offset() + first)

    def put(self, blocks: torch.Tensor, values: torch.Tensor) -> None:
        """Write [blocks, block_tokens, kv_heads, head_dim] to contiguous blocks [blocks, elements]."""
        if self.strides is None:
            blocks[:, self.index.to(blocks.device)] = values
        else:
            self.of(blocks).copy_(values)


class LayerKv:
    """KV of one attention layer."""

    def __init__(self, layer: Any) -> None:
        self.cache: torch.Tensor = (
            layer.kv_cache[0] if isinstance(layer.kv_cache, (list, tuple)) else layer.kv_cache
        )
        self.num_kv_heads = int(layer.impl.num_kv_heads)
        self.head_dim = int(layer.impl.head_size)
        self._layer = layer
        self._is_8_bit = self.cache.dtype.itemsize == 1

    def halves(self, block_tokens: int) -> tuple[Half, Half]:
        """Find the places of K and V in a block.

        Raises:
            UnsupportedModelError: a block has anything besides K and V.
        """
        shape = (block_tokens, self.num_kv_heads, self.head_dim)
        count = block_tokens * self.num_kv_heads * self.head_dim
        numbers = torch.arange(2 * count)
        elements = self.cache[0].numel()
        number_at = torch.zeros(elements, dtype=torch.int64)
        digits, remaining, digit = 1, 2 * count, SMALL_DIGIT if self._is_8_bit else DIGIT
        while remaining and elements == 2 * count:  # digit by digit: no type holds the numbers themselves
            written = self._scratch(((numbers // digits) % digit).view(2, *shape))
            number_at += written.flatten().round().long() * digits
            digits, remaining = digits * digit, remaining // digit
        if not torch.equal(number_at.sort().values, numbers):
            raise UnsupportedModelError(
                f"spec.engine.type: a KV block of this model, {elements} elements for {2 * count} of K and V, is arranged in a way that is not "
                "understood, so it cannot move between pods; omit spec.prefill, or set spec.engine.type: Native"
            )
        index = torch.empty_like(number_at)
        index[number_at] = numbers
        k, v = index.view(2, *shape)
        return Half(k), Half(v)

    def _scratch(self, values: torch.Tensor) -> torch.Tensor:
        """Return a block to which the backend has written these K and V [2, block_tokens, kv_heads, head_dim]."""
        layer, cache = self._layer, self.cache
        scratch = torch.zeros_like(cache[:1])
        slots = torch.arange(values.shape[1], device=cache.device)
        if not self._is_8_bit:
            layer.impl.do_kv_cache_update(layer, *values.to(cache), scratch, slots)
            return scratch[0].cpu().float()
        # The backend divides by scales, which a checkpoint may have, and rounds.
        scales = (layer._k_scale_float, layer._v_scale_float)
        k, v = (
            half.to(cache.device, torch.bfloat16) * scale for half, scale in zip(values, scales, strict=True)
        )
        layer.impl.do_kv_cache_update(layer, k, v, scratch, slots)
        return scratch[0].cpu().view(_eight_bits(layer.impl.kv_cache_dtype)).float()


def _eight_bits(name: str) -> torch.dtype:
    return torch.float8_e5m2 if name == "fp8_e5m2" else torch.float8_e4m3fn


def one_dtype(of: Iterable[str]) -> str:
    """Return the data type of all layers.

    Raises:
        UnsupportedModelError: the layers have several data types, or there are no layers.
    """
    dtypes = sorted(set(of))
    if len(dtypes) != 1:
        raise UnsupportedModelError(
            f"spec.engine: KV of this model has the data types {', '.join(dtypes) or 'of no layer'}, and only one can move between pods; remove "
            "extraArgs that set another for some layers, or omit spec.prefill"
        )
    return dtypes[0]


class PagedKv:
    """KV pool of one engine process, with `block_tokens` tokens per block."""

    def __init__(self, attention_layers: dict[str, Any], block_tokens: int) -> None:
        """`attention_layers`: vLLM's layers by name, in order. Layers that share another's KV are skipped."""
        self.block_tokens = block_tokens
        kv_layers = [
            layer
            for layer in attention_layers.values()
            if hasattr(layer, "impl") and getattr(layer, "kv_sharing_target_layer_name", None) is None
        ]
        self.layers = [LayerKv(layer) for layer in kv_layers]
        arrangements: dict[tuple[int, ...], tuple[Half, Half]] = {}
        self._halves = [
            arrangements.setdefault(key, layer.halves(block_tokens))
            if (key := (*layer.cache.shape[1:], layer.num_kv_heads, layer.head_dim)) not in arrangements
            else arrangements[key]
            for layer in self.layers
        ]
        self._views = [
            self._view(layer.cache, halves) for layer, halves in zip(self.layers, self._halves, strict=True)
        ]

    @cached_property
    def layout(self) -> KvLayout:
        """Layout of all layers. The type of KV in 8 bits is uint8."""
        return KvLayout(
            len(self.layers),
            [layer.num_kv_heads for layer in self.layers],
            [layer.head_dim for layer in self.layers],
            one_dtype(str(layer.cache.dtype).removeprefix("torch.") for layer in self.layers),
        )

    def read(self, block_ids: list[int], start: int, end: int) -> list[torch.Tensor]:
        """Copy the KV of tokens [start, end) of a sequence with these blocks."""
        rows, skipped = self._rows(block_ids, start, end)
        slots = self._slots(rows, skipped, end - start)
        read = empty_range(self.layout, end - start, self._device) if self.layers else []
        for layer, halves, views, out in zip(self.layers, self._halves, self._views, read, strict=True):
            if views is not None:
                for view, target in zip(views, out, strict=True):
                    torch.ops.aten.index.Tensor_out(view, slots, out=target)
                continue
            blocks = self._blocks(layer, rows)
            for half, target in zip(halves, out, strict=True):
                tokens = half.of(blocks).reshape(-1, layer.num_kv_heads, layer.head_dim)
                target.copy_(tokens[skipped : skipped + end - start])
        return read

    def write(self, block_ids: list[int], start: int, tensors: list[torch.Tensor]) -> None:
        """Write the KV of the tokens from `start` on to a sequence's blocks."""
        count = tensors[0].shape[1]
        rows, skipped = self._rows(block_ids, start, start + count)
        slots = self._slots(rows, skipped, count)
        for layer, halves, views, tensor in zip(self.layers, self._halves, self._views, tensors, strict=True):
            new_values = tensor.to(layer.cache)
            if views is not None:
                for view, values in zip(views, new_values, strict=True):
                    view[slots] = values
                continue
            blocks = self._blocks(layer, rows)
            for half, values in zip(halves, new_values, strict=True):
                whole = half.of(blocks).clone(memory_format=torch.contiguous_format)
                whole.view(-1, layer.num_kv_heads, layer.head_dim)[skipped : skipped + count] = values
                half.put(blocks, whole)
            layer.cache.index_copy_(0, rows, blocks.view(-1, *layer.cache.shape[1:]))

    def clear(self, block_ids: list[int]) -> None:
        """Zero blocks, because attention may read beyond the last token, and must find finite numbers there."""
        blocks = torch.tensor(block_ids, dtype=torch.long, device=self._device)
        for layer in self.layers:
            layer.cache[blocks] = 0

    def _rows(self, block_ids: list[int], start: int, end: int) -> tuple[torch.Tensor, int]:
        """Return the blocks with these tokens, and the number of earlier tokens in the first block.

        The block numbers are copied to the device once for all layers: the engine's thread waits for such a copy.
        """
        first, last = start // self.block_tokens, -(-end // self.block_tokens)
        return torch.tensor(block_ids[first:last], device=self._device), start - first * self.block_tokens

    def _slots(self, rows: torch.Tensor, skipped: int, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return each token's block and its place in the block."""
        tokens = torch.arange(skipped, skipped + count, device=self._device)
        return rows[tokens // self.block_tokens], tokens % self.block_tokens

    @staticmethod
    def _view(cache: torch.Tensor, halves: tuple[Half, Half]) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Return views of a pool's K and V by (block, token), or None. With views, no block is copied to
        access a few tokens."""
        k, v = (half.within(cache) for half in halves)
        return None if k is None or v is None else (k, v)

    @property
    def _device(self) -> torch.device:
        return self.layers[0].cache.device

    @staticmethod
    def _blocks(layer: LayerKv, rows: torch.Tensor) -> torch.Tensor:
        """Return contiguous copies of blocks [blocks, elements], whatever strides the pool has."""
        return layer.cache.index_select(0, rows).view(len(rows), -1)
