"""Builds the CPU kernels once with the system's C++ compiler, caches them for the user, and calls them.
Independent of the model.

Run as a program, it builds them for every level of x86-64 next to this file; image builds do that for their pods.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import logging
import os
import platform
import shutil
import struct
import subprocess
import tempfile
from pathlib import Path

import torch

from mmd_api.spec.engine import KvDtype
from mmd_workers.basics import packing
from mmd_workers.engine.cpu.pages import use_huge_pages

log = logging.getLogger(__name__)

SOURCE = Path(__file__).with_name("kernels.cpp")
HEADERS = ("vectors.h", "linear.h", "packed.h", "attention.h", "layer.h")
BUILT = Path(__file__).with_name("built")
FLAGS = ["-O3", "-std=c++17", "-ffp-contract=fast", "-fno-math-errno", "-fno-trapping-math"]
FLAGS += ["-fopenmp", "-shared", "-fPIC"]
BUILD_SECONDS = 120
FORMATS: tuple[KvDtype, ...] = ("Model", "Int8", "Fp8")
"""KV formats; the index is their number in packed.h."""
AVX2 = {"abm", "avx", "avx2", "bmi1", "bmi2", "f16c", "fma", "movbe"}
AVX512 = {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"}
LEVELS = {"x86-64-v4": AVX2 | AVX512, "x86-64-v3": AVX2}
"""Levels of x86-64 by their name for compilers, best first, with the flags of Linux's cpuinfo that each needs."""


class LinearStruct(ctypes.Structure):
    """`Linear` of linear.h: addresses of packed weights and of the bias (0: none), rows n and columns k of the weight."""

    _fields_ = (
        ("packed", ctypes.c_void_p),
        ("bias", ctypes.c_void_p),
        ("n", ctypes.c_int64),
        ("k", ctypes.c_int64),
    )


class NormStruct(ctypes.Structure):
    """`Norm` of layer.h: address of the scale (0: no norm) and epsilon."""

    _fields_ = (("scale", ctypes.c_void_p), ("eps", ctypes.c_float))


class LayerStruct(ctypes.Structure):
    """`Layer` of layer.h."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in ("hidden", "heads", "kv_heads", "dim", "inner")),
        *((name, NormStruct) for name in ("before_attention", "after_attention", "before_mlp", "after_mlp")),
        *((name, NormStruct) for name in ("query", "key")),
        *((name, LinearStruct) for name in ("qkv", "out", "gate_up", "down")),
        ("scale", ctypes.c_float),
        ("softcap", ctypes.c_float),
        ("activation", ctypes.c_int64),
    )


class StepStruct(ctypes.Structure):
    """`Step` of attention.h: each sequence's rows of a batch, its blocks, and the rows' slots."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in ("rows", "sequences", "columns")),
        *((name, ctypes.c_void_p) for name in ("starts", "table", "slots")),
    )


