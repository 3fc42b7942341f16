"""Backends of KV links that a machine may lack."""

from __future__ import annotations

import os

import pytest
import torch

from mmd_api.contract.errors import BackendUnavailableError
from mmd_workers.kv import nixl


def needs_nixl() -> None:
    """Skip this test where NIXL is not installed, but not in continuous integration."""
    try:
        nixl.check_available(torch.device("cpu"))
    except BackendUnavailableError as error:
        if os.environ.get("CI") == "true":
            raise
        pytest.skip(error.message)
