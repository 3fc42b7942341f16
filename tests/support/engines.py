"""The engines that suites run with. vLLM is optional on a developer's machine and not in CI."""

from __future__ import annotations

import os

import pytest

from mmd_api.spec.engine import EngineSpec
from mmd_cli.local.engines import EngineMissingError, interpreter_for


def missing_vllm() -> str:
    """Why vLLM's tests cannot run here; empty if they can."""
    try:
        interpreter_for(EngineSpec(type="VLLM"))
    except EngineMissingError as error:
        return str(error)
    return ""


MISSING = missing_vllm()
needs_vllm = pytest.mark.skipif(bool(MISSING) and not os.environ.get("CI"), reason=MISSING)
ENGINES = ["Native", pytest.param("VLLM", marks=needs_vllm)]
