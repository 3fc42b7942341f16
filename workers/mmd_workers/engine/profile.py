"""Measures how much memory a step takes beside weights and KV pool, by running the largest step the engine may schedule.

Runs on any device. On the meta device nothing is computed and only sizes count, so no weights are needed.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.fx.experimental import _config as fx_config
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from mmd_api.contract.errors import UnsupportedModelError
from mmd_api.contract.sampling import LogitRules
from mmd_api.spec.engine import KvDtype
from mmd_workers.engine import attention
from mmd_workers.engine.batch import Batch
from mmd_workers.engine.choosing.logit_rules import RuleState
from mmd_workers.engine.choosing.masks import Masks
from mmd_workers.engine.choosing.sampler import Draw, compute
from mmd_workers.engine.cpu import library as cpu_library
from mmd_workers.engine.fusion import fused_heads, prepare
from mmd_workers.engine.interface import SamplingParams
from mmd_workers.engine.memory.kv_pool import KvPool
from mmd_workers.engine.pieces import Work
from mmd_workers.engine.sequence import Sequence
from mmd_workers.model.interfaces import LanguageModel

MOST_LOGPROBS = 20
"""Most log probabilities that a request may ask for at each token."""
_MASK_ALIGNMENT = 16
"""Elements to which PyTorch's memory-efficient attention aligns the rows of masks."""


class LiveBytes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the bytes of tensors that operators create while the mode is active. `peak`: the most at one time.

    Workspaces inside an operator are not counted.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.peak = 0
        self._live = 0
        self._sizes: dict[int, int] = {}  # bytes of each storage; 0: created outside the mode

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operator and count the tensors it creates."""
        self._note((args, kwargs), created=False)
        experts = func is torch.ops.aten._grouped_mm.default and args[0].is_meta
        result = _experts_shape(*args[:2]) if experts else func(*args, **(kwargs or {}))
        self._note(result, created=True)
        return result

    def _note(self, tree: Any, *, created: bool) -> None:
        for leaf in pytree.tree_leaves(tree):
            if not isinstance(leaf, torch.Tensor):
                continue
            storage = leaf.untyped_storage()
            key = storage._cdata
            if key in self._sizes:
                continue
            self._sizes[key] = size = storage.nbytes() if created else 0
            weakref.finalize(storage, self._gone, key)
            self._live += size
            self.peak = max(self.peak, self._live)

    def _gone(self, key: int) -> None:
        self._live -= self._sizes.pop(key, 0)


def _experts_shape(rows: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Return an empty result of an expert layer for `rows` [rows, in] and `weights` [experts, in, out].

    On the meta device PyTorch supports this operator only for bfloat16.
    """
    return rows.new_empty(rows.shape[0], weights.shape[-1])


class _FusedAttention(TorchFunctionMode):
    """Allocates like PyTorch's attention on GPUs, and computes nothing.

    That attention keeps no scores. It converts a mask to the query's type, and copies it again if its rows are not aligned.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Allocate what attention would; run every other function."""
        if func is not functional.scaled_dot_product_attention:
            return func(*args, **(kwargs or {}))
        query, _, value = args
        mask = (kwargs or {}).get("attn_mask")
        if mask is not None:
            mask = torch.zeros_like(mask, dtype=query.dtype).masked_fill_(mask.logical_not(), -torch.inf)
            mask = functional.pad(mask, (0, _MASK_ALIGNMENT - mask.shape[-1] % _MASK_ALIGNMENT))
        return query.new_empty(*query.shape[:-1], value.shape[-1])


def fused_kernel(
    batch: Batch, layer: int, query: torch.Tensor, scale: float, window: int | None, softcap: float | None
) -> torch.Tensor:
    """Allocate like fused paged attention, such as vLLM's on GPUs: only the output. Computes nothing."""
    return torch.empty_like(query, memory_format=torch.contiguous_format)


def gpu_kernel(
    batch: Batch, layer: int, query: torch.Tensor, scale: float, window: int | None, softcap: float | None
) -> torch.Tensor:
    """Allocate like attention on GPUs, for a model on the meta device."""
    with _FusedAttention():
        return attention.torch_kernel(batch, layer, query, scale, window, softcap)


