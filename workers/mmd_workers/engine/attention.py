"""Attention over the block-paged KV pool, registered with transformers as `mmd_paged`, so that one engine serves every decoder.

Each layer writes its keys and values to the pool, and attends to those of its rows' sequences. A context
variable holds the running batch. Independent of architectures: refuses what it cannot compute exactly (sinks,
position biases).
"""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Iterator
from typing import Any, Protocol

import torch
from torch.nn import functional
from transformers import AttentionInterface

from mmd_api.contract.errors import UnsupportedModelError
from mmd_workers.engine.batch import Batch
from mmd_workers.engine.cpu import library as cpu_library
from mmd_workers.engine.cpu.library import Library
from mmd_workers.model.prompt import KvLayout

NAME = "mmd_paged"
_SERVED_LAYER_TYPES = {"full_attention", "sliding_attention"}


class Kernel(Protocol):
    """Computes the attention of one layer after its KV has been written."""

    def __call__(
        self,
        batch: Batch,
        layer: int,
        query: torch.Tensor,
        scale: float,
        window: int | None,
        softcap: float | None,
    ) -> torch.Tensor:
        """Map queries [rows, heads, dim] to outputs [rows, heads, dim]."""
        ...


_running: contextvars.ContextVar[tuple[Batch, Kernel]] = contextvars.ContextVar("mmd_paged_batch")


@contextlib.contextmanager
def running(batch: Batch, kernel: Kernel) -> Iterator[None]:
    """Make attention layers of this thread work on `batch`."""
    token = _running.set((batch, kernel))
    try:
        yield
    finally:
        _running.reset(token)


def current() -> Batch:
    """Return the batch that this thread's attention layers work on."""
    return _running.get()[0]


def paged_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attention function in transformers' signature.

    query: [1, heads, rows, dim]; key and value: [1, kv_heads, rows, dim]. Returns [1, rows, heads, dim].

    Raises:
        UnsupportedModelError: the layer has sinks or a position bias.
    """
    if kwargs.get("s_aux") is not None or kwargs.get("position_bias") is not None:
        raise UnsupportedModelError(
            "attention sinks and position biases are not supported by paged attention"
        )
    batch, kernel = _running.get()
    layer = int(module.layer_idx)  # type: ignore[arg-type]
    batch.pool.put(layer, batch.write_slots, key[0].transpose(0, 1), value[0].transpose(0, 1))
    scale = scaling if scaling is not None else query.shape[-1] ** -0.5
    rows = query[0].transpose(0, 1)
    return kernel(batch, layer, rows, scale, sliding_window, softcap)[None], None


AttentionInterface.register(NAME, paged_attention)
# No mask function is registered under this name, so transformers makes no mask: the batch makes its own.


def attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    scale: float,
    softcap: float | None,
) -> torch.Tensor:
    """Grouped-query attention: query [n, kv_heads, groups * rows, dim], key/value [n, kv_heads, context, dim], bool mask or None.

    Soft-capped scores take an explicit path with a float32 softmax, as in the models' own eager attention.
    """
    if softcap is None:
        return functional.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scale)
    scores = torch.matmul(query, key.transpose(-1, -2)) * scale
    scores = torch.tanh(scores / softcap) * softcap
    if mask is not None:
        scores = scores.masked_fill(~mask, torch.finfo(scores.dtype).min)
    weights = torch.softmax(scores, dim=-1, dtype=torch.float32).to(query.dtype)
    return torch.matmul(weights, value)


def torch_kernel(
    batch: Batch, layer: int, query: torch.Tensor, scale: float, window: int | None, softcap: float | None
) -> torch.Tensor:
    """Compute attention exactly on any device and dtype: single rows as one padded batch, each chunk separately."""
    pool, heads, dim = batch.pool, query.shape[1], query.shape[2]
    out = torch.empty_like(query, memory_format=torch.contiguous_format)
    if batch.num_single:
        slots = batch.single_slots()
        keys, values = (pool.at(tensor[layer], slots, query.dtype) for tensor in (pool.keys, pool.values))
        grouped = query[: batch.num_single].reshape(batch.num_single, keys.shape[2], -1, dim)
        mask = batch.single_mask(window)[:, None, None]
        result = attend(grouped, keys.transpose(1, 2), values.transpose(1, 2), mask, scale, softcap)
        out[: batch.num_single] = result.reshape(batch.num_single, heads, -1)
    _attend_chunks(batch, layer, query, scale, window, softcap, out)
    return out


def _attend_chunks(
    batch: Batch,
    layer: int,
    query: torch.Tensor,
    scale: float,
    window: int | None,
    softcap: float | None,
    out: torch.Tensor,
) -> None:
    pool = batch.pool
    groups = query.shape[1] // pool.layout.num_kv_heads[layer]
    for number, chunk in enumerate(batch.chunks()):
        mask = batch.chunk_mask(number, window)
        context_keys, context_values = (
            pool.at(tensor[layer], chunk.slots, query.dtype)
            .transpose(0, 1)
            .repeat_interleave(groups, 0)[None]
            for tensor in (pool.keys, pool.values)
        )
        rows = query[chunk.start : chunk.end].transpose(0, 1)[None]
        if mask is None and softcap is None:
            result = functional.scaled_dot_product_attention(
                rows, context_keys, context_values, is_causal=True, scale=scale
            )
        else:
            if mask is None:
                size = chunk.end - chunk.start
                mask = torch.ones(size, size, dtype=torch.bool, device=query.device).tril()
            result = attend(rows, context_keys, context_values, mask, scale, softcap)
        out[chunk.start : chunk.end] = result[0].transpose(0, 1)


def compiled_kernel(library: Library) -> Kernel:
    """Return the CPU kernel for float32 models. Every row reads its context from the pool; nothing is copied."""

    def kernel(
        batch: Batch, layer: int, query: torch.Tensor, scale: float, window: int | None, softcap: float | None
    ) -> torch.Tensor:
        return library.attend(
            query, batch.pool.struct(layer), batch.step(), batch.visible(window), scale, softcap
        )

    return kernel


def select_kernel(layout: KvLayout, device: torch.device) -> Kernel:
    """Return the fastest kernel for a model of this layout on this device."""
    library = cpu_library.kernels(device, getattr(torch, layout.dtype))
    if library is not None and all(dim % 16 == 0 for dim in layout.head_dim):
        return compiled_kernel(library)
    return torch_kernel


def install(decoder: torch.nn.Module) -> None:
    """Make a transformers decoder use the paged attention.

    Raises:
        UnsupportedModelError: the decoder has layers without plain KV, chunked attention or sinks; the message names them.
    """
    config = decoder.config
    unserved = set(getattr(config, "layer_types", None) or ()) - _SERVED_LAYER_TYPES
    if unserved:
        raise UnsupportedModelError(
            f"{type(decoder).__name__} has layers of type {', '.join(sorted(unserved))}; "
            f"only {', '.join(sorted(_SERVED_LAYER_TYPES))} are supported with a paged KV pool"
        )
    if any(getattr(module, "sinks", None) is not None for module in decoder.modules()):
        raise UnsupportedModelError(f"{type(decoder).__name__} has attention sinks, which are not supported")
    if any(getattr(module, "is_kv_shared_layer", False) for module in decoder.modules()):
        raise UnsupportedModelError(
            f"{type(decoder).__name__} has layers that share KV, which are not supported"
        )
    decoder.set_attn_implementation(NAME)  # type: ignore[operator]
