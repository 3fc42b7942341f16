"""Lets the CPU kernels compute whole decoder layers, after checking that each yields the same numbers as the
layer's own code.

The decoder runs two steps with its own code, and the kernels recompute each layer from its recorded inputs;
the outputs are compared. Such a check covers only the inputs that it tried, so a layer is also refused if it
takes or reads other inputs than the kernels know.
"""

from __future__ import annotations

import inspect
import itertools
import logging
import weakref
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Items
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NoReturn

import torch

from mmd_api.contract.errors import UnsupportedModelError
from mmd_workers.engine import attention
from mmd_workers.engine.batch import Batch
from mmd_workers.engine.cpu import library as cpu_library
from mmd_workers.engine.cpu.layer import AttentionCall, PackedLayer, PackedLayers, UnsuitedLayerError
from mmd_workers.engine.cpu.library import Library, PoolStruct
from mmd_workers.engine.cpu.modules import PackedLinear, fuse_norms, pack_linears
from mmd_workers.engine.interface import SamplingParams
from mmd_workers.engine.memory.kv_pool import KvPool
from mmd_workers.engine.pieces import Work
from mmd_workers.engine.sequence import Sequence
from mmd_workers.model.interfaces import LanguageModel

log = logging.getLogger(__name__)

TOLERANCE = 3e-4
"""Largest difference of the kernels, relative to what a layer adds to a row (root mean squares). Rounding causes 1e-6."""
ROUNDING = 1e-6
"""Rounding error relative to the row itself, which may be much larger than what a layer adds."""
MODEL_TOLERANCE = 1e-2
"""Largest relative difference of a row that the whole decoder returns: rounding errors grow over many layers."""
BLOCK_TOKENS = 20
"""More than the lanes of a vector, and not a multiple of them."""
LONG_CONTEXT = 150
"""More than two of the tiles in which the kernels read a context."""
SHORT_WINDOW = 70
"""The check narrows windows to this: more than a tile and less than the context."""
USED = frozenset({"hidden_states", "position_embeddings"})
"""Inputs of a layer that the kernels use."""
GIVEN = USED | {
    *("attention_mask", "position_ids", "cache_position", "past_key_value", "past_key_values", "use_cache"),
    "output_attentions",
}
"""Keyword inputs that a decoder may give a layer and its attention. The layer must not read tensors outside USED."""


Steps = tuple[tuple[tuple[int, int], tuple[int, int]], ...]
"""Token ranges [start, end) of two sequences in each step."""


def check_steps(threads: int) -> Steps:
    """Return the two steps of the check.

    The first has two prompts, with so many rows that the kernels split work by rows, in several blocks per
    thread. The second has a token of one sequence and a chunk of the other; the kernels split it by columns.
    """
    many = max(LONG_CONTEXT, 16 * threads + 32)
    return ((0, many), (0, 6)), ((many, many + 1), (6, 11))


class FusedForward:
    """Replaces the `forward` of one layer or of several consecutive ones. Layers after the first return their input."""

    def __init__(self, packed: Items[PackedLayer], indices: Items[int], library: Library) -> None:
        """`indices`: indices of the layers in the pool."""
        self.packed = packed
        self.indices = indices
        self._layers = PackedLayers(packed, library)
        self._pool_ref: weakref.ref[KvPool] | None = None  # a model must not keep an engine's pool alive
        self._pools = (PoolStruct * len(indices))()

    def __call__(
        self,
        hidden_states: torch.Tensor,
        position_embeddings: tuple[torch.Tensor, torch.Tensor],
        **_: Any,
    ) -> torch.Tensor:
        """Compute the layers for hidden states [1, rows, hidden] of the running batch. `position_embeddings`:
        cos and sin [1, rows, dim]."""
        batch = attention.current()
        if self._pool_ref is None or self._pool_ref() is not batch.pool:
            self._pool_ref = weakref.ref(batch.pool)
            structs = (batch.pool.struct(i) for i in self.indices)
            self._pools = (PoolStruct * len(self.indices))(*structs)
        cos, sin = position_embeddings
        rows = hidden_states[0]
        return self._layers.run(rows, (cos[0], sin[0]), self._pools, batch.step(), batch.visible)[None]


