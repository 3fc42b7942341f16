"""Builds the CPU kernels once with the system's C++ compiler, keeps them in the user's cache, and calls them. Independent of the model.

Run as a program, it builds them for every level of x86-64 next to this file, as image builds do for their pods.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import tempfile
from pathlib import Path

import torch

log = logging.getLogger(__name__)

SOURCE = Path(__file__).with_name("kernels.cpp")
BUILT = Path(__file__).with_name("built")
FLAGS = ["-O3", "-std=c++17", "-ffp-contract=fast", "-fno-math-errno", "-fno-trapping-math"]
FLAGS += ["-fopenmp", "-shared", "-fPIC"]
BUILD_SECONDS = 120
AVX2 = {"abm", "avx", "avx2", "bmi1", "bmi2", "f16c", "fma", "movbe"}
AVX512 = {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"}
LEVELS = {"x86-64-v4": AVX2 | AVX512, "x86-64-v3": AVX2}
"""Best first: what compilers call it, and the instruction sets of Linux's cpuinfo that it needs."""


class Library:
    """The loaded kernels. `panel`: output columns of one packed panel."""

    def __init__(self, path: Path) -> None:
        self._library = ctypes.CDLL(str(path))
        pointer, size = ctypes.c_void_p, ctypes.c_int64
        self._linear = self._library.mmd_linear
        self._linear.argtypes = [pointer, size, size, pointer, size, pointer, pointer, ctypes.c_int]
        self._linear.restype = None
        self._attend = self._library.mmd_attend_rows
        self._attend.argtypes = [
            pointer,
            size,
            size,
            size,
            pointer,
            pointer,
            size,
            size,
            pointer,
            size,
            pointer,
        ]
        self._attend.argtypes += [ctypes.c_float, size, ctypes.c_float, pointer, ctypes.c_int]
        self._attend.restype = None
        self.panel = int(self._library.mmd_panel())

    def pack(self, weight: torch.Tensor) -> torch.Tensor:
        """Weight [n, k] as panels [ceil(n / panel), k, panel], zero padded."""
        n, k = weight.shape
        padded = weight.new_zeros(-(-n // self.panel) * self.panel, k)
        padded[:n] = weight
        return padded.view(-1, self.panel, k).transpose(1, 2).contiguous()

    def linear(
        self, x: torch.Tensor, packed: torch.Tensor, n: int, bias: torch.Tensor | None
    ) -> torch.Tensor:
        """x [..., k] times a packed [n, k] transposed, plus bias [n]: float32 [..., n]."""
        x = x.contiguous()
        k = x.shape[-1]
        out = torch.empty(*x.shape[:-1], n)
        if x.numel():
            self._linear(
                x.data_ptr(),
                x.numel() // k,
                k,
                packed.data_ptr(),
                n,
                None if bias is None else bias.data_ptr(),
                out.data_ptr(),
                torch.get_num_threads(),
            )
        return out

    def attend_rows(
        self,
        query: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        block_table: torch.Tensor,
        lengths: torch.Tensor,
        scale: float,
        window: int | None,
        softcap: float | None,
    ) -> torch.Tensor:
        """One query row for each sequence: query [rows, heads, dim], pools [blocks, block_tokens, kv_heads, dim], dim % 16 == 0."""
        query = query.contiguous()
        rows, heads, dim = query.shape
        out = torch.empty_like(query)
        self._attend(
            query.data_ptr(),
            rows,
            heads,
            dim,
            keys.data_ptr(),
            values.data_ptr(),
            keys.shape[2],
            keys.shape[1],
            block_table.data_ptr(),
            block_table.shape[1],
            lengths.data_ptr(),
            scale,
            window or 0,
            softcap or 0.0,
            out.data_ptr(),
            torch.get_num_threads(),
        )
        return out


@functools.cache
def load() -> Library | None:
    """The kernels, built when this machine has not built them yet; None where they cannot be built (PyTorch serves then)."""
    features = _features()
    target = next((level for level, needed in LEVELS.items() if needed <= set(features.split())), "native")
    name = _name(target, features)
    try:
        if (BUILT / name).exists():
            return Library(BUILT / name)
        if (compiler := _compiler()) is None:
            log.info("no C++ compiler found; using PyTorch's operators on the CPU")
            return None
        return Library(_build(compiler, target, _cache(name) / name))
    except (OSError, subprocess.SubprocessError) as error:
        log.warning("the CPU kernels could not be built (%s); using PyTorch's operators", error)
        return None


def _compiler() -> str | None:
    return shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")


def _cache(name: str) -> Path:
    """The user's cache; where that cannot be written and has no such file, a folder of this process."""
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "multimodal-operator"
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not os.access(folder, os.W_OK) and not (folder / name).exists():
            raise PermissionError(folder)
    except OSError:
        return Path(tempfile.mkdtemp(prefix="multimodal-operator-"))
    return folder


def _build(compiler: str, target: str, path: Path) -> Path:
    if not path.exists():
        with tempfile.TemporaryDirectory(dir=path.parent) as scratch:
            made = Path(scratch) / path.name
            subprocess.run(  # noqa: S603 - the system's compiler on a file of this package
                [compiler, *FLAGS, f"-march={target}", str(SOURCE), "-o", str(made)],
                check=True,
                capture_output=True,
                timeout=BUILD_SECONDS,
            )
            made.replace(path)  # atomic: processes that build at the same time all end with a complete file
    return path


def _name(target: str, features: str) -> str:
    """Changes with the source and the flags; for a processor of no known level, with its features too."""
    of = [*FLAGS, target, *([features] if target not in LEVELS else [])]
    return f"{hashlib.sha256(SOURCE.read_bytes() + ' '.join(of).encode()).hexdigest()[:24]}.so"


def _features() -> str:
    """The processor's instruction sets, as far as the system reports them."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else [platform.processor()]
    return next((line for line in lines if line.startswith(("flags", "Features"))), platform.machine())


def main() -> None:
    """Build for every level next to this file; does nothing on other processors."""
    compiler = _compiler()
    if compiler is None or platform.machine() not in ("x86_64", "AMD64"):
        return
    BUILT.mkdir(exist_ok=True)
    for level in LEVELS:
        _build(compiler, level, BUILT / _name(level, ""))


if __name__ == "__main__":
    main()
