"""Selects the interpreter that runs the pods of a deployment on this machine.

vLLM has an environment of its own, whose pins differ from ours.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

from mmd_api.faults import Fault
from mmd_api.spec.engine import EngineSpec
from mmd_cli.errors import CommandError
from mmd_workers.vllm_engine.setup.environment import ENVIRONMENT

VLLM_ENVIRONMENT = "MMD_VLLM_ENVIRONMENT"
DEFAULT_FOLDER = ".cache/vllm"
VLLM_IMPORTED = ("mmd_workers.vllm_engine.setup.make",)
CHECK = "mmd_workers.vllm_engine.setup.check"
CHECK_SECONDS = 120.0


class EngineMissingError(CommandError):
    """The engine of a deployment is not installed on this machine, or does not run here."""


@dataclass(frozen=True, slots=True)
class Interpreter:
    """A Python interpreter.

    `environment`: variables that its libraries read when they are loaded. `imported`: modules that its
    processes import besides the workers.
    """

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
    if (vllm_spec := importlib.util.find_spec("vllm")) is not None and vllm_spec.origin is not None:
        return Interpreter(environment=ENVIRONMENT, imported=VLLM_IMPORTED)
    folder = Path(os.environ.get(VLLM_ENVIRONMENT, DEFAULT_FOLDER)).absolute()
    if not (folder / ".installed").exists():
        raise EngineMissingError(
            f"spec.engine.type: VLLM is not installed in {folder}; run `make vllm`, or set {VLLM_ENVIRONMENT} to its environment"
        )
    openmp = folder / "lib" / "libiomp5.so"
    preload = {"LD_PRELOAD": str(openmp)} if openmp.exists() else {}
    return Interpreter(str(folder / "bin" / "python"), {**ENVIRONMENT, **preload}, VLLM_IMPORTED)


def engine_faults(engine: EngineSpec) -> list[Fault]:
    """Return the settings that the installed engine refuses.

    Empty if it is not installed: its pods then check the settings at their start. Takes as long as importing
    vLLM, and no time where only the operator's rules apply.

    Raises:
        EngineMissingError: it is installed, but cannot be run.
    """
    pools = [pool for pool in (engine.prefill, engine.decode) if pool is not None]
    if not engine.adapters and not any(pool.quantization is not None or pool.extra_args for pool in pools):
        return []
    try:
        interpreter = interpreter_for(engine)
    except EngineMissingError:
        return []
    try:
        checked = subprocess.run(  # noqa: S603 -- our own interpreter and module
            [interpreter.python, "-m", CHECK],
            input=engine.model_dump_json(by_alias=True),
            env={**os.environ, **interpreter.environment},
            capture_output=True,
            text=True,
            timeout=CHECK_SECONDS,
            check=True,
        )
    except (subprocess.SubprocessError, OSError) as error:
        last = (str(getattr(error, "stderr", None) or error).strip().splitlines() or ["no output"])[-1]
        raise EngineMissingError(
            f"{interpreter.python} cannot check spec.engine with vLLM: {last}; run `make vllm` again"
        ) from error
    faults: list[str] = json.loads(checked.stdout.splitlines()[-1])
    return [Fault(*fault.split(": ", 1)) for fault in faults]