class PoolStruct(ctypes.Structure):
    """`Pool` of attention.h: one layer's keys and values."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("keys", "values")),
        *((name, ctypes.c_int64) for name in ("block_tokens", "kv_heads", "dim", "format")),
    )

    @classmethod
    def of(cls, keys: torch.Tensor, values: torch.Tensor, kv_dtype: KvDtype = "Model") -> PoolStruct:
        """Make the struct for keys and values [blocks, block_tokens, kv_heads, dim], which must outlive it.

        dim % 16 == 0; in a packed format, the bytes of a row take the place of dim.
        """
        *sizes, row = keys.shape[1:]
        dim = row if kv_dtype == "Model" else packing.values_of(row)
        return cls(keys.data_ptr(), values.data_ptr(), *sizes, dim, FORMATS.index(kv_dtype))


class Library:
    """The loaded kernels. `panel`: output columns of a packed panel."""

    def __init__(self, path: Path) -> None:
        self._library = ctypes.CDLL(str(path))
        pointer, size, number = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int
        self._linear = self._library.mmd_linear
        self._linear.argtypes = [pointer, size, size, pointer, size, pointer, pointer, number]
        self._linear.restype = None
        self._attend = self._library.mmd_attend
        self._attend.argtypes = [pointer, pointer, pointer, pointer, size, ctypes.c_float, ctypes.c_float]
        self._attend.argtypes += [pointer, number]
        self._attend.restype = None
        self._layers = self._library.mmd_layers
        self._layers.argtypes = [*[pointer] * 3, size, *[pointer] * 6, number]
        self._layers.restype = None
        self._mask = self._library.mmd_mask
        self._mask.argtypes = [pointer, size, pointer, size, pointer, size]
        self._mask.restype = None
        self._layers_floats = self._library.mmd_layers_floats
        self._layers_floats.argtypes = [pointer, size, number]
        self._layers_floats.restype = size
        self.panel = int(self._library.mmd_panel())

    def pack(self, weight: torch.Tensor) -> torch.Tensor:
        """Pack weight [n, k] as panels [ceil(n / panel), k, panel], zero padded."""
        n, k = weight.shape
        panels = -(-n // self.panel)
        packed = use_huge_pages(torch.empty(panels, k, self.panel))
        full_panels = n // self.panel
        packed[:full_panels] = (
            weight[: full_panels * self.panel].view(full_panels, self.panel, k).transpose(1, 2)
        )
        if full_panels < panels:
            packed[full_panels] = 0
            packed[full_panels, :, : n - full_panels * self.panel] = weight[full_panels * self.panel :].t()
        return packed

    def linear(
        self, x: torch.Tensor, packed: torch.Tensor, n: int, bias: torch.Tensor | None
    ) -> torch.Tensor:
        """Multiply x [..., k] by a packed weight [n, k] transposed, and add bias [n]. Returns float32 [..., n].

        Raises:
            ValueError: x has another width than the weight, or another dtype.
        """
        k = packed.shape[1]
        if x.shape[-1] != k or x.dtype is not torch.float32:
            raise ValueError(
                f"a linear layer of {k} float32 columns got {x.shape[-1]} of {x.dtype}; its model's processor or configuration does not "
                "match its weights"
            )
        x = x.contiguous()
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

    def attend(
        self,
        query: torch.Tensor,
        pool: PoolStruct,
        step: StepStruct,
        visible: torch.Tensor,
        scale: float,
        softcap: float | None,
    ) -> torch.Tensor:
        """Compute attention of query rows [rows, heads, dim] to their contexts.

        `visible` [rows, 2]: positions that each row sees (int32: first, last + 1).
        """
        query = query.contiguous()
        out = torch.empty_like(query)
        self._attend(
            ctypes.addressof(step),
            ctypes.addressof(pool),
            visible.data_ptr(),
            query.data_ptr(),
            query.shape[1],
            scale,
            softcap or 0.0,
            out.data_ptr(),
            torch.get_num_threads(),
        )
        return out

    def mask(self, logits: torch.Tensor, rows: list[int], bits: torch.Tensor) -> None:
        """Set rows of logits [batch, vocab] to -infinity where their bits [rows, bytes] are 0.

        Bits count from the lowest of a row's first byte. Both tensors are contiguous.

        Raises:
            ValueError: the bits are not bytes, not whole words of 32 bits, or too few, or a tensor is not contiguous.
        """
        batch, vocab = logits.shape
        width = bits.shape[1]
        packed = bits.dtype is torch.uint8 and bits.is_contiguous() and logits.is_contiguous()
        enough = width % 4 == 0 and 8 * width >= vocab and len(bits) == len(rows)
        if not (packed and enough and all(0 <= row < batch for row in rows)):
            raise ValueError(
                f"{tuple(bits.shape)} bytes cannot mask rows {rows} of {batch} of {vocab} tokens"
            )
        self._mask(
            bits.data_ptr(),
            width // 4,
            (ctypes.c_int64 * len(rows))(*rows),
            len(rows),
            logits.data_ptr(),
            vocab,
        )

    def layers(
        self,
        layers: ctypes.Array[LayerStruct],
        pools: ctypes.Array[PoolStruct],
        step: StepStruct,
        visible: list[torch.Tensor],
        rotary: tuple[torch.Tensor, torch.Tensor],
        x: torch.Tensor,
    ) -> torch.Tensor:
        """Run consecutive decoder layers of one geometry on hidden states [rows, hidden].

        Writes the rows' keys and values to the pools. `rotary`: cos and sin [rows, dim]. All tensors are
        contiguous. `visible`: per layer, as in `attend`.
        """
        threads = torch.get_num_threads()
        out = torch.empty_like(x)
        scratch = torch.empty(self._layers_floats(ctypes.addressof(layers), len(x), threads))
        cos, sin = rotary
        addresses = (ctypes.c_void_p * len(layers))(*[tensor.data_ptr() for tensor in visible])
        self._layers(
            ctypes.addressof(layers),
            ctypes.addressof(pools),
            ctypes.addressof(addresses),
            len(layers),
            ctypes.addressof(step),
            cos.data_ptr(),
            sin.data_ptr(),
            x.data_ptr(),
            out.data_ptr(),
            scratch.data_ptr(),
            threads,
        )
        return out


@functools.cache
def load() -> Library | None:
    """Return the kernels, built first if this machine has not built them yet; None if that fails, and PyTorch is used."""
    features = _features()
    target = next((level for level, needed in LEVELS.items() if needed <= set(features.split())), "native")
    name = _name(target, features)
    try:
        if (BUILT / name).exists():
            return Library(BUILT / name)
        if (compiler := _compiler()) is None:
            log.info("no C++ compiler found; using PyTorch's operators on the CPU")
            return None
        path = _cache(name) / name
        if path.exists():
            try:
                return _loaded(path)
            except (OSError, AttributeError) as error:
                log.warning("the CPU kernels in %s cannot be loaded (%s); building them again", path, error)
                path.unlink()
        return _loaded(_build(compiler, target, path))
    except (OSError, AttributeError, subprocess.SubprocessError) as error:
        log.warning("the CPU kernels could not be built (%s); using PyTorch's operators", _reason(error))
        return None


def kernels(device: torch.device, dtype: torch.dtype) -> Library | None:
    """Return the kernels where they apply (float32 on a CPU) and could be built, otherwise None."""
    return load() if device.type == "cpu" and dtype is torch.float32 else None


def _loaded(path: Path) -> Library:
    """Load the library from a file.

    Raises:
        OSError: the file is not such a library, or is truncated.
        AttributeError: the library is of another version.
    """
    data = path.read_bytes()
    if b"mmd_mask" not in data:  # checked before loading: a loaded library hides what replaces its file
        raise OSError("it is something else")
    head = data[:64]
    if head[:5] == b"\x7fELF\x02" and len(head) == 64:
        # The section table is at the end of the file. Loading a truncated file would end the process.
        (table,), (size, count) = struct.unpack_from("<Q", head, 40), struct.unpack_from("<HH", head, 58)
        if len(data) < table + size * count:
            raise OSError("it is truncated")
    return Library(path)


def _reason(error: Exception) -> str:
    """Return the error's text, with the last line of the compiler's output."""
    compiler_output = getattr(error, "stderr", None) or b""
    lines = compiler_output.decode(errors="replace").strip().splitlines()
    return f"{error}: {lines[-1]}" if lines else str(error)


def _compiler() -> str | None:
    return shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")


def _cache(name: str) -> Path:
    """Return the user's cache, or a folder of this process if the cache cannot be written and lacks the file."""
    try:
        # A user without an entry in the system's list has no home, which is a RuntimeError.
        folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "multimodal-operator"
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not os.access(folder, os.W_OK) and not (folder / name).exists():
            raise PermissionError(folder)
    except (OSError, RuntimeError):
        return Path(tempfile.mkdtemp(prefix="multimodal-operator-"))
    return folder


