"""The engines that suites run with. vLLM is optional on a developer's machine and not in CI."""

from __future__ import annotations

import pytest

from mmd_api.spec.engine import EngineSpec
from mmd_cli.local.engines import EngineMissingError, interpreter_for
from support.harness.needed import needs


def missing_vllm() -> str:
    """Why vLLM's tests cannot run here; empty if they can."""
    try:
        interpreter_for(EngineSpec(type="VLLM"))
    except EngineMissingError as error:
        return str(error)
    return ""


MISSING = missing_vllm()
needs_vllm = needs(not MISSING, MISSING)
ENGINES = ["Native", pytest.param("VLLM", marks=needs_vllm)]
