"""Checks a spec.engine from standard input with vLLM, and prints what it refuses as a JSON list: for programs of another environment."""

from __future__ import annotations

import json
import sys

from mmd_api.spec.engine import EngineSpec
from mmd_workers.vllm_engine.setup.environment import prepare_environment


def main() -> None:
    """Read, check, print."""
    prepare_environment()
    from mmd_workers.vllm_engine.setup import extra_arguments, lora

    engine = EngineSpec.model_validate_json(sys.stdin.read())
    json.dump([*extra_arguments.faults(engine), *lora.faults(engine)], sys.stdout)


if __name__ == "__main__":
    main()
