"""A suite is a folder: it imports its own helpers and `support`, never another suite or a test module, and nobody edits the path."""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDERS = ("tests", "e2e", "bench", "support")
SOURCES = sorted(path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py"))


@functools.cache
def tree(source: Path) -> ast.Module:
    return ast.parse(source.read_text())


def imported(source: Path) -> Iterator[str]:
    """Absolute names of what a module imports, with one more part for each name of `from … import`."""
    package = source.relative_to(ROOT).parent.parts
    for node in ast.walk(tree(source)):
        if isinstance(node, ast.Import):
            yield from (name.name for name in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) + 1 - node.level] if node.level else ()
            module = ".".join([*base, *([node.module] if node.module else [])])
            yield from (f"{module}.{name.name}" for name in node.names)


def may_import(source: Path, name: str) -> bool:
    room, *inside = name.split(".")
    if room != "tests":
        return True
    is_test = any(part == "conftest" or part.startswith("test_") for part in inside)
    return source.relative_to(ROOT).parts[:2] == (room, inside[0]) and not is_test


@functools.cache
def bound(source: Path) -> set[str]:
    """Names that a module defines or imports, anywhere in it."""
    names = {"__file__"}
    for node in ast.walk(tree(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            names |= {(name.asname or name.name).partition(".")[0] for name in node.names}
    return names


@functools.cache
def exists(name: str) -> bool:
    """Whether a module of these folders, or a name in one, is there."""
    path = ROOT / name.replace(".", "/")
    module = path.parent.with_suffix(".py")
    package = path.parent / "__init__.py"
    if path.with_suffix(".py").exists() or (path / "__init__.py").exists():
        return True
    return any(source.exists() and path.name in bound(source) for source in (module, package))


def test_what_is_imported_is_there() -> None:
    """Types of these folders are not checked, and a missing name of a program that a test starts shows late."""
    assert [
        (str(source.relative_to(ROOT)), name)
        for source in SOURCES
        for name in imported(source)
        if name.partition(".")[0] in FOLDERS and "." in name and not exists(name)
    ] == []


def test_a_suite_imports_only_itself_and_what_suites_share() -> None:
    assert [(str(s), name) for s in SOURCES for name in imported(s) if not may_import(s, name)] == []


def test_nobody_edits_the_path_on_which_modules_are_found() -> None:
    assert [
        f"{source}:{node.lineno}"
        for source in SOURCES
        for node in ast.walk(tree(source))
        if isinstance(node, ast.Attribute) and ast.unparse(node) == "sys.path"
    ] == []


@pytest.mark.parametrize(
    ("line", "allowed"),
    [
        ("from support.harness.waiting import until", True),
        ("from .fleet import Fleet", True),
        ("from tests.apiserver.fleet import Fleet", True),
        ("from ..roles.worker_process import environment_of", False),
        ("from tests.roles.worker_process import environment_of", False),
        ("from .test_scaling import says", False),
        ("from . import test_scaling", False),
        ("from .conftest import Fleet", False),
    ],
)
def test_the_rule_itself(line: str, allowed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(globals(), "ROOT", tmp_path)
    source = tmp_path / "tests" / "apiserver" / "test_new.py"
    source.parent.mkdir(parents=True)
    source.write_text(line)
    assert all(may_import(source, name) for name in imported(source)) is allowed
