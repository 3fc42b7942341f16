"""A KV link over NCCL (device memory). This revision only says whether NCCL can run here; the link itself follows."""

from __future__ import annotations

import torch

from mmd_workers.errors import BackendUnavailableError


def check_available(device: torch.device) -> None:
    """Raise BackendUnavailableError unless NCCL can run on `device`."""
    if device.type != "cuda" or not torch.cuda.is_available():
        raise BackendUnavailableError("NCCL needs a CUDA device; use transfer.kv.backend: Gloo")
    raise BackendUnavailableError("NCCL links are not served by this revision; use transfer.kv.backend: Gloo")
