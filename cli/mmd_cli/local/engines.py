"""Which interpreter runs the pods of a deployment on this machine: vLLM has an environment of its own, whose pins differ from ours."""

from __future__ import annotations

import importlib.util
import os
import sys
from dataclasses import dataclass, field
from pathlib import Path

from mmd_api.spec.engine import EngineSpec
from mmd_cli.errors import CommandError
from mmd_workers.vllm_engine.environment import ENVIRONMENT

VLLM_ENVIRONMENT = "MMD_VLLM_ENVIRONMENT"
DEFAULT_FOLDER = ".cache/vllm"
VLLM_IMPORTED = ("mmd_workers.vllm_engine.make",)


class EngineMissingError(CommandError):
    """The engine of a deployment is not installed on this machine."""


@dataclass(frozen=True, slots=True)
class Interpreter:
    """A Python, what its libraries read from the environment when they are loaded, and what its processes import besides the workers."""

    python: str = sys.executable
    environment: dict[str, str] = field(default_factory=dict)
    imported: tuple[str, ...] = ()


def interpreter_for(engine: EngineSpec) -> Interpreter:
    """The interpreter of an engine's pods.

    Raises:
        EngineMissingError: the engine is not installed; the message has the command that installs it.
    """
    if engine.type == "Native":
        return Interpreter()
    if importlib.util.find_spec("vllm") is not None:
        return Interpreter(environment=ENVIRONMENT, imported=VLLM_IMPORTED)
    folder = Path(os.environ.get(VLLM_ENVIRONMENT, DEFAULT_FOLDER)).absolute()
    if not (folder / ".installed").exists():
        raise EngineMissingError(
            f"spec.engine.type: VLLM is not installed in {folder}; run `make vllm`, or set {VLLM_ENVIRONMENT} to its environment"
        )
    openmp = folder / "lib" / "libiomp5.so"
    preload = {"LD_PRELOAD": str(openmp)} if openmp.exists() else {}
    return Interpreter(str(folder / "bin" / "python"), {**ENVIRONMENT, **preload}, VLLM_IMPORTED)
