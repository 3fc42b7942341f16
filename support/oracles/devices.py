"""The device of both sides in tests that compare with `generate`.

`MMD_TEST_DEVICE=cuda:0 pytest tests/engine tests/model` runs them on a GPU; without it they run on the CPU,
even where there is a GPU.
"""

from __future__ import annotations

import os

import pytest
import torch

DEVICE = torch.device(os.environ.get("MMD_TEST_DEVICE", "cpu"))
ON_GPU = DEVICE.type == "cuda"

needs_gpu = pytest.mark.skipif(not ON_GPU, reason="runs on a GPU: set MMD_TEST_DEVICE=cuda:0")
cpu_only = pytest.mark.skipif(
    ON_GPU, reason="about CPU kernels, or a lost GPU that the CPU stands in for; MMD_TEST_DEVICE names a GPU"
)