def passed(hidden_states: torch.Tensor, **_: Any) -> torch.Tensor:
    """`forward` of a layer that an earlier layer's `forward` has already computed."""
    return hidden_states


def is_fused(layer: torch.nn.Module) -> bool:
    """Return whether the kernels compute this layer."""
    return layer.forward is passed or isinstance(layer.forward, FusedForward)


@dataclass(slots=True)
class _LayerRecord:
    """Inputs and outputs of one layer in each step, and its call of attention."""

    given: list[tuple[tuple[Any, ...], dict[str, Any]]] = field(default_factory=list)
    inputs: list[torch.Tensor] = field(default_factory=list)
    rotary: list[tuple[torch.Tensor, torch.Tensor] | None] = field(default_factory=list)
    outputs: list[torch.Tensor] = field(default_factory=list)
    call: AttentionCall | None = None


@dataclass(slots=True)
class _StepRecord:
    """Input and output of the decoder in one step."""

    given: tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]
    output: torch.Tensor


class _CheckBatch(Batch):
    """Batch of the check, with windows narrower than its short contexts. Otherwise a window would have no effect."""

    def visible(self, window: int | None) -> torch.Tensor:
        return super().visible(_narrow(window))

    def single_mask(self, window: int | None) -> torch.Tensor:
        return super().single_mask(_narrow(window))

    def chunk_mask(self, number: int, window: int | None) -> torch.Tensor | None:
        return super().chunk_mask(number, _narrow(window))


def _narrow(window: int | None) -> int | None:
    return None if window is None else min(window, SHORT_WINDOW)


def prepare(model: LanguageModel, *, fused_layers: bool = True) -> None:
    """Give a decoder the paged attention and, in float32 on a CPU, the kernels.

    The kernels compute whole layers where they can and `fused_layers` is set, otherwise linear layers and
    norms. A prepared decoder stays as it is.

    Raises:
        UnsupportedModelError: the decoder cannot be served from a paged KV pool.
    """
    attention.install(model.decoder)
    library = cpu_library.kernels(model.device, model.dtype)
    if library is not None and fused_layers:
        fuse_layers(model, library)
    if library is not None:
        pack_linears(model.decoder, library)
        fuse_norms(model.decoder)


def fused_heads(decoder: torch.nn.Module) -> dict[int, int]:
    """Return the number of heads of each fused layer, by its index in the pool."""
    forwards = [module.forward for module in decoder.modules()]
    return {
        index: packed.call.heads
        for forward in forwards
        if isinstance(forward, FusedForward)
        for index, packed in zip(forward.indices, forward.packed, strict=True)
    }


def fuse_layers(model: LanguageModel, library: Library) -> int:
    """Let the kernels compute every decoder layer that they can, and return how many these are.

    The other layers stay as they are; the log has the reasons. A fused layer's own weights are removed.
    """
    layers = getattr(model.decoder, "layers", None)
    prepared = any(isinstance(module, PackedLinear) for module in model.decoder.modules())
    if prepared or not isinstance(layers, torch.nn.ModuleList) or any(map(is_fused, layers)):
        return 0
    with torch.inference_mode():
        batches = _batches(model, check_steps(torch.get_num_threads()))
        try:
            records, step_records = _observe(model, list(layers), batches)
        except UnsupportedModelError:
            raise
        except Exception:
            log.warning("decoder layers run module by module: they cannot be checked", exc_info=True)
            return 0
        reasons: dict[str, list[int]] = {}
        for number, (layer, record) in enumerate(zip(layers, records, strict=True)):
            forward_before = vars(layer).get("forward")
            try:
                _fuse(layer, record, library, batches)
            except Exception as error:
                vars(layer).pop("forward", None)
                if forward_before is not None:
                    layer.forward = forward_before
                unsuited = isinstance(error, UnsuitedLayerError)
                if not unsuited:
                    log.warning("decoder layer %d cannot be checked", number, exc_info=True)
                reason = str(error) if unsuited else f"the check failed with {type(error).__name__}"
                reasons.setdefault(reason, []).append(number)
                continue
            for name, _ in list(layer.named_children()):
                delattr(layer, name)
        _join_checked(list(layers), records, library, partial(_compare, model, step_records, batches))
    for reason, numbers in reasons.items():
        log.info("decoder layers %s run module by module: %s", _ranges(numbers), reason)
    count = len(layers) - sum(len(numbers) for numbers in reasons.values())
    log.info("%d of %d decoder layers run as one call of the CPU kernels", count, len(layers))
    return count


