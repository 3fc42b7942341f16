"""Whole decoder layers as one call of the CPU kernels. Checks that a layer has the supported structure, and
packs its weights.

`engine.fusion` checks that a layer with this structure also computes the same numbers.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch.nn import functional

from mmd_workers.engine.cpu.library import (
    LayerStruct,
    Library,
    LinearStruct,
    NormStruct,
    PoolStruct,
    StepStruct,
)
from mmd_workers.engine.cpu.modules import norm_scale
from mmd_workers.engine.cpu.pages import use_huge_pages

ACTIVATIONS: tuple[Callable[[torch.Tensor], torch.Tensor], ...] = (
    functional.silu,
    lambda x: functional.gelu(x, approximate="tanh"),
)
"""Activations; the index is their number in layer.h."""
NORMS = {
    frozenset({"input_layernorm", "post_attention_layernorm"}): {
        "before_attention": "input_layernorm",
        "before_mlp": "post_attention_layernorm",
    },
    frozenset(
        {
            *("input_layernorm", "post_attention_layernorm"),
            *("pre_feedforward_layernorm", "post_feedforward_layernorm"),
        }
    ): {
        "before_attention": "input_layernorm",
        "after_attention": "post_attention_layernorm",
        "before_mlp": "pre_feedforward_layernorm",
        "after_mlp": "post_feedforward_layernorm",
    },
}
"""Position of each norm, by the set of norms that a layer has."""
PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj")
FEED_FORWARD = ("gate_proj", "up_proj", "down_proj")


class UnsuitedLayerError(Exception):
    """The kernels do not compute this layer; the message is the reason."""


@dataclass(frozen=True, slots=True)
class AttentionCall:
    """Call of attention by a layer's own code: heads and dimension of the queries, and the computation of scores."""

    heads: int
    dim: int
    scale: float
    window: int | None
    softcap: float | None


class PackedLayer:
    """Packed weights of a decoder layer. `struct`: the form that the kernels read, valid as long as this object."""

    def __init__(self, layer: torch.nn.Module, library: Library, call: AttentionCall) -> None:
        """Pack copies of the weights.

        Raises:
            UnsuitedLayerError: the kernels do not compute a layer of this structure.
        """
        self.call = call
        self._library = library
        self._tensors: list[torch.Tensor] = []  # the struct has their addresses
        parts = dict(layer.named_children())
        attention, mlp = parts.pop("self_attn", None), parts.pop("mlp", None)
        if attention is None or mlp is None or frozenset(parts) not in NORMS:
            raise UnsuitedLayerError(f"{type(layer).__name__} consists of {_names(layer)}")
        projections = dict(attention.named_children())
        norms = {name: projections.pop(f"{name}_norm", None) for name in ("q", "k")}
        if set(projections) != set(PROJECTIONS):
            raise UnsuitedLayerError(f"{type(attention).__name__} consists of {_names(attention)}")
        feed_forward = dict(mlp.named_children())
        activation = feed_forward.pop("act_fn", None)
        if set(feed_forward) != set(FEED_FORWARD) or activation is None:
            raise UnsuitedLayerError(f"{type(mlp).__name__} consists of {_names(mlp)}")
        for module in (layer, attention, mlp):
            if parameters := [name for name, _ in module.named_parameters(recurse=False)]:
                raise UnsuitedLayerError(
                    f"{type(module).__name__} has parameters of its own: {', '.join(parameters)}"
                )
        if call.dim % 16:
            raise UnsuitedLayerError(f"its heads have {call.dim} dimensions, not a multiple of 16")
        q, k, v, o, gate, up, down = (
            _linear(name, child)
            for name, child in zip(
                (*PROJECTIONS, *FEED_FORWARD),
                (
                    *(projections[name] for name in PROJECTIONS),
                    *(feed_forward[name] for name in FEED_FORWARD),
                ),
                strict=True,
            )
        )
        _same_sizes(call, (q, k, v, o), (gate, up, down))
        weights = {
            "qkv": (library.pack(torch.cat([p.weight.detach() for p in (q, k, v)])), _biases([q, k, v])),
            "out": (library.pack(o.weight.detach()), _biases([o])),
            # Panels of gate and up alternate, so that one pass yields both for the same columns.
            "gate_up": (
                torch.stack([library.pack(p.weight.detach()) for p in (gate, up)], dim=1).flatten(0, 1),
                self._alternating_biases(gate, up),
            ),
            "down": (library.pack(down.weight.detach()), _biases([down])),
        }
        rows = {"qkv": q.out_features + 2 * k.out_features, "out": o.out_features, "down": down.out_features}
        norm_positions = NORMS[frozenset(parts)]
        self.struct = LayerStruct(
            hidden=q.in_features,
            heads=call.heads,
            kv_heads=k.out_features // call.dim,
            dim=call.dim,
            inner=gate.out_features,
            scale=call.scale,
            softcap=call.softcap or 0.0,
            activation=_activation(activation),
            **{place: self._norm(parts[name], q.in_features) for place, name in norm_positions.items()},
            **{
                place: self._norm(norm, call.dim)
                for place, norm in (("query", norms["q"]), ("key", norms["k"]))
                if norm is not None
            },
        )
        buffer = use_huge_pages(torch.empty(sum(packed.numel() for packed, _ in weights.values())))
        self._tensors.append(buffer)
        for name, (packed, bias) in weights.items():
            target, buffer = buffer[: packed.numel()], buffer[packed.numel() :]
            target.copy_(packed.flatten())
            n = rows.get(name, packed.shape[0] * library.panel)
            address = 0 if bias is None else self._keep(bias)
            setattr(self.struct, name, LinearStruct(target.data_ptr(), address, n, packed.shape[1]))

    @property
    def geometry(self) -> tuple[int, ...]:
        """Sizes that all layers of one call share."""
        s = self.struct
        return s.hidden, s.heads, s.kv_heads, s.dim, s.inner

    def _keep(self, tensor: torch.Tensor) -> int:
        self._tensors.append(tensor)
        return tensor.data_ptr()

    def _alternating_biases(self, gate: torch.nn.Linear, up: torch.nn.Linear) -> torch.Tensor | None:
        """Return the biases of gate and up in the order of their panels, zero padded."""
        biases = _biases([gate, up])
        if biases is None:
            return None
        panel = self._library.panel
        padded = functional.pad(biases.view(2, -1), (0, -gate.out_features % panel))
        return padded.view(2, -1, panel).transpose(0, 1).contiguous()

    def _norm(self, norm: torch.nn.Module, size: int) -> NormStruct:
        plain = all(parameter.dtype is torch.float32 for parameter in norm.parameters())
        scale_and_eps = norm_scale(norm) if plain else None
        if scale_and_eps is None or scale_and_eps[0].numel() != size:
            raise UnsuitedLayerError(
                f"{type(norm).__name__} is not an RMS norm over {size} dimensions in float32"
            )
        scale, eps = scale_and_eps
        return NormStruct(self._keep(scale.contiguous()), eps)


