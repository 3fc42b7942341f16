"""How much memory a step takes in addition to weights and KV pool, from one run of the largest step that the engine may schedule.

Runs on any device, meta included: there nothing is computed and only sizes count, so no weights are needed.
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
"""That a request may ask for at each token."""
_MASK_ALIGNMENT = 16
"""Elements; of the rows of masks that PyTorch's memory-efficient attention takes."""


class LiveBytes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the bytes of tensors that operators make while it is active; `peak` is the most that lived at once.

    Workspaces inside an operator are not seen.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.peak = 0
        self._live = 0
        self._sizes: dict[int, int] = {}  # of the storages that have been seen; 0: made by others

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operator and count what it made."""
        self._note((args, kwargs), made=False)
        experts = func is torch.ops.aten._grouped_mm.default and args[0].is_meta
        result = _experts_shape(*args[:2]) if experts else func(*args, **(kwargs or {}))
        self._note(result, made=True)
        return result

    def _note(self, tree: Any, *, made: bool) -> None:
        for leaf in pytree.tree_leaves(tree):
            if not isinstance(leaf, torch.Tensor):
                continue
            storage = leaf.untyped_storage()
            key = storage._cdata
            if key in self._sizes:
                continue
            self._sizes[key] = size = storage.nbytes() if made else 0
            weakref.finalize(storage, self._gone, key)
            self._live += size
            self.peak = max(self.peak, self._live)

    def _gone(self, key: int) -> None:
        self._live -= self._sizes.pop(key, 0)


def _experts_shape(rows: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """What a layer of experts returns for `rows` [rows, in] and `weights` [experts, in, out]: PyTorch knows it on the meta device
    for bfloat16 only."""
    return rows.new_empty(rows.shape[0], weights.shape[-1])


class _FusedAttention(TorchFunctionMode):
    """PyTorch's attention as on GPUs: it keeps no scores, but makes a mask of the query's type, and another one where rows of that are
    not aligned. Computes nothing."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Allocate what attention does; run everything else."""
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
    """What fused paged attention, as vLLM's on GPUs, allocates: its output. Computes nothing."""
    return torch.empty_like(query, memory_format=torch.contiguous_format)


def gpu_kernel(
    batch: Batch, layer: int, query: torch.Tensor, scale: float, window: int | None, softcap: float | None
) -> torch.Tensor:
    """The attention of GPUs, for a model on the meta device: allocates what it does there."""
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
    """Peak bytes of one step: a chunk of prefill that ends at `max_model_len`, together with `max_sequences` decoding sequences that share
    a context of that length, all of them sampled. `kernel`: the attention of another device than the model's; default: its own. `kv_dtype`: of the pool.

    Raises:
        UnsupportedModelError: the decoder cannot be served from a paged KV pool, or a layer of it keeps its state elsewhere.
    """
    prepare(model)
    device = model.device
    step = partial(_run_largest_step, model, chunk_tokens, max_sequences, block_tokens, kernel, kv_dtype)
    if device.type == "cuda":
        step(max_model_len)  # libraries set up their workspaces, which stay
        # PyTorch's attention copies a mask whose rows are not aligned: of two contexts that differ by one token, one has such a mask.
        peak = max(
            _cuda_peak(partial(step, length), device) for length in (max_model_len, max(1, max_model_len - 1))
        )
        torch.cuda.empty_cache()
        return peak
    # On the meta device a mask's rows cannot be counted; those of this run are all set.
    assume_set = fx_config.patch(meta_nonzero_assume_all_nonzero=True)  # type: ignore[attr-defined]
    with assume_set, LiveBytes() as live:
        heads = step(max_model_len)
    scores = 0
    if kernel is None and cpu_library.kernels(device, model.dtype) is not None:
        # of a row alone, which every thread of the CPU kernels keeps for all heads, and never returns
        scores = torch.get_num_threads() * heads * max_model_len * torch.float32.itemsize
    return int(live.peak) + scores


def _cuda_peak(run: Callable[[], object], device: torch.device) -> int:
    """The most bytes that `run` held at once, in addition to what was there before."""
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    run()
    torch.cuda.synchronize(device)
    return int(torch.cuda.max_memory_allocated(device) - before)


def _run_largest_step(
    model: LanguageModel,
    chunk_tokens: int,
    max_sequences: int,
    block_tokens: int,
    kernel: attention.Kernel | None,
    kv_dtype: KvDtype,
    max_model_len: int,
) -> int:
    """All sequences share one block: only the amount that they read matters, not its content. Returns the most heads of a layer."""
    device = model.device
    pool = KvPool(model.kv_layout.packed_as(kv_dtype), 1, block_tokens, device)
    chosen, ran = kernel or attention.select_kernel(model.kv_layout, device), dict[int, int]()

    def noting(
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
    # Not in inference mode: it does not decompose operators, and tensors made inside them are not counted.
    with torch.no_grad():
        embeds, extras = model.embed(torch.zeros(rows, dtype=torch.int64, device=device))
        positions = torch.zeros(rows, dtype=torch.int64, device=device).expand(model.position_axes, -1)
        with attention.running(batch, noting):
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
    """What takes most memory to sample: rows that are cut are sorted, beside one that is not they are copied, and log probabilities are
    of all, before rules change the logits. Each row's prompt has so many different tokens, which are penalized."""
    cut = SamplingParams(
        max_tokens=1, temperature=1.0, top_k=50, top_p=0.9, min_p=0.1, logprobs=MOST_LOGPROBS
    )
    whole = SamplingParams(max_tokens=1, temperature=1.0, logprobs=MOST_LOGPROBS)
    rules = LogitRules(logit_bias=[(0, 1.0)], repetition_penalty=1.1)
    return [
        Draw(
            whole if row == 0 < count - 1 else cut,
            0,
            model.suppress_token_ids,
            RuleState(rules, 0, (), range(prompt_tokens)),
        )
        for row in range(count)
    ]


def _sequence(tokens: int, block_tokens: int) -> Sequence:
    blocks = [0] * -(-tokens // block_tokens)
    return Sequence("profile", 0, [], 0, 0, SamplingParams(max_tokens=1), [], None, blocks=blocks)
