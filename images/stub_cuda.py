"""Makes the CUDA build of torch start without CUDA's libraries: for images that compute on the CPU only.

PyPI's torch for Linux is linked against 3 GB of NVIDIA libraries. A machine without a GPU runs not one line of them, but without
them torch does not load. This compiles one small library that has every symbol torch wants from them, and puts it under each of
their names. A call of such a symbol answers 100, which is cudaErrorNoDevice and success for none of these libraries; so
`torch.cuda.is_available()` is False, as on any machine without a GPU.

Usage: stub_cuda.py SITE_PACKAGES, with binutils and a C compiler, by the Python that will import torch.
"""

from __future__ import annotations

import ctypes
import re
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

NO_DEVICE = 100
SYSTEM_LIBRARIES = re.compile(r"(ld-linux|lib(c|m|dl|rt|pthread|gcc_s|stdc\+\+)\.so)")


def lines(*command: str | Path) -> list[str]:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()


def needed_libraries(library: Path) -> Iterator[str]:
    for line in lines("readelf", "-dW", library):
        if found := re.search(r"\(NEEDED\).*\[(.+)\]", line):
            yield found[1]


def undefined_symbols(library: Path) -> Iterator[tuple[str, str]]:
    """(name, version or "") of what another library must define; weak ones need not be."""
    for line in lines("nm", "-D", "--undefined-only", library):
        kind, symbol = line.split()[-2:]
        if kind == "U":
            name, _, version = symbol.partition("@")
            yield name, version


def defined_symbols(library: Path) -> Iterator[str]:
    for line in lines("nm", "-D", "--defined-only", library):
        yield line.split()[-1].split("@")[0]


def link(library: Path, symbols: dict[str, str]) -> None:
    """Compile a library with these symbols, each of its version; the loader insists on versions."""
    versions: dict[str, list[str]] = defaultdict(list)
    for name, version in symbols.items():
        versions[version or "NO_CUDA"].append(name)
    with tempfile.TemporaryDirectory() as folder:
        source, script = Path(folder) / "no_cuda.c", Path(folder) / "versions"
        functions = [
            f"static int no_device(void) {{ return {NO_DEVICE}; }}",
            'static const char *words(void) { return "this image computes on the CPU only"; }',
        ]
        for name in symbols:
            answer = "words" if name.endswith(("ErrorString", "ErrorName", "ResultString")) else "no_device"
            functions.append(f'int {name}(void) __attribute__((alias("{answer}")));')
        source.write_text("\n".join([*functions, ""]))
        nodes = [f"{version} {{ global: {'; '.join(names)}; }};" for version, names in versions.items()]
        script.write_text("\n".join([*nodes, ""]))
        command = ["cc", "-shared", "-fPIC", "-w", f"-Wl,--version-script={script}", "-o", library, source]
        subprocess.run(command, check=True)


def main(site_packages: Path) -> None:
    torch = site_packages / "torch" / "lib"
    libraries = list(torch.glob("*.so*"))
    here = {path.name for path in libraries}
    names = {name for path in libraries for name in needed_libraries(path)}
    system = {name for name in names - here if SYSTEM_LIBRARIES.match(name)}
    absent = sorted(names - here - system)

    for name in system:
        ctypes.CDLL(name, ctypes.RTLD_GLOBAL)
    process = ctypes.CDLL(None)  # Python and the system's libraries
    own = {symbol for path in libraries for symbol in defined_symbols(path)}
    wanted = dict(symbol for path in libraries for symbol in undefined_symbols(path))
    stubs = {s: v for s, v in sorted(wanted.items()) if s not in own and not hasattr(process, s)}

    stub = torch / "libno_cuda.so"
    link(stub, stubs)
    for name in absent:
        (torch / name).symlink_to(stub.name)
    print(f"{len(stubs)} symbols of {len(absent)} libraries: {', '.join(absent)}")

    script = (
        "import torch, torchvision; assert not torch.cuda.is_available(); torch.ones(2, 2) @ torch.ones(2, 2)"
    )
    subprocess.run([sys.executable, "-c", script], check=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
