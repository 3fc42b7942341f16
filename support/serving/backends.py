"""Backends of KV links that a machine may lack."""

from __future__ import annotations

import torch

from mmd_api.contract.errors import BackendUnavailableError
from mmd_workers.kv import nixl
from support.harness.needed import lacking


def needs_nixl() -> None:
    """Skip this test where NIXL is not installed, but not in continuous integration."""
    try:
        nixl.check_available(torch.device("cpu"))
    except BackendUnavailableError as error:
        lacking(error.message)
