"""Every file, folder and test that the documentation names exists, as does the target of every link.

A name is looked up from the root, beside the page, and below the folders that its section, or the beginning of its page, names.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = [*sorted((ROOT / "docs").rglob("*.md")), ROOT / "README.md", ROOT / "CONTRIBUTING.md"]
ENDINGS = "py|md|yaml|json|sh|toml|css|html|js|png|svg|cpp|txt|go"
QUOTED = re.compile(r"`([^`\n]+)`")
FILE = re.compile(rf"[\w.-]+(?:/[\w.*{{}},-]+)*\.(?:{ENDINGS})")
FOLDER = re.compile(r"[\w.-]+(?:/[\w.-]+)*/|[\w.-]+(?:/[\w.-]+)+")
TOP = {path.name for path in ROOT.iterdir() if path.is_dir() and path.name[0] != "."}
READERS_OWN = {"adapter_config.json", "demo-report.html", "generation_config.json", "keys.yaml"}
"""Files that a reader has, and the repository does not."""
FIELDS = {"structured_outputs.json"}
"""Of requests: no files, although they end like some."""


def sections(page: str) -> Iterator[str]:
    first, *rest = re.split(r"^## ", page, flags=re.MULTILINE)
    yield first
    yield from rest


def folders_in(text: str) -> set[Path]:
    """Folders that a text names, and those of the files that it names from the root."""
    names = [ROOT / name for name in QUOTED.findall(text) if FOLDER.fullmatch(name) or FILE.fullmatch(name)]
    return {path if path.is_dir() else path.parent for path in names if path.exists() and path.parent != ROOT}


def strangers(page: str, beside: Path) -> list[str]:
    intro = next(sections(page))
    missing = []
    for section in sections(page):
        bases = {ROOT, beside} | folders_in(section) | folders_in(intro)
        for name in QUOTED.findall(section):
            of_ours = FILE.fullmatch(name) or (FOLDER.fullmatch(name) and name.split("/")[0] in TOP)
            if of_ours and name not in READERS_OWN | FIELDS and not any(found(base, name) for base in bases):
                missing.append(name)
            if ".py::" in name and not is_test(name):
                missing.append(name)
    links = re.findall(r"\]\(([\w./-]+)(?:#[^)]*)?\)", page)
    return missing + [link for link in links if not (beside / link).exists()]


def found(base: Path, name: str) -> bool:
    return any(True for _ in base.glob(name)) if "*" in name else (base / name).exists()


def is_test(name: str) -> bool:
    """Whether a name such as `tests/a/test_b.py::test_c`, from the root, is that of a test."""
    file, *path = name.split("::")
    body = ast.parse((ROOT / file).read_text()).body if (ROOT / file).is_file() else []
    for part in path:
        kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
        found = [node for node in body if isinstance(node, kinds) and node.name == part]
        if not found:
            return False
        body = found[0].body
    return path[-1].startswith("test_")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_what_a_page_names_exists(page: Path) -> None:
    assert strangers(page.read_text(), page.parent) == []


@pytest.mark.parametrize(
    ("text", "missing"),
    [
        ("see `operator/mmd_operator/explain.py`", []),
        ("see `operator/mmd_operator/gone.py`", ["operator/mmd_operator/gone.py"]),
        ("`explain.py`, below `operator/mmd_operator`", []),
        ("`operator/mmd_operator`\n## one\n`explain.py`\n## two\n`serve.py`", []),
        ("## one\n`operator/mmd_operator`\n## two\n`explain.py`", ["explain.py"]),
        ("`operator/gone/`", ["operator/gone/"]),
        ("`tests/plan/golden/*.out.yaml` and `tests/plan/*.gone.yaml`", ["tests/plan/*.gone.yaml"]),
        ("`tests/observe/test_tracing.py::TestServed::test_one_request_is_one_trace_over_all_its_pods`", []),
        ("`tests/gone.py::test_it`", ["tests/gone.py::test_it"]),
        ("`tests/conftest.py::test_gone`", ["tests/conftest.py::test_gone"]),
        ("`tests/structure/test_names.py::defined`", ["tests/structure/test_names.py::defined"]),
        ("[a](reference.md#b), [c](https://x.y/z.md), [d](gone.md)", ["gone.md"]),
        ("`kubectl get pods`, `amd64/linux`, `repository@sha256:1`", []),
    ],
)
def test_the_search_itself(text: str, missing: list[str]) -> None:
    assert strangers(text, ROOT / "docs") == missing
