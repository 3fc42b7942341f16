"""The image for CUDA with vLLM has the version of NIXL that the native one has."""

import re
import subprocess
from pathlib import Path

from images import install_vllm

NATIVE = Path(install_vllm.ROOT) / "constraints.txt"


def test_the_image_with_vllm_installs_the_nixl_of_the_native_one(tmp_path, monkeypatch):
    ran = []
    monkeypatch.setattr(subprocess, "run", lambda command, **_: ran.append([str(word) for word in command]))
    install_vllm.install(tmp_path, "cuda", only_requirements=True)
    (version,) = re.findall(r"^nixl-cu13==([^\s;]+)", NATIVE.read_text(), re.M)
    installed = [word for command in ran for word in command if word.startswith("nixl")]
    assert installed == [f"nixl-cu13=={version}"]
