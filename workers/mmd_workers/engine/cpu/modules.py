"""Replaces the slow modules of a float32 decoder or tower on a CPU: linear layers and RMS norms. Each is
checked numerically first."""

from __future__ import annotations

import types

import torch
from torch.nn import functional

from mmd_workers.engine.cpu.library import Library

TOLERANCE = 1e-5


class PackedLinear(torch.nn.Module):
    """A linear layer over packed weights, without the plain weight."""

    def __init__(self, linear: torch.nn.Linear, library: Library) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self._library = library
        self.register_buffer("packed", library.pack(linear.weight.detach()), persistent=False)
        self.register_buffer("bias", None if linear.bias is None else linear.bias.detach(), persistent=False)

    @property
    def weight(self) -> torch.Tensor:
        """Empty tensor: models use a layer's weight only for its dtype and device."""
        return torch.empty(0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map x [..., in_features] to [..., out_features]."""
        assert isinstance(self.packed, torch.Tensor)
        assert self.bias is None or isinstance(self.bias, torch.Tensor)
        return self._library.linear(x, self.packed, self.out_features, self.bias)


def pack_linears(model: torch.nn.Module, library: Library) -> int:
    """Replace every plain float32 `nn.Linear` below `model` that the kernels reproduce. Returns how many were replaced."""
    count = 0
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if type(child) is torch.nn.Linear and child.weight.dtype is torch.float32:
                packed = PackedLinear(child, library)
                if _reproduces(packed, child):
                    setattr(parent, name, packed)
                    count += 1
    return count


def _reproduces(packed: PackedLinear, plain: torch.nn.Linear) -> bool:
    """Return whether both layers agree on two rows, up to rounding."""
    probe = torch.linspace(-3, 5, 2 * plain.in_features).sin().view(2, -1)
    with torch.no_grad():
        expected = plain(probe)
        error = (packed(probe) - expected).abs().max()
    return bool(error <= 1e-4 * expected.abs().max())


def own_memory(model: torch.nn.Module) -> None:
    """Copy unpacked tensors out of the mapped checkpoint, so that it is freed: one view would keep all of it in memory."""
    for module in model.modules():
        for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False)):
            if tensor is not getattr(module, "packed", None):
                tensor.data = tensor.data.clone()


def norm_scale(module: torch.nn.Module) -> tuple[torch.Tensor, float] | None:
    """Return scale [dimensions] and epsilon with which PyTorch's `rms_norm` equals this RMS norm; None if
    there are none."""
    weight = getattr(module, "weight", None)
    eps = getattr(module, "variance_epsilon", getattr(module, "eps", None))
    if not type(module).__name__.endswith("RMSNorm") or weight is None or eps is None or weight.dim() != 1:
        return None
    probe = torch.linspace(-3, 5, 4 * weight.numel()).sin().view(4, -1) * 2
    with torch.no_grad():
        expected = module(probe)
        for offset in (0.0, 1.0):  # Llama's scale is the weight, Gemma's is 1 + weight
            scale = weight.detach() + offset if offset else weight.detach()
            if torch.allclose(
                functional.rms_norm(probe, weight.shape, scale, eps), expected, TOLERANCE, TOLERANCE
            ):
                return scale, float(eps)
    return None


def fuse_norms(decoder: torch.nn.Module) -> int:
    """Let RMS norms that equal PyTorch's fused `rms_norm` use it. Returns how many do."""
    count = 0
    for module in decoder.modules():
        if (scale_and_eps := norm_scale(module)) is not None:
            module.forward = types.MethodType(_rms_norm(*scale_and_eps), module)
            count += 1
    return count


def _rms_norm(scale: torch.Tensor, eps: float):  # type: ignore[no-untyped-def]
    def forward(self: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
        return functional.rms_norm(x, scale.shape, scale, eps)

    return forward
