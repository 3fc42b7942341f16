"""Rows of KV in 8 or 4 bits: the codes of one head of one token, their scale and, in 4 bits, their centre. Pure.

A packed row depends on its own values alone, so it is the same however a prompt is cut. A row with a value that is not finite becomes all NaN.
`engine/cpu/packed.h` computes the same bytes.
"""

from __future__ import annotations

import torch

from mmd_api.spec.transfer import KvWireFormat

_SCALE_BYTES = 2  # a bfloat16, whose range is that of float32
_LARGEST_CODE = {"Fp8": torch.finfo(torch.float8_e4m3fn).max, "Int8": 127.0, "Int4": 7.5}
_LARGEST_CENTRE = torch.finfo(torch.bfloat16).max


def row_bytes(head_dim: int, wire_format: KvWireFormat) -> int:
    """Bytes of one head of one token: its codes, its scale and, in 4 bits, the centre of its values."""
    if wire_format == "Int4":
        return (head_dim + 1) // 2 + 2 * _SCALE_BYTES
    return head_dim + _SCALE_BYTES


def values_of(num_bytes: int) -> int:
    """The number of values in an 8-bit row of this many bytes."""
    return num_bytes - _SCALE_BYTES


def pack(tensor: torch.Tensor, rows: torch.Tensor, wire_format: KvWireFormat) -> None:
    """Write values [..., head_dim] as rows, uint8 [..., bytes of a row]."""
    values, largest = tensor.float(), _LARGEST_CODE[wire_format]
    if wire_format == "Int4":
        low, high = values.aminmax(dim=-1, keepdim=True)
        centre = (low / 2 + high / 2).clamp(-_LARGEST_CENTRE, _LARGEST_CENTRE).bfloat16()
        middle = centre.float()
        values = values - middle
        scale = _scale(torch.maximum(high - middle, middle - low), largest)
        codes = _codes(values, scale, largest).add_(largest).round_().to(torch.uint8)
        if codes.shape[-1] % 2:
            codes = torch.nn.functional.pad(codes, (0, 1))
        rows[..., : -2 * _SCALE_BYTES] = codes[..., ::2] | codes[..., 1::2] << 4
        rows[..., -2 * _SCALE_BYTES : -_SCALE_BYTES] = centre.view(torch.uint8)
    else:
        scale = _scale(values.abs().amax(dim=-1, keepdim=True), largest)
        scaled = _codes(values, scale, largest)
        codes = scaled.to(torch.float8_e4m3fn) if wire_format == "Fp8" else scaled.round_().to(torch.int8)
        rows[..., :-_SCALE_BYTES] = codes.view(torch.uint8)
    rows[..., -_SCALE_BYTES:] = scale.view(torch.uint8)


def _scale(reach: torch.Tensor, largest: float) -> torch.Tensor:
    """The least bfloat16 with which codes up to `largest` cover `reach`; NaN if `reach` is not finite."""
    exact = torch.where(reach.isfinite(), reach / largest, torch.nan)
    return (exact.view(torch.int32) + 0xFFFF).bitwise_right_shift_(16).to(torch.int16).view(torch.bfloat16)


def _codes(values: torch.Tensor, scale: torch.Tensor, largest: float) -> torch.Tensor:
    """Values in units of their scale; 0 if there is no scale."""
    return values.div(scale.float()).nan_to_num_(nan=0.0).clamp_(-largest, largest)


def unpack(rows: torch.Tensor, head_dim: int, dtype: torch.dtype, wire_format: KvWireFormat) -> torch.Tensor:
    """Values [..., head_dim] from rows that `pack` wrote."""
    scale = _aligned(rows[..., -_SCALE_BYTES:]).view(torch.bfloat16).float()
    if wire_format == "Int4":
        codes = rows[..., : -2 * _SCALE_BYTES]
        centre = _aligned(rows[..., -2 * _SCALE_BYTES : -_SCALE_BYTES]).view(torch.bfloat16).float()
        pairs = torch.stack((codes & 15, codes >> 4), dim=-1).flatten(-2)[..., :head_dim]
        values = pairs.float().sub_(_LARGEST_CODE["Int4"]).mul_(scale).add_(centre)
    else:
        code = torch.float8_e4m3fn if wire_format == "Fp8" else torch.int8
        values = rows[..., :-_SCALE_BYTES].view(code).float().mul_(scale)
    largest = torch.finfo(dtype).max  # half a step beyond the largest value may be beyond the type
    return values.clamp_(-largest, largest).to(dtype)


def _aligned(columns: torch.Tensor) -> torch.Tensor:
    """A copy that can be viewed as another type: `contiguous` does not move an empty tensor."""
    return columns.clone(memory_format=torch.contiguous_format)