def _follows(record: _LayerRecord, previous: _LayerRecord) -> bool:
    """Return whether a layer's input is exactly the previous layer's output, with the same rotary positions."""
    return all(a is b for a, b in zip(record.inputs, previous.outputs, strict=True)) and all(
        a is not None and b is not None and a[0] is b[0] and a[1] is b[1]
        for a, b in zip(record.rotary, previous.rotary, strict=True)
    )


def _join(layers: Items[torch.nn.Module], records: Items[_LayerRecord], library: Library) -> None:
    """Let the first of several consecutive fused layers compute all of them."""
    run: list[torch.nn.Module] = []
    for number, layer in enumerate(layers):
        if not isinstance(layer.forward, FusedForward):
            run = []
            continue
        if run and _follows(records[number], records[number - 1]):
            first = run[0].forward
            assert isinstance(first, FusedForward)
            if first.packed[0].geometry == layer.forward.packed[0].geometry:
                run[0].forward = FusedForward(
                    [*first.packed, *layer.forward.packed], [*first.indices, *layer.forward.indices], library
                )
                layer.forward = passed
                run.append(layer)
                continue
        run = [layer]


def _join_checked(
    layers: Items[torch.nn.Module],
    records: Items[_LayerRecord],
    library: Library,
    difference: Callable[[], float],
) -> None:
    """Join layers, unless the decoder's output then differs from that of its own code."""
    separate_forwards = [layer.forward for layer in layers]
    if not any(isinstance(forward, FusedForward) for forward in separate_forwards):
        return
    _join(layers, records, library)
    if (joined_difference := difference()) <= MODEL_TOLERANCE:
        return
    for layer, forward in zip(layers, separate_forwards, strict=True):
        if isinstance(forward, FusedForward):
            layer.forward = forward
    log.warning(
        "with all layers in one call the decoder returns something else (%.1g of it); each is a call of its own, which differs by %.1g",
        joined_difference,
        difference(),
    )


def _compare(
    model: LanguageModel, step_records: Items[_StepRecord], batches: Callable[[], Iterator[Batch]]
) -> float:
    """Return the largest relative difference of a row between the decoder's present and recorded outputs."""
    worst = 0.0
    for batch, step in zip(batches(), step_records, strict=True):
        with attention.running(batch, attention.torch_kernel):
            output = model.forward(*step.given)
        error = _root_mean_square(output - step.output) / _root_mean_square(step.output)
        worst = max(worst, _largest(error))
    return worst


