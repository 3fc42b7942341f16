"""Checks a spec.engine from standard input with vLLM, and prints the faults as a JSON list. Used by programs
in other environments."""

from __future__ import annotations

import json
import sys

from mmd_api.spec.engine import EngineSpec
from mmd_workers.vllm_engine.setup.environment import prepare_environment


def main() -> None:
    """Read the spec, check it, and print the faults."""
    prepare_environment()
    from mmd_workers.vllm_engine.setup import extra_arguments, lora

    engine = EngineSpec.model_validate_json(sys.stdin.read())
    json.dump([*extra_arguments.faults(engine), *lora.faults(engine)], sys.stdout)


if __name__ == "__main__":
    main()