def activation_bytes(
    model: LanguageModel,
    *,
    chunk_tokens: int,
    max_sequences: int,
    block_tokens: int,
    max_model_len: int,
    kernel: attention.Kernel | None = None,
    kv_dtype: KvDtype = "Model",
) -> int:
    """Return the peak bytes of the largest step.

    The step has a prefill chunk that ends at `max_model_len`, and `max_sequences` decoding sequences that
    share a context of that length; all of them are sampled. `kernel`: attention of another device than the
    model's; None: the model's own. `kv_dtype`: data type of the pool.

    Raises:
        UnsupportedModelError: the decoder cannot be served from a paged KV pool, or a layer keeps its state elsewhere.
    """
    prepare(model)
    device = model.device
    step = partial(_run_largest_step, model, chunk_tokens, max_sequences, block_tokens, kernel, kv_dtype)
    if device.type == "cuda":
        step(max_model_len)  # libraries allocate their workspaces, which stay
        # PyTorch's attention copies a mask with unaligned rows. One of two context lengths that differ by 1 has such a mask.
        peak = max(
            _cuda_peak(partial(step, length), device) for length in (max_model_len, max(1, max_model_len - 1))
        )
        torch.cuda.empty_cache()
        return peak
    # The meta device cannot count the rows that a mask selects; in this run, masks select all rows.
    assume_set = fx_config.patch(meta_nonzero_assume_all_nonzero=True)  # type: ignore[attr-defined]
    with assume_set, LiveBytes() as live:
        heads = step(max_model_len)
    scores = 0
    if kernel is None and cpu_library.kernels(device, model.dtype) is not None:
        # For a single row, every thread of the CPU kernels keeps the scores of all heads, and never frees them.
        scores = torch.get_num_threads() * heads * max_model_len * torch.float32.itemsize
    return int(live.peak) + scores


def _cuda_peak(run: Callable[[], object], device: torch.device) -> int:
    """Return the most bytes that `run` held at one time, beyond what was allocated before."""
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    allocated_before = torch.cuda.memory_allocated(device)
    run()
    torch.cuda.synchronize(device)
    return int(torch.cuda.max_memory_allocated(device) - allocated_before)


def _run_largest_step(
    model: LanguageModel,
    chunk_tokens: int,
    max_sequences: int,
    block_tokens: int,
    kernel: attention.Kernel | None,
    kv_dtype: KvDtype,
    max_model_len: int,
) -> int:
    """Run the largest step, and return the largest number of heads of a layer.

    All sequences use the pool's block of zeros: only the amount that they read matters, not the content. An
    engine's pool has such a block too, beside the blocks that the KV pool's size is divided into.
    """
    device = model.device
    pool = KvPool(model.kv_layout.packed_as(kv_dtype), 0, block_tokens, device)
    chosen, ran = kernel or attention.select_kernel(model.kv_layout, device), dict[int, int]()

    def counting_kernel(
        batch: Batch, layer: int, query: torch.Tensor, scale: float, window: int | None, softcap: float | None
    ) -> torch.Tensor:
        ran[layer] = query.shape[1]
        return chosen(batch, layer, query, scale, window, softcap)

    context = min(max_model_len, max(2, max_model_len // max_sequences))
    chunk = min(chunk_tokens, max_model_len)
    work = [Work(_sequence(context, block_tokens), context - 1, context) for _ in range(max_sequences - 1)]
    work.append(Work(_sequence(max_model_len, block_tokens), max_model_len - chunk, max_model_len))
    batch = Batch(pool, work)
    rows = batch.num_rows
    # Not in inference mode, which does not decompose operators: tensors created inside them would not be counted.
    with torch.no_grad():
        embeds, extras = model.embed(torch.zeros(rows, dtype=torch.int64, device=device))
        positions = torch.zeros(rows, dtype=torch.int64, device=device).expand(model.position_axes, -1)
        with attention.running(batch, counting_kernel):
            hidden = model.forward(embeds, positions, extras)
        ran |= fused_heads(model.decoder)
        if len(ran) != model.kv_layout.num_layers:
            raise UnsupportedModelError(
                f"spec.model.id: only {len(ran)} of {model.kv_layout.num_layers} layers allow replacing their attention; choose another "
                "architecture"
            )
        last = hidden[torch.zeros(len(work), dtype=torch.int64, device=device)]
        logits = model.logits(last)
        draws = _costliest_draws(model, len(work), min(max_model_len, logits.shape[-1]))
        compute(logits, draws, Masks.of_all(*logits.shape))
    return max(ran.values())


def _costliest_draws(model: LanguageModel, count: int, prompt_tokens: int) -> list[Draw]:
    """Return the draws that take the most memory to sample.

    Rows with top-k, top-p or min-p are sorted; beside a row without, they are copied first. All rows have log
    probabilities, taken before rules change the logits. Each row penalizes `prompt_tokens` different prompt
    tokens.
    """
    cut = SamplingParams(
        max_tokens=1, temperature=1.0, top_k=50, top_p=0.9, min_p=0.1, logprobs=MOST_LOGPROBS
    )
    uncut = SamplingParams(max_tokens=1, temperature=1.0, logprobs=MOST_LOGPROBS)
    rules = LogitRules(logit_bias=[(0, 1.0)], repetition_penalty=1.1)
    return [
        Draw(
            uncut if row == 0 < count - 1 else cut,
            0,
            model.suppress_token_ids,
            RuleState(rules, 0, (), range(prompt_tokens)),
        )
        for row in range(count)
    ]


def _sequence(tokens: int, block_tokens: int) -> Sequence:
    blocks = [0] * -(-tokens // block_tokens)  # the number of the block of zeros in a pool of no other blocks
    return Sequence("profile", 0, [], 0, 0, SamplingParams(max_tokens=1), [], None, blocks=blocks)