def _batches(model: LanguageModel, steps: Steps) -> Callable[[], Iterator[Batch]]:
    """Return a function that makes the steps' batches, on an empty pool each time."""

    def make() -> Iterator[Batch]:
        blocks = [-(-ends[-1][1] // BLOCK_TOKENS) for ends in zip(*steps, strict=True)]
        pool = KvPool(model.kv_layout, sum(blocks), BLOCK_TOKENS, model.device)
        numbers = iter(reversed(range(sum(blocks))))
        sequences = [
            Sequence(
                "",
                0,
                [0] * steps[-1][n][1],
                0,
                0,
                SamplingParams(1),
                [],
                None,
                blocks=[next(numbers) for _ in range(count)],
            )
            for n, count in enumerate(blocks)
        ]
        for step in steps:
            work = [Work(s, *ends) for s, ends in zip(sequences, step, strict=True)]
            yield _CheckBatch(pool, work)

    return make


def _observe(
    model: LanguageModel, layers: list[torch.nn.Module], batches: Callable[[], Iterator[Batch]]
) -> tuple[list[_LayerRecord], list[_StepRecord]]:
    """Run the steps with the decoder's own code, and record its layers and outputs."""
    step_records: list[_StepRecord] = []
    records = [_LayerRecord() for _ in layers]
    by_index = {
        index: record
        for layer, record in zip(layers, records, strict=True)
        if (index := _index(layer)) is not None
    }

    def kernel(
        batch: Batch, layer: int, query: torch.Tensor, scale: float, window: int | None, softcap: float | None
    ) -> torch.Tensor:
        if layer in by_index:
            by_index[layer].call = AttentionCall(query.shape[1], query.shape[2], scale, window, softcap)
        return attention.torch_kernel(batch, layer, query, scale, window, softcap)

    generator = torch.Generator().manual_seed(0)
    with _watched(layers, records):
        for number, batch in enumerate(batches()):
            ids = torch.randint(model.vocab_size, (batch.num_rows,), generator=generator)
            embeds, extras = model.embed(ids)
            # Not zeros: what a decoder adds between two layers must have an effect.
            extras = {name: torch.randn(tensor.shape, generator=generator) for name, tensor in extras.items()}
            positions = _positions(model, batch, number)
            with attention.running(batch, kernel):
                output = model.forward(embeds, positions, extras)
            step_records.append(_StepRecord((embeds, positions, extras), output))
    return records, step_records


def _positions(model: LanguageModel, batch: Batch, step: int) -> torch.Tensor:
    """Return rotary positions [axes, rows] of a step's rows.

    They need not match the rows' slots: the first step has positions in the lower half of the model's range,
    the second in the upper half.
    """
    low, high = (model.max_model_len * part // 2 for part in (step, step + 1))
    last = max(low, high - 1)
    lengths = batch.query_starts.diff().tolist()
    spread = [low + (last - low) * torch.arange(1, length + 1) // length for length in lengths]
    # Axes differ, so that a dimension that takes its position from the wrong axis shows.
    return torch.stack([(torch.cat(spread) - 3 * axis).clamp(min=low) for axis in range(model.position_axes)])


@contextmanager
def _watched(layers: list[torch.nn.Module], records: list[_LayerRecord]) -> Iterator[None]:
    def watch(record: _LayerRecord) -> Callable[..., None]:
        def hook(_: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
            record.given.append((args, kwargs))
            record.inputs.append(args[0] if args else kwargs["hidden_states"])
            record.rotary.append(kwargs.get("position_embeddings"))
            record.outputs.append(output)

        return hook

    handles = [
        layer.register_forward_hook(watch(record), with_kwargs=True)
        for layer, record in zip(layers, records, strict=True)
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _index(layer: torch.nn.Module) -> int | None:
    """Return the index of the pool layer that a decoder layer's attention uses."""
    return getattr(getattr(layer, "self_attn", None), "layer_idx", None)


def _fuse(
    layer: torch.nn.Module, record: _LayerRecord, library: Library, batches: Callable[[], Iterator[Batch]]
) -> None:
    """Give a layer the kernels' forward, and check it with the recorded calls. The layer keeps its modules.

    Raises:
        UnsuitedLayerError: the kernels do not compute this layer, or not the same numbers.
    """
    index = _index(layer)
    if index is None or record.call is None:
        raise UnsuitedLayerError(f"{type(layer).__name__} has no attention of its own")
    if any(rotary is None or rotary[0].shape[-1] != record.call.dim for rotary in record.rotary):
        raise UnsuitedLayerError(
            f"{type(layer).__name__} has no rotary positions for all dimensions of a head"
        )
    if not all(isinstance(recorded_output, torch.Tensor) for recorded_output in record.outputs):
        raise UnsuitedLayerError(f"{type(layer).__name__} returns more than hidden states")
    _refuse_other_inputs(layer, record, batches)
    packed = PackedLayer(layer, library, record.call)
    _refuse_other_shapes(packed, index, record, next(batches()).pool)
    layer.forward = FusedForward([packed], [index], library)
    worst = 0.0
    for batch, (args, kwargs), hidden_input, expected in zip(
        batches(), record.given, record.inputs, record.outputs, strict=True
    ):
        with attention.running(batch, attention.torch_kernel):
            output = layer(*args, **kwargs)
        rounding = ROUNDING * _root_mean_square(expected)
        error = (_root_mean_square(output - expected) - rounding) / _root_mean_square(expected - hidden_input)
        worst = max(worst, _largest(error))
    if worst > TOLERANCE:
        raise UnsuitedLayerError(
            f"the kernels differ from {type(layer).__name__} by more than {TOLERANCE:.0e} of what it adds"
        )


def _refuse_other_shapes(packed: PackedLayer, index: int, record: _LayerRecord, pool: KvPool) -> None:
    """Check sizes, because the kernels read memory by those of the layer.

    Raises:
        UnsuitedLayerError: the pool, hidden states or rotary positions have other sizes.
    """
    hidden, _, kv_heads, dim, _ = packed.geometry
    for tensor in (pool.keys[index], pool.values[index]):
        if tensor.shape[2:] != (kv_heads, dim) or tensor.dtype is not torch.float32:
            raise UnsuitedLayerError(f"its pool has heads {list(tensor.shape[2:])}, not {[kv_heads, dim]}")
    for rows, rotary in zip(record.inputs, record.rotary, strict=True):
        assert rotary is not None
        expected = [(rows, (1, rows.shape[1], hidden)), *((part, (1, rows.shape[1], dim)) for part in rotary)]
        for tensor, shape in expected:
            if tensor.shape != shape or tensor.dtype is not torch.float32:
                raise UnsuitedLayerError(
                    f"it is given {tensor.dtype} {list(tensor.shape)}, not float32 {list(shape)}"
                )


class _Unread(torch.Tensor):
    """Stands for a tensor that must not be read: every operation on it, and any use of an attribute, is an error."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> NoReturn:
        """Refuse every operation."""
        raise _ReadError


class _ReadError(Exception):
    """A layer has read a tensor that it must not read."""


def _refuse_other_inputs(
    layer: torch.nn.Module, record: _LayerRecord, batches: Callable[[], Iterator[Batch]]
) -> None:
    """Refuse a layer with inputs that the kernels ignore. No comparison shows their effect: it may begin at position 1000.

    Raises:
        UnsuitedLayerError: a layer or its attention takes inputs of other names, or reads a tensor that the kernels do not.
    """
    for module in (layer, layer.get_submodule("self_attn")):
        parameters = list(inspect.signature(type(module).forward).parameters.values())[1:]
        named = {parameter.name for parameter in parameters if parameter.kind is not parameter.VAR_KEYWORD}
        if other := sorted(named - GIVEN):
            raise UnsuitedLayerError(f"{type(module).__name__} takes {', '.join(other)}")
    *_, batch = batches()
    args, kwargs = record.given[-1]
    for name, value in kwargs.items():
        if name in USED or not isinstance(value, torch.Tensor):
            continue
        with attention.running(batch, attention.torch_kernel):
            try:
                layer(*args, **kwargs | {name: torch.empty(0).as_subclass(_Unread)})
            except _ReadError:
                raise UnsuitedLayerError(f"{type(layer).__name__} reads {name}") from None


def _largest(errors: torch.Tensor) -> float:
    return float(errors.max()) if bool(torch.isfinite(errors).all()) else float("inf")


def _root_mean_square(x: torch.Tensor) -> torch.Tensor:
    return x.square().mean(dim=-1).sqrt()


def _ranges(numbers: list[int]) -> str:
    """Format [0, 1, 2, 5] as "0-2, 5"."""
    runs = itertools.groupby(enumerate(numbers), key=lambda pair: pair[1] - pair[0])
    ends = [[pair[1] for pair in run] for _, run in runs]
    return ", ".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in ends)
