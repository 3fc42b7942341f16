"""Runs clients whose packages do not go along with this project's.

They are Node's, and those of Python that want other versions of its packages. They are installed from PyPI
and npm, at exact versions, into an environment of their own, Node included.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
SOURCES = ROOT / "tests" / "pipeline" / "other_clients"
HOME = ROOT / ".cache" / "other_clients"
PINNED = ("requirements.txt", "package.json", "package-lock.json")
INSTALL_SECONDS = 300
RUN_SECONDS = 180


def environment() -> Path:
    """The folder `bin` of the environment, which is installed if it is missing or out of date.

    Skips the test if the registries cannot be reached; with CI=true, fails it.
    """
    digest = hashlib.sha256(b"".join((SOURCES / name).read_bytes() for name in PINNED)).hexdigest()
    stamp = HOME / "installed"
    if not stamp.exists() or stamp.read_text() != digest:
        try:
            _install()
        except (OSError, subprocess.SubprocessError) as error:
            stderr = getattr(error, "stderr", None) or b""
            reason = f"cannot install other clients: {error}; {stderr[-500:].decode(errors='replace')}"
            (pytest.fail if os.environ.get("CI") else pytest.skip)(reason)
        stamp.write_text(digest)
    return HOME / "bin"


def _install() -> None:
    shutil.rmtree(HOME, ignore_errors=True)
    uv = Path(sys.executable).with_name("uv")
    _run(uv, "venv", "--quiet", "--python", sys.executable, HOME)
    _run(uv, "pip", "install", "--quiet", "--python", HOME / "bin/python", "-r", SOURCES / "requirements.txt")
    for name in PINNED[1:]:
        shutil.copy(SOURCES / name, HOME)
    _run(HOME / "bin/npm", "ci", "--ignore-scripts", "--no-audit", "--no-fund", "--prefix", HOME)


def _run(*command: object) -> None:
    subprocess.run(
        list(map(str, command)), check=True, capture_output=True, timeout=INSTALL_SECONDS, cwd=ROOT
    )


def node(script: str, *arguments: str, request: dict[str, Any]) -> dict[str, Any]:
    """Run a script of `SOURCES` for a request, and return what it prints as JSON.

    It finds its packages next to it.
    """
    folder = environment()
    shutil.copy(SOURCES / script, HOME)
    answer: dict[str, Any] = json.loads(program(folder / "node", HOME / script, *arguments, REQUEST=request))
    return answer


def python(script: str, *, request: dict[str, Any]) -> dict[str, Any]:
    """Run a script of `SOURCES` for a request, and return what it prints as JSON."""
    answer: dict[str, Any] = json.loads(program(environment() / "python", SOURCES / script, REQUEST=request))
    return answer


def program(*command: object, **variables: Any) -> str:
    """Run a program of the environment, and return what it prints.

    `variables`: environment variables of the program. Values that are not text are given as JSON.
    """
    texts = {
        name: value if isinstance(value, str) else json.dumps(value) for name, value in variables.items()
    }
    inherited = {name: os.environ[name] for name in ("HOME", "LANG") if name in os.environ}
    path = f"{HOME / 'bin'}{os.pathsep}{os.environ['PATH']}"
    result = subprocess.run(
        list(map(str, command)),
        capture_output=True,
        text=True,
        timeout=RUN_SECONDS,
        env={**inherited, "PATH": path, **texts},
    )
    assert result.returncode == 0, result.stderr[-4000:]
    return result.stdout
