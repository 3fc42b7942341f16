"""Clients whose packages do not go along with this project's: Node's, and those of Python that want other versions of its packages.

They are installed from PyPI and npm, at exact versions, into an environment of their own, Node included.
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
    """The folder `bin` of the environment, which is installed where it is missing or out of date.

    Skips the test where the registries cannot be reached, which with CI=true fails it.
    """
    wanted = hashlib.sha256(b"".join((SOURCES / name).read_bytes() for name in PINNED)).hexdigest()
    stamp = HOME / "installed"
    if not stamp.exists() or stamp.read_text() != wanted:
        try:
            _install()
        except (OSError, subprocess.SubprocessError) as error:
            said = getattr(error, "stderr", None) or b""
            reason = f"cannot install other clients: {error}; {said[-500:].decode(errors='replace')}"
            (pytest.fail if os.environ.get("CI") else pytest.skip)(reason)
        stamp.write_text(wanted)
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
    """What a script of `SOURCES` prints for a request, as JSON. It finds its packages next to it."""
    folder = environment()
    shutil.copy(SOURCES / script, HOME)
    found: dict[str, Any] = json.loads(program(folder / "node", HOME / script, *arguments, REQUEST=request))
    return found


def python(script: str, *, request: dict[str, Any]) -> dict[str, Any]:
    """What a script of `SOURCES` prints for a request, as JSON."""
    found: dict[str, Any] = json.loads(program(environment() / "python", SOURCES / script, REQUEST=request))
    return found


def program(*command: object, **variables: Any) -> str:
    """What a program of the environment prints. `variables`: of its environment; what is no text is given as JSON."""
    given = {
        name: value if isinstance(value, str) else json.dumps(value) for name, value in variables.items()
    }
    kept = {name: os.environ[name] for name in ("HOME", "LANG") if name in os.environ}
    path = f"{HOME / 'bin'}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        list(map(str, command)),
        capture_output=True,
        text=True,
        timeout=RUN_SECONDS,
        env={**kept, "PATH": path, **given},
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout
