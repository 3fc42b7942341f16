"""Features as headers and raw bytes, and back. Bytes are little-endian, C order; nothing is pickled."""

from __future__ import annotations

import torch

from mmd_api.contract.pools import Modality
from mmd_workers.model.prompt import Feature
from mmd_workers.wire.messages.message_parts import TensorHeader


def buffers_of(feature: Feature) -> list[tuple[TensorHeader, memoryview]]:
    """Header and bytes of every tensor of a feature, without copying what is contiguous on the CPU."""
    buffers = []
    for name, tensor in feature.tensors.items():
        flat = tensor.detach().to("cpu").contiguous()
        data = memoryview(flat.reshape(-1).view(torch.uint8).numpy())  # type: ignore[arg-type]
        dtype = str(tensor.dtype).removeprefix("torch.")
        buffers.append((TensorHeader(name, dtype, list(tensor.shape), data.nbytes), data))
    return buffers


def feature_of(modality: Modality, headers: list[TensorHeader], data: bytearray | memoryview) -> Feature:
    """The feature from tensors that lie one after the other in `data`; they share its memory."""
    tensors, offset = {}, 0
    for header in headers:
        count = header.num_bytes
        raw = (
            torch.frombuffer(data, dtype=torch.uint8, count=count, offset=offset)
            if count
            else torch.empty(0, dtype=torch.uint8)
        )
        tensors[header.name] = raw.view(getattr(torch, header.dtype)).reshape(header.shape)
        offset += count
    return Feature(modality, tensors)
