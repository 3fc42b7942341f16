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
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
PINNED = ("requirements.txt", "package.json", "package-lock.json")
INSTALL_SECONDS = 300
RUN_SECONDS = 180


@dataclass(frozen=True)
class Environment:
    """The packages that `sources` pins, for Python and perhaps for Node, installed in the folder `home`."""

    sources: Path
    home: Path
    npm: str = "ci"  # `install` where the lock lacks packages of other platforms, which `ci` refuses

    def install(self) -> Path:
        """The folder `bin` of the environment, which is installed if it is missing or out of date.

        Skips the test if the registries cannot be reached; with CI=true, fails it.
        """
        pinned = [self.sources / name for name in PINNED if (self.sources / name).exists()]
        digest = hashlib.sha256(b"".join(file.read_bytes() for file in pinned)).hexdigest()
        stamp = self.home / "installed"
        if not stamp.exists() or stamp.read_text() != digest:
            try:
                self._install(pinned)
            except (OSError, subprocess.SubprocessError) as error:
                stderr = getattr(error, "stderr", None) or b""
                reason = f"cannot install other clients: {error}; {stderr[-500:].decode(errors='replace')}"
                (pytest.fail if os.environ.get("CI") else pytest.skip)(reason)
            stamp.write_text(digest)
        return self.home / "bin"

    def _install(self, pinned: list[Path]) -> None:
        shutil.rmtree(self.home, ignore_errors=True)
        uv = Path(sys.executable).with_name("uv")
        _run(uv, "venv", "--quiet", "--python", sys.executable, self.home)
        requirements, *of_npm = pinned
        _run(uv, "pip", "install", "--quiet", "--python", self.home / "bin/python", "-r", requirements)
        for file in of_npm:
            shutil.copy(file, self.home)
        if of_npm:
            npm = self.home / "bin/npm"
            _run(npm, self.npm, "--ignore-scripts", "--no-audit", "--no-fund", "--prefix", self.home)


CLIENTS = Environment(ROOT / "tests" / "pipeline" / "other_clients", ROOT / ".cache" / "other_clients")
AGENTS = Environment(
    ROOT / "tests" / "gateway" / "agents" / "packages", ROOT / ".cache" / "agents", npm="install"
)
AIDER = Environment(ROOT / "tests" / "gateway" / "agents" / "aider", ROOT / ".cache" / "aider")


def environment() -> Path:
    """The folder `bin` of the clients' environment, installed as `Environment.install` does."""
    return CLIENTS.install()


def _run(*command: object) -> None:
    subprocess.run(
        list(map(str, command)), check=True, capture_output=True, timeout=INSTALL_SECONDS, cwd=ROOT
    )


def node(script: str, *arguments: str, request: dict[str, Any]) -> dict[str, Any]:
    """Run a script of `CLIENTS.sources` for a request, and return what it prints as JSON.

    It finds its packages next to it.
    """
    folder = environment()
    shutil.copy(CLIENTS.sources / script, CLIENTS.home)
    answer: dict[str, Any] = json.loads(
        program(folder / "node", CLIENTS.home / script, *arguments, REQUEST=request)
    )
    return answer


def python(script: str, *, request: dict[str, Any]) -> dict[str, Any]:
    """Run a script of `CLIENTS.sources` for a request, and return what it prints as JSON."""
    answer: dict[str, Any] = json.loads(
        program(environment() / "python", CLIENTS.sources / script, REQUEST=request)
    )
    return answer


def program(*command: object, **variables: Any) -> str:
    """Run a program of the environment, and return what it prints.

    `variables`: environment variables of the program. Values that are not text are given as JSON.
    """
    texts = {
        name: value if isinstance(value, str) else json.dumps(value) for name, value in variables.items()
    }
    inherited = {name: os.environ[name] for name in ("HOME", "LANG") if name in os.environ}
    path = f"{CLIENTS.home / 'bin'}{os.pathsep}{os.environ['PATH']}"
    result = subprocess.run(
        list(map(str, command)),
        capture_output=True,
        text=True,
        timeout=RUN_SECONDS,
        env={**inherited, "PATH": path, **texts},
    )
    assert result.returncode == 0, result.stderr[-4000:]
    return result.stdout