class PackedLayers:
    """Consecutive layers of one geometry, computed by one call."""

    def __init__(self, layers: Sequence[PackedLayer], library: Library) -> None:
        self._layers = layers
        self._library = library
        self._structs = (LayerStruct * len(layers))(*(layer.struct for layer in layers))

    def run(
        self,
        x: torch.Tensor,
        rotary: tuple[torch.Tensor, torch.Tensor],
        pools: ctypes.Array[PoolStruct],
        step: StepStruct,
        visible: Callable[[int | None], torch.Tensor],
    ) -> torch.Tensor:
        """Map hidden states [rows, hidden] to those after the layers. Writes keys and values to the pools.

        `rotary`: cos and sin [rows, dim]. `visible`: returns for a window the positions that each row sees
        (int32 [rows, 2]).
        """
        cos, sin = rotary
        visible_ranges = [visible(layer.call.window) for layer in self._layers]
        return self._library.layers(
            self._structs, pools, step, visible_ranges, (cos.contiguous(), sin.contiguous()), x.contiguous()
        )


def _linear(name: str, module: torch.nn.Module) -> torch.nn.Linear:
    plain = type(module) is torch.nn.Linear and all(p.dtype is torch.float32 for p in module.parameters())
    if not plain:
        raise UnsuitedLayerError(f"its {name} is not a linear layer in float32")
    assert isinstance(module, torch.nn.Linear)
    return module


def _same_sizes(
    call: AttentionCall, projections: Sequence[torch.nn.Linear], feed_forward: Sequence[torch.nn.Linear]
) -> None:
    """Check sizes, because the kernels read each once and rely on it for all weights.

    Raises:
        UnsuitedLayerError: the size of a weight does not fit those of the others.
    """
    (q, k, v, o), (gate, up, down) = projections, feed_forward
    hidden, queries, keys, inner = q.in_features, call.heads * call.dim, k.out_features, gate.out_features
    expected = {"q_proj": (queries, hidden), "k_proj": (keys, hidden), "v_proj": (keys, hidden)}
    expected |= {"o_proj": (hidden, queries), "gate_proj": (inner, hidden), "up_proj": (inner, hidden)}
    expected |= {"down_proj": (hidden, inner)}
    for (name, shape), linear in zip(expected.items(), (q, k, v, o, gate, up, down), strict=True):
        if linear.weight.shape != shape:
            raise UnsuitedLayerError(f"its {name} is {list(linear.weight.shape)}, not {list(shape)}")
    if keys % call.dim or not keys or call.heads % (keys // call.dim):
        raise UnsuitedLayerError(f"its {keys} outputs of k_proj are no heads of {call.dim} for {call.heads}")


def _biases(linears: list[torch.nn.Linear]) -> torch.Tensor | None:
    """Return the concatenated biases, with zeros for layers without bias; None if no layer has one."""
    if all(linear.bias is None for linear in linears):
        return None
    return torch.cat(
        [
            linear.weight.new_zeros(linear.out_features) if linear.bias is None else linear.bias.detach()
            for linear in linears
        ]
    )


def _names(module: torch.nn.Module) -> str:
    return ", ".join(name for name, _ in module.named_children()) or "nothing"


def _activation(module: torch.nn.Module) -> int:
    probe = torch.linspace(-8, 8, 333)
    for number, function in enumerate(ACTIVATIONS):
        if torch.allclose(module(probe), function(probe), 1e-6, 1e-6):
            return number
    raise UnsuitedLayerError(f"its activation is {type(module).__name__}")