def _build(compiler: str, target: str, path: Path) -> Path:
    if not path.exists():
        with tempfile.TemporaryDirectory(dir=path.parent) as scratch:
            output = Path(scratch) / path.name
            subprocess.run(  # noqa: S603 - the system's compiler on a file of this package
                [compiler, *FLAGS, f"-march={target}", str(SOURCE), "-o", str(output)],
                check=True,
                capture_output=True,
                timeout=BUILD_SECONDS,
            )
            output.replace(path)  # atomic: processes that build at the same time each get a complete file
    return path


def _name(target: str, features: str) -> str:
    """Return a file name that depends on sources and flags, and on the processor's features if it has no known level."""
    settings = [*FLAGS, target, *([features] if target not in LEVELS else [])]
    files = b"".join(path.read_bytes() for path in (SOURCE, *(SOURCE.with_name(name) for name in HEADERS)))
    return f"{hashlib.sha256(files + ' '.join(settings).encode()).hexdigest()[:24]}.so"


def _features() -> str:
    """Return the processor's instruction sets, as far as the system reports them."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else [platform.processor()]
    return next((line for line in lines if line.startswith(("flags", "Features"))), platform.machine())


def main() -> None:
    """Build the kernels for every level next to this file. Does nothing on processors other than x86-64."""
    compiler = _compiler()
    if compiler is None or platform.machine() not in ("x86_64", "AMD64"):
        return
    BUILT.mkdir(exist_ok=True)
    for level in LEVELS:
        _build(compiler, level, BUILT / _name(level, ""))


if __name__ == "__main__":
    main()
